// Depthwise convolution in registers: a thread goes down the rows of a few columns of V output channels.
//
// x (n, c, h, w), y (n, k, p, q), dense in either memory order; every output channel has one input channel. What a row
// of x holds for the thread's columns is read once, and goes into all outputs under way that see it.
//
// Outputs whose taps meet the same elements of x form a residue class along each axis: p = residue + phases * i with
// phases = dilation / gcd(stride, dilation). In one class rows of x are `dilation` apart, and outputs are SH = stride /
// gcd such rows apart. So dilation costs nothing, and strides are small numbers that are known here.
#include "ops/conv/cuda/depthwise/columns.cuh"

struct Columns {
    const void *x, *w;
    void *y;
    const void *bias, *residual;
    long long n, k, height, width, p, q, r;
    // Outputs of one input channel.
    long long multiplier;
    // Elements from one to the next of x, y, and w.
    long long x_image, x_channel, x_row, x_column, y_image, y_channel, y_row, y_column, w_channel, w_tap;
    long long stride_h, stride_w, dilation_h, dilation_w, pad_h, pad_w, phases_h, phases_w;
    // Outputs that a thread computes down a column; such pieces of a column; groups of columns.
    long long rows, pieces, column_groups;
    // The filters were written before all that is still to run.
    long long weights_ready;
};

// A thread's part: output channels k to k + V of image n; in all its columns output row residue + phases * (first + o),
// o < count.
template <bool CHANNELS_LAST, int V, int TX, typename I> struct Part {
    long long n;
    int k, residue, first, count, q0, q_step;
    bool exists;

    DEVICE explicit Part(const Columns &a) {
        I i = blockIdx.x * (I)blockDim.x + threadIdx.x;
        exists = i < (I)a.n * (I)a.pieces * (I)a.column_groups * (I)(a.k / V);
        const int fast = CHANNELS_LAST ? a.k / V : a.column_groups, slow = CHANNELS_LAST ? a.column_groups : a.k;
        const int inner = i % fast;
        i /= fast;
        const int outer = i % slow;
        i /= slow;
        k = CHANNELS_LAST ? inner * V : outer;
        const int group = CHANNELS_LAST ? outer : inner, piece = i % (I)a.pieces;
        n = i / (I)a.pieces;
        residue = piece % (int)a.phases_h;
        first = piece / (int)a.phases_h * (int)a.rows;
        count = min((int)a.rows, ((int)a.p - residue + (int)a.phases_h - 1) / (int)a.phases_h - first);
        if (CHANNELS_LAST) {
            // Columns of a class, beside each other there.
            const int column = group / (int)a.phases_w * TX;
            q0 = group % (int)a.phases_w + column * (int)a.phases_w, q_step = a.phases_w;
        } else {
            // Lanes beside each other have columns beside each other.
            q0 = group, q_step = a.column_groups;
        }
    }
};

template <bool LARGE> struct Select { using type = unsigned; };
template <> struct Select<true> { using type = unsigned long long; };

// The elements of a row of x for the columns of a thread: of a class (CHANNELS_LAST) its TX windows share them. STEP:
// elements of x from one to the next.
template <typename T, bool CHANNELS_LAST, int V, int S, int SW, int TX, int STEP> struct Windows {
    using A = typename Arithmetic<T>::type;
    static constexpr int COUNT = CHANNELS_LAST ? (TX - 1) * SW + S : TX * S;
    static_assert(COUNT <= 64);
    using Mask = typename Select<(COUNT > 32)>::type;
    using Row = Channels<T, V>[COUNT];
    static constexpr Mask ALL = ~Mask(0) >> (sizeof(Mask) * 8 - COUNT);
    // The first row of the image.
    const T *x;
    // A row of x has fewer than 2^31 elements.
    int apart;
    Mask inside;

    template <class P> DEVICE Windows(const Columns &a, const P &part) {
        const int left = part.q0 * (int)a.stride_w - (int)a.pad_w, next = part.q_step * (int)a.stride_w;
        apart = next * (int)a.x_column;
        x = static_cast<const T *>(a.x) + part.n * a.x_image + part.k / (int)a.multiplier * a.x_channel +
            left * a.x_column;
        inside = 0;
#pragma unroll
        for (int m = 0; m < COUNT; ++m) {
            const int column = left + (CHANNELS_LAST ? m : m % S) * (int)a.dilation_w;
            if ((unsigned)(column + (CHANNELS_LAST ? 0 : m / S * next)) < (unsigned)a.width) inside |= Mask(1) << m;
        }
    }
    // Padding is zeros, which are multiplied too: a filter of NaN gives NaN beside the edges. Where nothing is padding,
    // which in NHWC is so for most warps, loads need no questions.
    DEVICE void load(Row &v, const T *from, bool wanted) const {
        const Mask mask = wanted ? inside : 0;
        if (CHANNELS_LAST && mask == ALL) {
#pragma unroll
            for (int m = 0; m < COUNT; ++m) v[m] = *reinterpret_cast<const Channels<T, V> *>(from + m * STEP);
            return;
        }
#pragma unroll
        for (int m = 0; m < COUNT; ++m) {
            const int offset = CHANNELS_LAST ? m * STEP : m / S * apart + m % S * STEP;
            v[m] = {};
            if (mask >> m & 1) v[m] = *reinterpret_cast<const Channels<T, V> *>(from + offset);
        }
    }
    static DEVICE constexpr int place(int column, int tap) {
        return CHANNELS_LAST ? column * SW + tap : column * S + tap;
    }
};

