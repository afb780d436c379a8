// im2col and col2im of 1 to 3 spatial axes; fewer axes are filled up with ones in front.
//
// x (n, c, d, h, w), columns (n, c * taps, windows), dense. im2col: a thread has VECTOR windows of one channel and
// writes all taps of them, so places are worked out once for all taps, and neighbouring threads write neighbouring
// elements. col2im: a thread has a few elements of x and gathers what the windows hold of them: no atomics, a fixed
// order.
#include "ops/patches/patches.cuh"
#include "partition.cuh"

// I counts elements: unsigned where they are fewer than 2^31, as 64-bit divisions take longer than the rest. K0, K1,
// K2: the kernel's sizes, so that the reads of several taps are under way together; 0 where they are known at run time
// only. STEP: the stride along a line, so that windows share what they read; 0 where none is known, or taps are no
// neighbours. SPREAD: a thread has one tap only, where kernels are large and windows few. ACROSS: as in partition.cuh,
// for blocks of THREADS.
template <typename T, int VECTOR, int K0, int K1, int K2, int STEP, bool STREAM, bool SPREAD, int THREADS, int ACROSS,
          typename I>
__device__ __forceinline__ void im2col(const Patches &a) {
    begin_dependent();
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
        // All windows of a thread lie in one line.
        const UnsignedCoordinate line = (UnsignedCoordinate)first / (UnsignedCoordinate)out2;
        const Coordinate at0 = (Coordinate)(line / out1) * (Coordinate)a.stride[0] - (Coordinate)a.pad[0];
        const Coordinate at1 = (Coordinate)(line % out1) * (Coordinate)a.stride[1] - (Coordinate)a.pad[1];
        const Coordinate at2 =
            ((Coordinate)first - (Coordinate)line * out2) * (Coordinate)a.stride[2] - (Coordinate)a.pad[2];
        T *y = static_cast<T *>(a.y) + (plane * taps + tap) * windows + first;
        // COUNT taps of a line, from k2 on.
        const auto of_taps = [&](auto count, Coordinate k0, Coordinate k1, Coordinate k2) {
            constexpr int COUNT = decltype(count)::value, READ = STEP ? COUNT + (VECTOR - 1) * STEP : 1;
            const Coordinate i0 = at0 + k0 * (Coordinate)a.dilation[0], i1 = at1 + k1 * (Coordinate)a.dilation[1];
            const bool real = (UnsignedCoordinate)i0 < (UnsignedCoordinate)a.size[0] &&
                              (UnsignedCoordinate)i1 < (UnsignedCoordinate)size1;
            const T *const from = x + ((long long)i0 * size1 + i1) * size2;
            const auto read = [&](Coordinate i2) {
                return real && (UnsignedCoordinate)i2 < (UnsignedCoordinate)size2 ? from[i2] : downcast<T>(0);
            };
            T shared[READ];
            if constexpr (STEP > 0)
#pragma unroll
                for (int i = 0; i < READ; ++i) shared[i] = read(at2 + k2 + i);
#pragma unroll
            for (int t = 0; t < COUNT; ++t, y += windows) {
                Pack<T, VECTOR> values;
#pragma unroll
                for (int v = 0; v < VECTOR; ++v)
                    if constexpr (STEP > 0) values.item[v] = shared[t + v * STEP];
                    else
                        values.item[v] = read(at2 + (k2 + t) * (Coordinate)a.dilation[2] + v * (Coordinate)a.stride[2]);
                store<STREAM>(reinterpret_cast<Pack<T, VECTOR> *>(y), values);
            }
        };
        if constexpr (SPREAD) {
            of_taps(Count<1>{}, tap / kernel2 / kernel1, tap / kernel2 % kernel1, tap % kernel2);
        } else {
#pragma unroll(K0 ? K0 : 1)
            for (Coordinate k0 = 0; k0 < kernel0; ++k0)
#pragma unroll(K1 ? K1 : 1)
                for (Coordinate k1 = 0; k1 < kernel1; ++k1)
                    if constexpr (K2 > 0) {
                        of_taps(Count<K2>{}, k0, k1, 0);
                    } else {
                        for (Coordinate k2 = 0; k2 < kernel2; ++k2) of_taps(Count<1>{}, k0, k1, k2);
                    }
        }
    }
}

