// Depthwise convolution on sparse tensor cores, channels last: rows of a filter as bands of matrices, pixels read and
// written as they lie.
//
// A place is up to 8 outputs beside each other in a row of an image, and the 16 columns of x that they see. A product
// has two channels of 8 places:
//
//     D (2 channels x 8 outputs) x (8 places) += A (2 x 8 outputs x 16 columns x 2) * B (16 columns x 2 x 8 places)
//
// A has a row of the filter's taps: A[j][i] = w[r][i - j] for output j and column i. What it has between
// different channels is zero, two in four, and is not multiplied (mma.sp). So a word of shared memory, two channels of
// a pixel, is a pair of B as it lies, and two sums of a lane are a word of y. All of a filter's taps stay in registers;
// a warp goes down the rows of x, and a row comes to registers once for all rows of outputs that see it, whose sums
// are under way. TMA brings rows of x, some ahead, zeros beside the images with them, and takes rows of y away.
#include "matrix.cuh"
#include "ops/conv/cuda/by_definition.cuh"
#include "tma.cuh"

struct SparseRows {
    // Tensor maps of x and y.
    alignas(64) unsigned long long map_x[16], map_y[16];
    const void *x, *w;
    void *y;
    const void *bias, *residual;
    long long n, c, height, width, p, q;
    long long stride_h, stride_w, dilation_h, dilation_w, pad_h, pad_w;
    // Sets of images, which with strips of columns are lines, one behind the other, whose rows parts share; rows that a
    // line counts more then, as its begin takes time; rows of a part, counted so, and parts with one more.
    long long sets, run_rows, part_rows, more_parts;
    // The filters were written before all that is still to run.
    long long weights_ready;
};

// T; CHANNELS of a block; SHARE warps of the same channels, each with TILES of 8 places; UNITS of WIDTH columns of
// outputs in a strip, COLUMNS_X of x, IMAGES; ROWS of a stage, STAGES of them of x on their way, OUTS of y; R rows of
// taps, S; DH, DW: dilations; TAKES, LEAVES: registers of threads that multiply and of others, where those are a
// warpgroup that gives up some; BIAS, ACTIVATION; FILTER_TAPS, FILTER_FIRST, FILTER_ROW, FILTER_COLUMN:
// place_in_filter.cuh.
template <class Traits> struct SparseRowsTile : Traits {
    using B = Traits;
    static constexpr bool TAPS_FIRST = false, RESIDUAL = false;
    static constexpr int GROUP_C = 1;
    // Channels of a warp, 8 bytes of a pixel.
    static constexpr int EACH = 4, PAIRS = EACH / 2, ACROSS = B::CHANNELS / EACH, CONSUMERS = 32 * ACROSS * B::SHARE,
                         THREADS = CONSUMERS + (B::TAKES > 0 ? 128 : 64);
    static constexpr int PLACES = B::UNITS * B::IMAGES, STRIP = B::UNITS * B::WIDTH, PIXEL = 2 * B::CHANNELS;
    static_assert(PLACES <= 8 * B::TILES * B::SHARE && B::WIDTH <= 8 && B::WIDTH + (B::S - 1) * B::DW <= 16);
    static constexpr int whole(int bytes) { return (bytes + 1023) / 1024 * 1024; }
    // Columns of x that are read; rows of x and y, of all images; zeros behind a row of x, where the last image's last
    // unit reads beyond.
    static constexpr int READ_X = STRIP - B::WIDTH + 16, BYTES_X = B::IMAGES * B::COLUMNS_X * PIXEL;
    static constexpr int ZEROS = READ_X > B::COLUMNS_X ? (READ_X - B::COLUMNS_X) * PIXEL : 0;
    static constexpr int ROW_X = whole(BYTES_X + ZEROS), ROW_Y = whole(B::IMAGES * STRIP * PIXEL);
    static constexpr int OUT_AT = B::STAGES * B::ROWS * ROW_X, TAPS_AT = OUT_AT + B::OUTS * B::ROWS * ROW_Y,
                         TAPS = B::FILTER_TAPS ? B::FILTER_TAPS : B::R * B::S;
    static constexpr int BARRIERS_AT = TAPS_AT + B::CHANNELS * TAPS * 2;
    // Of the columns of a lane's operand, whether taps are in the first eight or the last eight alone.
    static constexpr bool ONE_HALF = (B::S - 1) * B::DW < 7;
    // Rows of x from an output's first to its last; rows of y under way, with the one that is whole: after so many rows
    // a warp's registers have the same of them again.
    static constexpr int REACH = (B::R - 1) * B::DH, LIVE = REACH + 2;
    static DEVICE constexpr int slot(int row) { return (row + 2 * LIVE) % LIVE; }
    // So stages begin at the same turns always, of x and of y, which is LIVE rows behind.
    static_assert(LIVE % B::ROWS == 0);
};

