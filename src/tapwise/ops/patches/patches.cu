// im2col and col2im of 1 to 3 spatial axes; fewer axes are filled up with ones in front.
//
// x (n, c, d, h, w), columns (n, c * taps, windows), dense. im2col: a thread has VECTOR windows of one channel and
// writes all taps of them, so places are worked out once for all taps, and neighbouring threads write neighbouring
// elements. col2im: a thread has one element of x and gathers what the windows hold of it: no atomics, a fixed order.
#include "partition.cuh"
#include "types.cuh"

struct Patches {
    const void *x;
    void *y;
    long long planes, size[3], kernel[3], out[3], stride[3], pad[3], dilation[3];
};

template <typename T, int VECTOR> struct __align__(sizeof(T) * VECTOR) Pack { T item[VECTOR]; };

// I counts elements: unsigned where they are fewer than 2^31, as 64-bit divisions take longer than the rest. K0, K1,
// K2: the kernel's sizes, so that the reads of several taps are under way together; 0 where they are known at run time
// only. SPREAD: a thread has one tap only, where kernels are large and windows few. ACROSS: as in partition.cuh, for
// blocks of THREADS.
template <typename T, int VECTOR, int K0, int K1, int K2, bool SPREAD, int THREADS, int ACROSS, typename I>
__device__ __forceinline__ void im2col(const Patches &a) {
    const Coordinate kernel0 = K0 ? K0 : a.kernel[0], kernel1 = K1 ? K1 : a.kernel[1], kernel2 = K2 ? K2 : a.kernel[2];
    const Coordinate size1 = a.size[1], size2 = a.size[2], out1 = a.out[1], out2 = a.out[2];
    const long long windows = a.out[0] * out1 * out2, taps = (long long)kernel0 * kernel1 * kernel2;
    const Coordinate window_rows = a.out[0] * out1;
    I packs = windows / VECTOR;
    if constexpr (ACROSS > 0) packs = tiles_of<THREADS, ACROSS>(window_rows, out2) * THREADS;
    const I rows = SPREAD ? a.planes * taps : a.planes;
    const I total = rows * packs, step = gridDim.x * blockDim.x;
    for (I i = blockIdx.x * (I)blockDim.x + threadIdx.x; i < total; i += step) {
        const long long row = i / packs, plane = SPREAD ? row / taps : row;
        long long first = i % packs * VECTOR;
        if constexpr (ACROSS > 0) {
            first = window_of<THREADS, ACROSS>(first / THREADS, first % THREADS, window_rows, out2);
            if (first >= windows) continue;
        }
        const Coordinate tap = SPREAD ? row % taps : 0;
        const T *x = static_cast<const T *>(a.x) + plane * a.size[0] * size1 * size2;
        T *y = static_cast<T *>(a.y) + (plane * taps + tap) * windows + first;
        Coordinate at0[VECTOR], at1[VECTOR], at2[VECTOR];
#pragma unroll
        for (int v = 0; v < VECTOR; ++v) {
            const UnsignedCoordinate window = first + v, window_row = window / out2;
            at0[v] = (Coordinate)(window_row / out1) * (Coordinate)a.stride[0] - (Coordinate)a.pad[0];
            at1[v] = (Coordinate)(window_row % out1) * (Coordinate)a.stride[1] - (Coordinate)a.pad[1];
            at2[v] = (Coordinate)(window % out2) * (Coordinate)a.stride[2] - (Coordinate)a.pad[2];
        }
        auto write = [&](Coordinate k0, Coordinate k1, Coordinate k2) {
            const Coordinate d0 = k0 * (Coordinate)a.dilation[0], d1 = k1 * (Coordinate)a.dilation[1],
                             d2 = k2 * (Coordinate)a.dilation[2];
            Pack<T, VECTOR> values;
#pragma unroll
            for (int v = 0; v < VECTOR; ++v) {
                const Coordinate i0 = at0[v] + d0, i1 = at1[v] + d1, i2 = at2[v] + d2;
                const bool real = (UnsignedCoordinate)i0 < (UnsignedCoordinate)a.size[0] &&
                                  (UnsignedCoordinate)i1 < (UnsignedCoordinate)size1 &&
                                  (UnsignedCoordinate)i2 < (UnsignedCoordinate)size2;
                values.item[v] = real ? x[((long long)i0 * size1 + i1) * size2 + i2] : downcast<T>(0);
            }
            *reinterpret_cast<Pack<T, VECTOR> *>(y) = values;
            y += windows;
        };
        if constexpr (SPREAD) {
            write(tap / kernel2 / kernel1, tap / kernel2 % kernel1, tap % kernel2);
        } else {
#pragma unroll(K0 ? K0 : 1)
            for (Coordinate k0 = 0; k0 < kernel0; ++k0)
#pragma unroll(K1 ? K1 : 1)
                for (Coordinate k1 = 0; k1 < kernel1; ++k1)
#pragma unroll(K2 ? K2 : 1)
                    for (Coordinate k2 = 0; k2 < kernel2; ++k2) write(k0, k1, k2);
        }
    }
}

