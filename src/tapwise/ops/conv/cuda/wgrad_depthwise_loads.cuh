// How rows of x and dy come to the shared memory of wgrad_depthwise.cu, a stage at a time, some stages ahead. Three
// ways:
//
//   COPIES  every pixel's channels, or a row of a plane, by cp.async, any dilation
//   TMA     boxes of rows, columns and channels by TMA, zeros outside the image: no thread works out a place
//   ROWS    a block has all channels: a row of pixels is one copy, from the 16 bytes on in which it begins, by a warp
//           that does nothing else. What is beside the image does not come.
#pragma once

#include "ops/conv/cuda/depthwise/columns.cuh"
#if __CUDA_ARCH__ >= 900
#include "tma.cuh"
#endif

enum By { COPIES, TMA, ROWS };

struct DepthwiseWgrad {
    // Tensor maps of x and dy.
    alignas(64) unsigned long long map_x[16], map_dy[16];
    // w is dy; sums: the parts, or dw.
    const void *x, *w;
    void *sums;
    long long n, c, height, width, k, r, s, p, q;
    long long stride_h, stride_w, dilation_h, dilation_w, pad_h, pad_w, phases_h, phases_w;
    // Filters of a channel; parts of the sum; pieces of a filter; blocks of channels.
    long long multiplier, parts, pieces_h, pieces_w, channel_blocks;
    // Rows of a class, of all classes, strips and images.
    long long class_rows, all_rows;
    // Whether what comes next is placed early: grid.cuh.
    long long early;
};

// Of ROWS: with what lies in front and behind in pieces of 16 bytes.
constexpr int row_bytes(int columns, int most, int pixel) {
    return ((columns < most ? columns : most) * pixel + 29) / 16 * 16;
}

// T; LAST: channels last; R, S: taps of a piece; SH, SW: strides in a class; V channels (of dy) and TX columns a
// thread; LANES of channels and GROUPS of columns a block; C_X channels of x that a block reads, SAME as those of dy;
// STAGES; BY, COPY_X, COPY_DY: bytes of a copy; PAD_X, PAD_DY: bytes behind a channel that is not LAST; MOST_X,
// MOST_DY: columns that a row has at most; WHOLE: all strips have all their columns; SPLIT: writes parts.
template <class Traits> struct WgradTile : Traits {
    using B = Traits;
    using T = typename B::T;
    using A = typename Arithmetic<T>::type;
    static constexpr int LIVE = (B::R + B::SH - 1) / B::SH, PERIOD = LIVE * B::SH;
    static constexpr int USED = B::LANES * B::GROUPS, CONSUMERS = (USED + 31) / 32 * 32,
                         THREADS = CONSUMERS + 32 * (B::BY == ROWS), C = B::LANES * B::V;
    // Columns of x of a thread and of a block, columns of dy of a block.
    static constexpr int WINDOW = (B::TX - 1) * B::SW + B::S, DY_COLUMNS = B::GROUPS * B::TX,
                         COLUMNS = (DY_COLUMNS - 1) * B::SW + B::S;
    // Channels-last lines are a pixel's channels; others a row of columns, from the piece on in which it begins.
    static constexpr int E_X = B::COPY_X / sizeof(T), E_DY = B::COPY_DY / sizeof(T);
    static constexpr int LINE_X = B::LAST ? B::C_X : (COLUMNS + 2 * E_X - 2) / E_X * E_X,
                         LINE_DY = B::LAST ? C : (DY_COLUMNS + 2 * E_DY - 2) / E_DY * E_DY;
    // Bytes from one to the next: of channels (rows of their own if not LAST), rows, columns.
    static constexpr int SIZE = sizeof(T), COLUMN_X = B::LAST ? LINE_X * SIZE : SIZE,
                         COLUMN_DY = B::LAST ? LINE_DY * SIZE : SIZE;
    static constexpr int ROW_X = B::BY == ROWS ? row_bytes(COLUMNS, B::MOST_X, COLUMN_X)
                                               : LINE_X * SIZE * (B::LAST ? COLUMNS : 1),
                         ROW_DY = B::BY == ROWS ? row_bytes(DY_COLUMNS, B::MOST_DY, COLUMN_DY)
                                                : LINE_DY * SIZE * (B::LAST ? DY_COLUMNS : 1);
    static constexpr int CHANNEL_X = B::LAST ? SIZE : PERIOD * ROW_X + B::PAD_X,
                         CHANNEL_DY = B::LAST ? SIZE : LIVE * ROW_DY + B::PAD_DY;
    // A stage: x, then dy.
    static constexpr int ALIGNED = B::BY == TMA ? 128 : 16;
    static constexpr int BOX_X = B::LAST ? PERIOD * ROW_X : CHANNEL_X * B::C_X,
                         BOX_DY = B::LAST ? LIVE * ROW_DY : CHANNEL_DY * C;
    static constexpr int DY_AT = (BOX_X + ALIGNED - 1) / ALIGNED * ALIGNED,
                         STAGE = DY_AT + (BOX_DY + ALIGNED - 1) / ALIGNED * ALIGNED;
    static_assert((B::BY == ROWS || (LINE_X % E_X == 0 && LINE_DY % E_DY == 0)) && (B::SAME || B::V == 1) &&
                  (B::LAST || B::V == 1));
};

