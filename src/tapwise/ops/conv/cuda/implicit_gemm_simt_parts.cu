// What surrounds the product of implicit_gemm_simt.cu: the sum of gemm_k's parts, and filters in the product's order.
#pragma once

#include "activation.cuh"
#include "grid.cuh"

struct Parts {
    const void *parts;
    void *y;
    const void *bias, *residual;
    // Outputs, filters, outputs of a filter side by side, parts of gemm_k.
    long long count, k, inner, split_k;
};

// y from the sums of parts, in the order of gemm_k. WRITE outputs a thread at once, WRITE of the bias if ALONG. INDEX
// counts them.
template <typename T, typename INDEX, int WRITE, bool ALONG, int ACTIVATION> DEVICE void add_parts(const Parts &p) {
    struct alignas(WRITE * sizeof(T)) Written { T v[WRITE]; };
    const T *parts = static_cast<const T *>(p.parts), *bias = static_cast<const T *>(p.bias),
            *residual = static_cast<const T *>(p.residual);
    const INDEX count = p.count / WRITE, inner = p.inner, k = p.k, each = gridDim.x * blockDim.x;
    wait_for_previous();
    for (INDEX i = blockIdx.x * blockDim.x + threadIdx.x; i < count; i += each) {
        const long long at = (long long)i * WRITE;
        Written sum = *reinterpret_cast<const Written *>(parts + at);
#pragma unroll 4
        for (int part = 1; part < (int)p.split_k; ++part) {
            const Written more = *reinterpret_cast<const Written *>(parts + part * p.count + at);
#pragma unroll
            for (int e = 0; e < WRITE; ++e) sum.v[e] += more.v[e];
        }
        const T *const offset = bias ? bias + (INDEX)(i * WRITE) / inner % k : nullptr;
        Written added{};
        if (residual) added = *reinterpret_cast<const Written *>(residual + at);
#pragma unroll
        for (int e = 0; e < WRITE; ++e) {
            if (bias) sum.v[e] += offset[ALONG ? e : 0];
            if (residual) sum.v[e] += added.v[e];
            sum.v[e] = activate<ACTIVATION>(sum.v[e]);
        }
        *reinterpret_cast<Written *>(static_cast<T *>(p.y) + at) = sum;
    }
    let_next_begin();
}

struct Transposed {
    const void *w;
    void *y;
    // y[group][row][pitch]: `rows` terms, of which `taps` times `wide` are taps and their channels. Of w in elements:
    // filters and channels of a group, distances of filters, channels and taps.
    long long rows, pitch, taps, wide, group_k, group_c, taps_w, step_k, step_c, step_r, step_s;
    // Squares of 32 filters and 32 terms.
    long long tiles_k, tiles_rows;
};

// Filters side by side for each term, zeros where there is none. A block takes 32 filters and 32 terms, in the order of
// (k, c, r, s), and transposes them.
template <typename T> DEVICE void pack_transposed(const Transposed &p) {
    extern __shared__ __align__(1024) unsigned char memory[];
    T(*const tile)[33] = reinterpret_cast<T(*)[33]>(memory);
    const long long at = blockIdx.x / p.tiles_k, filter0 = (blockIdx.x - at * p.tiles_k) * 32,
                    group = at / p.tiles_rows, first = (at - group * p.tiles_rows) * 32;
    const int lane = threadIdx.x % 32, warp = threadIdx.x / 32;
    const long long read = first + lane, channel = read / p.taps, tap = read - channel * p.taps, r = tap / p.taps_w;
    const T *const from = static_cast<const T *>(p.w) + group * p.group_k * p.step_k + channel * p.step_c +
                          r * p.step_r + (tap - r * p.taps_w) * p.step_s;
    for (int i = warp; i < 32; i += 8) {
        const long long filter = filter0 + i;
        tile[i][lane] = channel < p.group_c && filter < p.group_k ? from[filter * p.step_k] : T(0);
    }
    __syncthreads();
    for (int i = warp; i < 32; i += 8) {
        const long long term = first + i, c = term / p.taps;
        if (term >= p.rows || filter0 + lane >= p.pitch) continue;
        // Behind the last tap's channels are rows of zeros.
        const long long row = c < p.wide ? (term - c * p.taps) * p.wide + c : term;
        static_cast<T *>(p.y)[(group * p.rows + row) * p.pitch + filter0 + lane] = tile[lane][i];
    }
}
