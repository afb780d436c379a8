// How rows of x come to the shared memory of depthwise/streamed.cu and implicit_gemm_rows.cu, a stage at a time, some
// stages ahead. Three ways:
//
//   PIXELS  every pixel's channels by cp.async, any dilation
//   ROWS    a block has all channels: a row of pixels by cp.async as it lies, from the piece of 16 bytes on in which it
//           begins. What is beside the image is another row's, and masked where it is read.
//   TMA     boxes of rows, columns and channels, zeros outside the image: no thread works out a place
#pragma once

#include "cp_async.cuh"
#if __CUDA_ARCH__ >= 900
#include "tma.cuh"
#endif

struct Streamed {
    // The tensor map of x.
    alignas(64) unsigned long long map[16];
    const void *x, *w;
    void *y;
    const void *bias, *residual;
    long long n, c, height, width, k, p, q;
    long long x_image, x_row, y_image, y_channel, y_row, y_column;
    long long stride_h, stride_w, dilation_h, dilation_w, pad_h, pad_w, phases_h, phases_w;
    // Output rows of a strip; pieces of a column of outputs, strips along a row, blocks of channels.
    long long rows, pieces, strips_row, channel_blocks;
    // The filters were written before all that is still to run.
    long long weights_ready;
};

enum By { PIXELS, ROWS, TMA };

// A block's strip, of one image or of IMAGES from n on: output rows residue + phases * (first + o), o < count, of
// GROUPS * TX columns of a class from q0, and channels from k; `k` and `q0` of a thread become its own. Rows of x from
// `top` on, `apart` from each other, so many; the first column of x.
struct Strip {
    long long n;
    int k, residue, first, count, q0, q_step, top, apart, rows, left;

    template <class P> static DEVICE Strip of(const Streamed &a) {
        Strip s;
        unsigned i = blockIdx.x;
        s.k = i % (unsigned)a.channel_blocks * (P::LANES * P::V), i /= (unsigned)a.channel_blocks;
        const int along = i % (unsigned)a.strips_row;
        i /= (unsigned)a.strips_row;
        const int piece = i % (unsigned)a.pieces;
        s.n = i / (unsigned)a.pieces * P::IMAGES;
        s.residue = piece % (int)a.phases_h, s.first = piece / (int)a.phases_h * (int)a.rows;
        s.count = min((int)a.rows, ((int)a.p - s.residue + (int)a.phases_h - 1) / (int)a.phases_h - s.first);
        s.q_step = a.phases_w, s.q0 = along % s.q_step + along / s.q_step * (P::GROUPS * P::TX * s.q_step);
        s.top = (s.residue + (int)a.phases_h * s.first) * (int)a.stride_h - (int)a.pad_h, s.apart = a.dilation_h;
        s.rows = (s.count - 1) * P::SH + P::R, s.left = s.q0 * (int)a.stride_w - (int)a.pad_w;
        return s;
    }
};

