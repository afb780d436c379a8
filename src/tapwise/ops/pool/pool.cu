// Max and average pooling: one thread an output, or V neighbouring channels of one.
//
// x (n, c, h, w), y and places (n, c, p, q), all dense, channels last where CHANNELS_LAST (else V is 1; it divides c).
// Threads go through y in the order of its memory, so neighbours read neighbours. R, S: the kernel's sizes, 0 where
// they are known at run time only.
#include "grid.cuh"
#include "types.cuh"

struct Pooling {
    const void *x;
    void *y, *places;
    long long n, c, height, width, r, s, p, q, stride_h, stride_w, pad_h, pad_w, dilation_h, dilation_w;
    // Where padding that an average counts ends, behind the image; what sums are divided by, 0 for the count.
    long long end_h, end_w, divisor;
};

// I counts elements of y: unsigned where they are fewer than 2^31.
template <typename T, int V, bool LARGEST, bool PLACES, bool COUNT_PADDING, bool CHANNELS_LAST, int R, int S,
          typename I>
__device__ __forceinline__ void pool(const Pooling &a) {
    using A = typename Arithmetic<T>::type;
    const Coordinate taps_h = R ? R : a.r, taps_w = S ? S : a.s, height = a.height, width = a.width;
    const long long step = CHANNELS_LAST ? a.c : 1;
    begin_dependent();
    const I channels = a.c / V, rows = a.p, columns = a.q, total = a.n * channels * a.p * a.q;
    for (I i = blockIdx.x * (I)blockDim.x + threadIdx.x; i < total; i += gridDim.x * blockDim.x) {
        I rest = i, channel = 0;
        if constexpr (CHANNELS_LAST) channel = rest % channels, rest /= channels;
        const Coordinate q = rest % columns;
        rest /= columns;
        const Coordinate p = rest % rows;
        // Of the image (channels last) or of the plane.
        const long long outer = rest / rows;
        const T *x = static_cast<const T *>(a.x) + outer * height * width * step + channel * V;
        const Coordinate top = p * (Coordinate)a.stride_h - (Coordinate)a.pad_h,
                         left = q * (Coordinate)a.stride_w - (Coordinate)a.pad_w;
        A value[V];
        long long place[V];
#pragma unroll
        for (int v = 0; v < V; ++v) value[v] = LARGEST ? A(-POSITIVE_INFINITY) : A(0), place[v] = -1;
        Coordinate count_h = 0, count_w = 0;
#pragma unroll(R ? R : 1)
        for (Coordinate r = 0; r < taps_h; ++r) {
            const Coordinate h = top + r * (Coordinate)a.dilation_h;
            const bool inside_h = (UnsignedCoordinate)h < (UnsignedCoordinate)height;
            count_h += COUNT_PADDING ? h < a.end_h : inside_h;
#pragma unroll(S ? S : 1)
            for (Coordinate s = 0; s < taps_w; ++s) {
                const Coordinate w = left + s * (Coordinate)a.dilation_w;
                const bool inside_w = (UnsignedCoordinate)w < (UnsignedCoordinate)width;
                if (r == 0) count_w += COUNT_PADDING ? w < a.end_w : inside_w;
                if (!inside_h || !inside_w) continue;
                const long long here = (long long)h * width + w;
                const auto read = *reinterpret_cast<const Neighbours<T, V> *>(x + here * step);
#pragma unroll
                for (int v = 0; v < V; ++v) {
                    const A one = upcast(read.v[v]);
                    if constexpr (LARGEST) {
                        // The first of equals; a NaN stays until the next one.
                        if ((PLACES && place[v] < 0) || one > value[v] || one != one) {
                            value[v] = one;
                            if constexpr (PLACES) place[v] = here;
                        }
                    } else {
                        value[v] += one;
                    }
                }
            }
        }
        const A divisor = LARGEST ? A(1) : A(a.divisor ? a.divisor : (long long)count_h * count_w);
        Neighbours<T, V> written;
#pragma unroll
        for (int v = 0; v < V; ++v) {
            written.v[v] = downcast<T>(LARGEST ? value[v] : value[v] / divisor);
            if constexpr (PLACES) static_cast<long long *>(a.places)[i * V + v] = place[v];
        }
        static_cast<Neighbours<T, V> *>(a.y)[i] = written;
    }
}
