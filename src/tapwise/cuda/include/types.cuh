// Element types and the types that are computed in: upcast and downcast go from one to the other.
#pragma once

#include "float16.cuh"

template <typename T> struct Arithmetic {
    using type = T;
    static __device__ __forceinline__ T narrow(T value) { return value; }
};
template <typename T> struct Bits16 {
    using type = float;
    static __device__ __forceinline__ T narrow(float value) { return Element<T>::from_float(value); }
};
template <> struct Arithmetic<bf16> : Bits16<bf16> {};
template <> struct Arithmetic<f16> : Bits16<f16> {};

#ifdef WITH_HALF
#include <cuda_fp16.h>

template <> struct Arithmetic<__half> {
    using type = float;
    static __device__ __forceinline__ __half narrow(float value) { return __float2half_rn(value); }
};

__device__ __forceinline__ float upcast(__half value) { return __half2float(value); }
#endif

__device__ __forceinline__ float upcast(float value) { return value; }
__device__ __forceinline__ double upcast(double value) { return value; }
__device__ __forceinline__ float upcast(f16 value) { return Element<f16>::to_float(value); }
__device__ __forceinline__ float upcast(bf16 value) { return Element<bf16>::to_float(value); }
template <typename T> __device__ __forceinline__ T downcast(typename Arithmetic<T>::type value) {
    return Arithmetic<T>::narrow(value);
}

template <bool FIRST, typename A, typename B> struct Choose { using type = A; };
template <typename A, typename B> struct Choose<false, A, B> { using type = B; };

// V neighbours, loaded and stored at once: their bytes are a power of two up to 16, and their address a multiple of it.
template <typename T, int V> struct alignas(sizeof(T) * V) Neighbours { T v[V]; };

// Of a place along an axis, and of elements of an image: WIDE_COORDINATES where there are 2^31 or more.
#ifdef WIDE_COORDINATES
using Coordinate = long long;
using UnsignedCoordinate = unsigned long long;
#else
using Coordinate = int;
using UnsignedCoordinate = unsigned;
#endif

// NVRTC has no <math.h> to take them from.
#define POSITIVE_INFINITY __int_as_float(0x7f800000)
#define NOT_A_NUMBER __int_as_float(0x7fffffff)