// Rows of dy that a block goes down: `count` of them, `phases_h` apart, of GROUPS * TX columns; and where their windows
// begin in x. The rows of a strip's images follow one another.
template <class P> struct Runs {
    const DepthwiseWgrad &a;
    unsigned at, end;
    int tap_h, tap_w, n, row, q0, top, left, count, rows;

    DEVICE Runs(const DepthwiseWgrad &a, int part, int tap_h, int tap_w)
        : a(a), at(a.all_rows * part / a.parts), end(a.all_rows * (part + 1) / a.parts), tap_h(tap_h), tap_w(tap_w) {}
    // False where there is no more.
    DEVICE bool next() {
        while (at < end) {
            unsigned line = at / (unsigned)a.class_rows;
            const int first = at - line * (unsigned)a.class_rows,
                      most = min((int)a.class_rows - first, (int)(end - at));
            at += most;
            n = line % (unsigned)a.n, line /= (unsigned)a.n;
            const int residue = line % (unsigned)a.phases_h, along = line / (unsigned)a.phases_h;
            count = min(most, ((int)a.p - residue + (int)a.phases_h - 1) / (int)a.phases_h - first);
            if (count <= 0) continue;
            const int step = a.phases_w;
            q0 = along % step + along / step * (P::DY_COLUMNS * step), row = residue + (int)a.phases_h * first;
            top = row * (int)a.stride_h - (int)a.pad_h + tap_h * (int)a.dilation_h;
            left = q0 * (int)a.stride_w - (int)a.pad_w + tap_w * (int)a.dilation_w;
            rows = (count - 1) * P::SH + P::R;
            return true;
        }
        return false;
    }
};

// The first one, in front of a wait: whether there is any.
template <class P> DEVICE bool first_run(Runs<P> &runs) {
    const bool more = runs.next();
    work_out(more, runs.at, runs.end, runs.n, runs.row, runs.q0, runs.top, runs.left, runs.count, runs.rows);
    return more;
}

// A dense array: its sizes, and elements from one to the next.
struct Planes {
    int channels, height, width, image, channel, row, column;

    Planes() = default;
    DEVICE Planes(int channels, int height, int width, bool last)
        : channels(channels), height(height), width(width), image(channels * height * width),
          channel(last ? 1 : height * width), row(last ? width * channels : width), column(last ? channels : 1) {}
};

// Copies of a stage: ROWS of COLUMNS of CHANNELS, in lines of PIECES of COPY bytes each. A thread has a piece, of every
// DOWN-th line.
template <typename T, bool LAST, int ROWS, int COLUMNS, int LINE, int CHANNELS, int COPY, int PAD, int THREADS>
struct Copies {
    static constexpr int E = COPY / sizeof(T), PIECES = LINE / E, LINES = ROWS * (LAST ? COLUMNS : CHANNELS);
    static constexpr int ACROSS = PIECES < THREADS ? PIECES : THREADS, DOWN = THREADS / ACROSS;
    static constexpr int TURNS = (LINES + DOWN - 1) / DOWN, TOGETHER = TURNS < 4 ? TURNS : 4;
    const T *image;
    Planes planes;
    int top, left, channel, apart_h, apart_w, bottom;

