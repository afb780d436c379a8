// Depthwise convolution, channels last, rows of x streamed through shared memory.
//
// A thread goes down the rows of TX columns of V channels as in columns.cu, all weights and the rows of sums under way
// in registers. But a block copies what all its threads see of a row to shared memory, once and some rows ahead: what
// neighbouring columns share is read once, padding is zeros there, and loads ask no questions. A stage is a period of
// rows: as many as until the same sums are free again.
#include "ops/conv/cuda/depthwise/columns.cuh"

struct Streamed {
    const void *x, *w;
    void *y;
    const void *bias, *residual;
    long long n, c, height, width, p, q;
    long long x_image, x_row, y_image, y_channel, y_row, y_column;
    long long stride_h, stride_w, dilation_h, dilation_w, pad_h, pad_w, phases_h, phases_w;
    // Output rows of a strip; pieces of a column of outputs, strips along a row, blocks of channels.
    long long rows, pieces, strips_row, channel_blocks;
    // The filters were written before all that is still to run.
    long long weights_ready;
};

// T; R, S; SH, SW: strides in a class (columns.cu); V channels and TX columns a thread; LANES of channels and GROUPS of
// columns a block; STAGES; COPY bytes; Y_STEP: elements of y from a column to the next;
// WHOLE: all strips have all their columns; BIAS, RESIDUAL, ACTIVATION.
template <class Traits> struct Stream : Traits {
    using B = Traits;
    using Item = Channels<typename B::T, B::V>;
    static constexpr int LIVE = (B::R + B::SH - 1) / B::SH, PERIOD = LIVE * B::SH;
    static constexpr int USED = B::LANES * B::GROUPS, THREADS = (USED + 31) / 32 * 32;
    // Columns of x of a thread and of a block; bytes of a pixel, of a row, of a stage.
    static constexpr int WINDOW = (B::TX - 1) * B::SW + B::S, COLUMNS = (B::GROUPS * B::TX - 1) * B::SW + B::S;
    static constexpr int PIXEL = B::LANES * sizeof(Item), ROW = COLUMNS * PIXEL, STAGE = PERIOD * ROW;
    static constexpr int PIECES = PIXEL / B::COPY, COPIES = PERIOD * COLUMNS * PIECES;
    static constexpr int ITEMS = (COPIES + THREADS - 1) / THREADS;
    static_assert(PIXEL % B::COPY == 0);
};

// A block's strip: output rows residue + phases * (first + o), o < count, of GROUPS * TX columns of a class from q0,
// and channels from k; `k` and `q0` of a thread become its own.
struct Strip {
    long long n;
    int k, residue, first, count, q0, q_step;

    template <int CHANNELS, int WIDE> static DEVICE Strip of(const Streamed &a) {
        Strip s;
        unsigned i = blockIdx.x;
        s.k = i % (unsigned)a.channel_blocks * CHANNELS, i /= (unsigned)a.channel_blocks;
        const int along = i % (unsigned)a.strips_row;
        i /= (unsigned)a.strips_row;
        const int piece = i % (unsigned)a.pieces;
        s.n = i / (unsigned)a.pieces;
        s.residue = piece % (int)a.phases_h, s.first = piece / (int)a.phases_h * (int)a.rows;
        s.count = min((int)a.rows, ((int)a.p - s.residue + (int)a.phases_h - 1) / (int)a.phases_h - s.first);
        s.q_step = a.phases_w, s.q0 = along % s.q_step + along / s.q_step * (WIDE * s.q_step);
        return s;
    }
};

