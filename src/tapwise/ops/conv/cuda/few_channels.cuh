// What convolutions of a few channels on tensor cores share, whatever the order of x: rows of x in shared memory.
#pragma once

#include "row_loads.cuh"

struct Tiles {
    const void *x, *w;
    void *y;
    const void *bias, *residual;
    long long n, height, width, k, p, q, stride_h, stride_w, pad_h, pad_w, dilation_h;
    // Outputs of a tile along both axes, tiles of an image and all; rows of x of a tile, and the bytes of each.
    long long down, across, tiles_h, tiles_w, tiles, image_rows, pitch;
    // Columns of one kind of a tile's row, pieces that are copied of a row; 2^32 over both for divisions, 0 for 1.
    long long columns, pieces, per_column, per_piece;
    // The filters were packed before the launch before this one.
    long long weights_ready;
};

enum Parity { EVEN, ODD, BOTH };

struct Fragments {
    const void *w;
    void *y;
    // Filters, words and chunks of y, and of w in elements: distances of filters, channels and taps.
    long long k, words, chunks, step_k, step_c, step_r, step_s;
};

// The filters, and in front of what waits the first tile's origin.
DEVICE TileOrigin first_tile(const Tiles &p) {
    const TileOrigin at(blockIdx.x, p.tiles_h, p.tiles_w, p.down, p.across);
    work_out(at.n, at.h, at.w, (int)p.height, (int)p.pitch, (int)p.per_piece);
    return at;
}
template <class O> DEVICE void begin_filters(const Tiles &p, unsigned to, unsigned bytes) {
    if (!p.weights_ready) begin_dependent();
    for (unsigned at = threadIdx.x * 16; at < bytes; at += O::THREADS * 16)
        cp_async<16>(to + at, static_cast<const unsigned char *>(p.w) + at, true);
    if (p.weights_ready) begin_dependent();
}

// The rows of x that a tile reaches, from `begin` elements of a row on, zeros outside x.
template <class O> DEVICE void load_rows(const Tiles &p, unsigned to, int n, int h0, int begin) {
    using T = typename O::T;
    const int pieces = p.pieces, count = (int)p.image_rows * pieces, height = p.height;
    const int width = (int)p.width * O::PIXEL;
    const T *const image = static_cast<const T *>(p.x) + (long long)n * O::PLANES * height * width;
#pragma unroll 4
    for (int i = threadIdx.x; i < count; i += O::THREADS) {
        const int image_row = divide(i, p.per_piece), piece = i - image_row * pieces;
        const int h = h0 + image_row / O::PLANES, plane_row = image_row % O::PLANES * height + h;
        const int at = begin + piece * O::GRAIN;
        const bool inside = (unsigned)h < (unsigned)height;
        const T *const from = image + ((long long)plane_row * width + at);
        const unsigned place = to + image_row * (unsigned)p.pitch + piece * (O::GRAIN * O::SIZE);
        if constexpr (O::COPY > 0) {
            const bool there = inside && (unsigned)at < (unsigned)width;
            cp_async<O::COPY>(place, there ? from : image, there);
        } else {
            unsigned v = 0;
#pragma unroll
            for (int e = 0; e < 2; ++e)
                if (inside && (unsigned)(at + e) < (unsigned)width) v |= bits(from[e]) << 16 * e;
            store_word(place, v);
        }
    }
    cp_async_commit();
}