// All weights in registers, and LIVE rows of outputs under way: after a row of x the oldest of them is done. AHEAD rows
// of x are on their way.
template <typename T, bool CHANNELS_LAST, int V, int R, int S, int SH, int SW, int TX, int AHEAD, int X_STEP,
          int Y_STEP, bool WHOLE, bool BIAS, bool RESIDUAL, int ACTIVATION, typename I>
DEVICE void depthwise_rolling(const Columns &a) {
    using A = typename Arithmetic<T>::type;
    using Window = Windows<T, CHANNELS_LAST, V, S, SW, TX, X_STEP>;
    constexpr int LIVE = (R + SH - 1) / SH, PERIOD = LIVE * SH;
    // Few products are done for rows without an output as well: without branches they are in a better order.
    constexpr bool SKIPS = R * S * TX * V >= 64;
    const Part<CHANNELS_LAST, V, TX, I> part(a);
    if (!part.exists || part.count <= 0) return;
    const Window windows(a, part);
    if (!a.weights_ready) begin_dependent();
    A w[R * S][V];
#pragma unroll
    for (int tap = 0; tap < R * S; ++tap)
        load_channels(w[tap], static_cast<const T *>(a.w) + part.k * a.w_channel + tap * a.w_tap);
    if (a.weights_ready) begin_dependent();
    Epilogue<T, V, TX, Y_STEP, WHOLE, BIAS, RESIDUAL, ACTIVATION> epilogue(a, part);
    A sums[LIVE][TX][V];
    typename Window::Row next[AHEAD];
    const int rows = (part.count - 1) * SH + R, apart = a.dilation_h, height = a.height;
    int row = (part.residue + (int)a.phases_h * part.first) * (int)a.stride_h - (int)a.pad_h, asked = 0;
    const long long row_step = apart * a.x_row;
    const T *from = windows.x + row * a.x_row;
    const auto load = [&](typename Window::Row &v) {
        windows.load(v, from, asked < rows && (unsigned)row < (unsigned)height);
        from += row_step, row += apart, ++asked;
    };
#pragma unroll
    for (int t = 0; t < AHEAD; ++t) load(next[t]);
    for (int base = 0, first = 0; base < rows; base += PERIOD, first += LIVE) {
#pragma unroll
        for (int i = 0; i < PERIOD; ++i) {
            A now[Window::COUNT][V];
#pragma unroll
            for (int m = 0; m < Window::COUNT; ++m) {
                next[0][m].to(now[m]);
#pragma unroll
                for (int t = 1; t < AHEAD; ++t) next[t - 1][m] = next[t][m];
            }
            load(next[AHEAD - 1]);
#pragma unroll
            for (int r = i % SH; r < R; r += SH) {
                // Output o sees this row with tap r; its first product begins the sum.
                const int back = (i - r + PERIOD) / SH - LIVE, o = first + back, slot = (back + LIVE) % LIVE;
                if (SKIPS && (o < 0 || o >= part.count)) continue;
#pragma unroll
                for (int s = 0; s < S; ++s)
#pragma unroll
                    for (int j = 0; j < TX; ++j)
                        multiply_add<V, A>(sums[slot][j], now[Window::place(j, s)], w[r * S + s], r == 0 && s == 0);
                if (r == R - 1 && (SKIPS || (o >= 0 && o < part.count))) epilogue.store(sums[slot]);
            }
        }
    }
}