// A block's rows of outputs, in runs: `count` of a line from p0 on; the first row and column of x; of its rows that the
// run's outputs see, counted from there, a stage's first, of which some are in x, and the last one that is.
template <class P> struct SparseRuns {
    const SparseRows &a;
    int channel0;
    unsigned line, row, left_over;
    int n, p0, q0, count, top, left, first, last;
    DEVICE explicit SparseRuns(const SparseRows &a) : a(a) {
        const int own = (int)blockIdx.x * P::CHANNELS;
        // A last block of fewer channels has some of the one before, too: boxes that lie partly beside x take longer.
        channel0 = P::CHANNELS < (int)a.c ? min(own, (int)a.c - P::CHANNELS) : own;
        unsigned end_line, end;
        begin_of(blockIdx.y, line, row), begin_of(blockIdx.y + 1, end_line, end);
        left_over = (end_line - line) * (unsigned)a.p + end - row;
    }
    DEVICE void begin_of(unsigned part, unsigned &line, unsigned &row) const {
        const unsigned counted = part * (unsigned)a.part_rows + min(part, (unsigned)a.more_parts),
                       each = (unsigned)a.p + (unsigned)a.run_rows;
        line = counted / each, row = (unsigned)max(0, (int)(counted - line * each) - (int)a.run_rows);
    }
    // Of `most` rows.
    DEVICE bool next(unsigned most = ~0u) {
        if (left_over == 0) return false;
        const unsigned strip = line / (unsigned)a.sets;
        p0 = row, n = (line - strip * (unsigned)a.sets) * P::IMAGES, q0 = strip * P::STRIP;
        count = min(min((unsigned)a.p - row, left_over), most);
        left_over -= count, row += count;
        if (row == (unsigned)a.p) row = 0, ++line;
        top = p0 - (int)a.pad_h, left = q0 - (int)a.pad_w;
        first = max(0, -top) / P::ROWS * P::ROWS, last = min(count + P::REACH, (int)a.height - top) - 1;
        return true;
    }
};

template <class P> struct SparseBarriers {
    unsigned full, empty, made, taken, written, taps;
    DEVICE explicit SparseBarriers(unsigned memory) {
        full = memory + P::BARRIERS_AT, empty = full + 8 * P::STAGES;
        made = empty + 8 * P::STAGES, taken = made + 8 * P::OUTS, written = taken + 8 * P::OUTS, taps = written + 8;
    }
    DEVICE void init() const {
        for (int i = 0; i < P::STAGES; ++i)
            barrier_init(full + i * 8, 1), barrier_init(empty + i * 8, P::CONSUMERS / 32);
        for (int i = 0; i < P::OUTS; ++i) barrier_init(made + i * 8, P::CONSUMERS / 32), barrier_init(taken + i * 8, 1);
        barrier_init(written, 1), barrier_init(taps, 1);
        publish_barriers();
    }
};

