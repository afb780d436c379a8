// Warp-level tensor core instructions and what feeds them from shared memory (compute capability 8.0 and newer).
#pragma once

#include "cp_async.cuh"
#include "float16.cuh"
#include "shared_memory.cuh"

DEVICE unsigned bits(float v) { return __float_as_uint(v); }
DEVICE unsigned bits(f16 v) { return v.bits; }
DEVICE unsigned bits(bf16 v) { return v.bits; }

// A word is in a register of its own from here on, not put together where it is used.
DEVICE void keep_in_register(unsigned &v) { asm volatile("" : "+r"(v)); }

// Sums stay floats: as words they take other registers.
DEVICE void store_pair(unsigned to, float a, float b) {
    asm volatile("st.shared.v2.f32 [%0], {%1, %2};" ::"r"(to), "f"(a), "f"(b) : "memory");
}
DEVICE float load_float(unsigned from) {
    float v;
    asm volatile("ld.shared.f32 %0, [%1];" : "=f"(v) : "r"(from) : "memory");
    return v;
}

// COUNT matrices of 8 rows of 16 bytes; each lane gives one row's address.
template <int COUNT> DEVICE void ldmatrix(unsigned (&v)[COUNT], unsigned from) {
    if constexpr (COUNT == 4)
        asm volatile("ldmatrix.sync.aligned.m8n8.x4.shared.b16 {%0, %1, %2, %3}, [%4];"
                     : "=r"(v[0]), "=r"(v[1]), "=r"(v[2]), "=r"(v[3])
                     : "r"(from)
                     : "memory");
    else
        asm volatile("ldmatrix.sync.aligned.m8n8.x2.shared.b16 {%0, %1}, [%2];"
                     : "=r"(v[0]), "=r"(v[1])
                     : "r"(from)
                     : "memory");
}
// Four of them, or two, each transposed.
DEVICE void ldmatrix_transposed(unsigned (&v)[4], unsigned from) {
    asm volatile("ldmatrix.sync.aligned.m8n8.x4.trans.shared.b16 {%0, %1, %2, %3}, [%4];"
                 : "=r"(v[0]), "=r"(v[1]), "=r"(v[2]), "=r"(v[3])
                 : "r"(from)
                 : "memory");
}

DEVICE void ldmatrix_transposed(unsigned (&v)[2], unsigned from) {
    asm volatile("ldmatrix.sync.aligned.m8n8.x2.trans.shared.b16 {%0, %1}, [%2];"
                 : "=r"(v[0]), "=r"(v[1])
                 : "r"(from)
                 : "memory");
}

// Two numbers of 16 bits times zero, added to two others: those stay zeros until one of the first is not finite.
template <typename T> DEVICE unsigned add_zeros(unsigned v, unsigned sum);
#define ADD_ZEROS(TYPE)                                                                  \
    template <> DEVICE unsigned add_zeros<TYPE>(unsigned v, unsigned sum) {              \
        asm volatile("fma.rn." #TYPE "x2 %0, %1, %2, %0;" : "+r"(sum) : "r"(v), "r"(0)); \
        return sum & 0x7fff7fff;                                                         \
    }
ADD_ZEROS(f16)
ADD_ZEROS(bf16)
#undef ADD_ZEROS

// d += a * b of 16 rows, 8 columns and 32 bytes of gemm_k.
template <typename T> DEVICE void mma(float (&d)[4], const unsigned (&a)[4], const unsigned (&b)[2]);
#define MMA(TYPE, SHAPE)                                                                                          \
    template <> DEVICE void mma<TYPE>(float (&d)[4], const unsigned (&a)[4], const unsigned (&b)[2]) {            \
        asm volatile("mma.sync.aligned." SHAPE " {%0, %1, %2, %3}, {%4, %5, %6, %7}, {%8, %9}, {%0, %1, %2, %3};" \
                     : "+f"(d[0]), "+f"(d[1]), "+f"(d[2]), "+f"(d[3])                                             \
                     : "r"(a[0]), "r"(a[1]), "r"(a[2]), "r"(a[3]), "r"(b[0]), "r"(b[1]));                         \
    }
MMA(f16, "m16n8k16.row.col.f32.f16.f16.f32")
MMA(bf16, "m16n8k16.row.col.f32.bf16.bf16.f32")
MMA(float, "m16n8k8.row.col.f32.tf32.tf32.f32")
#undef MMA
// The same of 16 bytes of gemm_k, 16 bits.
template <typename T> DEVICE void mma_half(float (&d)[4], const unsigned (&a)[2], unsigned b);
#define MMA_HALF(TYPE)                                                                                      \
    template <> DEVICE void mma_half<TYPE>(float (&d)[4], const unsigned (&a)[2], unsigned b) {             \
        asm volatile("mma.sync.aligned.m16n8k8.row.col.f32." #TYPE "." #TYPE ".f32 {%0, %1, %2, %3}, {%4, " \
                     "%5}, {%6}, {%0, %1, %2, %3};"                                                         \
                     : "+f"(d[0]), "+f"(d[1]), "+f"(d[2]), "+f"(d[3])                                       \
                     : "r"(a[0]), "r"(a[1]), "r"(b));                                                       \
    }
MMA_HALF(f16)
MMA_HALF(bf16)
#undef MMA_HALF

// d += a * b of 16 rows, 8 columns and 64 bytes of gemm_k, in which two numbers beside each other are of two channels:
// rows 0 to 7 have those of the first one, rows 8 to 15 of the second one, and zeros between them, which are left out.
template <typename T> DEVICE void mma_two_channels(float (&d)[4], const unsigned (&a)[4], const unsigned (&b)[4]);
// Which two of four numbers a row has, of 16 numbers: 0 and 2 in the first rows, 1 and 3 in the others.
#define MMA_SPARSE(TYPE)                                                                                            \
    template <> DEVICE void mma_two_channels<TYPE>(float (&d)[4], const unsigned (&a)[4], const unsigned (&b)[4]) { \
        asm volatile("mma.sp::ordered_metadata.sync.aligned.m16n8k32.row.col.f32." #TYPE "." #TYPE                  \
                     ".f32 {%0, %1, %2, %3}, "                                                                      \
                     "{%4, %5, %6, %7}, {%8, %9, %10, %11}, {%0, %1, %2, %3}, %12, 0;"                              \
                     : "+f"(d[0]), "+f"(d[1]), "+f"(d[2]), "+f"(d[3])                                               \
                     : "r"(a[0]), "r"(a[1]), "r"(a[2]), "r"(a[3]), "r"(b[0]), "r"(b[1]), "r"(b[2]), "r"(b[3]),      \
                       "r"(0xdddd8888));                                                                            \
    }
MMA_SPARSE(f16)
MMA_SPARSE(bf16)
#undef MMA_SPARSE

// fp32 numbers as a tf32 number and another one for what it leaves.
template <int COUNT> DEVICE void split_tf32(unsigned (&v)[COUNT], unsigned (&rest)[COUNT]) {
#pragma unroll
    for (int i = 0; i < COUNT; ++i) {
        const float whole = __uint_as_float(v[i]), large = to_tf32(whole);
        v[i] = __float_as_uint(large);
        // Infinities and NaN leave nothing.
        rest[i] = large - large == 0.0f ? __float_as_uint(to_tf32(whole - large)) : 0;
    }
}
