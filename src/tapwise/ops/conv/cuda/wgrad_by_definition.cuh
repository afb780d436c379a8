// Sums of a weight gradient on their way to dw: those that zeros of a tile times what is not finite may have made NaN
// are worked out again by the definition, and parts of sums are added.
#pragma once

#include "grid.cuh"
#include "types.cuh"

// An element of dw by the definition, by a warp; padding is zeros. `k`: its filter, `c`: its channel of x.
template <typename T, bool LAST, class Arguments>
__device__ __noinline__ float sum_by_definition(const Arguments &a, int k, int c, int r, int s) {
    const int p = a.p, q = a.q, height = a.height, width = a.width, pixels = (int)a.n * p * q;
    const int column_x = LAST ? (int)a.c : 1, column_dy = LAST ? (int)a.k : 1;
    float sum = 0.0f;
    for (int i = threadIdx.x % 32; i < pixels; i += 32) {
        const int line = i / q, image = line / p,
                  h = (line - image * p) * (int)a.stride_h - (int)a.pad_h + r * (int)a.dilation_h,
                  w = (i - line * q) * (int)a.stride_w - (int)a.pad_w + s * (int)a.dilation_w;
        const bool real = (unsigned)h < (unsigned)height && (unsigned)w < (unsigned)width;
        const int plane_x = LAST ? image * (int)a.c * height * width + c : (image * (int)a.c + c) * height * width,
                  plane_dy = LAST ? image * (int)a.k * p * q + k : (image * (int)a.k + k) * p * q;
        sum += (real ? upcast(static_cast<const T *>(a.x)[plane_x + (h * width + w) * column_x]) : 0.0f) *
               upcast(static_cast<const T *>(a.w)[plane_dy + (i - image * p * q) * column_dy]);
    }
#pragma unroll
    for (int lanes = 16; lanes > 0; lanes /= 2) sum += __shfl_xor_sync(~0u, sum, lanes);
    return sum;
}

// Element `at` of dw, of a lane that has one; GROUP: channels and filters of a group.
template <typename T, bool LAST, int GROUP, class Arguments>
DEVICE void store_sum(const Arguments &a, bool mine, int at, float sum) {
    const int finite = !mine || sum - sum == 0.0f;
    if (!__all_sync(~0u, finite)) {
        const int s = a.s, taps = (int)a.r * s;
#pragma unroll 1
        for (int lane = 0; lane < 32; ++lane) {
            if (__shfl_sync(~0u, finite, lane)) continue;
            const int there = __shfl_sync(~0u, at, lane), k = there / (taps * GROUP), within = there - k * taps * GROUP,
                      tap = LAST ? within / GROUP : within % taps, c = LAST ? within % GROUP : within / taps;
            const float again = sum_by_definition<T, LAST>(a, k, k / GROUP * GROUP + c, tap / s, tap % s);
            if (lane == (int)threadIdx.x % 32) sum = again;
        }
    }
    if (mine) static_cast<T *>(a.y)[at] = downcast<T>(sum);
}

// dw from the parts, in a fixed order: of WARPS, SLICES share 32 elements, each adds every SLICES-th of their parts,
// and the first one adds those sums. `early`: grid.cuh.
template <typename T, bool LAST, int GROUP, int WARPS, int SLICES, class Arguments>
DEVICE void add_parts_of_sums(const Arguments &a, bool early) {
    // Parts that are loaded at once, the last few too: a loop over what is left would wait for each.
    constexpr int ONCE = 8;
    __shared__ float sums[WARPS][32];
    const int count = a.split, each = (int)(a.k * a.r * a.s) * GROUP;
    const int warp = threadIdx.x / 32, lane = threadIdx.x % 32, slice = warp % SLICES;
    const int i = (blockIdx.x * (WARPS / SLICES) + warp / SLICES) * 32 + lane;
    const float *const from = static_cast<const float *>(a.parts) + i;
    work_out(count, each, (int)(long long)from);
    begin_dependent(early);
    float sum = 0.0f;
    if (i < each)
#pragma unroll 1
        for (int part = slice; part < count; part += SLICES * ONCE) {
            float some[ONCE];
#pragma unroll
            for (int e = 0; e < ONCE; ++e)
                some[e] = part + e * SLICES < count ? from[(long long)(part + e * SLICES) * each] : 0.0f;
#pragma unroll
            for (int e = 0; e < ONCE; ++e) sum += some[e];
        }
    if constexpr (SLICES > 1) {
        sums[warp][lane] = sum;
        __syncthreads();
        if (slice > 0) return;
#pragma unroll
        for (int other = 1; other < SLICES; ++other) sum += sums[warp + other][lane];
    }
    store_sum<T, LAST, GROUP>(a, i < each, i, sum);
}
