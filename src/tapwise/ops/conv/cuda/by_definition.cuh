// One output by the definition: where products with the zeros of a matrix may have made NaN.
#pragma once

#include "activation.cuh"
#include "float16.cuh"
#include "ops/conv/cuda/place_in_filter.cuh"

// Of filter k, channels last; `a` has a convolution's words, P: T, R, S, BIAS, RESIDUAL, ACTIVATION; GROUP_C channels
// and filters a group; TAPS_FIRST: weights are [tap][filter][channel of the group], else [filter][tap] of one channel;
// FILTER_TAPS: they are read as they lie.
template <class P, class Arguments>
__device__ __noinline__ void by_definition(const Arguments &a, int n, int k, int p, int q) {
    using T = typename P::T;
    const T *x = static_cast<const T *>(a.x) + (long long)n * a.height * a.width * a.c + k / P::GROUP_C * P::GROUP_C;
    constexpr bool TAPS_FIRST = P::TAPS_FIRST && !P::FILTER_TAPS;
    const int filter = P::FILTER_TAPS ? P::FILTER_TAPS : P::TAPS_FIRST ? P::GROUP_C : P::R * P::S;
    const T *w = static_cast<const T *>(a.w) + (long long)k * filter;
    float sum = 0.0f;
    for (int r = 0; r < P::R; ++r)
        for (int s = 0; s < P::S; ++s)
            for (int c = 0; c < P::GROUP_C; ++c) {
                const long long h = p * a.stride_h - a.pad_h + r * a.dilation_h;
                const long long v = q * a.stride_w - a.pad_w + s * a.dilation_w;
                const bool real = h >= 0 && h < a.height && v >= 0 && v < a.width;
                const long long tap =
                    P::FILTER_TAPS ? place_in_filter<P>(r, s) : (r * P::S + s) * (TAPS_FIRST ? a.c * P::GROUP_C : 1);
                sum += (real ? Element<T>::to_float(x[(h * a.width + v) * a.c + c]) : 0.0f) *
                       Element<T>::to_float(w[tap + c]);
            }
    const long long at = ((n * a.p + p) * a.q + q) * a.c + k;
    if constexpr (P::BIAS) sum += Element<T>::to_float(static_cast<const T *>(a.bias)[k]);
    if constexpr (P::RESIDUAL) sum += Element<T>::to_float(static_cast<const T *>(a.residual)[at]);
    const unsigned word = activated<T, P::ACTIVATION>(sum, 0.0f);
    static_cast<T *>(a.y)[at] = T{(unsigned short)word};
}
