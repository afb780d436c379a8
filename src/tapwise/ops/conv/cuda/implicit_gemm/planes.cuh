// Planes of x in NCHW that TMA reads as they lie (PLANES): a tile has pixels of one plane.
#pragma once

#include "epilogue_buffers.cuh"

// A chunk of channels of planes in whole pieces of 16 bytes, in rows of 64 pixels.
template <class Tile, class Gemm>
DEVICE void copy_planes(const Gemm &p, unsigned to, unsigned full, int chunk, int group, int n, int pixel) {
#pragma unroll
    for (int block = 0; block < Tile::PIXEL_BLOCKS; ++block)
        copy_box(to + block * Tile::BLOCK_BYTES, p.x, full, pixel + block * 64, chunk * Tile::CHUNK_ELEMENTS, group, n);
}

// Where the pixels of a warpgroup's tile lie in y, those from the `first` of the CTA's tile on, which begins at
// `pixel`.
template <class Tile, class Gemm>
DEVICE void fill_plane_places(const Gemm &p, unsigned table, int pixel, int first, int group) {
    const int filters = p.filters, plane = p.p * p.q, k = (int)p.groups * filters;
    const int n = pixel / plane, rest0 = pixel - n * plane + first;
    for (int i = threadIdx.x % 128; i < Tile::WARPGROUP_PIXELS; i += 128)
        set_place(table, i, rest0 + i < plane ? (n * k + group * filters) * plane + rest0 + i : -1);
}
