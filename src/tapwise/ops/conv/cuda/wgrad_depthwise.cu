// Weight gradient of depthwise convolution: x and dy are read once for all taps of a piece of the filter.
//
// A thread has the sums of R x S taps of V channels in registers and goes down the rows of TX columns of dy. What it
// sees of a row of x is loaded once and multiplied by the LIVE rows of dy that meet it, which stay in registers: row o
// of dy meets row o * SH + r of x with tap r. Rows come through shared memory some stages ahead; a stage is as many
// rows of x as until the same registers hold another row of dy. A block goes through a run of rows of all images, one
// behind the other, so there are few parts: its threads' sums are added in a fixed order, then the parts by a second
// launch.
//
// Columns and rows are those of a residue class (columns.cu): dilation costs nothing, strides are small numbers.
#include "ops/conv/cuda/depthwise/columns.cuh"
#if __CUDA_ARCH__ >= 900
#include "tma.cuh"
#endif

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
};

// T; LAST: channels last; R, S: taps of a piece; SH, SW: strides in a class; V channels (of dy) and TX columns a
// thread; LANES of channels and GROUPS of columns a block; C_X channels of x that a block reads, SAME as those of dy;
// STAGES; BY_TMA, COPY_X, COPY_DY: bytes of a copy; PAD_X, PAD_DY: bytes behind a channel that is not LAST; WHOLE: all
// strips have all their columns; SPLIT: writes parts.
template <class Traits> struct WgradTile : Traits {
    using B = Traits;
    using T = typename B::T;
    using A = typename Arithmetic<T>::type;
    static constexpr int LIVE = (B::R + B::SH - 1) / B::SH, PERIOD = LIVE * B::SH;
    static constexpr int USED = B::LANES * B::GROUPS, THREADS = (USED + 31) / 32 * 32, C = B::LANES * B::V;
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
    static constexpr int ROW_X = LINE_X * SIZE * (B::LAST ? COLUMNS : 1),
                         ROW_DY = LINE_DY * SIZE * (B::LAST ? DY_COLUMNS : 1);
    static constexpr int CHANNEL_X = B::LAST ? SIZE : PERIOD * ROW_X + B::PAD_X,
                         CHANNEL_DY = B::LAST ? SIZE : LIVE * ROW_DY + B::PAD_DY;
    // A stage: x, then dy.
    static constexpr int ALIGNED = B::BY_TMA ? 128 : 16;
    static constexpr int BOX_X = B::LAST ? PERIOD * ROW_X : CHANNEL_X * B::C_X,
                         BOX_DY = B::LAST ? LIVE * ROW_DY : CHANNEL_DY * C;
    static constexpr int DY_AT = (BOX_X + ALIGNED - 1) / ALIGNED * ALIGNED,
                         STAGE = DY_AT + (BOX_DY + ALIGNED - 1) / ALIGNED * ALIGNED;
    static_assert(LINE_X % E_X == 0 && LINE_DY % E_DY == 0 && (B::SAME || B::V == 1) && (B::LAST || B::V == 1));
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
template <class P, bool BY_TMA> struct WgradLoads {
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
        : a(a), runs(runs), stages(stages), k(k) {}
    DEVICE void find_run() {
        base = 0, more = runs.next();
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
            if (base >= runs.rows) find_run();
        }
        cp_async_commit();
    }
    DEVICE void begin() {
        find_run();
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
};

#if __CUDA_ARCH__ >= 900
// Barriers: stages that are full, and stages that all warps have read, which the first thread waits for.
template <class P> struct WgradLoads<P, true> {
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
            more = runs.next();
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
};
#endif

template <class Traits> DEVICE void wgrad_depthwise(const DepthwiseWgrad &a) {
    using P = WgradTile<Traits>;
    using T = typename P::T;
    using A = typename P::A;
    using Item = Channels<T, P::V>;
    constexpr int V = P::V, TX = P::TX, R = P::R, S = P::S, SH = P::SH, LIVE = P::LIVE, C = P::C;
    extern __shared__ __align__(1024) unsigned char memory[];
    unsigned block = blockIdx.x;
    const int s0 = block % (unsigned)a.pieces_w * S;
    block /= (unsigned)a.pieces_w;
    const int r0 = block % (unsigned)a.pieces_h * R;
    block /= (unsigned)a.pieces_h;
    const int k0 = block % (unsigned)a.channel_blocks * C, part = block / (unsigned)a.channel_blocks;
    const int tid = threadIdx.x, lane = min(P::LAST ? tid % P::LANES : tid / P::GROUPS, P::LANES - 1),
              group = min(P::LAST ? tid / P::LANES : tid % P::GROUPS, P::GROUPS - 1);
    Runs<P> runs(a, part, r0, s0);
    WgradLoads<P, P::BY_TMA> loads(a, runs, shared_address(memory), k0);
    begin_dependent();
    loads.begin();
    int lane_x = lane * V;
    if (!P::SAME) lane_x = min((k0 + lane) / (int)a.multiplier - k0 / (int)a.multiplier, P::C_X - 1);
    const unsigned char *const x = memory + lane_x * P::CHANNEL_X + group * (TX * P::SW) * P::COLUMN_X,
                               *const dy = memory + P::DY_AT + lane * V * P::CHANNEL_DY + group * TX * P::COLUMN_DY;
    A sums[R][S][V] = {}, seen[LIVE][TX][V];
    while (runs.next()) {
        const int count = runs.count, rows = runs.rows, step = a.phases_w;
        // Columns of dy that are there.
        const int columns = ((int)a.q - runs.q0 + step - 1) / step - group * TX;
        const int lead_x = P::LAST ? 0 : (runs.left & (P::E_X - 1)) * P::SIZE,
                  lead_dy = P::LAST ? 0 : (runs.q0 & (P::E_DY - 1)) * P::SIZE;
        for (int base = 0, first = 0; base < rows; base += P::PERIOD, first += LIVE) {
            const int here = loads.next();
            const unsigned char *const rows_x = x + here + lead_x, *const rows_dy = dy + here + lead_dy;
#pragma unroll
            for (int i = 0; i < P::PERIOD; ++i) {
                if (i > 0 && base + i >= rows) break;
                if (i % SH == 0)
#pragma unroll
                    for (int j = 0; j < TX; ++j)
                        load_channels(seen[i / SH][j],
                                      reinterpret_cast<const T *>(rows_dy + i / SH * P::ROW_DY + j * P::COLUMN_DY));
                if (i % SH >= R) continue;
                A now[P::WINDOW][V];
#pragma unroll
                for (int m = 0; m < P::WINDOW; ++m)
                    load_channels(now[m], reinterpret_cast<const T *>(rows_x + i * P::ROW_X + m * P::COLUMN_X));
#pragma unroll
                for (int r = i % SH; r < R; r += SH) {
                    // Row first + back of dy meets this row of x with tap r.
                    const int back = (i - r) / SH, slot = (back + LIVE) % LIVE;
                    if ((back < 0 && first == 0) || first + back >= count) continue;
#pragma unroll
                    for (int j = 0; j < TX; ++j) {
                        if (!P::WHOLE && j >= columns) break;
#pragma unroll
                        for (int s = 0; s < S; ++s)
#pragma unroll
                            for (int v = 0; v < V; ++v)
                                sums[r][s][v] = fma(seen[slot][j][v], now[j * P::SW + s][v], sums[r][s][v]);
                    }
                }
            }
            loads.done();
        }
    }
    // As many taps at a time as there is room for, of all columns.
    constexpr int TAPS = R * S, ROOM = P::STAGES * P::STAGE / (P::GROUPS * C * (int)sizeof(A)),
                  EACH = ROOM < TAPS ? ROOM : TAPS;
    static_assert(EACH > 0);
    using Sums = Channels<A, V>;
    A *const shared = reinterpret_cast<A *>(memory);
#pragma unroll
    for (int begin = 0; begin < TAPS; begin += EACH) {
        const int here = TAPS - begin < EACH ? TAPS - begin : EACH;
        __syncthreads();
        if (tid < P::USED)
#pragma unroll
            for (int tap = begin; tap < begin + here; ++tap)
                *reinterpret_cast<Sums *>(shared + ((tap - begin) * P::GROUPS + group) * C + lane * V) =
                    Sums::of(sums[tap / S][tap % S]);
        __syncthreads();
        for (int i = tid; i < here * C; i += P::THREADS) {
            const int tap = i / C, channel = i % C, r = r0 + (begin + tap) / S, s = s0 + (begin + tap) % S;
            A sum = shared[tap * P::GROUPS * C + channel];
#pragma unroll 4
            for (int g = 1; g < P::GROUPS; ++g) sum += shared[(tap * P::GROUPS + g) * C + channel];
            if (k0 + channel >= (int)a.k || r >= (int)a.r || s >= (int)a.s) continue;
            const int taps = (int)a.r * (int)a.s, at = r * (int)a.s + s;
            if constexpr (P::SPLIT)
                static_cast<A *>(a.sums)[((long long)part * taps + at) * a.k + (k0 + channel)] = sum;
            else static_cast<T *>(a.sums)[(k0 + channel) * taps + at] = downcast<T>(sum);
        }
    }
}

struct WgradParts {
    const void *parts;
    void *y;
    // Filters, taps of each, parts of their sums.
    long long k, taps, count;
};

// dw from parts (part, tap, k), in a fixed order: a warp adds every WARPS-th of them for a lane's element, and a warp
// those sums.
template <typename T, int WARPS> DEVICE void add_wgrad_parts(const WgradParts &p) {
    using A = typename Arithmetic<T>::type;
    __shared__ A sums[WARPS][32];
    const int k = p.k, taps = p.taps, count = p.count, each = k * taps;
    const int warp = threadIdx.x / 32, lane = threadIdx.x % 32, i = blockIdx.x * 32 + lane;
    wait_for_previous();
    let_next_begin();
    A sum = 0;
    if (i < each)
#pragma unroll 8
        for (int part = warp; part < count; part += WARPS)
            sum += static_cast<const A *>(p.parts)[(long long)part * each + i];
    sums[warp][lane] = sum;
    __syncthreads();
    if (warp > 0 || i >= each) return;
#pragma unroll
    for (int other = 1; other < WARPS; ++other) sum += sums[other][lane];
    static_cast<T *>(p.y)[i % k * taps + i / k] = downcast<T>(sum);
}
