// One thread an output: it slides its window over the input channels.
//
// x (n, c, h, w), w (k, c / groups, r, s), y (n, k, p, q), all dense. A block is BX x BY outputs of one plane: a
// square, a piece of a row or a piece of a column. From shared memory, the block's part of one input channel with its
// halo is loaded by all threads together, between two barriers, before any of them reads it.
#include "activation.cuh"
#include "grid.cuh"
#include "window.cuh"

template <typename T, bool SHARED, int BX, int BY, int ACTIVATION>
__device__ __forceinline__ void sliding_window(const Window &a) {
    using A = typename Arithmetic<T>::type;
    begin_dependent();
    extern __shared__ __align__(16) unsigned char memory[];
    T *tile = reinterpret_cast<T *>(memory);

    const int height = a.height, width = a.width, taps_h = a.r, taps_w = a.s;
    const int stride_h = a.stride_h, stride_w = a.stride_w, dilation_h = a.dilation_h, dilation_w = a.dilation_w;
    const int q0 = blockIdx.x % (unsigned)a.tiles_q * BX, p0 = blockIdx.x / (unsigned)a.tiles_q * BY;
    const int tx = threadIdx.x % BX, ty = threadIdx.x / BX;
    const int q = q0 + tx, p = p0 + ty;
    const bool inside = p < a.p && q < a.q;
    const int group_c = a.c / a.groups, group_k = a.k / a.groups;
    // The tile's corner in the image, and its size with the halo.
    const int top = p0 * stride_h - (int)a.pad_h, left = q0 * stride_w - (int)a.pad_w;
    const int rows = (BY - 1) * stride_h + (taps_h - 1) * dilation_h + 1;
    const int columns = (BX - 1) * stride_w + (taps_w - 1) * dilation_w + 1;

    for (long long plane = blockIdx.z; plane < a.n * a.k; plane += gridDim.z) {
        const long long n = plane / a.k, k = plane % a.k;
        const T *x = static_cast<const T *>(a.x) + (n * a.c + k / group_k * group_c) * height * width;
        const T *w = static_cast<const T *>(a.w) + k * group_c * taps_h * taps_w;
        A sum = 0;
        for (int c = 0; c < group_c; ++c, x += (long long)height * width, w += taps_h * taps_w) {
            if constexpr (SHARED) {
                __syncthreads();
                for (int i = threadIdx.x; i < rows * columns; i += BX * BY) {
                    const int h = top + i / columns, v = left + i % columns;
                    const bool real = (unsigned)h < (unsigned)height && (unsigned)v < (unsigned)width;
                    tile[i] = real ? x[(long long)h * width + v] : downcast<T>(A(0));
                }
                __syncthreads();
                if (!inside) continue;
                const T *mine = tile + ty * stride_h * columns + tx * stride_w;
                for (int r = 0; r < taps_h; ++r)
                    for (int s = 0; s < taps_w; ++s)
                        sum += upcast(mine[r * dilation_h * columns + s * dilation_w]) * upcast(w[r * taps_w + s]);
            } else if (inside) {
                for (int r = 0; r < taps_h; ++r) {
                    const int h = top + ty * stride_h + r * dilation_h;
                    for (int s = 0; s < taps_w; ++s) {
                        const int v = left + tx * stride_w + s * dilation_w;
                        // Padding is multiplied too, so that a filter of NaN gives NaN beside the edges.
                        const bool real = (unsigned)h < (unsigned)height && (unsigned)v < (unsigned)width;
                        sum += (real ? upcast(x[(long long)h * width + v]) : A(0)) * upcast(w[r * taps_w + s]);
                    }
                }
            }
        }
        if (inside) {
            const long long at = (plane * a.p + p) * a.q + q;
            static_cast<T *>(a.y)[at] =
                finish<T, ACTIVATION>(sum, static_cast<const T *>(a.bias), static_cast<const T *>(a.residual), k, at);
        }
    }
}

// Any memory order, any number of elements: threads go through y in the order of its memory. I counts elements, which
// is an int where there are fewer than 2^31 of them.
template <typename T, bool CHANNELS_LAST, int ACTIVATION, typename I>
__device__ __forceinline__ void sliding_window_run(const Window &a) {
    using A = typename Arithmetic<T>::type;
    begin_dependent();
    const I channels = a.c, height = a.height, width = a.width, filters = a.k, rows = a.p, columns = a.q;
    const I taps_h = a.r, taps_w = a.s, group_c = channels / (I)a.groups, group_k = filters / (I)a.groups;
    const long long step_c = CHANNELS_LAST ? 1 : a.height * a.width, step_w = CHANNELS_LAST ? a.c : 1;
    const long long step_h = step_w * a.width, total = a.n * a.k * a.p * a.q;
    for (long long at = blockIdx.x * (long long)blockDim.x + threadIdx.x; at < total;
         at += gridDim.x * (long long)blockDim.x) {
        I rest = at, k = 0;
        if constexpr (CHANNELS_LAST) k = rest % filters, rest /= filters;
        const I q = rest % columns;
        rest /= columns;
        const I p = rest % rows;
        rest /= rows;
        if constexpr (!CHANNELS_LAST) k = rest % filters, rest /= filters;
        const long long first = k / group_k * group_c;
        const T *x = static_cast<const T *>(a.x) + rest * (a.c * a.height * a.width) + first * step_c;
        const T *w = static_cast<const T *>(a.w) + k * ((long long)group_c * taps_h * taps_w);
        const I top = p * (I)a.stride_h - (I)a.pad_h, left = q * (I)a.stride_w - (I)a.pad_w;
        A sum = 0;
        for (I r = 0; r < taps_h; ++r) {
            const I h = top + r * (I)a.dilation_h;
            for (I s = 0; s < taps_w; ++s) {
                const I v = left + s * (I)a.dilation_w;
                const bool real = h >= 0 && h < height && v >= 0 && v < width;
                const T *pixel = x + (real ? h * step_h + v * step_w : 0);
                const T *tap = w + r * taps_w + s;
                // Padding is multiplied too, as above.
                for (I c = 0; c < group_c; ++c)
                    sum += (real ? upcast(pixel[c * step_c]) : A(0)) * upcast(tap[c * (long long)(taps_h * taps_w)]);
            }
        }
        static_cast<T *>(a.y)[at] =
            finish<T, ACTIVATION>(sum, static_cast<const T *>(a.bias), static_cast<const T *>(a.residual), k, at);
    }
}