    // Of image n from a row, column and channel on; rows and columns `apart_h` and `apart_w` from one to the next.
    DEVICE void begin(const void *all, const Planes &sizes, int n, int top_, int bottom_, int left_, int channel_,
                      int apart_h_, int apart_w_) {
        image = static_cast<const T *>(all) + (long long)n * sizes.image;
        planes = sizes, top = top_, left = left_, channel = channel_, apart_h = apart_h_, apart_w = apart_w_;
        // A run may lie above the image.
        bottom = max(0, min(planes.height, bottom_));
    }
    static DEVICE int place(int line, int piece) {
        return (line * PIECES + piece) * COPY + (LAST ? 0 : line / ROWS * PAD);
    }
    // Rows from `first` on.
    DEVICE void copy(int first, unsigned to) const {
        const int thread = threadIdx.x, begin = thread < ACROSS * DOWN ? thread / ACROSS : LINES;
#pragma unroll 1
        for (int piece = thread % ACROSS; piece < PIECES; piece += ACROSS)
#pragma unroll 1
            for (int line0 = begin; line0 < LINES; line0 += TOGETHER * DOWN) {
                Piece<COPY> pieces[TOGETHER];
#pragma unroll
                for (int i = 0; i < TOGETHER; ++i) {
                    const int line = line0 + i * DOWN;
                    const int row = top + (first + (LAST ? line / COLUMNS : line % ROWS)) * apart_h,
                              column = left + (LAST ? line % COLUMNS : piece * E) * apart_w,
                              mine = channel + (LAST ? piece * E : line / ROWS);
                    const bool real = line < LINES && (unsigned)row < (unsigned)bottom &&
                                      (unsigned)column < (unsigned)planes.width && mine < planes.channels;
                    const T *const from = image + (row * planes.row + column * planes.column + mine * planes.channel);
                    if constexpr (COPY >= 4) {
                        if (line < LINES) cp_async<COPY>(to + place(line, piece), from, real);
                    } else {
                        pieces[i] = {};
                        if (real) pieces[i] = load_global<COPY>(from);
                    }
                }
                if constexpr (COPY < 4)
#pragma unroll
                    for (int i = 0; i < TOGETHER; ++i)
                        if (line0 + i * DOWN < LINES)
                            store_shared<COPY>(to + place(line0 + i * DOWN, piece), pieces[i]);
            }
    }
};

// Stages of rows on their way, those of a run after those of the run before it.
template <class P, int BY> struct WgradLoads {
    using T = typename P::T;
    const DepthwiseWgrad &a;
    Runs<P> runs;
    const unsigned stages;
    const int k;
    Copies<T, P::LAST, P::PERIOD, P::COLUMNS, P::LINE_X, P::C_X, P::COPY_X, P::PAD_X, P::THREADS> x;
    Copies<T, P::LAST, P::LIVE, P::DY_COLUMNS, P::LINE_DY, P::C, P::COPY_DY, P::PAD_DY, P::THREADS> dy;
    int base = 0, stage = 0;
    bool more;

    DEVICE WgradLoads(const DepthwiseWgrad &a, const Runs<P> &runs, unsigned stages, int k)
        : a(a), runs(runs), stages(stages), k(k), more(first_run(this->runs)) {}
    DEVICE void begin_run() {
        base = 0;
        if (!more) return;
        const int step_h = a.phases_h, step_w = a.phases_w;
        x.begin(a.x, {(int)a.c, (int)a.height, (int)a.width, P::LAST}, runs.n, runs.top,
                runs.top + runs.rows * (int)a.dilation_h, P::LAST ? runs.left : runs.left & -P::E_X,
                P::SAME ? k : k / (int)a.multiplier, a.dilation_h, a.dilation_w);
        dy.begin(a.w, {(int)a.k, (int)a.p, (int)a.q, P::LAST}, runs.n, runs.row, runs.row + runs.count * step_h,
                 P::LAST ? runs.q0 : runs.q0 & -P::E_DY, k, step_h, step_w);
    }
    DEVICE void copy(int to) {
        if (more) {
            x.copy(base, stages + to * P::STAGE);
            dy.copy(base / P::SH, stages + to * P::STAGE + P::DY_AT);
            base += P::PERIOD;
            if (base >= runs.rows) more = runs.next(), begin_run();
        }
        cp_async_commit();
    }
    DEVICE void begin() {
        begin_run();
#pragma unroll
        for (int i = 0; i < P::STAGES - 1; ++i) copy(i);
    }
    // The next stage is there, at the returned offset; another one is on its way.
    DEVICE int next() {
        cp_async_wait<P::STAGES - 2>();
        __syncthreads();
        copy(stage == 0 ? P::STAGES - 1 : stage - 1);
        const int here = stage * P::STAGE;
        stage = stage == P::STAGES - 1 ? 0 : stage + 1;
        return here;
    }
    DEVICE void done() {}
    // Bytes from where a row of x or dy of a stage lies to its run's first column.
    DEVICE int lead_x(const Runs<P> &run, int) const { return P::LAST ? 0 : (run.left & (P::E_X - 1)) * P::SIZE; }
    DEVICE int lead_dy(const Runs<P> &run, int) const { return P::LAST ? 0 : (run.q0 & (P::E_DY - 1)) * P::SIZE; }
};