// A thread brings the taps of a block's channels.
template <class P> DEVICE void bring_taps(const SparseRows &a, int channel0, unsigned memory) {
    const SparseBarriers<P> barriers(memory);
    const unsigned bytes = min(P::CHANNELS, (int)a.c - channel0) * (P::TAPS * 2);
    barrier_expect(barriers.taps, bytes);
    copy_bytes(memory + P::TAPS_AT, static_cast<const typename P::T *>(a.w) + (long long)channel0 * P::TAPS, bytes,
               barriers.taps);
}
// A thread brings stages of x, zeros where rows are not in it; another one takes rows of y away.
template <class P> DEVICE void bring_rows(SparseRuns<P> runs, bool more, unsigned memory) {
    const SparseBarriers<P> barriers(memory);
    unsigned stage = 0, phase = 1;
    for (; more; more = runs.next())
        for (int i = runs.first; i <= runs.last; i += P::ROWS) {
            barrier_wait(barriers.empty + stage * 8, phase);
            barrier_expect(barriers.full + stage * 8, P::ROWS * P::BYTES_X);
#pragma unroll
            for (int row = 0; row < P::ROWS; ++row)
                copy_box(memory + (stage * P::ROWS + row) * P::ROW_X, runs.a.map_x, barriers.full + stage * 8,
                         runs.channel0, runs.left, runs.top + i + row, runs.n);
            if (++stage == P::STAGES) stage = 0, phase ^= 1;
        }
}
template <class P> DEVICE void take_rows(SparseRuns<P> runs, bool more, unsigned memory) {
    const SparseBarriers<P> barriers(memory);
    unsigned out = 0, before = P::OUTS, phase = 0;
    for (; more; more = runs.next())
        for (int o = 0; o < runs.count; o += P::ROWS) {
            barrier_wait(barriers.made + out * 8, phase);
            for (int row = 0; row < P::ROWS && o + row < runs.count; ++row)
                store_box(runs.a.map_y, memory + P::OUT_AT + (out * P::ROWS + row) * P::ROW_Y, runs.channel0, runs.q0,
                          runs.p0 + o + row, runs.n);
            commit_stores();
            // The rows before have left shared memory.
            wait_for_stores<1>();
            if (before < P::OUTS) barrier_arrive(barriers.taken + before * 8);
            before = out;
            if (++out == P::OUTS) out = 0, phase ^= 1;
        }
    wait_for_all_stores();
    barrier_arrive(barriers.written);
}