template <class Traits> DEVICE void depthwise_streamed(const Streamed &a) {
    using P = Stream<Traits>;
    using T = typename P::T;
    using A = typename Arithmetic<T>::type;
    using Item = typename P::Item;
    constexpr int V = P::V, TX = P::TX, R = P::R, S = P::S, SH = P::SH, LIVE = P::LIVE, PERIOD = P::PERIOD;
    extern __shared__ __align__(128) unsigned char memory[];
    const unsigned stages = shared_address(memory);
    Strip part = Strip::of<P::LANES * V, P::GROUPS * TX>(a);
    if (part.count <= 0) return;
    const int tid = threadIdx.x, lane = tid % P::LANES, group = tid / P::LANES;
    const int rows = (part.count - 1) * SH + R, apart = a.dilation_h;
    const int top = (part.residue + (int)a.phases_h * part.first) * (int)a.stride_h - (int)a.pad_h;
    // Copies of a stage: their place in the first stage's rows, and that row, far below zero where there is nothing.
    const T *x = static_cast<const T *>(a.x) + part.n * a.x_image;
    const int bottom = max(0, min((int)a.height, top + rows * apart));
    int from[P::ITEMS], row[P::ITEMS];
    {
        const int left = part.q0 * (int)a.stride_w - (int)a.pad_w;
#pragma unroll
        for (int i = 0; i < P::ITEMS; ++i) {
            const int at = tid + i * P::THREADS, t = at / (P::COLUMNS * P::PIECES),
                      rest = at % (P::COLUMNS * P::PIECES);
            const int column = left + rest / P::PIECES * (int)a.dilation_w;
            const int channel = part.k + rest % P::PIECES * (P::COPY / (int)sizeof(T));
            row[i] = top + t * apart;
            from[i] = row[i] * (int)a.x_row + column * (int)a.c + channel;
            if ((unsigned)column >= (unsigned)a.width || channel >= (int)a.c) row[i] = -(1 << 30);
        }
    }
    // The stage whose first row is `first` rows further.
    const auto copy = [&](int first, int stage) {
        const int down = first * apart, along = down * (int)a.x_row;
#pragma unroll
        for (int i = 0; i < P::ITEMS; ++i) {
            if (i * P::THREADS + P::THREADS > P::COPIES && i * P::THREADS + tid >= P::COPIES) break;
            cp_async<P::COPY>(stages + stage * P::STAGE + (i * P::THREADS + tid) * P::COPY, x + (from[i] + along),
                              (unsigned)(row[i] + down) < (unsigned)bottom);
        }
        cp_async_commit();
    };

    part.k += lane * V;
    const bool exists = tid < P::USED && part.k < (int)a.c;
    part.k = min(part.k, (int)a.c - V);
    part.q0 = exists ? part.q0 + group * (TX * part.q_step) : (int)a.q;
    if (!a.weights_ready) begin_dependent();
    Item taps[R * S];
#pragma unroll
    for (int tap = 0; tap < R * S; ++tap)
        taps[tap] = *reinterpret_cast<const Item *>(static_cast<const T *>(a.w) + tap * (int)a.c + part.k);
    if (a.weights_ready) begin_dependent();
#pragma unroll
    for (int stage = 0; stage < P::STAGES - 1; ++stage) copy(stage * PERIOD, stage);
    Epilogue<T, V, TX, P::Y_STEP, P::WHOLE, P::BIAS, P::RESIDUAL, P::ACTIVATION> epilogue(a, part);
    A w[R * S][V];
#pragma unroll
    for (int tap = 0; tap < R * S; ++tap) taps[tap].to(w[tap]);
    A sums[LIVE][TX][V];
    int stage = 0;
    const unsigned char *const mine =
        memory + min(group, P::GROUPS - 1) * (TX * P::SW * P::PIXEL) + lane * sizeof(Item);
    for (int base = 0, first = 0; base < rows; base += PERIOD, first += LIVE) {
        cp_async_wait<P::STAGES - 2>();
        __syncthreads();
        copy(base + (P::STAGES - 1) * PERIOD, stage == 0 ? P::STAGES - 1 : stage - 1);
        const unsigned char *const here = mine + stage * P::STAGE;
        stage = stage == P::STAGES - 1 ? 0 : stage + 1;
#pragma unroll
        for (int i = 0; i < PERIOD; ++i) {
            A now[P::WINDOW][V];
#pragma unroll
            for (int m = 0; m < P::WINDOW; ++m)
                reinterpret_cast<const Item *>(here + i * P::ROW + m * P::PIXEL)->to(now[m]);
#pragma unroll
            for (int r = i % SH; r < R; r += SH) {
                // Output o sees this row with tap r; its first product begins the sum.
                const int back = (i - r + PERIOD) / SH - LIVE, o = first + back, slot = (back + LIVE) % LIVE;
                if (o < 0 || o >= part.count) continue;
#pragma unroll
                for (int s = 0; s < S; ++s)
#pragma unroll
                    for (int j = 0; j < TX; ++j)
                        multiply_add<V, A>(sums[slot][j], now[j * P::SW + s], w[r * S + s], r == 0 && s == 0);
                if (r == R - 1) epilogue.store(sums[slot]);
            }
        }
    }
}
