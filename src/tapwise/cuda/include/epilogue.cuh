// What happens to a sum on its way to y: bias, residual, activation, rounding to the element type.
#pragma once

#include "types.cuh"

enum Activation { NONE, RELU, RELU6, SILU, GELU, SIGMOID, TANH };

// fmax and fmin would lose a NaN; comparisons keep it.
template <int ACTIVATION, typename A>
__device__ __forceinline__ A activate(A v) {
    if constexpr (ACTIVATION == RELU) return v < A(0) ? A(0) : v;
    if constexpr (ACTIVATION == RELU6) return v < A(0) ? A(0) : v > A(6) ? A(6) : v;
    if constexpr (ACTIVATION == SIGMOID) return A(1) / (A(1) + exp(-v));
    if constexpr (ACTIVATION == SILU) return v / (A(1) + exp(-v));
    if constexpr (ACTIVATION == GELU) return A(0.5) * v * (A(1) + erf(v * A(0.70710678118654752440)));
    if constexpr (ACTIVATION == TANH) return tanh(v);
    return v;
}

// The same for outputs of tensor cores; what 16 bits round off need not be computed.
template <typename T, int ACTIVATION>
__device__ __forceinline__ float activated(float v) {
    if constexpr (sizeof(T) == 2 && ACTIVATION == SIGMOID) return __fdividef(1.0f, 1.0f + __expf(-v));
    if constexpr (sizeof(T) == 2 && ACTIVATION == SILU) return __fdividef(v, 1.0f + __expf(-v));
    return activate<ACTIVATION>(v);
}

// Two of them of 16 bits in a word.
template <typename T, int ACTIVATION>
__device__ __forceinline__ unsigned activated(float low, float high) {
    if constexpr (ACTIVATION == RELU) return Element<T>::pack_relu(low, high);
    return Element<T>::pack(activated<T, ACTIVATION>(low), activated<T, ACTIVATION>(high));
}

// One output: `at` is its place in y and residual, `k` its channel. Pointers are null where there is none.
template <typename T, int ACTIVATION, typename A>
__device__ __forceinline__ T finish(A sum, const T *bias, const T *residual, long long k, long long at) {
    if (bias) sum += widen(bias[k]);
    if (residual) sum += widen(residual[at]);
    return narrow<T>(activate<ACTIVATION>(sum));
}