// The window whose tap lies `distance` behind its first element, or -1. STRIDE 0: known at run time only.
template <int STRIDE>
__device__ __forceinline__ Coordinate window_at(Coordinate distance, Coordinate stride, Coordinate out) {
    if constexpr (STRIDE > 0) stride = STRIDE;
    const Coordinate window = distance / stride;
    return distance >= 0 && window * stride == distance && window < out ? window : -1;
}

// A thread has VECTOR neighbouring elements of a row (more than one with a stride of 1 only); rows are multiples of it.
// STRIDE 1: taps are unrolled, and each reads from a place that is there in any case: without a branch, reads go out
// together. Else, without dilation, only those taps are gone through that meet a window.
template <typename T, int VECTOR, int STRIDE, int K0, int K1, int K2, bool ACCUMULATE, typename I>
__device__ __forceinline__ void col2im(const Patches &a) {
    using A = typename Arithmetic<T>::type;
    static_assert(VECTOR == 1 || STRIDE == 1, "neighbours lie in neighbouring windows");
    const Coordinate kernel0 = K0 ? K0 : a.kernel[0], kernel1 = K1 ? K1 : a.kernel[1], kernel2 = K2 ? K2 : a.kernel[2];
    const Coordinate size1 = a.size[1], packs2 = a.size[2] / VECTOR, out1 = a.out[1], out2 = a.out[2];
    const long long windows = a.out[0] * out1 * out2, taps = (long long)kernel0 * kernel1 * kernel2;
    const I image = a.size[0] * size1 * packs2, total = a.planes * image, step = gridDim.x * blockDim.x;
    for (I i = blockIdx.x * (I)blockDim.x + threadIdx.x; i < total; i += step) {
        const UnsignedCoordinate place = i % image, row = place / packs2;
        const Coordinate at0 = row / size1 + a.pad[0], at1 = row % size1 + a.pad[1],
                         at2 = place % packs2 * VECTOR + a.pad[2];
        const T *columns = static_cast<const T *>(a.x) + (long long)(i / image) * taps * windows;
        A sum[VECTOR];
#pragma unroll
        for (int v = 0; v < VECTOR; ++v) sum[v] = 0;
        const bool steps = STRIDE != 1 && a.dilation[1] == 1 && a.dilation[2] == 1;
        const Coordinate step1 = steps ? (Coordinate)a.stride[1] : 1, step2 = steps ? (Coordinate)a.stride[2] : 1;
        const Coordinate first1 = steps ? at1 % step1 : 0, first2 = steps ? at2 % step2 : 0;
#pragma unroll(K0 ? K0 : 1)
        for (Coordinate k0 = 0; k0 < kernel0; ++k0) {
            const Coordinate w0 = window_at<0>(at0 - k0 * (Coordinate)a.dilation[0], a.stride[0], a.out[0]);
            auto gather = [&](Coordinate k1, Coordinate k2) {
                const Coordinate w1 = window_at<STRIDE>(at1 - k1 * (Coordinate)a.dilation[1], a.stride[1], out1);
                const bool real = w0 >= 0 && w1 >= 0;
                const long long tap = ((long long)k0 * kernel1 + k1) * kernel2 + k2;
                const T *window_row = columns + tap * windows + (real ? ((long long)w0 * out1 + w1) * out2 : 0);
                const Coordinate distance = at2 - k2 * (Coordinate)a.dilation[2];
#pragma unroll
                for (int v = 0; v < VECTOR; ++v) {
                    const Coordinate w2 = window_at<STRIDE>(distance + v, a.stride[2], out2);
                    const A value = upcast(window_row[max(w2, Coordinate(0))]);
                    sum[v] += real && w2 >= 0 ? value : A(0);
                }
            };
            if constexpr (STRIDE == 1) {
#pragma unroll(K1 ? K1 : 1)
                for (Coordinate k1 = 0; k1 < kernel1; ++k1)
#pragma unroll(K2 ? K2 : 1)
                    for (Coordinate k2 = 0; k2 < kernel2; ++k2) gather(k1, k2);
            } else {
                for (Coordinate k1 = first1; k1 < kernel1; k1 += step1)
                    for (Coordinate k2 = first2; k2 < kernel2; k2 += step2) gather(k1, k2);
            }
        }
        Pack<T, VECTOR> *y = reinterpret_cast<Pack<T, VECTOR> *>(static_cast<T *>(a.y) + (long long)i * VECTOR), values;
        if constexpr (ACCUMULATE) values = *y;
#pragma unroll
        for (int v = 0; v < VECTOR; ++v)
            values.item[v] = downcast<T>(ACCUMULATE ? upcast(values.item[v]) + sum[v] : sum[v]);
        *y = values;
    }
}