// The window whose tap lies `distance` behind its first element, or -1.
__device__ __forceinline__ Coordinate window_at(Coordinate distance, Coordinate stride, Coordinate out) {
    const Coordinate window = distance / stride;
    return distance >= 0 && window * stride == distance && window < out ? window : -1;
}

// What a thread of col2im writes: VECTOR neighbours of a line, or one by one those that are there.
template <bool ACCUMULATE, typename T, typename A, int VECTOR>
__device__ __forceinline__ void write_sums(T *y, const A (&sum)[VECTOR], bool whole, Coordinate there) {
    if (whole) {
        Pack<T, VECTOR> *const to = reinterpret_cast<Pack<T, VECTOR> *>(y), values;
        if constexpr (ACCUMULATE) values = *to;
#pragma unroll
        for (int v = 0; v < VECTOR; ++v)
            values.item[v] = downcast<T>(ACCUMULATE ? upcast(values.item[v]) + sum[v] : sum[v]);
        *to = values;
    } else {
#pragma unroll
        for (int v = 0; v < VECTOR; ++v)
            if (v < there) y[v] = downcast<T>(ACCUMULATE ? upcast(y[v]) + sum[v] : sum[v]);
    }
}

// The smallest offset from a place that leaves FIRST, divided by the stride, at which tap k meets a window.
template <int STRIDE, int FIRST, int STEP> __device__ __forceinline__ constexpr int meets(int k) {
    return (STRIDE - (FIRST + STRIDE * STEP - k * STEP % STRIDE) % STRIDE) % STRIDE;
}

// Of a stride of 1 or 2: a thread has STRIDE lines of VECTOR neighbours, so that each tap meets as many of them. FIRST,
// STEP: what padding and dilation leave, divided by the stride, so that it is known which; with a stride of 2 the
// kernel's sizes are known, too. WHOLE: lines are multiples of VECTOR.
template <typename T, int VECTOR, int STRIDE, int FIRST1, int FIRST2, int STEP1, int STEP2, int K0, int K1, int K2,
          bool WHOLE, bool ACCUMULATE, typename I>
__device__ __forceinline__ void col2im_tiles(const Patches &a) {
    using A = typename Arithmetic<T>::type;
    static_assert(VECTOR % STRIDE == 0 && (STRIDE == 1 || K2 > 0));
    begin_dependent();
    const Coordinate kernel0 = K0 ? K0 : a.kernel[0], kernel1 = K1 ? K1 : a.kernel[1], kernel2 = K2 ? K2 : a.kernel[2];
    const Coordinate size0 = a.size[0], size1 = a.size[1], size2 = a.size[2], out1 = a.out[1], out2 = a.out[2];
    const Coordinate lines = (size1 + STRIDE - 1) / STRIDE, packs = (size2 + VECTOR - 1) / VECTOR;
    const long long windows = a.out[0] * out1 * out2, taps = (long long)kernel0 * kernel1 * kernel2;
    const I image = (I)size0 * lines * packs, total = a.planes * image, step = gridDim.x * blockDim.x;
    for (I i = blockIdx.x * (I)blockDim.x + threadIdx.x; i < total; i += step) {
        const UnsignedCoordinate place = i % image, row = place / packs;
        const Coordinate to0 = row / lines, to1 = row % lines * STRIDE, to2 = place % packs * VECTOR;
        const Coordinate at1 = to1 + a.pad[1], at2 = to2 + a.pad[2];
        const T *columns = static_cast<const T *>(a.x) + (long long)(i / image) * taps * windows;
        A sum[STRIDE][VECTOR];
#pragma unroll
        for (int v = 0; v < STRIDE * VECTOR; ++v) sum[v / VECTOR][v % VECTOR] = 0;
#pragma unroll(K0 ? K0 : 1)
        for (Coordinate k0 = 0; k0 < kernel0; ++k0) {
            const Coordinate w0 =
                window_at(to0 + (Coordinate)a.pad[0] - k0 * (Coordinate)a.dilation[0], a.stride[0], a.out[0]);
#pragma unroll(K1 ? K1 : 1)
            for (int k1 = 0; k1 < kernel1; ++k1) {
                const int r = meets<STRIDE, FIRST1, STEP1>(k1);
                const Coordinate down = at1 + r - k1 * (Coordinate)a.dilation[1];
                const bool real = w0 >= 0 && (UnsignedCoordinate)down < (UnsignedCoordinate)(out1 * STRIDE);
                const T *line = columns + ((long long)k0 * kernel1 + k1) * kernel2 * windows +
                                (real ? ((long long)w0 * out1 + (down >> (STRIDE - 1))) * out2 : 0);
#pragma unroll(K2 ? K2 : 4)
                for (int k2 = 0; k2 < kernel2; ++k2, line += windows) {
                    const int c = meets<STRIDE, FIRST2, STEP2>(k2);
                    // A multiple of the stride.
                    const Coordinate window = (at2 + c - k2 * (Coordinate)a.dilation[2]) >> (STRIDE - 1);
                    const T *const from = line + window;
#pragma unroll
                    for (int v = 0; v < VECTOR / STRIDE; ++v) {
                        const bool met = real && (UnsignedCoordinate)(window + v) < (UnsignedCoordinate)out2;
                        // Converted behind the choice: a branch would keep reads from going out together.
                        sum[r][v * STRIDE + c] += upcast(met ? from[v] : downcast<T>(0));
                    }
                }
            }
        }
        T *const y = static_cast<T *>(a.y) + (((long long)(i / image) * size0 + to0) * size1 + to1) * size2 + to2;
#pragma unroll
        for (int r = 0; r < STRIDE; ++r)
            if (to1 + r < size1) write_sums<ACCUMULATE>(y + (long long)r * size2, sum[r], WHOLE, size2 - to2);
    }
}

