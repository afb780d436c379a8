// What algorithms of weight gradients share: their arguments, and where columns of dw and pixels of dy lie.
#pragma once

#include "grid.cuh"

struct Gradient {
    // x, dy and dw.
    const void *x, *w;
    void *y;
    // Sums of parts of the pixels, where they are split, each in dw's order and `part_pitch` long.
    void *parts;
    long long c, height, width, k, r, s, p, q, stride_h, stride_w, pad_h, pad_w, dilation_h, dilation_w;
    long long groups, group_c, group_k;
    // Columns of a group, elements of dw's rows, filter taps, pixels of dy; tiles along a group's columns and filters.
    long long columns, row, taps, pixels, tiles_c, tiles_f;
    // Of runs: of `s` columns of a filter's row those in front of its own, and these.
    long long before, real;
    // Steps of pixels, and of one part.
    long long steps, part_steps, part_pitch;
    // 2^32 over p * q and over q, rounded up, or 0 for 1.
    long long by_plane, by_q;
};

// What is known of a column or filter: how far it lies from a pixel's place, and its tap.
struct Column {
    unsigned shift;
    int h, w;
};
// Rows of what is no pixel, and of what is no column: any sum with them is far below the first row.
constexpr int NO_PIXEL = -(1 << 30), NO_COLUMN = -(1 << 29), FAR = -(1 << 28);

// Where a pixel's window begins in x and in its image, and the pixel in dy.
struct Place {
    unsigned x;
    int h, w;
    unsigned dy;
};
DEVICE void store_place(unsigned to, const Place &place) {
    store_shared<16>(to, {{place.x, (unsigned)place.h, (unsigned)place.w, place.dy}});
}
DEVICE Place load_place(unsigned from) {
    const Piece<16> v = load_shared<16>(from);
    return {v.v[0], (int)v.v[1], (int)v.v[2], v.v[3]};
}

DEVICE unsigned divided(unsigned value, unsigned by, unsigned reciprocal) {
    if (by == 1) return value;
    const unsigned quotient = __umulhi(value, reciprocal);
    return quotient - (quotient * by > value);
}

// Of column j of a group in x (OF_X), or of filter j in dy.
template <bool NCHW, bool OF_X> DEVICE Column column_of(const Gradient &p, int group, int j) {
    const int plane = OF_X ? (int)p.height * (int)p.width : (int)p.p * (int)p.q;
    const int step_c = NCHW ? plane : 1, step_w = NCHW ? 1 : (int)p.c;
    if (group >= (int)p.groups || j >= (OF_X ? (int)p.columns : (int)p.group_k)) return {0, NO_COLUMN, 0};
    if constexpr (!OF_X) return {(unsigned)(group * (int)p.group_k + j) * step_c, 0, 0};
    const int inner = NCHW ? p.taps : p.group_c, outer = j / inner, rest = j - outer * inner;
    const int tap = NCHW ? rest : outer, c = NCHW ? outer : rest, r = tap / (int)p.s;
    const int h = r * (int)p.dilation_h, w = (tap - r * (int)p.s) * (int)p.dilation_w;
    return {(unsigned)(h * (int)p.width + w) * step_w + (unsigned)(group * (int)p.group_c + c) * step_c, h, w};
}

// Of the pixel `number`; its row is NO_PIXEL behind the last one.
template <bool NCHW> DEVICE Place place_of(const Gradient &p, unsigned number) {
    const unsigned plane = (unsigned)p.p * (unsigned)p.q, n = divided(number, plane, (unsigned)p.by_plane),
                   rest = number - n * plane, row = divided(rest, p.q, (unsigned)p.by_q);
    const int h = (int)row * (int)p.stride_h - (int)p.pad_h,
              w = ((int)rest - (int)row * (int)p.q) * (int)p.stride_w - (int)p.pad_w;
    const unsigned step_n = (unsigned)p.c * (unsigned)p.height * (unsigned)p.width, step_w = NCHW ? 1 : p.c,
                   x = n * step_n + (unsigned)(h * (int)p.width + w) * step_w,
                   dy = NCHW ? n * plane * (unsigned)p.k + rest : number * (unsigned)p.k;
    return {x, number < (unsigned)p.pixels ? h : NO_PIXEL, w, dy};
}
