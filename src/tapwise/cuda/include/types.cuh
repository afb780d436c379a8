// Element types and the types that are computed in.
#pragma once

#include "float16.cuh"

template <typename T>
struct Arithmetic {
    using type = T;
};

#ifdef WITH_HALF
#include <cuda_fp16.h>

template <>
struct Arithmetic<__half> {
    using type = float;
};

__device__ __forceinline__ float widen(__half value) { return __half2float(value); }
template <typename T>
__device__ __forceinline__ T narrow(float value);
template <>
__device__ __forceinline__ __half narrow<__half>(float value) {
    return __float2half_rn(value);
}
template <>
__device__ __forceinline__ float narrow<float>(float value) {
    return value;
}
#else
template <typename T>
__device__ __forceinline__ T narrow(T value) {
    return value;
}
#endif

__device__ __forceinline__ float widen(float value) { return value; }
__device__ __forceinline__ double widen(double value) { return value; }
__device__ __forceinline__ float widen(bf16 value) { return Element<bf16>::widen(value); }

// NVRTC has no <math.h> to take them from.
#define POSITIVE_INFINITY __int_as_float(0x7f800000)
#define NOT_A_NUMBER __int_as_float(0x7fffffff)
