// Planes of x in NCHW that TMA reads as they lie (PLANES): a tile has pixels of one plane, or (IMAGES above 1) the
// whole planes of so many images, 64 pixels each.
#pragma once

#include "epilogue_buffers.cuh"

// A chunk of channels of planes in whole pieces of 16 bytes, in rows of 64 pixels.
template <class Tile, class Gemm>
DEVICE void copy_planes(const Gemm &p, unsigned to, unsigned full, int chunk, int group, int n, int pixel) {
#pragma unroll
    for (int block = 0; block < Tile::PIXEL_BLOCKS; ++block) {
        const int image = Tile::IMAGES > 1 ? block : 0, along = Tile::IMAGES > 1 ? 0 : block * 64;
        copy_box(to + block * Tile::BLOCK_BYTES, p.x, full, pixel + along, chunk * Tile::CHUNK_ELEMENTS, group,
                 n + image);
    }
}

// Where the pixels of a warpgroup's tile lie in y, those from the `first` of the CTA's tile on, which begins at
// `pixel`.
template <class Tile, class Gemm>
DEVICE void fill_plane_places(const Gemm &p, unsigned table, int pixel, int first, int group) {
    const int filters = p.filters, plane = p.p * p.q, k = (int)p.groups * filters;
    const int n0 = pixel / plane, rest0 = pixel - n0 * plane;
    for (int i = threadIdx.x % 128; i < Tile::WARPGROUP_PIXELS; i += 128) {
        const int at = first + i, n = Tile::IMAGES > 1 ? n0 + at / 64 : n0,
                  rest = Tile::IMAGES > 1 ? at % 64 : rest0 + at;
        const bool real = rest < plane && n * plane < (int)p.pixels;
        set_place(table, i, real ? (n * k + group * filters) * plane + rest : -1);
    }
}
