// Depthwise convolution, channels last, images of few columns: a thread computes whole rows of outputs of V channels.
//
// A row of x comes to registers, all its columns, once for all taps of the filter's row. Which of its products have
// padding is known here, so they are left out: of a 7x7 filter on 7x7 pixels 43 in 100. A block's weights are in shared
// memory as they are computed with.
#include "ops/conv/cuda/depthwise/columns.cuh"

struct Rows {
    const void *x, *w;
    void *y;
    const void *bias, *residual;
    long long n, c, height, p, q;
    long long x_image, x_row, y_image, y_channel, y_row, y_column;
    long long stride_h, dilation_h, pad_h, phases_h;
    // Blocks of rows of an image, blocks of channels.
    long long pieces, channel_blocks;
    // The filters were written before all that is still to run.
    long long weights_ready;
};

// T; R, S; W, Q: columns of x and y; STEP, PAD, DILATION along a row; V channels and ROWS rows a thread; LANES of
// channels and GROUPS of rows a block; X_STEP, Y_STEP: elements from a column to the next; FILTER_TAPS (columns.cuh) of
// filters that are read as they lie; BIAS, RESIDUAL, ACTIVATION.
template <class Traits> struct RowOf : Traits {
    using B = Traits;
    using Item = Channels<typename B::T, B::V>;
    static constexpr int USED = B::LANES * B::GROUPS, THREADS = (USED + 31) / 32 * 32, CHANNELS = B::LANES * B::V;
    // The column of x that an output sees with a tap, outside of 0 to W in the padding.
    static DEVICE constexpr int column(int q, int s) { return q * B::STEP - B::PAD + s * B::DILATION; }
};

// A block's share: outputs from row `first` on, channels from k; these become a thread's own. q0: its first column.
struct Share {
    long long n;
    int k, first, residue, q0, q_step;
};

template <class Traits> DEVICE void depthwise_rows(const Rows &a) {
    using P = RowOf<Traits>;
    using T = typename P::T;
    using A = typename Arithmetic<T>::type;
    using Item = typename P::Item;
    constexpr int V = P::V, W = P::W, Q = P::Q, R = P::R, S = P::S, ROWS = P::ROWS;
    extern __shared__ __align__(128) unsigned char memory[];
    struct alignas(sizeof(A) * V) Weights { A v[V]; };
    unsigned block = blockIdx.x;
    Share part{0, 0, 0, 0, 0, 1};
    part.k = block % (unsigned)a.channel_blocks * P::CHANNELS, block /= (unsigned)a.channel_blocks;
    part.first = block % (unsigned)a.pieces * (P::GROUPS * ROWS);
    part.n = block / (unsigned)a.pieces;
    const int tid = threadIdx.x, lane = tid % P::LANES, group = tid / P::LANES, c = a.c;
    part.k += lane * V, part.first += group * ROWS;
    const bool known = tid < P::USED && part.k < c;
    if (!a.weights_ready) begin_dependent();
    // Every thread of a lane brings some taps of its channels, many at a time.
    constexpr int TURNS = (R * S + P::GROUPS - 1) / P::GROUPS, MOST = 32 * 4 / sizeof(Item);
    constexpr int AT_ONCE = TURNS < MOST ? TURNS : MOST;
    A *const mine = reinterpret_cast<A *>(memory) + lane * V;
    bool finite = true;
    if (known) {
        const T *const w = static_cast<const T *>(a.w) + part.k * max(1, P::FILTER_TAPS);
#pragma unroll 1
        for (int first = group; first < R * S; first += AT_ONCE * P::GROUPS) {
            Item taps[AT_ONCE];
#pragma unroll
            for (int i = 0; i < AT_ONCE; ++i) {
                const int tap = min(first + i * P::GROUPS, R * S - 1);
                if constexpr (P::FILTER_TAPS > 0)
                    taps[i] = Item::gather(w + place_in_filter<P>(tap / S, tap % S), P::FILTER_TAPS);
                else taps[i] = *reinterpret_cast<const Item *>(w + tap * c);
            }
#pragma unroll
            for (int i = 0; i < AT_ONCE; ++i) {
                Weights weight;
                taps[i].to(weight.v);
#pragma unroll
                for (int v = 0; v < V; ++v) finite &= weight.v[v] - weight.v[v] == A(0);
                if (first + i * P::GROUPS < R * S)
                    *reinterpret_cast<Weights *>(mine + (first + i * P::GROUPS) * P::CHANNELS) = weight;
            }
        }
    }
    finite = __syncthreads_and(finite);
    if (a.weights_ready) begin_dependent();
    if (!known || part.first >= (int)a.p) return;
    Epilogue<T, V, Q, P::Y_STEP, true, P::BIAS, P::RESIDUAL, P::ACTIVATION> epilogue(a, part);
    // Rows of x that the thread's outputs see: those inside the image, from row `from` on.
    const int apart = a.dilation_h, top = part.first * (int)a.stride_h - (int)a.pad_h, height = a.height;
    const int seen = ROWS == 1 ? R : (ROWS - 1) * (int)a.stride_h + R;
    const int begin = top < 0 ? (-top + apart - 1) / apart : 0;
    const int end = min(seen, top < height ? (height - 1 - top) / apart + 1 : 0);
    const T *from = static_cast<const T *>(a.x) + part.n * a.x_image + part.k + (top + begin * apart) * a.x_row;
    A sums[ROWS][Q][V] = {};
    Item next[W];
    const auto load = [&] {
#pragma unroll
        for (int m = 0; m < W; ++m) next[m] = *reinterpret_cast<const Item *>(from + m * P::X_STEP);
        from += apart * a.x_row;
    };
    if (begin < end) load();
#pragma unroll 1
    for (int t = begin; t < end; ++t) {
        A now[W][V];
#pragma unroll
        for (int m = 0; m < W; ++m) next[m].to(now[m]);
        if (t + 1 < end) load();
#pragma unroll
        for (int o = 0; o < ROWS; ++o) {
            const int r = ROWS == 1 ? t : t - o * (int)a.stride_h;
            if (ROWS > 1 && (unsigned)r >= (unsigned)R) continue;
#pragma unroll
            for (int s = 0; s < S; ++s) {
                const Weights weight = *reinterpret_cast<const Weights *>(mine + (r * S + s) * P::CHANNELS);
#pragma unroll
                for (int q = 0; q < Q; ++q)
                    if (P::column(q, s) >= 0 && P::column(q, s) < W)
                        multiply_add<V, A>(sums[o][q], now[P::column(q, s)], weight.v, false);
            }
        }
    }
    if (!finite) {
        // Padding times an infinity or NaN is NaN.
        for (int o = 0; o < ROWS; ++o)
            for (int tap = 0; tap < R * S; ++tap) {
                const int r = tap / S, s = tap % S, row = top + (o * (int)a.stride_h + r * apart);
                const Weights weight = *reinterpret_cast<const Weights *>(mine + tap * P::CHANNELS);
#pragma unroll
                for (int at = 0; at < ROWS * Q; ++at) {
                    const bool inside =
                        (unsigned)row < (unsigned)height && (unsigned)P::column(at % Q, s) < (unsigned)W;
                    if (at / Q != o || inside) continue;
#pragma unroll
                    for (int v = 0; v < V; ++v) sums[at / Q][at % Q][v] += weight.v[v] * A(0);
                }
            }
    }
#pragma unroll
    for (int o = 0; o < ROWS; ++o)
        if (part.first + o < (int)a.p) epilogue.store(sums[o]);
}
