// Gradients of max and average pooling: dx is gathered from the windows, so nothing is added by atomics.
//
// x is dy (n, c, p, q), w (of max) the positions of the largest (n, c, p, q), y is dx (n, c, h, w); all dense, channels
// last where CHANNELS_LAST (else V is 1; it divides c). A position is compared with an element's own: one that is
// outside of its window finds nobody, or a neighbour in the tile.
#include "grid.cuh"
#include "types.cuh"

struct PoolGradient {
    const void *x, *w;
    void *y;
    long long n, c, height, width, r, s, p, q, stride_h, stride_w, pad_h, pad_w, dilation_h, dilation_w;
    // From where to where a mean counts taps; what sums are divided by, 0 for the count.
    long long low_h, low_w, high_h, high_w, divisor;
    // Windows from one that sees an element to the next; tiles of a plane.
    long long step_h, step_w, tiles_h, tiles_w;
};

// V positions behind each other, in loads of up to 16 bytes.
template <int V> __device__ __forceinline__ void load_positions(const long long *from, long long (&place)[V]) {
    constexpr int N = V > 1 ? 2 : 1;
#pragma unroll
    for (int v = 0; v < V; v += N) {
        const auto read = *reinterpret_cast<const Neighbours<long long, N> *>(from + v);
#pragma unroll
        for (int i = 0; i < N; ++i) place[v + i] = read.v[i];
    }
}

// Taps that a mean counts on one axis.
__device__ __forceinline__ Coordinate counted(Coordinate start, Coordinate low, Coordinate high, Coordinate taps,
                                              Coordinate dilation) {
    const Coordinate first = start < low ? (low - start + dilation - 1) / dilation : 0;
    const Coordinate end = start < high ? (high - start + dilation - 1) / dilation : 0;
    return max((end < taps ? end : taps) - first, (Coordinate)0);
}

// The last window on an axis that sees a place with one of its taps, and the first that reaches so far.
struct Seen {
    Coordinate last, first;

    __device__ __forceinline__ Seen(Coordinate place, Coordinate count, Coordinate stride, Coordinate taps,
                                    Coordinate dilation) {
        const Coordinate before = place - (taps - 1) * dilation;
        last = min(place / stride, count - 1), first = before > 0 ? (before + stride - 1) / stride : 0;
        if (dilation > 1)
            while (last >= first && (place - last * stride) % dilation) --last;
    }
};

// One thread an element of dx, or V neighbouring channels of one; any dilation. I counts elements of dx.
template <typename T, int V, bool LARGEST, bool CHANNELS_LAST, typename I>
__device__ __forceinline__ void gather(const PoolGradient &a) {
    using A = typename Arithmetic<T>::type;
    const long long step = CHANNELS_LAST ? a.c : 1;
    begin_dependent();
    const I channels = a.c / V, columns = a.width, rows = a.height, total = a.n * channels * a.height * a.width;
    for (I i = blockIdx.x * (I)blockDim.x + threadIdx.x; i < total; i += gridDim.x * blockDim.x) {
        I rest = i, channel = 0;
        if constexpr (CHANNELS_LAST) channel = rest % channels, rest /= channels;
        const Coordinate w = rest % columns;
        rest /= columns;
        const Coordinate h = rest % rows;
        const long long outer = rest / rows, here = (long long)h * a.width + w;
        const Seen down(h + (Coordinate)a.pad_h, a.p, a.stride_h, a.r, a.dilation_h);
        const Seen across(w + (Coordinate)a.pad_w, a.q, a.stride_w, a.s, a.dilation_w);
        A sum[V];
#pragma unroll
        for (int v = 0; v < V; ++v) sum[v] = A(0);
        for (Coordinate p = down.last; p >= down.first; p -= (Coordinate)a.step_h) {
            Coordinate count_h = 1;
            if constexpr (!LARGEST)
                if (!a.divisor)
                    count_h =
                        counted(p * (Coordinate)a.stride_h - (Coordinate)a.pad_h, a.low_h, a.high_h, a.r, a.dilation_h);
            for (Coordinate q = across.last; q >= across.first; q -= (Coordinate)a.step_w) {
                const long long at = ((outer * a.p + p) * a.q + q) * step + channel * V;
                const auto dy = *reinterpret_cast<const Neighbours<T, V> *>(static_cast<const T *>(a.x) + at);
                if constexpr (LARGEST) {
                    long long place[V];
                    load_positions(static_cast<const long long *>(a.w) + at, place);
#pragma unroll
                    for (int v = 0; v < V; ++v)
                        if (place[v] == here) sum[v] += upcast(dy.v[v]);
                } else {
                    long long divisor = a.divisor;
                    if (!divisor)
                        divisor = (long long)count_h * counted(q * (Coordinate)a.stride_w - (Coordinate)a.pad_w,
                                                               a.low_w, a.high_w, a.s, a.dilation_w);
                    const A share = A(1) / A(divisor);
#pragma unroll
                    for (int v = 0; v < V; ++v) sum[v] += upcast(dy.v[v]) * share;
                }
            }
        }
        Neighbours<T, V> written;
#pragma unroll
        for (int v = 0; v < V; ++v) written.v[v] = downcast<T>(sum[v]);
        static_cast<Neighbours<T, V> *>(a.y)[i] = written;
    }
}