#if __CUDA_ARCH__ >= 900
// Barriers: stages that are full, and stages that all warps have read, which the first thread waits for.
template <class P> struct WgradLoads<P, TMA> {
    const DepthwiseWgrad &a;
    Runs<P> runs;
    const unsigned stages, full, empty;
    const int k, k_x;
    int base = 0, stage = 0;
    unsigned phase = 0;
    bool more, first = true;

    DEVICE WgradLoads(const DepthwiseWgrad &a, const Runs<P> &runs, unsigned stages, int k)
        : a(a), runs(runs), stages(stages), full(stages + P::STAGES * P::STAGE), empty(full + P::STAGES * 8), k(k),
          k_x(P::SAME ? k : k / (int)a.multiplier) {
        if (threadIdx.x) return;
        prefetch_map(a.map_x), prefetch_map(a.map_dy);
        for (int i = 0; i < P::STAGES; ++i) barrier_init(full + i * 8, 1), barrier_init(empty + i * 8, P::THREADS / 32);
        publish_barriers();
        more = first_run(this->runs);
    }
    DEVICE void copy(int to) {
        const unsigned there = stages + to * P::STAGE, barrier = full + to * 8;
        barrier_expect(barrier, P::BOX_X + P::BOX_DY);
        copy_box(there, a.map_x, barrier, k_x, runs.left, runs.top + base, runs.n);
        copy_box(there + P::DY_AT, a.map_dy, barrier, k, runs.q0, runs.row + base / P::SH, runs.n);
        base += P::PERIOD;
        if (base >= runs.rows) base = 0, more = runs.next();
    }
    DEVICE void begin() {
        if (threadIdx.x == 0) {
            for (int i = 0; i < P::STAGES && more; ++i) copy(i);
        }
        __syncthreads();
    }
    DEVICE int next() {
        const int before = stage == 0 ? P::STAGES - 1 : stage - 1;
        if (threadIdx.x == 0 && !first && more) {
            barrier_wait(empty + before * 8, stage == 0 ? phase ^ 1 : phase);
            copy(before);
        }
        first = false;
        barrier_wait(full + stage * 8, phase);
        return stage * P::STAGE;
    }
    DEVICE void done() {
        __syncwarp();
        if (threadIdx.x % 32 == 0) barrier_arrive(empty + stage * 8);
        if (++stage == P::STAGES) stage = 0, phase ^= 1;
    }
    DEVICE int lead_x(const Runs<P> &, int) const { return 0; }
    DEVICE int lead_dy(const Runs<P> &, int) const { return 0; }
};