// Of any stride (STRIDE 0, else known): a thread has one element. Without dilation only those taps are gone through
// that meet a window.
template <typename T, int STRIDE, bool ACCUMULATE, typename I>
__device__ __forceinline__ void col2im(const Patches &a) {
    using A = typename Arithmetic<T>::type;
    begin_dependent();
    const Coordinate kernel0 = a.kernel[0], kernel1 = a.kernel[1], kernel2 = a.kernel[2];
    const Coordinate size1 = a.size[1], size2 = a.size[2], out1 = a.out[1], out2 = a.out[2];
    const long long windows = a.out[0] * out1 * out2, taps = (long long)kernel0 * kernel1 * kernel2;
    const I image = a.size[0] * size1 * size2, total = a.planes * image, step = gridDim.x * blockDim.x;
    for (I i = blockIdx.x * (I)blockDim.x + threadIdx.x; i < total; i += step) {
        const UnsignedCoordinate place = i % image, row = place / size2;
        const Coordinate at0 = row / size1 + a.pad[0], at1 = row % size1 + a.pad[1], at2 = place % size2 + a.pad[2];
        const T *columns = static_cast<const T *>(a.x) + (long long)(i / image) * taps * windows;
        A sum[1] = {0};
        const Coordinate stride1 = STRIDE ? STRIDE : a.stride[1], stride2 = STRIDE ? STRIDE : a.stride[2];
        const bool steps = a.dilation[1] == 1 && a.dilation[2] == 1;
        const Coordinate step1 = steps ? stride1 : 1, step2 = steps ? stride2 : 1;
        for (Coordinate k0 = 0; k0 < kernel0; ++k0) {
            const Coordinate w0 = window_at(at0 - k0 * (Coordinate)a.dilation[0], a.stride[0], a.out[0]);
            for (Coordinate k1 = steps ? at1 % step1 : 0; k1 < kernel1; k1 += step1) {
                const Coordinate w1 = window_at(at1 - k1 * (Coordinate)a.dilation[1], stride1, out1);
                const bool real = w0 >= 0 && w1 >= 0;
                const long long line = real ? ((long long)w0 * out1 + w1) * out2 : 0;
                for (Coordinate k2 = steps ? at2 % step2 : 0; k2 < kernel2; k2 += step2) {
                    const Coordinate w2 = window_at(at2 - k2 * (Coordinate)a.dilation[2], stride2, out2);
                    const long long tap = ((long long)k0 * kernel1 + k1) * kernel2 + k2;
                    // Read in any case: behind a branch, reads would not go out together.
                    const A value = upcast(columns[tap * windows + line + max(w2, Coordinate(0))]);
                    sum[0] += real && w2 >= 0 ? value : A(0);
                }
            }
        }
        write_sums<ACCUMULATE>(static_cast<T *>(a.y) + (long long)i, sum, true, 1);
    }
}
