// Depthwise convolution, channels last, rows of x streamed through shared memory.
//
// A thread goes down the rows of TX columns of V channels as in columns.cu, all weights and the rows of sums under way
// in registers. But a block copies what all its threads see of a row to shared memory, once and some rows ahead: what
// neighbouring columns share is read once, padding is zeros there, and loads ask no questions. A stage is a period of
// rows: as many as until the same sums are free again.
#include "ops/conv/cuda/depthwise/columns.cuh"
#include "ops/conv/cuda/streamed_loads.cuh"

// T; R, S; SH, SW: strides in a class (columns.cu); V channels and TX columns a thread; LANES of channels and GROUPS of
// columns a block; STAGES; BY, and COPY bytes; MARGIN: bytes in front of each of ROWS; Y_STEP: elements of y
// from a column to the next; WHOLE: all strips have all their columns; FILTER_TAPS (columns.cuh) of filters that are
// read as they lie, in shared memory from FILTERS_AT on; BIAS, RESIDUAL, ACTIVATION.
template <class Traits> struct Stream : Traits {
    using B = Traits;
    using Item = Channels<typename B::T, B::V>;
    static constexpr int IMAGES = 1, LIVE = (B::R + B::SH - 1) / B::SH, PERIOD = LIVE * B::SH;
    static constexpr int USED = B::LANES * B::GROUPS, THREADS = (USED + 31) / 32 * 32, C = B::LANES * B::V;
    // Columns of x of a thread and of a block; bytes of a pixel, of a row, of a stage.
    static constexpr int WINDOW = (B::TX - 1) * B::SW + B::S, COLUMNS = (B::GROUPS * B::TX - 1) * B::SW + B::S;
    static constexpr int PIXEL = B::LANES * sizeof(Item), GRAIN = B::COPY / sizeof(typename B::T);
    static constexpr int EXACT = COLUMNS * PIXEL, MORE = B::COPY - (int)sizeof(typename B::T);
    static constexpr int ROW = B::BY == ROWS ? B::MARGIN + (EXACT + MORE + B::COPY - 1) / B::COPY * B::COPY : EXACT;
    static constexpr int STAGE = B::BY == TMA ? (PERIOD * ROW + 127) / 128 * 128 : PERIOD * ROW;
    static constexpr int PIECES_PIXEL = PIXEL / B::COPY, ROW_COPIES = (ROW - B::MARGIN) / B::COPY,
                         COPIES = PERIOD * ROW_COPIES;
    static constexpr int ITEMS = (COPIES + THREADS - 1) / THREADS;
    static_assert(B::BY == ROWS || PIXEL % B::COPY == 0);
    static constexpr bool PADDED = false;
    // Where byte `at` of a stage lies.
    static DEVICE unsigned place(unsigned at) { return at; }
};

template <class Traits> DEVICE void depthwise_streamed(const Streamed &a) {
    using P = Stream<Traits>;
    using T = typename P::T;
    using A = typename Arithmetic<T>::type;
    using Item = typename P::Item;
    constexpr int V = P::V, TX = P::TX, R = P::R, S = P::S, SH = P::SH, LIVE = P::LIVE, PERIOD = P::PERIOD;
    extern __shared__ __align__(128) unsigned char memory[];
    Strip part = Strip::of<P>(a);
    if (part.count <= 0) return;
    const int tid = threadIdx.x, lane = tid % P::LANES, group = tid / P::LANES, rows = part.rows;
    Loads<P, P::BY> loads(a, part, shared_address(memory));
    // Columns of x of a thread that are the image's, where others are not zeros.
    const int column = part.left + min(group, P::GROUPS - 1) * (TX * P::SW);
    unsigned masks[P::WINDOW];
    if constexpr (P::BY == ROWS)
#pragma unroll
        for (int m = 0; m < P::WINDOW; ++m) masks[m] = (unsigned)(column + m) < (unsigned)a.width ? ~0u : 0;
    const unsigned char *const mine =
        memory + lane * sizeof(Item) + (column - (P::BY == ROWS ? max(0, part.left) : part.left)) * P::PIXEL;
    const int k0 = part.k;
    part.k += lane * V;
    const bool exists = tid < P::USED && part.k < (int)a.c;
    part.k = min(part.k, (int)a.c - V);
    part.q0 = exists ? part.q0 + group * (TX * part.q_step) : (int)a.q;
    if (!a.weights_ready) begin_dependent();
    Item taps[R * S];
    if constexpr (P::FILTER_TAPS > 0) {
        // A block's lie side by side: they are brought as they are, and picked in shared memory.
        T *const filters = reinterpret_cast<T *>(memory + P::FILTERS_AT);
        const T *const from = static_cast<const T *>(a.w) + k0 * P::FILTER_TAPS;
        const int count = min(P::C, (int)a.c - k0) * P::FILTER_TAPS;
#pragma unroll 8
        for (int i = tid; i < count; i += P::THREADS) filters[i] = from[i];
        if (a.weights_ready) begin_dependent();
        loads.begin();
        __syncthreads();
#pragma unroll
        for (int tap = 0; tap < R * S; ++tap)
            taps[tap] = Item::gather(filters + (part.k - k0) * P::FILTER_TAPS + place_in_filter<P>(tap / S, tap % S),
                                     P::FILTER_TAPS);
    } else {
#pragma unroll
        for (int tap = 0; tap < R * S; ++tap)
            taps[tap] = *reinterpret_cast<const Item *>(static_cast<const T *>(a.w) + tap * (int)a.c + part.k);
        if (a.weights_ready) begin_dependent();
        loads.begin();
    }
    Epilogue<T, V, TX, P::Y_STEP, P::WHOLE, P::BIAS, P::RESIDUAL, P::ACTIVATION> epilogue(a, part);
    A w[R * S][V];
#pragma unroll
    for (int tap = 0; tap < R * S; ++tap) taps[tap].to(w[tap]);
    A sums[LIVE][TX][V];
    for (int base = 0, first = 0; base < rows; base += PERIOD, first += LIVE) {
        const unsigned char *const here = mine + loads.next(base);
#pragma unroll
        for (int i = 0; i < PERIOD; ++i) {
            if (i > 0 && base + i >= rows) break;
            const unsigned char *const row = here + loads.row_of(i, base);
            A now[P::WINDOW][V];
#pragma unroll
            for (int m = 0; m < P::WINDOW; ++m) {
                Item item = *reinterpret_cast<const Item *>(row + m * P::PIXEL);
                if constexpr (P::BY == ROWS) item.mask(masks[m]);
                item.to(now[m]);
            }
            multiply_row<P>(i, first, sums, now, w, [&](int slot, int back) {
                if (first + back < part.count) epilogue.store(sums[slot]);
            });
        }
        loads.done();
    }
}
