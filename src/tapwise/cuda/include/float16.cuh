// Element types of tensor cores, without CUDA's headers: they take longer to compile than a kernel.
#pragma once

struct f16 { unsigned short bits; };
struct bf16 { unsigned short bits; };

template <typename T> struct Element;
template <> struct Element<float> {
    static __device__ __forceinline__ float to_float(float v) { return v; }
    static __device__ __forceinline__ float from_float(float v) { return v; }
    static __device__ __forceinline__ float larger(float a, float b) {
        float r;
        asm("max.NaN.f32 %0, %1, %2;" : "=f"(r) : "f"(a), "f"(b));
        return r;
    }
};
__device__ __forceinline__ float widen(f16 v) {
    float wide;
    asm("cvt.f32.f16 %0, %1;" : "=f"(wide) : "h"(v.bits));
    return wide;
}
__device__ __forceinline__ float widen(bf16 v) { return __uint_as_float((unsigned)v.bits << 16); }

// Two in a word, the first in its lower half; pack_relu: zero for what is below it, NaN stays; pack_relu6: and six
// (SIX) for what is above it; pack_relu1: and one (ONE). larger: of each half, or of floats, the larger one, NaN above
// all.
#define ELEMENT(TYPE, SIX, ONE)                                                                     \
    template <> struct Element<TYPE> {                                                              \
        static __device__ __forceinline__ float to_float(TYPE v) { return widen(v); }               \
        static __device__ __forceinline__ TYPE from_float(float v) {                                \
            TYPE r;                                                                                 \
            asm("cvt.rn." #TYPE ".f32 %0, %1;" : "=h"(r.bits) : "f"(v));                            \
            return r;                                                                               \
        }                                                                                           \
        static __device__ __forceinline__ unsigned pack(float low, float high) {                    \
            unsigned r;                                                                             \
            asm("cvt.rn." #TYPE "x2.f32 %0, %1, %2;" : "=r"(r) : "f"(high), "f"(low));              \
            return r;                                                                               \
        }                                                                                           \
        static __device__ __forceinline__ unsigned larger(unsigned a, unsigned b) {                 \
            unsigned r;                                                                             \
            asm("max.NaN." #TYPE "x2 %0, %1, %2;" : "=r"(r) : "r"(a), "r"(b));                      \
            return r;                                                                               \
        }                                                                                           \
        static __device__ __forceinline__ unsigned pack_relu(float low, float high) {               \
            unsigned r;                                                                             \
            asm("cvt.rn.relu." #TYPE "x2.f32 %0, %1, %2;" : "=r"(r) : "f"(high), "f"(low));         \
            return r;                                                                               \
        }                                                                                           \
        static __device__ __forceinline__ unsigned pack_relu6(float low, float high) {              \
            unsigned r;                                                                             \
            asm("min.NaN." #TYPE "x2 %0, %1, %2;" : "=r"(r) : "r"(pack_relu(low, high)), "r"(SIX)); \
            return r;                                                                               \
        }                                                                                           \
        static __device__ __forceinline__ unsigned pack_relu1(float low, float high) {              \
            unsigned r;                                                                             \
            asm("min.NaN." #TYPE "x2 %0, %1, %2;" : "=r"(r) : "r"(pack_relu(low, high)), "r"(ONE)); \
            return r;                                                                               \
        }                                                                                           \
    };
ELEMENT(f16, 0x46004600, 0x3c003c00)
ELEMENT(bf16, 0x40c040c0, 0x3f803f80)
#undef ELEMENT

// Two float16 in a word: less two others; of floats, rounded towards zero.
__device__ __forceinline__ unsigned subtract_f16x2(unsigned a, unsigned b) {
    unsigned r;
    asm("sub.rn.f16x2 %0, %1, %2;" : "=r"(r) : "r"(a), "r"(b));
    return r;
}
__device__ __forceinline__ unsigned truncate_f16x2(float low, float high) {
    unsigned r;
    asm("cvt.rz.f16x2.f32 %0, %1, %2;" : "=r"(r) : "f"(high), "f"(low));
    return r;
}

// fp32 rounded to the nearest tf32, ties away from zero; infinities stay, NaN becomes another NaN.
__device__ __forceinline__ float to_tf32(float v) {
    unsigned r;
    asm("cvt.rna.tf32.f32 %0, %1;" : "=r"(r) : "f"(v));
    return __uint_as_float(r);
}
