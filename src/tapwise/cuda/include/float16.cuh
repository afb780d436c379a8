// Element types of tensor cores, without CUDA's headers: they take longer to compile than a kernel.
#pragma once

struct f16 { unsigned short bits; };
struct bf16 { unsigned short bits; };

template <typename T> struct Element;
template <> struct Element<float> {
    static __device__ __forceinline__ float to_float(float v) { return v; }
    static __device__ __forceinline__ float from_float(float v) { return v; }
};
template <> struct Element<f16> {
    static __device__ __forceinline__ float to_float(f16 v) {
        float wide;
        asm("cvt.f32.f16 %0, %1;" : "=f"(wide) : "h"(v.bits));
        return wide;
    }
    static __device__ __forceinline__ f16 from_float(float v) {
        f16 r;
        asm("cvt.rn.f16.f32 %0, %1;" : "=h"(r.bits) : "f"(v));
        return r;
    }
    // Two in a word, the first in its lower half.
    static __device__ __forceinline__ unsigned pack(float low, float high) {
        unsigned r;
        asm("cvt.rn.f16x2.f32 %0, %1, %2;" : "=r"(r) : "f"(high), "f"(low));
        return r;
    }
    // The same with zero for what is below it; NaN stays.
    static __device__ __forceinline__ unsigned pack_relu(float low, float high) {
        unsigned r;
        asm("cvt.rn.relu.f16x2.f32 %0, %1, %2;" : "=r"(r) : "f"(high), "f"(low));
        return r;
    }
    // And six for what is above it.
    static __device__ __forceinline__ unsigned pack_relu6(float low, float high) {
        unsigned r;
        asm("min.NaN.f16x2 %0, %1, %2;" : "=r"(r) : "r"(pack_relu(low, high)), "r"(0x46004600));
        return r;
    }
};
template <> struct Element<bf16> {
    static __device__ __forceinline__ float to_float(bf16 v) { return __uint_as_float((unsigned)v.bits << 16); }
    static __device__ __forceinline__ bf16 from_float(float v) {
        bf16 r;
        asm("cvt.rn.bf16.f32 %0, %1;" : "=h"(r.bits) : "f"(v));
        return r;
    }
    static __device__ __forceinline__ unsigned pack(float low, float high) {
        unsigned r;
        asm("cvt.rn.bf16x2.f32 %0, %1, %2;" : "=r"(r) : "f"(high), "f"(low));
        return r;
    }
    static __device__ __forceinline__ unsigned pack_relu(float low, float high) {
        unsigned r;
        asm("cvt.rn.relu.bf16x2.f32 %0, %1, %2;" : "=r"(r) : "f"(high), "f"(low));
        return r;
    }
    // And six for what is above it.
    static __device__ __forceinline__ unsigned pack_relu6(float low, float high) {
        unsigned r;
        asm("min.NaN.bf16x2 %0, %1, %2;" : "=r"(r) : "r"(pack_relu(low, high)), "r"(0x40c040c0));
        return r;
    }
};

// fp32 rounded to the nearest tf32, ties away from zero; infinities stay, NaN becomes another NaN.
__device__ __forceinline__ float to_tf32(float v) {
    unsigned r;
    asm("cvt.rna.tf32.f32 %0, %1;" : "=r"(r) : "f"(v));
    return __uint_as_float(r);
}
