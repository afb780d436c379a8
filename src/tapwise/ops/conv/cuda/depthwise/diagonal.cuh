// What the kernels with diagonal weights share.
#pragma once

#include "activation.cuh"
#include "matrix.cuh"

struct Diagonal {
    const void *x, *w;
    void *y;
    const void *bias, *residual;
    long long n, c, height, width, p, q;
    long long stride_h, stride_w, dilation_h, dilation_w, pad_h, pad_w, phases_h, phases_w;
    // Output rows of a block; strips along a row of y, all images' strips, blocks of them and of channels.
    long long rows, strips_row, strips, strip_groups, channel_blocks;
    // The filters were written before all that is still to run.
    long long weights_ready;
};

// Whether two weights in a word are numbers.
template <typename T> DEVICE bool finite_pair(unsigned pair) {
    const float low = Element<T>::to_float(T{(unsigned short)pair}),
                high = Element<T>::to_float(T{(unsigned short)(pair >> 16)});
    return (low - low) + (high - high) == 0.0f;
}

// Where a strip begins: its image, and its first column of y.
struct Strip {
    int n, q0;
    bool exists;
    DEVICE Strip(const Diagonal &a, int strip, int columns) {
        exists = strip < (int)a.strips;
        n = exists ? strip / (int)a.strips_row : 0;
        const int along = strip - n * (int)a.strips_row, phases = a.phases_w;
        q0 = along % phases + along / phases * columns * phases;
    }
};

// Two channels of a pixel, `at` in y.
template <class Traits>
DEVICE void store_pixel(const Diagonal &a, int c, int at, float low, float high, const float (&bias)[2]) {
    using T = typename Traits::T;
    T *y = static_cast<T *>(a.y) + at;
    const T *residual = static_cast<const T *>(a.residual) + at;
    if constexpr (Traits::BIAS) low += bias[0], high += bias[1];
    if constexpr (Traits::COPY >= 4) {
        if constexpr (Traits::RESIDUAL) {
            const unsigned word = load_global<4>(residual).v[0];
            low += Element<T>::to_float(T{(unsigned short)word});
            high += Element<T>::to_float(T{(unsigned short)(word >> 16)});
        }
        store_global<4>(y, {{activated<T, Traits::ACTIVATION>(low, high)}});
    } else {
        const bool both = c + 1 < (int)a.c;
        if constexpr (Traits::RESIDUAL) {
            low += Element<T>::to_float(residual[0]);
            if (both) high += Element<T>::to_float(residual[1]);
        }
        const unsigned word = activated<T, Traits::ACTIVATION>(low, high);
        y[0] = T{(unsigned short)word};
        if (both) y[1] = T{(unsigned short)(word >> 16)};
    }
}

// Two channels of a pixel again, by the definition.
template <class Traits>
__device__ __noinline__ void store_again(const Diagonal &a, int n, int c, int p, int q, int at, float low, float high) {
    using T = typename Traits::T;
    const float bias[2] = {low, high};
    float sums[2] = {};
    for (int e = 0; e < 2 && c + e < (int)a.c; ++e) {
        const T *x = static_cast<const T *>(a.x) + n * a.height * a.width * a.c + c + e;
        const T *w = static_cast<const T *>(a.w) + (c + e) * Traits::R * Traits::S;
        for (int r = 0; r < Traits::R; ++r)
            for (int s = 0; s < Traits::S; ++s) {
                const long long h = p * a.stride_h - a.pad_h + r * a.dilation_h;
                const long long v = q * a.stride_w - a.pad_w + s * a.dilation_w;
                const bool real = h >= 0 && h < a.height && v >= 0 && v < a.width;
                sums[e] += (real ? Element<T>::to_float(x[(h * a.width + v) * a.c]) : 0.0f) *
                           Element<T>::to_float(w[r * Traits::S + s]);
            }
    }
    store_pixel<Traits>(a, c, at, sums[0], sums[1], bias);
}
