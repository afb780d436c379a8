// Halo rows of pixels that TMA does not take: three warps copy x in pieces as small as its channels ask.
#pragma once

#include "cp_async.cuh"
#include "ops/conv/cuda/implicit_gemm/halo.cuh"

// The pixels of one chunk in pieces of GATHER_BYTES, zeros where there is no pixel or channel.
template <class Tile> DEVICE void gather(const HaloGemm &p, unsigned to, int pixel, int group, int chunk) {
    using T = typename Tile::T;
    constexpr int PIECES = Tile::CHUNK_BYTES / Tile::GATHER_BYTES, STRIDE = GATHERERS / PIECES,
                  ELEMENTS = Tile::GATHER_BYTES / (int)sizeof(T);
    const int thread = threadIdx.x - FIRST_PRODUCER, at = thread % PIECES * Tile::GATHER_BYTES, first = thread / PIECES;
    const int wide = p.wide, high = p.high, plane = wide * high, height = p.height, width = p.width, c = p.c;
    const int pixels = p.halo_pixels, channel = chunk * Tile::CHUNK_ELEMENTS + thread % PIECES * ELEMENTS;
    // Bytes behind the last step's are never read.
    if (at >= (chunk + 1 == (int)p.chunks ? Tile::LAST_CHUNK_STEPS * 32 : Tile::CHUNK_BYTES)) return;
    const bool real = channel < p.group_c;
    int n = (pixel + first) / plane, rest = pixel + first - n * plane, y = rest / wide - (int)p.pad_h;
    int v = rest % wide - (int)p.pad_w;
    const T *image = static_cast<const T *>(p.image);
    const T *from = image + group * p.group_c + channel + (((long long)n * height + y) * width + v) * c;
    const int end = wide - (int)p.pad_w, bottom = high - (int)p.pad_h, step = STRIDE * c;
    const long long next_row = (long long)(width - wide) * c, next_image = (long long)(height - high) * width * c;
    bool inside = real && n < (int)p.n && (unsigned)y < (unsigned)height;
#pragma unroll 4
    for (int i = first; i < pixels; i += STRIDE) {
        const bool there = inside && (unsigned)v < (unsigned)width;
        cp_async<Tile::GATHER_BYTES>(to + swizzled<Tile::CHUNK_BYTES>(i, at), there ? from : image, there);
        v += STRIDE;
        from += step;
        while (v >= end) {
            v -= wide;
            from += next_row;
            if (++y == bottom) {
                y -= high;
                from += next_image;
                ++n;
            }
            inside = real && n < (int)p.n && (unsigned)y < (unsigned)height;
        }
    }
}
