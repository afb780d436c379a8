// Gradients of convolution from the definition: any memory order, any number of elements.
//
// x (n, c, h, w), w (k, c / groups, r, s) in C order, y (n, k, p, q); images and dw dense in the memory order LAST
// says.
#include "activation.cuh"
#include "grid.cuh"
#include "window.cuh"

// Steps between neighbours along the axes of (n, channels, rows, columns), dense in one of both memory orders.
struct Steps {
    long long n, c, h, w;

    __device__ Steps(bool last, long long channels, long long rows, long long columns) {
        c = last ? 1 : rows * columns, w = last ? channels : 1, h = w * columns, n = channels * rows * columns;
    }
};

// The element of (n, channels, rows, columns) at a place in memory.
struct Place {
    long long n, c, h, w;

    __device__ Place(bool last, long long at, long long channels, long long rows, long long columns) {
        if (last) c = at % channels, at /= channels;
        w = at % columns, at /= columns;
        h = at % rows, at /= rows;
        if (!last) c = at % channels, at /= channels;
        n = at;
    }
};

// One thread an element of dx, which is a.y; a.x is dy.
template <typename T, bool LAST, int ACTIVATION> __device__ __forceinline__ void dgrad(const Window &a) {
    using A = typename Arithmetic<T>::type;
    begin_dependent();
    const long long group_c = a.c / a.groups, group_k = a.k / a.groups, total = a.n * a.c * a.height * a.width;
    const Steps dy_step(LAST, a.k, a.p, a.q);
    for (long long at = blockIdx.x * (long long)blockDim.x + threadIdx.x; at < total;
         at += gridDim.x * (long long)blockDim.x) {
        const Place here(LAST, at, a.c, a.height, a.width);
        const long long k0 = here.c / group_c * group_k;
        const T *dy = static_cast<const T *>(a.x) + here.n * dy_step.n + k0 * dy_step.c;
        const T *w = static_cast<const T *>(a.w) + (k0 * group_c + here.c % group_c) * a.r * a.s;
        A sum = 0;
        for (long long r = 0; r < a.r; ++r) {
            const long long top = here.h + a.pad_h - r * a.dilation_h, p = top / a.stride_h;
            if (top < 0 || top % a.stride_h || p >= a.p) continue;
            for (long long s = 0; s < a.s; ++s) {
                const long long left = here.w + a.pad_w - s * a.dilation_w, q = left / a.stride_w;
                if (left < 0 || left % a.stride_w || q >= a.q) continue;
                const T *pixel = dy + p * dy_step.h + q * dy_step.w, *tap = w + r * a.s + s;
                for (long long k = 0; k < group_k; ++k)
                    sum += upcast(pixel[k * dy_step.c]) * upcast(tap[k * group_c * a.r * a.s]);
            }
        }
        static_cast<T *>(a.y)[at] =
            finish<T, ACTIVATION>(sum, static_cast<const T *>(a.bias), static_cast<const T *>(nullptr), here.c, at);
    }
}

// One block an element of dw, which is a.y; a.w is dy. Threads share out the pixels, and their sums are added in pairs.
template <typename T, bool LAST, int THREADS> __device__ __forceinline__ void wgrad(const Window &a) {
    using A = typename Arithmetic<T>::type;
    __shared__ A sums[THREADS];
    begin_dependent();
    const long long group_c = a.c / a.groups, group_k = a.k / a.groups, pixels = a.n * a.p * a.q;
    const Steps x_step(LAST, a.c, a.height, a.width), dy_step(LAST, a.k, a.p, a.q);
    for (long long at = blockIdx.x; at < a.k * group_c * a.r * a.s; at += gridDim.x) {
        // (k, c / groups, r, s) has the axes of an image.
        const Place here(LAST, at, group_c, a.r, a.s);
        const T *x = static_cast<const T *>(a.x) + (here.n / group_k * group_c + here.c) * x_step.c;
        const T *dy = static_cast<const T *>(a.w) + here.n * dy_step.c;
        A sum = 0;
        for (long long pixel = threadIdx.x; pixel < pixels; pixel += THREADS) {
            const long long q = pixel % a.q, p = pixel / a.q % a.p, n = pixel / a.q / a.p;
            const long long h = p * a.stride_h - a.pad_h + here.h * a.dilation_h;
            const long long v = q * a.stride_w - a.pad_w + here.w * a.dilation_w;
            if (h < 0 || h >= a.height || v < 0 || v >= a.width) continue;
            sum += upcast(x[n * x_step.n + h * x_step.h + v * x_step.w]) *
                   upcast(dy[n * dy_step.n + p * dy_step.h + q * dy_step.w]);
        }
        sums[threadIdx.x] = sum;
#pragma unroll
        for (int half = THREADS / 2; half; half /= 2) {
            __syncthreads();
            if (threadIdx.x < half) sums[threadIdx.x] += sums[threadIdx.x + half];
        }
        if (threadIdx.x == 0) static_cast<T *>(a.y)[at] = downcast<T>(sums[0]);
        __syncthreads();
    }
}