// Copies of a thread: where they go is known, so they differ in where they come from. `first` rows further a stage.
template <class P, int BY> struct Loads {
    using T = typename P::T;
    // All of x, and the strip's image, of ROWS from the first column on.
    const T *const all, *x;
    const unsigned stages;
    // Of each copy: its row, far below zero where there is nothing; its place in that row, or in the first one; where
    // it goes in a stage of ROWS.
    int row[P::ITEMS], from[P::ITEMS], place[P::ITEMS];
    int top, apart, bottom, row_step, stage = 0;
    // ROWS: elements before x in its piece of 16 bytes, and from there to the end of all.
    int lead, end;

    DEVICE Loads(const Streamed &a, const Strip &s, unsigned stages)
        : all(static_cast<const T *>(a.x)), x(all + s.n * a.x_image), stages(stages), top(s.top), apart(s.apart),
          bottom(max(0, min((int)a.height, s.top + s.rows * s.apart))), row_step(a.x_row) {
        const int left = BY == ROWS ? max(0, s.left) * P::C : 0;
        if constexpr (BY == ROWS) {
            lead = (s.n * a.x_image + left) % P::GRAIN;
            end = min((a.n - s.n) * a.x_image - left, 1ll << 30);
            x += left;
        }
#pragma unroll
        for (int i = 0; i < P::ITEMS; ++i) {
            const int at = threadIdx.x + i * P::THREADS, t = at / P::ROW_COPIES, rest = at % P::ROW_COPIES;
            row[i] = top + t % P::PERIOD * apart;
            if constexpr (BY == ROWS) {
                from[i] = rest * P::GRAIN, place[i] = t * P::ROW + P::MARGIN + rest * P::COPY;
                continue;
            }
            if (P::PADDED) place[i] = P::place(at * P::COPY);
            const int column = s.left + rest / P::PIECES_PIXEL * (int)a.dilation_w;
            const int channel = s.k + rest % P::PIECES_PIXEL * (P::COPY / (int)sizeof(T));
            const int image = P::IMAGES == 1 ? 0 : t / P::PERIOD;
            from[i] = image * (int)a.x_image + row[i] * row_step + column * (int)a.c + channel;
            const bool real = (unsigned)column < (unsigned)a.width && channel < (int)a.c && s.n + image < a.n;
            if (!real) row[i] = -(1 << 30);
        }
    }
    // Elements of row `row` in front of its first column, where its copies begin.
    DEVICE int lead_of(int row) const { return (unsigned)(lead + row * row_step) % P::GRAIN; }
    DEVICE void copy(int first, int to) {
        const int down = first * apart, along = down * row_step;
#pragma unroll
        for (int i = 0; i < P::ITEMS; ++i) {
            if (i * P::THREADS + P::THREADS > P::COPIES && i * P::THREADS + (int)threadIdx.x >= P::COPIES) break;
            const bool real = (unsigned)(row[i] + down) < (unsigned)bottom;
            const int within =
                BY == ROWS || P::PADDED ? place[i] : P::place((i * P::THREADS + (int)threadIdx.x) * P::COPY);
            const unsigned there = stages + to * P::STAGE + within;
            if constexpr (BY == ROWS) {
                const int begin = (row[i] + down) * row_step, at = begin + from[i] - lead_of(row[i] + down);
                cp_async_part<P::COPY>(there, real ? x + at : all, real ? min(end - at, P::GRAIN) * (int)sizeof(T) : 0);
            } else {
                cp_async<P::COPY>(there, x + (from[i] + along), real);
            }
        }
        cp_async_commit();
    }
    DEVICE void begin() {
#pragma unroll
        for (int i = 0; i < P::STAGES - 1; ++i) copy(i * P::PERIOD, i);
    }
    // The stage of rows from `first` on is there, at the returned offset; the next one is on its way.
    DEVICE int next(int first) {
        cp_async_wait<P::STAGES - 2>();
        __syncthreads();
        copy(first + (P::STAGES - 1) * P::PERIOD, stage == 0 ? P::STAGES - 1 : stage - 1);
        const int here = stage * P::STAGE;
        stage = stage == P::STAGES - 1 ? 0 : stage + 1;
        return here;
    }
    // Where row `first` of a stage begins there.
    DEVICE int row_of(int t, int first) const {
        const int here = t * P::ROW + P::MARGIN;
        return BY == ROWS ? here + lead_of(top + first + t) * (int)sizeof(T) : here;
    }
    DEVICE void done() {}
};

#if __CUDA_ARCH__ >= 900
// Barriers: stages that are full, and stages that all warps have read, which the first thread waits for.
template <class P> struct Loads<P, TMA> {
    const Streamed &a;
    const Strip s;
    const unsigned stages, full, empty;
    int stage = 0;
    unsigned phase = 0;

    DEVICE Loads(const Streamed &a, const Strip &s, unsigned stages)
        : a(a), s(s), stages(stages), full(stages + P::STAGES * P::STAGE), empty(full + P::STAGES * 8) {
        if (threadIdx.x) return;
        prefetch_map(a.map);
        for (int i = 0; i < P::STAGES; ++i) barrier_init(full + i * 8, 1), barrier_init(empty + i * 8, P::THREADS / 32);
        publish_barriers();
    }
    DEVICE void copy(int first, int to) const {
        barrier_expect(full + to * 8, P::IMAGES * P::PERIOD * P::ROW);
        copy_box(stages + to * P::STAGE, a.map, full + to * 8, s.k, s.left, s.top + first, (int)s.n);
    }
    DEVICE void begin() {
        if (threadIdx.x == 0)
            for (int i = 0; i < P::STAGES && i * P::PERIOD < s.rows; ++i) copy(i * P::PERIOD, i);
        __syncthreads();
    }
    DEVICE int next(int first) {
        const int before = stage == 0 ? P::STAGES - 1 : stage - 1, ahead = first + (P::STAGES - 1) * P::PERIOD;
        if (threadIdx.x == 0 && first > 0 && ahead < s.rows) {
            barrier_wait(empty + before * 8, stage == 0 ? phase ^ 1 : phase);
            copy(ahead, before);
        }
        barrier_wait(full + stage * 8, phase);
        return stage * P::STAGE;
    }
    DEVICE int row_of(int t, int) const { return t * P::ROW; }
    DEVICE void done() {
        __syncwarp();
        if (threadIdx.x % 32 == 0) barrier_arrive(empty + stage * 8);
        if (++stage == P::STAGES) stage = 0, phase ^= 1;
    }
};
#endif
