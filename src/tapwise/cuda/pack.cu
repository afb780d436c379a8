// Brings x and filters into the order that tensor maps want: channels innermost, a multiple of 16 bytes, groups apart.
//
// PARTS is 2 for 3xtf32: a tf32 number and another one for what it leaves of fp32. Else tf32 is rounded to, or 16-bit copied.
#pragma once

#include "narrow.cuh"

struct Images {
    const void *x;
    void *y;
    // Of x in elements: distances of images, channels and pixels. `wide` channels of a group in y, `channels` in x.
    long long n, groups, channels, wide, pixels, step_n, step_c, step_pixel, tiles_pixels, tiles_channels;
};

template <typename T, int PART>
__device__ __forceinline__ T part_of(T v) {
    if constexpr (PART == 2) {
        return v;
    } else if constexpr (sizeof(T) == 4) {
        const float large = to_tf32(v);
        // Infinities and NaN leave nothing.
        return PART == 0 ? large : large - large == 0.0f ? to_tf32(v - large) : 0.0f;
    } else {
        return v;
    }
}

// One piece of 16 bytes of y, from elements of x that are all there.
template <typename T, int PARTS>
__device__ __forceinline__ void put(T *y, long long parts_apart, T (&v)[16 / sizeof(T)]) {
    constexpr int V = 16 / sizeof(T);
    alignas(16) T out[V];
#pragma unroll
    for (int e = 0; e < V; ++e) out[e] = part_of<T, 0>(v[e]);
    *reinterpret_cast<uint4 *>(y) = *reinterpret_cast<uint4 *>(out);
    if constexpr (PARTS == 2) {
#pragma unroll
        for (int e = 0; e < V; ++e) out[e] = part_of<T, 1>(v[e]);
        *reinterpret_cast<uint4 *>(y + parts_apart) = *reinterpret_cast<uint4 *>(out);
    }
}

// y[part][group][n][pixel][wide] of channels-last x; a thread takes 16 bytes of y, from pieces of PIECE bytes.
template <typename T, int PARTS, int PIECE>
__device__ void pack_channels_last(const Images &p) {
    constexpr int V = 16 / sizeof(T), EACH = PIECE / sizeof(T);
    struct alignas(PIECE) Piece {
        T v[EACH];
    };
    const unsigned across = p.wide / V, groups = p.groups;
    const long long pixels = p.n * p.pixels, plane = pixels * p.wide, count = pixels * groups * across;
    for (long long i = blockIdx.x * 256ll + threadIdx.x; i < count; i += gridDim.x * 256ll) {
        const long long rest = i / across, pixel = rest / groups;
        const int channel = (int)(i - rest * across) * V, group = (int)(rest - pixel * groups);
        const T *x = static_cast<const T *>(p.x) + pixel * p.step_pixel + group * p.channels + channel;
        Piece pieces[V / EACH];
#pragma unroll
        for (int e = 0; e < V / EACH; ++e)
            pieces[e] = channel + e * EACH < p.channels ? reinterpret_cast<const Piece *>(x)[e] : Piece{};
        T v[V];
#pragma unroll
        for (int e = 0; e < V; ++e) v[e] = pieces[e / EACH].v[e % EACH];
        put<T, PARTS>(static_cast<T *>(p.y) + group * plane + pixel * p.wide + channel, groups * plane, v);
    }
}

// The same of x with channels outside; blocks of 256 threads turn 64 pixels x 64 channels.
template <typename T, int PARTS>
__device__ void pack_channels_first(const Images &p) {
    __shared__ T tile[64][64 + 4 / sizeof(T)];
    long long rest = blockIdx.x;
    const int channel0 = rest % p.tiles_channels * 64;
    rest /= p.tiles_channels;
    const int pixel0 = rest % p.tiles_pixels * 64;
    rest /= p.tiles_pixels;
    const int group = rest % p.groups;
    const long long n = rest / p.groups;
    const T *x = static_cast<const T *>(p.x) + n * p.step_n + group * p.channels * p.step_c;
#pragma unroll 4
    for (int i = threadIdx.x; i < 64 * 64; i += 256) {
        const int pixel = i % 64, channel = i / 64;
        const bool real = pixel0 + pixel < p.pixels && channel0 + channel < p.channels;
        tile[pixel][channel] = real ? x[(channel0 + channel) * p.step_c + pixel0 + pixel] : T{};
    }
    __syncthreads();
    constexpr int V = 16 / sizeof(T), ACROSS = 64 / V;
    const long long plane = p.n * p.pixels * p.wide;
    for (int i = threadIdx.x; i < 64 * ACROSS; i += 256) {
        const int pixel = i / ACROSS, channel = i % ACROSS * V;
        if (pixel0 + pixel >= p.pixels || channel0 + channel >= p.wide) continue;
        T v[V];
#pragma unroll
        for (int e = 0; e < V; ++e) v[e] = tile[pixel][channel + e];
        T *y = static_cast<T *>(p.y) + group * plane + (n * p.pixels + pixel0 + pixel) * p.wide + channel0 + channel;
        put<T, PARTS>(y, p.groups * plane, v);
    }
}

struct Filters {
    const void *w;
    void *y;
    // y[k][tap][part][wide], filters `pitch` elements apart; of w in elements: distances of filters, channels and taps.
    long long k, taps, channels, wide, pitch, step_k, step_c, step_r, step_s, taps_w;
};

// Parts of filters for 3xtf32: large, small, large.
// PARTS 0: as they are.
template <typename T, int PARTS>
__device__ void pack_filters(const Filters &p) {
    const long long line = PARTS == 2 ? 3 * p.wide : p.wide, count = p.k * p.pitch;
    const T *w = static_cast<const T *>(p.w);
    T *y = static_cast<T *>(p.y);
    for (long long i = blockIdx.x * 256ll + threadIdx.x; i < count; i += gridDim.x * 256ll) {
        const long long k = i / p.pitch, rest = i - k * p.pitch, tap = rest / line, at = rest - tap * line;
        const long long channel = at % p.wide, part = at / p.wide;
        T v{};
        if (channel < p.channels && tap < p.taps)
            v = w[k * p.step_k + channel * p.step_c + tap / p.taps_w * p.step_r + tap % p.taps_w * p.step_s];
        y[i] = part == 1 ? part_of<T, 1>(v) : part_of<T, PARTS == 0 ? 2 : 0>(v);
    }
}