// The same barriers; a warp copies, a lane a row of a stage, of x or dy.
template <class P> struct WgradLoads<P, ROWS> {
    static_assert(P::PERIOD + P::LIVE <= 32);
    const DepthwiseWgrad &a;
    Runs<P> runs;
    using T = typename P::T;
    const unsigned stages, full, empty;
    int stage = 0;
    unsigned phase = 0;
    bool more;

    DEVICE WgradLoads(const DepthwiseWgrad &a, const Runs<P> &runs, unsigned stages, int)
        : a(a), runs(runs), stages(stages), full(stages + P::STAGES * P::STAGE), empty(full + P::STAGES * 8),
          more(first_run(this->runs)) {
        if (threadIdx.x) return;
        for (int i = 0; i < P::STAGES; ++i)
            barrier_init(full + i * 8, 32), barrier_init(empty + i * 8, P::CONSUMERS / 32);
        publish_barriers();
    }
    // A row's columns, those that there are of `columns` from `left` on, to `to`; what it asks for counts for the
    // barrier. All that there is may end within 16 bytes: elements behind come one by one.
    static DEVICE void copy_row(unsigned to, const void *all, long long rows, long long row, int width, int left,
                                int columns, bool real, unsigned barrier) {
        constexpr int PIXEL = P::COLUMN_X, E = sizeof(T);
        const int begin = max(0, left), wide = min(left + columns, width) - begin;
        if (!real || wide <= 0) return barrier_arrive(barrier);
        const long long first = (row * width + begin) * PIXEL, end = first + wide * PIXEL, from = first & -16,
                        last = min((end + 15) & -16, rows * width * PIXEL & -16);
        const char *const bytes = static_cast<const char *>(all);
        for (long long at = max(first, last); at < end; at += E)
            store_shared<E>(to + (unsigned)(at - from), load_global<E>(bytes + at));
        const unsigned count = max(0ll, last - from);
        barrier_expect(barrier, count);
        if (count) copy_bytes(to, bytes + from, count, barrier);
    }
    DEVICE void copy_all() {
        const int lane = threadIdx.x % 32, of_dy = lane - P::PERIOD;
        phase = 1;
        for (; more; more = runs.next())
            for (int base = 0; base < runs.rows; base += P::PERIOD) {
                const unsigned there = stages + stage * P::STAGE, barrier = full + stage * 8;
                barrier_wait(empty + stage * 8, phase);
                if (of_dy < 0) {
                    const int row = runs.top + base + lane;
                    copy_row(there + lane * P::ROW_X, a.x, a.n * a.height, runs.n * a.height + row, a.width, runs.left,
                             P::COLUMNS, base + lane < runs.rows && (unsigned)row < (unsigned)a.height, barrier);
                } else {
                    const int row = base / P::SH + of_dy;
                    copy_row(there + P::DY_AT + of_dy * P::ROW_DY, a.w, a.n * a.p, runs.n * a.p + runs.row + row, a.q,
                             runs.q0, P::DY_COLUMNS, of_dy < P::LIVE && row < runs.count, barrier);
                }
                next_stage();
            }
    }
    DEVICE void next_stage() {
        if (++stage == P::STAGES) stage = 0, phase ^= 1;
    }
    DEVICE void begin() {
        __syncthreads();
        if (threadIdx.x >= P::CONSUMERS) copy_all();
    }
    DEVICE int next() const {
        barrier_wait(full + stage * 8, phase);
        return stage * P::STAGE;
    }
    DEVICE void done() {
        __syncwarp();
        if (threadIdx.x % 32 == 0) barrier_arrive(empty + stage * 8);
        next_stage();
    }
    DEVICE int lead_x(const Runs<P> &run, int row) const {
        const int begin = max(0, run.left);
        const unsigned first =
            ((unsigned)(run.n * (int)a.height + run.top + row) * (unsigned)a.width + begin) * P::COLUMN_X;
        return (int)(first % 16) - (begin - run.left) * P::COLUMN_X;
    }
    DEVICE int lead_dy(const Runs<P> &run, int row) const {
        return ((unsigned)(run.n * (int)a.p + run.row + row) * (unsigned)a.q + run.q0) * P::COLUMN_DY % 16;
    }
};
#endif