// What a warp has: all taps of its channels as bands, where its lanes' words lie, sums of rows of y under way.
template <class P> struct SparseRowsWarp {
    using T = typename P::T;
    using Words = Piece<2 * P::EACH>;
    const int lane = threadIdx.x % 32;
    int channel, share;
    unsigned bands[P::PAIRS][P::R][4];
    // Of a tile's place words of columns t and t + 4; eight columns further lie a pattern of pieces further.
    unsigned from[P::TILES][2];
    // Of a lane's two places words of y, and whether they are there.
    unsigned to[P::TILES][2];
    bool real[P::TILES][2];
    float sums[P::LIVE][P::TILES][P::PAIRS][4];
    // Of the row of x that is multiplied next.
    unsigned columns[P::TILES][P::PAIRS][4];
    float bias[P::EACH] = {};
    // Selectors of a word's bytes, of zeros, that the compiler does not know: else it puts operands together anew for
    // each product.
    unsigned as_they_are, zeros;
    // Stays zero while all outputs are finite.
    unsigned check = 0;

    // A place's images follow each other.
    DEVICE static int image_of(int place) { return place % P::IMAGES; }
    DEVICE static int unit_of(int place) { return place / P::IMAGES; }
    DEVICE int tile_place(int tile, int i) const { return (share * P::TILES + tile) * 8 + i; }

    // `channels`: of the block, that there are.
    DEVICE SparseRowsWarp(int warp, const unsigned short *taps, int channels)
        : channel(warp % P::ACROSS * P::EACH), share(warp / P::ACROSS) {
        const int output = lane / 4, t = lane % 4, first = t * 2 - output;
        const bool low = first > -2, there = output < P::WIDTH && channel < channels;
        // A row of the filter, so many columns behind this lane's output.
        const auto tap = [&](int c, int r, int distance) -> unsigned {
            const int s = distance / P::DW;
            const bool real = there && distance >= 0 && s * P::DW == distance && s < P::S;
            return real ? taps[(channel + c) * P::TAPS + (P::FILTER_TAPS ? place_in_filter<P>(r, s) : r * P::S + s)]
                        : 0;
        };
        const auto both = [&](int c, int r, int distance) {
            return tap(c, r, distance) | tap(c, r, distance + 1) << 16;
        };
#pragma unroll
        for (int pair = 0; pair < P::PAIRS; ++pair)
#pragma unroll
            for (int r = 0; r < P::R; ++r)
#pragma unroll
                for (int second = 0; second < 2; ++second) {
                    unsigned (&band)[4] = bands[pair][r];
                    if constexpr (P::ONE_HALF) {
                        const unsigned found = both(2 * pair + second, r, low ? first : first + 8);
                        band[second] = low ? found : 0, band[2 + second] = low ? 0 : found;
                    } else {
                        band[second] = both(2 * pair + second, r, first);
                        band[2 + second] = both(2 * pair + second, r, first + 8);
                    }
                }
#pragma unroll
        for (int tile = 0; tile < P::TILES; ++tile) {
            const int place = min(tile_place(tile, lane / 4), P::PLACES - 1);
            const int pixel = image_of(place) * P::COLUMNS_X + unit_of(place) * P::WIDTH + t;
#pragma unroll
            for (int i = 0; i < 2; ++i) from[tile][i] = swizzled<P::PIXEL>(pixel + 4 * i, channel * 2);
#pragma unroll
            for (int e = 0; e < 2; ++e) {
                const int own = tile_place(tile, t * 2 + e);
                real[tile][e] = output < P::WIDTH && own < P::PLACES;
                to[tile][e] = P::OUT_AT + swizzled<P::PIXEL>(
                                              image_of(own) * P::STRIP + unit_of(own) * P::WIDTH + output, channel * 2);
            }
        }
    }
    // Another run: nothing is under way.
    DEVICE void begin() {
#pragma unroll
        for (int l = 0; l < P::LIVE; ++l)
#pragma unroll
            for (int tile = 0; tile < P::TILES; ++tile)
#pragma unroll
                for (int pair = 0; pair < P::PAIRS; ++pair)
#pragma unroll
                    for (int e = 0; e < 4; ++e) sums[l][tile][pair][e] = 0.0f, columns[tile][pair][e] = 0;
    }
    DEVICE float with_bias(float sum, int c) const {
        if constexpr (P::BIAS) return sum + bias[c];
        else return sum;
    }
    // Sums of a row of outputs as words of y to a row of shared memory: those of a tile's places `e`.
    template <int SLOT> DEVICE void keep(unsigned row, int tile, int e) {
        Words words;
#pragma unroll
        for (int pair = 0; pair < P::PAIRS; ++pair) {
            const float (&of)[4] = sums[SLOT][tile][pair];
            words.v[pair] = activated<T, P::ACTIVATION>(with_bias(of[e], 2 * pair), with_bias(of[2 + e], 2 * pair + 1));
            check = add_zeros<T>(words.v[pair], check);
        }
        if (real[tile][e]) store_shared<2 * P::EACH>(row + to[tile][e], words);
    }
    // The row that waits with a filter's rows; `ROW`: the place of its newest outputs. Between products the row of y
    // that was whole before, of place KEPT, goes to shared memory.
    template <int ROW, int KEPT> DEVICE void multiply(unsigned row) {
#pragma unroll
        for (int r = P::R - 1; r >= 0; --r) {
            constexpr int PIECES = 2 * P::TILES;
            const int slot = P::slot(ROW - r * P::DH);
#pragma unroll
            for (int tile = 0; tile < P::TILES; ++tile)
#pragma unroll
                for (int pair = 0; pair < P::PAIRS; ++pair)
                    mma_two_channels<T>(sums[slot][tile][pair], bands[pair][r], columns[tile][pair]);
#pragma unroll
            for (int piece = 0; piece < PIECES; ++piece)
                if (piece % P::R == P::R - 1 - r) keep<KEPT>(row, piece / 2, piece % 2);
        }
#pragma unroll
        for (int tile = 0; tile < P::TILES; ++tile)
#pragma unroll
            for (int pair = 0; pair < P::PAIRS; ++pair)
#pragma unroll
                for (int e = 0; e < 4; ++e) sums[KEPT][tile][pair][e] = 0.0f;
    }
    // A lane's outputs again, by the definition: where products with the zeros beside the taps may have made NaN.
    DEVICE void again(const SparseRows &a) const {
#pragma unroll 1
        for (SparseRuns<P> row(a); row.next(1);)
#pragma unroll 1
            for (int i = 0; i < 2 * P::TILES * P::EACH; ++i) {
                const int place = tile_place(i / P::EACH / 2, lane % 4 * 2 + i / P::EACH % 2), output = lane / 4,
                          n = row.n + image_of(place), q = row.q0 + unit_of(place) * P::WIDTH + output,
                          c = row.channel0 + channel + i % P::EACH;
                if (place < P::PLACES && output < P::WIDTH && n < (int)a.n && q < (int)a.q && c < (int)a.c)
                    by_definition<P>(a, n, c, row.p0, q);
            }
    }
};

