// Element types and the types that are computed in: upcast and downcast go from one to the other.
#pragma once

#include "float16.cuh"

template <typename T> struct Arithmetic { using type = T; };

#ifdef WITH_HALF
#include <cuda_fp16.h>

template <> struct Arithmetic<__half> { using type = float; };

__device__ __forceinline__ float upcast(__half value) { return __half2float(value); }
template <typename T> __device__ __forceinline__ T downcast(float value);
template <> __device__ __forceinline__ __half downcast<__half>(float value) { return __float2half_rn(value); }
template <> __device__ __forceinline__ float downcast<float>(float value) { return value; }
#else
template <typename T> __device__ __forceinline__ T downcast(T value) { return value; }
#endif

__device__ __forceinline__ float upcast(float value) { return value; }
__device__ __forceinline__ double upcast(double value) { return value; }
__device__ __forceinline__ float upcast(bf16 value) { return Element<bf16>::to_float(value); }

// NVRTC has no <math.h> to take them from.
#define POSITIVE_INFINITY __int_as_float(0x7f800000)
#define NOT_A_NUMBER __int_as_float(0x7fffffff)
