// The derivative of an activation at its argument, with PyTorch's values where it has none.
#pragma once

#include "activation.cuh"

__device__ __forceinline__ float sigmoid_of(float v) { return reciprocal(1.0f + power_of_two(v * -1.44269504f)); }
__device__ __forceinline__ double sigmoid_of(double v) { return 1.0 / (1.0 + exp(-v)); }

// Comparisons keep a NaN: what is multiplied by its derivative is to show it.
template <int ACTIVATION, typename A> __device__ __forceinline__ A derivative(A v) {
    if constexpr (ACTIVATION == RELU) return v <= A(0) ? A(0) : A(1);
    if constexpr (ACTIVATION == RELU6) return v <= A(0) || v >= A(6) ? A(0) : A(1);
    if constexpr (ACTIVATION == LEAKY_RELU) return v > A(0) ? A(1) : A(LEAKY_RELU_SLOPE);
    if constexpr (ACTIVATION == HARDSIGMOID) return v <= A(-3) || v >= A(3) ? A(0) : A(1.0 / 6.0);
    if constexpr (ACTIVATION == HARDSWISH) return v <= A(-3) ? A(0) : v >= A(3) ? A(1) : v * A(1.0 / 3.0) + A(0.5);
    if constexpr (ACTIVATION == SIGMOID || ACTIVATION == SILU) {
        const A s = sigmoid_of(v);
        return ACTIVATION == SILU ? s + v * s * (A(1) - s) : s * (A(1) - s);
    }
    if constexpr (ACTIVATION == TANH) {
        const A t = tanh(v);
        return A(1) - t * t;
    }
    if constexpr (ACTIVATION == GELU) {
        const A density = A(0.39894228040143267794) * exp(A(-0.5) * v * v);
        return A(0.5) * (A(1) + erf(v * A(0.70710678118654752440))) + v * density;
    }
    if constexpr (ACTIVATION == GELU_TANH) {
        const A square = v * v, s = sigmoid_of(v * (A(GELU_LINEAR) + A(GELU_CUBIC) * square));
        return s + v * s * (A(1) - s) * (A(GELU_LINEAR) + A(3 * GELU_CUBIC) * square);
    }
    return A(1);
}

// The same from the activation's result for those whose result says it; others are given the argument. Of relu and
// relu6, and leaky_relu with a positive slope, either does.
template <int ACTIVATION, typename A> __device__ __forceinline__ A derivative_by_result(A v) {
    if constexpr (ACTIVATION == SIGMOID) return v * (A(1) - v);
    if constexpr (ACTIVATION == TANH) return A(1) - v * v;
    return derivative<ACTIVATION>(v);
}
