// What surrounds the convolution of cuda.pixel_shuffle: its filters and bias, of w's and of dx's, and dx of its result.
#include "activation.cuh"
#include "grid.cuh"

struct PixelShuffle {
    const void *w, *bias, *parts;
    void *y;
    // w's sizes and strides in elements; `taps_`: of the convolution's filters, whose first one sees dy `ahead_` places
    // before the place that the phase's number gives, a stride apart.
    long long k, c, r, s, step_k, step_c, step_r, step_s, taps_h, taps_w, ahead_h, ahead_w;
    // Phases of a row and of a column; images, their sizes, and those of the convolution's result.
    long long across, down, n, height, width, p, q;
    long long stride_h, stride_w, pad_h, pad_w, dilation_h, dilation_w;
};

// The tap of w that a phase's element meets at a place of dy, or -1.
DEVICE int tap_of(int phase, int place, int pad, int stride, int dilation, int taps) {
    const int distance = phase + pad - place * stride, tap = distance / dilation;
    return distance >= 0 && distance % dilation == 0 && tap < taps ? tap : -1;
}

// Filters (phase of h, phase of w, c; taps of h, taps of w, k) in y, a thread an element; zeros where there is no tap.
template <typename T> DEVICE void gather_filters(const PixelShuffle &a) {
    begin_dependent();
    const unsigned k = a.k, c = a.c, taps_w = a.taps_w, taps_h = a.taps_h, across = a.across;
    const unsigned count = (unsigned)a.down * across * c * taps_h * taps_w * k;
    for (unsigned i = blockIdx.x * blockDim.x + threadIdx.x; i < count; i += gridDim.x * blockDim.x) {
        const unsigned filter = i % k, tap = i / k % (taps_h * taps_w), row = i / k / (taps_h * taps_w);
        const unsigned channel = row % c, phase = row / c;
        const int h =
            tap_of(phase / across, (int)(tap / taps_w) - (int)a.ahead_h, a.pad_h, a.stride_h, a.dilation_h, a.r);
        const int v =
            tap_of(phase % across, (int)(tap % taps_w) - (int)a.ahead_w, a.pad_w, a.stride_w, a.dilation_w, a.s);
        const T *from =
            static_cast<const T *>(a.w) + filter * a.step_k + channel * a.step_c + h * a.step_r + v * a.step_s;
        static_cast<T *>(a.y)[i] = h < 0 || v < 0 ? downcast<T>(typename Arithmetic<T>::type(0)) : *from;
    }
}

// The bias of every filter.
template <typename T> DEVICE void repeat_bias(const PixelShuffle &a) {
    begin_dependent();
    const unsigned i = blockIdx.x * blockDim.x + threadIdx.x;
    if (i < a.down * a.across * a.c) static_cast<T *>(a.y)[i] = static_cast<const T *>(a.bias)[i % (unsigned)a.c];
}

// dx of (n, phases, c, p, q): pieces of V neighbours in memory, of which those of a row (LAST: of all phases of a row
// and their channels) lie as they do in dx.
template <typename T, bool LAST, int V, typename I> DEVICE void shuffle_pixels(const PixelShuffle &a) {
    using Piece = Neighbours<T, V>;
    begin_dependent();
    const I c = a.c, across = a.across, down = a.down, height = a.height, p = a.p, q = a.q;
    const I run = LAST ? across * c : across, row = (LAST ? a.width * c : (I)a.width) / V,
            planes = LAST ? a.n : a.n * c;
    const I total = planes * height * row;
    for (I at = blockIdx.x * (I)blockDim.x + threadIdx.x; at < total; at += gridDim.x * (I)blockDim.x) {
        const I column = at % row * V, h = at / row % height, plane = at / row / height;
        const I i = h / down, phase = h - i * down, j = column / run, rest = column - j * run;
        I from;
        if constexpr (LAST) from = (((plane * p + i) * q + j) * down + phase) * run + rest;
        else from = (((plane / c * down + phase) * across + rest) * c + plane % c) * p * q + i * q + j;
        *reinterpret_cast<Piece *>(static_cast<T *>(a.y) + (long long)at * V) =
            *reinterpret_cast<const Piece *>(static_cast<const T *>(a.parts) + from);
    }
}
