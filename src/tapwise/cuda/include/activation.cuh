// What happens to a sum on its way to y: bias, residual, activation, rounding to the element type.
#pragma once

#include "approximate.cuh"
#include "types.cuh"

// Those from SILU on are more than a few instructions.
enum Activation { NONE, RELU, RELU6, LEAKY_RELU, HARDSIGMOID, HARDSWISH, SILU, GELU, GELU_TANH, SIGMOID, TANH };
// A kernel's argument may be LEAKY_RELU(slope): no template takes the slope, which its stub defines in front.
#define LEAKY_RELU(SLOPE) LEAKY_RELU
#ifndef LEAKY_RELU_SLOPE
#define LEAKY_RELU_SLOPE 0.01
#endif
// gelu_tanh(v) = v sigmoid(v (LINEAR + CUBIC v^2)).
constexpr double GELU_LINEAR = 1.59576912160573071, GELU_CUBIC = GELU_LINEAR * 0.044715;

// fmax and fmin would lose a NaN; comparisons keep it.
template <int ACTIVATION, typename A> __device__ __forceinline__ A activate(A v) {
    if constexpr (ACTIVATION == RELU) return v < A(0) ? A(0) : v;
    if constexpr (ACTIVATION == RELU6) return v < A(0) ? A(0) : v > A(6) ? A(6) : v;
    if constexpr (ACTIVATION == LEAKY_RELU) return v > A(0) ? v : v * A(LEAKY_RELU_SLOPE);
    if constexpr (ACTIVATION == HARDSIGMOID || ACTIVATION == HARDSWISH) {
        const A hard = activate<RELU6>(v + A(3)) * A(1.0 / 6.0);
        return ACTIVATION == HARDSWISH ? v * hard : hard;
    }
    // By e^-|z|, which does not overflow where the result is tiny.
    if constexpr (ACTIVATION == SIGMOID || ACTIVATION == SILU || ACTIVATION == GELU_TANH) {
        const A z = ACTIVATION == GELU_TANH ? v * (A(GELU_LINEAR) + A(GELU_CUBIC) * (v * v)) : v;
        const A power = exp(z < A(0) ? z : -z), factor = ACTIVATION == SIGMOID ? A(1) : v;
        return (z < A(0) ? factor * power : factor) / (A(1) + power);
    }
    if constexpr (ACTIVATION == GELU) return A(0.5) * v * (A(1) + erf(v * A(0.70710678118654752440)));
    if constexpr (ACTIVATION == TANH) return tanh(v);
    return v;
}

// v times the normal distribution's integral, which beside zero is a polynomial of t = 1 / (1 + p |v|) times exp(-v^2 /
// 2), to 8e-8 (Abramowitz and Stegun, 7.1.26). Of an infinity above zero nothing is taken away.
__device__ __forceinline__ float gelu_of(float v) {
    const float t = reciprocal(1.0f + 0.23164190f * fabsf(v)), scaled = v * 0.84932180f;
    float integral = 0.53070271f * t - 0.72657601f;
    integral = integral * t + 0.71070688f;
    integral = integral * t - 0.14224837f;
    integral = integral * t + 0.12741480f;
    integral *= t * power_of_two(-scaled * scaled);
    return fmaxf(v, 0.0f) - fabsf(fminf(v, 1e4f)) * integral;
}

// The same for outputs of tensor cores, a few units of fp32's roundoff off: in few instructions, as each of them keeps
// the next products from registers. Sums are multiplied by what the exponent needs as the bias is added, which then
// costs nothing: silu(v) = v / (1 + 2^(s v)) = s v / (s + s 2^(s v)); in gelu_tanh, s^3 is the factor of v^3. One
// reciprocal for two silus is a function less and seven instructions more, which is slower.
template <int ACTIVATION>
constexpr float SCALE = ACTIVATION == SILU || ACTIVATION == SIGMOID ? -1.44269504f
                        : ACTIVATION == GELU_TANH                   ? 0.46866869f
                                                                    : 1.0f;

template <int ACTIVATION> __device__ __forceinline__ float activated_scaled(float v) {
    if constexpr (ACTIVATION == SIGMOID) return reciprocal(1.0f + power_of_two(v));
    if constexpr (ACTIVATION == SILU) return v * reciprocal(SCALE<SILU> + SCALE<SILU> * power_of_two(v));
    if constexpr (ACTIVATION == GELU) return gelu_of(v);
    if constexpr (ACTIVATION == GELU_TANH)
        return v * reciprocal(SCALE<GELU_TANH> + SCALE<GELU_TANH> * power_of_two(v * (-4.91222954f - v * v)));
    // A factor of NaN is zero, and the product NaN all the same.
    if constexpr (ACTIVATION == HARDSWISH) return v * __saturatef(v * (1.0f / 6.0f) + 0.5f);
    return activate<ACTIVATION>(v);
}
template <int ACTIVATION> __device__ __forceinline__ float activated(float v) {
    return activated_scaled<ACTIVATION>(v * SCALE<ACTIVATION>);
}

// Two of them of 16 bits in a word.
template <typename T, int ACTIVATION> __device__ __forceinline__ unsigned activated_scaled(float low, float high) {
    if constexpr (ACTIVATION == RELU) return Element<T>::pack_relu(low, high);
    if constexpr (ACTIVATION == RELU6) return Element<T>::pack_relu6(low, high);
    if constexpr (ACTIVATION == HARDSIGMOID)
        return Element<T>::pack_relu1(low * (1.0f / 6.0f) + 0.5f, high * (1.0f / 6.0f) + 0.5f);
    return Element<T>::pack(activated_scaled<ACTIVATION>(low), activated_scaled<ACTIVATION>(high));
}
template <typename T, int ACTIVATION> __device__ __forceinline__ unsigned activated(float low, float high) {
    return activated_scaled<T, ACTIVATION>(low * SCALE<ACTIVATION>, high * SCALE<ACTIVATION>);
}

// One output: `at` is its place in y and residual, `k` its channel. Pointers are null where there is none.
template <typename T, int ACTIVATION, typename A>
__device__ __forceinline__ T finish(A sum, const T *bias, const T *residual, long long k, long long at) {
    if (bias) sum += upcast(bias[k]);
    if (residual) sum += upcast(residual[at]);
    return downcast<T>(activate<ACTIVATION>(sum));
}