// A row of x, `U` of as many as there are rows of y: it is loaded while the one before is multiplied, and what is whole
// since then is kept. Behind the last one zeros are multiplied; what is kept before an output is whole does not count.
// A stage's first row waits for it, its last one gives it back.
template <class P, int U> struct SparseTurn {
    DEVICE static void turn(SparseRowsWarp<P> &own, const SparseRuns<P> &run, unsigned memory, int begin,
                            unsigned &stage, unsigned &phase, unsigned &out, unsigned &out_phase) {
        constexpr int ROW = U % P::ROWS;
        constexpr bool LAST = ROW == P::ROWS - 1;
        const SparseBarriers<P> barriers(memory);
        const int i = begin + U - ROW;
        if (ROW == 0 && i >= run.count + P::LIVE) return;
        const bool there = i >= run.first && i <= run.last, made = i >= P::LIVE;
        if (ROW == 0 && there) barrier_wait(barriers.full + stage * 8, phase);
        typename SparseRowsWarp<P>::Words next[P::TILES][4];
        const unsigned from = memory + (stage * P::ROWS + ROW) * P::ROW_X,
                       to = memory + (out * P::ROWS + ROW) * P::ROW_Y;
#pragma unroll
        for (int tile = 0; tile < P::TILES; ++tile)
#pragma unroll
            for (int k = 0; k < 4; ++k)
                next[tile][k] = load_shared<2 * P::EACH>(from + own.from[tile][k % 2] + k / 2 * 8 * P::PIXEL);
        // What does not count is kept, too: of the run before, rows may still lie there.
        if (ROW == 0) barrier_wait(barriers.taken + out * 8, out_phase);
        own.template multiply<P::slot(U - 1), P::slot(U - 2 - P::REACH)>(to);
        const unsigned selector = there ? own.as_they_are : own.zeros;
#pragma unroll
        for (int tile = 0; tile < P::TILES; ++tile)
#pragma unroll
            for (int k = 0; k < 4; ++k)
#pragma unroll
                for (int pair = 0; pair < P::PAIRS; ++pair)
                    own.columns[tile][pair][k] = __byte_perm(next[tile][k].v[pair], 0, selector);
        if (LAST && made) publish_shared();
        __syncwarp();
        if (LAST && there) {
            if (own.lane == 0) barrier_arrive(barriers.empty + stage * 8);
            if (++stage == P::STAGES) stage = 0, phase ^= 1;
        }
        if (LAST && made) {
            if (own.lane == 0) barrier_arrive(barriers.made + out * 8);
            if (++out == P::OUTS) out = 0, out_phase ^= 1;
        }
        if constexpr (U + 1 < P::LIVE)
            SparseTurn<P, U + 1>::turn(own, run, memory, begin, stage, phase, out, out_phase);
    }
};