// ROWS rows of outputs at a time, weights read where they are used: filters of any height.
template <typename T, bool CHANNELS_LAST, int V, int S, int SH, int SW, int TX, int ROWS, int X_STEP, int Y_STEP,
          bool WHOLE, bool BIAS, bool RESIDUAL, int ACTIVATION, typename I>
DEVICE void depthwise_blocked(const Columns &a) {
    using A = typename Arithmetic<T>::type;
    using Window = Windows<T, CHANNELS_LAST, V, S, SW, TX, X_STEP>;
    const Part<CHANNELS_LAST, V, TX, I> part(a);
    if (!part.exists || part.count <= 0) return;
    const Window windows(a, part);
    begin_dependent();
    Epilogue<T, V, TX, Y_STEP, WHOLE, BIAS, RESIDUAL, ACTIVATION> epilogue(a, part);
    const T *w = static_cast<const T *>(a.w) + part.k * a.w_channel;
    const int taps_h = a.r;
    for (int first = 0; first < part.count; first += ROWS) {
        A sums[ROWS][TX][V] = {};
        const int top = (part.residue + (int)a.phases_h * (part.first + first)) * (int)a.stride_h - (int)a.pad_h;
        const int live = min(ROWS, part.count - first), rows = (live - 1) * SH + taps_h;
        for (int t = 0; t < rows; ++t) {
            typename Window::Row found;
            const int row = top + t * (int)a.dilation_h;
            windows.load(found, windows.x + row * a.x_row, (unsigned)row < (unsigned)a.height);
            A now[Window::COUNT][V];
#pragma unroll
            for (int m = 0; m < Window::COUNT; ++m) found[m].to(now[m]);
#pragma unroll
            for (int o = 0; o < ROWS; ++o) {
                const int r = t - o * SH;
                if (r < 0 || r >= taps_h || o >= live) continue;
                const T *taps = w + r * S * a.w_tap;
#pragma unroll
                for (int s = 0; s < S; ++s) {
                    A weight[V];
                    load_channels(weight, taps + s * a.w_tap);
#pragma unroll
                    for (int j = 0; j < TX; ++j)
                        multiply_add<V, A>(sums[o][j], now[Window::place(j, s)], weight, false);
                }
            }
        }
#pragma unroll
        for (int o = 0; o < ROWS; ++o)
            if (o < live) epilogue.store(sums[o]);
    }
}

// Few outputs: a thread has TX columns of one row, and asks for all weights and all of their windows at once.
template <typename T, bool CHANNELS_LAST, int V, int R, int S, int SW, int TX, int X_STEP, int Y_STEP, bool WHOLE,
          bool BIAS, bool RESIDUAL, int ACTIVATION, typename I>
DEVICE void depthwise_windows(const Columns &a) {
    using A = typename Arithmetic<T>::type;
    using Item = Channels<T, V>;
    using Window = Windows<T, CHANNELS_LAST, V, S, SW, TX, X_STEP>;
    const Part<CHANNELS_LAST, V, TX, I> part(a);
    if (!part.exists || part.count <= 0) return;
    const Window windows(a, part);
    if (!a.weights_ready) begin_dependent();
    Item taps[R * S];
    const T *const w = static_cast<const T *>(a.w) + part.k * a.w_channel;
#pragma unroll
    for (int tap = 0; tap < R * S; ++tap) taps[tap] = *reinterpret_cast<const Item *>(w + tap * a.w_tap);
    if (a.weights_ready) begin_dependent();
    Epilogue<T, V, TX, Y_STEP, WHOLE, BIAS, RESIDUAL, ACTIVATION> epilogue(a, part);
    const int top = (part.residue + (int)a.phases_h * part.first) * (int)a.stride_h - (int)a.pad_h;
    typename Window::Row rows[R];
#pragma unroll
    for (int r = 0; r < R; ++r) {
        const int row = top + r * (int)a.dilation_h;
        windows.load(rows[r], windows.x + row * a.x_row, (unsigned)row < (unsigned)a.height);
    }
    A sums[TX][V];
#pragma unroll
    for (int r = 0; r < R; ++r) {
        A now[Window::COUNT][V];
#pragma unroll
        for (int m = 0; m < Window::COUNT; ++m) rows[r][m].to(now[m]);
#pragma unroll
        for (int s = 0; s < S; ++s) {
            A weight[V];
            taps[r * S + s].to(weight);
#pragma unroll
            for (int j = 0; j < TX; ++j)
                multiply_add<V, A>(sums[j], now[Window::place(j, s)], weight, r == 0 && s == 0);
        }
    }
    epilogue.store(sums);
}
