// Parts of an image whose channels are worked on by themselves: what a block's threads have of it.
//
// x (rows, c) channels last, a row a pixel (LAST), or (images, c, pixels), where a row is V neighbours of a plane. A
// block of THREADS has a part of the rows for ACROSS vectors of channels, or for one channel: a row's neighbours in
// memory are neighbouring threads'.
#pragma once

#include "grid.cuh"
#include "types.cuh"

struct Channels {
    const void *x, *w, *bias;
    void *y, *second, *workspace;
    long long rows, c, pixels, parts;
};

constexpr int THREADS = 256;

template <int V, int ACROSS, bool LAST> struct Part {
    static constexpr int DOWN = THREADS / ACROSS, CHANNELS = LAST ? V : 1;
    static_assert(LAST || ACROSS == 1, "a block has one channel of planes");
    // Of this thread: its vector and its first row of a part, which has rows `first` to `end`; its first channel.
    int across, down;
    long long slab, channel, first, end, c;
    UnsignedCoordinate pixels;
    bool real;

    __device__ __forceinline__ explicit Part(const Channels &a)
        : across(threadIdx.x % ACROSS), down(threadIdx.x / ACROSS) {
        slab = static_cast<long long>(blockIdx.x) * ACROSS * CHANNELS, channel = slab + across * CHANNELS;
        real = channel < a.c, c = a.c, pixels = a.pixels / (LAST ? 1 : V);
        const long long share = (a.rows + a.parts - 1) / a.parts;
        first = blockIdx.y * share, end = real ? min(first + share, a.rows) : first;
    }
    // Of a row, in vectors.
    __device__ __forceinline__ long long place(long long row) const {
        if constexpr (LAST) return (row * c + channel) / V;
        const UnsignedCoordinate image = static_cast<UnsignedCoordinate>(row) / pixels;
        return (image * c + channel) * pixels + (static_cast<UnsignedCoordinate>(row) - image * pixels);
    }
};