template <class Traits> DEVICE void depthwise_sparse(const SparseRows &a) {
    using P = SparseRowsTile<Traits>;
    using T = typename P::T;
    extern __shared__ __align__(1024) unsigned char memory[];
    const unsigned base = shared_address(memory);
    const int tid = threadIdx.x, warp = __shfl_sync(~0u, tid / 32, 0);
    if (tid == P::CONSUMERS) {
        SparseBarriers<P>(base).init();
        if (a.weights_ready) bring_taps<P>(a, SparseRuns<P>(a).channel0, base);
        prefetch_map(a.map_x), prefetch_map(a.map_y);
    }
    // Zeros behind rows of x.
    if constexpr (P::ZEROS > 0)
        for (int i = tid; i < P::STAGES * P::ROWS * P::ZEROS / 16; i += P::THREADS) {
            constexpr int PIECES = P::ZEROS / 16;
            store_shared<16>(base + i / PIECES * P::ROW_X + P::BYTES_X + i % PIECES * 16, {});
        }
    __syncthreads();
    let_next_begin();
    if (tid >= P::CONSUMERS) {
        if constexpr (P::TAKES > 0) release_registers<P::LEAVES>();
        SparseRuns<P> runs(a);
        const bool more = runs.next();
        work_out(more, runs.n, runs.p0, runs.q0, runs.count, runs.top, runs.left, runs.first, runs.last, runs.line,
                 runs.row, runs.left_over);
        wait_for_previous();
        if (tid == P::CONSUMERS) {
            if (!a.weights_ready) bring_taps<P>(a, runs.channel0, base);
            bring_rows<P>(runs, more, base);
        }
        if (tid == P::CONSUMERS + 32) take_rows<P>(runs, more, base);
        return;
    }
    if constexpr (P::TAKES > 0) take_registers<P::TAKES>();
    SparseRuns<P> runs(a);
    bool more = runs.next();
    work_out(more, runs.count, runs.first, runs.last, runs.line, runs.row, runs.left_over);
    barrier_wait(SparseBarriers<P>(base).taps, 0);
    SparseRowsWarp<P> own(warp, reinterpret_cast<const unsigned short *>(memory + P::TAPS_AT),
                          (int)a.c - runs.channel0);
    // A bias, and what is computed again, the launch before may have made.
    wait_for_previous();
    if constexpr (P::BIAS)
#pragma unroll
        for (int c = 0; c < P::EACH; ++c)
            if (runs.channel0 + own.channel + c < (int)a.c)
                own.bias[c] = Element<T>::to_float(static_cast<const T *>(a.bias)[runs.channel0 + own.channel + c]);
    own.as_they_are = 0x3210 + (unsigned)(a.n >> 40), own.zeros = 0x4444 + (unsigned)(a.n >> 40);
    unsigned stage = 0, phase = 0, out = 0, out_phase = 1;
    // An output is whole with its last row, be that in x or not.
    for (; more; more = runs.next()) {
        own.begin();
#pragma unroll 1
        for (int begin = min(runs.first, P::REACH / P::ROWS * P::ROWS); begin < runs.count + P::LIVE; begin += P::LIVE)
            SparseTurn<P, 0>::turn(own, runs, base, begin, stage, phase, out, out_phase);
    }
    if (__all_sync(~0u, own.check == 0)) return;
    barrier_wait(SparseBarriers<P>(base).written, 0);
    if (own.check != 0) own.again(a);
}