// One thread a tile of ROWS x COLUMNS elements of dx, whole strides, and V neighbouring channels, in registers. The
// windows that see any of it are WINDOWS_H x WINDOWS_W, each read once; the first begins START_H, START_W from the
// tile, FIRST_H, FIRST_W windows from the one that begins with the tile's share of them. Dilation 1. STORE: neighbours
// in a row of dx that are stored at once. I counts tiles.
template <typename T, int V, bool LARGEST, bool CHANNELS_LAST, int R, int S, int STRIDE_H, int STRIDE_W, int ROWS,
          int COLUMNS, int WINDOWS_H, int WINDOWS_W, int FIRST_H, int FIRST_W, int START_H, int START_W, int STORE,
          typename I>
__device__ __forceinline__ void tile(const PoolGradient &a) {
    using A = typename Arithmetic<T>::type;
    static_assert(ROWS % STRIDE_H == 0 && COLUMNS % STRIDE_W == 0, "whole strides");
    static_assert(!CHANNELS_LAST || STORE == 1, "neighbours in memory are channels");
    static_assert(CHANNELS_LAST || V == 1, "neighbours in memory are pixels");
    const long long step = CHANNELS_LAST ? a.c : 1;
    begin_dependent();
    const I channels = a.c / V, columns = a.tiles_w, rows = a.tiles_h, total = a.n * channels * a.tiles_h * a.tiles_w;
    for (I i = blockIdx.x * (I)blockDim.x + threadIdx.x; i < total; i += gridDim.x * blockDim.x) {
        I rest = i, channel = 0;
        if constexpr (CHANNELS_LAST) channel = rest % channels, rest /= channels;
        const Coordinate across = rest % columns;
        rest /= columns;
        const Coordinate down = rest % rows;
        const long long outer = rest / rows;
        const Coordinate top = down * ROWS, left = across * COLUMNS, width = a.width, height = a.height;
        const Coordinate corner = top * width + left;
        const Coordinate p0 = down * (ROWS / STRIDE_H) + FIRST_H, q0 = across * (COLUMNS / STRIDE_W) + FIRST_W;
        A sum[ROWS][COLUMNS][V];
#pragma unroll
        for (int j = 0; j < ROWS; ++j)
#pragma unroll
            for (int k = 0; k < COLUMNS; ++k)
#pragma unroll
                for (int v = 0; v < V; ++v) sum[j][k][v] = A(0);
#pragma unroll
        for (int down_by = 0; down_by < WINDOWS_H; ++down_by) {
            const Coordinate p = p0 + down_by;
            if ((UnsignedCoordinate)p >= (UnsignedCoordinate)a.p) continue;
#pragma unroll
            for (int across_by = 0; across_by < WINDOWS_W; ++across_by) {
                const Coordinate q = q0 + across_by;
                if ((UnsignedCoordinate)q >= (UnsignedCoordinate)a.q) continue;
                // Where the window begins, from the tile's corner: known when this is compiled.
                const int above = START_H + down_by * STRIDE_H, before = START_W + across_by * STRIDE_W;
                const long long at = ((outer * a.p + p) * a.q + q) * step + channel * V;
                const auto dy = *reinterpret_cast<const Neighbours<T, V> *>(static_cast<const T *>(a.x) + at);
                long long place[V];
                A share = A(1);
                if constexpr (LARGEST) {
                    load_positions(static_cast<const long long *>(a.w) + at, place);
                } else {
                    long long divisor = a.divisor;
                    if (!divisor)
                        divisor = (long long)counted(top + above, a.low_h, a.high_h, R, 1) *
                                  counted(left + before, a.low_w, a.high_w, S, 1);
                    share = A(1) / A(divisor);
                }
#pragma unroll
                for (int v = 0; v < V; ++v) {
                    const A value = upcast(dy.v[v]) * share;
                    const Coordinate chosen = LARGEST ? (Coordinate)place[v] - corner : 0;
#pragma unroll
                    for (int j = 0; j < ROWS; ++j)
#pragma unroll
                        for (int k = 0; k < COLUMNS; ++k)
                            if (j >= above && j < above + R && k >= before && k < before + S)
                                if (!LARGEST || chosen == j * width + k) sum[j][k][v] += value;
                }
            }
        }
        T *y = static_cast<T *>(a.y) + (outer * height + top) * width * step + left * step + channel * V;
#pragma unroll
        for (int j = 0; j < ROWS; ++j) {
            if (top + j >= height) continue;
#pragma unroll
            for (int k = 0; k < COLUMNS; k += STORE) {
                if (left + k >= width) continue;
                Neighbours<T, V * STORE> written;
#pragma unroll
                for (int n = 0; n < STORE; ++n)
#pragma unroll
                    for (int v = 0; v < V; ++v) written.v[n * V + v] = downcast<T>(sum[j][k + n][v]);
                *reinterpret_cast<Neighbours<T, V * STORE> *>(y + (j * (long long)width + k) * step) = written;
            }
        }
    }
}
