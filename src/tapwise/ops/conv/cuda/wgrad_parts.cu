// The weight gradient from sums of parts of the pixels, which lie in the workspace in dw's order.
#pragma once

#include "grid.cuh"
#include "types.cuh"

struct Parts {
    const void *parts;
    void *y;
    // Elements of dw, distance of parts, parts.
    long long count, part_pitch, split_k;
};

// SLICES warps of eight share the parts of 32 pieces of 16 bytes, then their sums are added in order.
template <typename T, int SLICES> DEVICE void add_parts(const Parts &p) {
    using Sum = typename Arithmetic<T>::type;
    constexpr int V = 16 / (int)sizeof(Sum);
    using Sums = Neighbours<Sum, V>;
    extern __shared__ __align__(1024) unsigned char memory[];
    const int warp = threadIdx.x / 32, lane = threadIdx.x % 32, slice = warp % SLICES;
    const long long at = ((blockIdx.x * (8ll / SLICES) + warp / SLICES) * 32 + lane) * V;
    const int count = at < p.count ? (int)p.split_k : 0;
    const Sum *from = static_cast<const Sum *>(p.parts) + at;
    Sums sum{};
    work_out(count, (int)(long long)from, (int)p.part_pitch);
    begin_dependent();
#pragma unroll 4
    for (int part = slice; part < count; part += SLICES) {
        const Sums v = *reinterpret_cast<const Sums *>(from + part * p.part_pitch);
#pragma unroll
        for (int e = 0; e < V; ++e) sum.v[e] += v.v[e];
    }
    if constexpr (SLICES > 1) {
        Sums *const sums = reinterpret_cast<Sums *>(memory) + lane;
        sums[warp * 32] = sum;
        __syncthreads();
        if (slice > 0) return;
#pragma unroll
        for (int other = 1; other < SLICES; ++other) {
            const Sums v = sums[(warp + other) * 32];
#pragma unroll
            for (int e = 0; e < V; ++e) sum.v[e] += v.v[e];
        }
    }
    T *const y = static_cast<T *>(p.y) + at;
    Neighbours<T, V> out;
#pragma unroll
    for (int e = 0; e < V; ++e) out.v[e] = downcast<T>(sum.v[e]);
    if (at + V <= p.count) *reinterpret_cast<Neighbours<T, V> *>(y) = out;
    else
#pragma unroll
        for (int e = 0; e < V; ++e)
            if (at + e < p.count) y[e] = out.v[e];
}
