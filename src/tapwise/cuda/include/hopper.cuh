// Hopper's own instructions (sm_90a): warpgroup matrix products, clusters.
//
// The stub defines one matrix instruction: WGMMA (its text), WGMMA_N (its columns) and WGMMA_SUMS (its accumulators).
#pragma once

#include "tma.cuh"

// Two floats to shared memory of the cluster, whose barrier there counts their bytes.
DEVICE void send_two(unsigned to, unsigned barrier, float a, float b) {
    asm volatile("st.async.shared::cluster.mbarrier::complete_tx::bytes.v2.f32 [%0], {%2, %3}, [%1];" ::"r"(to),
                 "r"(barrier), "f"(a), "f"(b)
                 : "memory");
}

// An operand whose rows of SPAN bytes (128, 64, 32) run along gemm_k, swizzled as the copies leave them: groups of 8
// rows follow one another. One step of the instruction is 32 bytes further, so + 2. It may begin at any row: the
// hardware swizzles by address, so nothing has to be said about the row that a shifted operand begins with.
template <int SPAN> DEVICE unsigned long long descriptor(unsigned address) {
    constexpr unsigned long long MODE = SPAN == 128 ? 1 : SPAN == 64 ? 2 : 3;
    return (unsigned long long)((address & 0x3FFFF) >> 4) | 1ull << 16 | (unsigned long long)(SPAN / 2) << 32 |
           MODE << 62;
}
// A transposed operand: rows of SPAN bytes (128, 64) are 64 or 32 elements of gemm_m or gemm_n at one place of gemm_k,
// swizzled as the copies leave them. Groups of 8 rows follow one another (stride offset); the next elements of the same
// rows lie `distance` bytes on (leading offset). In elements: Swizzle<3,4,3> of ((8,8,m),(8,k)):((1,8,leading),(64,
// stride)), and Swizzle<2,4,3> of ((8,4,m),(8,k)):((1,8,leading),(32,stride)), the canonical layouts of PTX for
// MN-major operands of 16 bits. One step of the instruction, 16 rows, is 16 * SPAN bytes further, so + SPAN.
template <int SPAN> DEVICE unsigned long long transposed_descriptor(unsigned address, unsigned distance) {
    static_assert(SPAN == 128 || SPAN == 64);
    return (unsigned long long)((address & 0x3FFFF) >> 4) | (unsigned long long)(distance >> 4) << 16 |
           (unsigned long long)(SPAN / 2) << 32 | (SPAN == 128 ? 1ull : 2ull) << 62;
}
DEVICE void wgmma_fence() { asm volatile("wgmma.fence.sync.aligned;" ::: "memory"); }
DEVICE void wgmma_commit() { asm volatile("wgmma.commit_group.sync.aligned;" ::: "memory"); }
// Waits until at most PENDING groups are under way.
template <int PENDING> DEVICE void wgmma_wait() {
    asm volatile("wgmma.wait_group.sync.aligned %0;" ::"n"(PENDING) : "memory");
}
// What stands before this is not moved behind it, nor worked out anew there.
template <int STEPS, int N> DEVICE void keep_sums(float (&d)[STEPS][N]) {
#pragma unroll
    for (int m = 0; m < STEPS; ++m)
#pragma unroll
        for (int i = 0; i < N; ++i) asm volatile("" : "+f"(d[m][i])::"memory");
}
// Sums are read only behind this, whose place the compiler keeps: else it waits for every product by itself.
template <int STEPS, int N> DEVICE void wait_for_products(float (&d)[STEPS][N]) {
    wgmma_wait<0>();
    keep_sums(d);
}
// sums = a * b, or sums += a * b.
DEVICE void wgmma(float (&d)[WGMMA_N / 2], unsigned long long a, unsigned long long b, int add) {
    asm volatile(WGMMA : WGMMA_SUMS : "l"(a), "l"(b), "r"(add));
}

// Four 8 x 8 matrices of 16-bit elements between a warp's registers and shared memory, as they are or transposed.
template <bool TRANSPOSED> DEVICE void store_matrices(unsigned to, const unsigned (&v)[4]) {
    if constexpr (TRANSPOSED)
        asm volatile("stmatrix.sync.aligned.m8n8.x4.trans.shared.b16 [%0], {%1, %2, %3, %4};" ::"r"(to), "r"(v[0]),
                     "r"(v[1]), "r"(v[2]), "r"(v[3])
                     : "memory");
    else
        asm volatile("stmatrix.sync.aligned.m8n8.x4.shared.b16 [%0], {%1, %2, %3, %4};" ::"r"(to), "r"(v[0]), "r"(v[1]),
                     "r"(v[2]), "r"(v[3])
                     : "memory");
}
template <bool TRANSPOSED> DEVICE void ldmatrix(unsigned (&v)[4], unsigned from) {
    if constexpr (TRANSPOSED)
        asm volatile("ldmatrix.sync.aligned.m8n8.x4.trans.shared.b16 {%0, %1, %2, %3}, [%4];"
                     : "=r"(v[0]), "=r"(v[1]), "=r"(v[2]), "=r"(v[3])
                     : "r"(from)
                     : "memory");
    else
        asm volatile("ldmatrix.sync.aligned.m8n8.x4.shared.b16 {%0, %1, %2, %3}, [%4];"
                     : "=r"(v[0]), "=r"(v[1]), "=r"(v[2]), "=r"(v[3])
                     : "r"(from)
                     : "memory");
}
