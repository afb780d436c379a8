// Weight gradients of rows that come in stages: a block goes down the rows of x and dy, which TMA, or warps of their
// own, bring to shared memory some stages ahead, its warps multiply, and their sums are added in a fixed order.
//
// A kernel has a tile and a class of what a warp does. The tile says what a block has (CHANNELS, of GROUP channels a
// group; R rows of taps, S; SH: the stride of rows), what a stage has (ROWS of dy and ROWS_X of x, of IMAGES, and ZEROS
// bytes behind x; pixels are PIXEL bytes of OCTETS times eight channels, COLUMNS_X and COLUMNS_DY of a row, of a STRIP
// of columns of dy), in how many boxes it comes (BOXES_X of x, BYTES_X in all; of dy likewise), where rows lie
// (pixel_x, pixel_dy; dy from DY_AT on; STAGE bytes, STAGES of them), who multiplies (CONSUMERS threads) and copies
// (COPIERS warps, one of them by TMA, more where pixels begin at multiples of ALIGNED bytes), and how many terms a sum
// has in a block (TERMS), PITCH floats apart.
#pragma once

#include "matrix.cuh"
#include "ops/conv/cuda/unaligned_pixels.cuh"
#include "ops/conv/cuda/wgrad_by_definition.cuh"
#include "tma.cuh"

struct StagedWgrad {
    // Tensor maps of x and dy: one, or of pixels of odd multiples of 8 bytes eight, of even and odd columns (1), rows
    // (2) and images (4).
    alignas(64) unsigned long long map_x[8][16], map_dy[8][16];
    const void *x;
    // dy.
    const void *w;
    void *y;
    // Sums of parts, each in dw's order.
    void *parts;
    long long n, c, height, width, k, r, s, p, q;
    long long stride_h, stride_w, dilation_h, dilation_w, pad_h, pad_w;
    // Parts of the sum, blocks of channels, pieces of a filter's rows; sets of images that come together; rows that a
    // run counts more, as its begin takes time; rows of a part, of sets and strips of columns one behind the other,
    // counted so, and parts with one more; bytes of shared memory in front of barriers.
    long long split, channel_blocks, pieces, sets, run_rows, part_rows, more_parts, barriers_at;
};

// Rows of dy that a block goes down: `count` of a strip of a set of images from `row` on, and where their windows begin
// in x. Stages begin so that one begins with an image's first row, `ahead` rows of dy before the run's.
template <class P> struct StageRuns {
    const StagedWgrad &a;
    unsigned at, end;
    int r0, n, row, q0, top, left, count, ahead, rows;

    DEVICE StageRuns(const StagedWgrad &a, int part, int r0)
        : a(a), at(first_row(part)), end(first_row(part + 1)), r0(r0) {}
    DEVICE unsigned first_row(int part) const {
        const unsigned counted = part * (unsigned)a.part_rows + min(part, (int)a.more_parts),
                       each = (unsigned)a.p + (unsigned)a.run_rows, line = counted / each;
        return line * (unsigned)a.p + (unsigned)max(0, (int)(counted - line * each) - (int)a.run_rows);
    }
    DEVICE bool next() {
        if (at >= end) return false;
        const unsigned line = at / (unsigned)a.p, strip = line / (unsigned)a.sets;
        row = at - line * (unsigned)a.p, n = (line - strip * (unsigned)a.sets) * P::IMAGES, q0 = strip * P::STRIP;
        count = min((unsigned)a.p - row, end - at);
        at += count;
        top = row * P::SH - (int)a.pad_h + r0 * P::DH, left = q0 * P::SW - (int)a.pad_w;
        ahead = top < 0 ? (P::ROWS - -top / P::SH % P::ROWS) % P::ROWS : 0;
        top -= ahead * P::SH, row -= ahead;
        rows = min((ahead + count - 1) * P::SH + (P::R - 1) * P::DH + 1, (int)a.height - top);
        return true;
    }
    // Whether rows of the stage that begins `base` rows of x behind the first are in x; whether rows of dy are the
    // run's.
    DEVICE bool of_x(int base) const { return top + base + P::ROWS_X > 0 && top + base < (int)a.height; }
    DEVICE bool of_dy(int base) const { return base / P::SH < ahead + count; }
};

// A row of IMAGES whose pixels are odd multiples of 8 bytes. TMA's pieces are of 16, as are every second column, row
// and image from each other: even and odd columns, and images, come in boxes of their own, SIZE bytes apart. Where
// pixels begin within a piece, it comes with what is in front.
template <int SIZE>
DEVICE void copy_halves(unsigned to, const unsigned long long (&maps)[8][16], unsigned barrier, int channel0, int w,
                        int h, int n, int height, int width, int channels) {
#pragma unroll
    for (int half = 0; half < 4; ++half) {
        const int of_w = (w + half % 2) & 1, of_h = h & 1, of_n = half / 2,
                  first = ((of_n * height + of_h) * width + of_w) * channels + channel0;
        copy_box(to + half * SIZE, maps[of_n * 4 + of_h * 2 + of_w], barrier, first - first % 8, (w + half % 2) >> 1,
                 h >> 1, n >> 1);
    }
}

// A thread copies all stages of a run, and of those behind it, if there are `more`. What is beside the images, or
// behind the run's rows of dy, does not come.
template <class P>
DEVICE void copy_stages(StageRuns<P> runs, bool more, int channel0, unsigned ring, unsigned full, unsigned empty) {
    const StagedWgrad &a = runs.a;
    unsigned stage = 0, phase = 1;
    for (; more; more = runs.next())
        for (int base = 0; base < runs.rows; base += P::ROWS_X) {
            const bool x = runs.of_x(base), dy = runs.of_dy(base);
            const unsigned to = ring + stage * P::STAGE, barrier = full + stage * 8;
            const int top = runs.top + base, row = runs.row + base / P::SH;
            barrier_wait(empty + stage * 8, phase);
            barrier_expect(barrier, (x ? P::BYTES_X : 0) + (dy ? P::BYTES_DY : 0));
            if (x)
#pragma unroll
                for (int i = 0; i < P::ROWS_X; i += P::ROWS_X / P::BOXES_X) {
                    if constexpr (P::HALVES)
                        copy_halves<P::HALF_X>(to + i * P::ROW_X, a.map_x, barrier, channel0, runs.left, top + i,
                                               runs.n, a.height, a.width, a.c);
                    else
                        copy_box(to + P::pixel_x(0, i) * P::PIXEL, a.map_x[0], barrier, channel0, runs.left, top + i,
                                 runs.n);
                }
            if (dy)
#pragma unroll
                for (int i = 0; i < P::ROWS; i += P::ROWS / P::BOXES_DY) {
                    if constexpr (P::HALVES)
                        copy_halves<P::HALF_DY>(to + P::DY_AT + i * P::ROW_DY, a.map_dy, barrier, channel0, runs.q0,
                                                row + i, runs.n, a.p, a.q, a.c);
                    else
                        copy_box(to + P::DY_AT + P::pixel_dy(0, i) * P::PIXEL, a.map_dy[0], barrier, channel0, runs.q0,
                                 row + i, runs.n);
                }
            if (++stage == P::STAGES) stage = 0, phase ^= 1;
        }
}

// The same by the copying warps, a row each.
template <class P>
DEVICE void bring_stages(StageRuns<P> runs, bool more, int channel0, unsigned ring, unsigned full, unsigned empty,
                         int warp) {
    constexpr int ROWS_X = P::IMAGES * P::ROWS_X, ROWS_DY = P::IMAGES * P::ROWS;
    const StagedWgrad &a = runs.a;
    const Pixels x{a.x, (int)a.n, (int)a.height, (int)a.width, (int)a.c};
    const Pixels dy{a.w, (int)a.n, (int)a.p, (int)a.q, (int)a.c};
    unsigned stage = 0, phase = 1;
    for (; more; more = runs.next())
        for (int base = 0; base < runs.rows; base += P::ROWS_X) {
            const unsigned to = ring + stage * P::STAGE, barrier = full + stage * 8;
            const int end = runs.of_dy(base) ? ROWS_X + ROWS_DY : ROWS_X;
            barrier_wait(empty + stage * 8, phase);
#pragma unroll 1
            for (int row = runs.of_x(base) ? warp : ROWS_X + warp; row < end; row += P::COPIERS) {
                const bool of_x = row < ROWS_X;
                const int line = of_x ? row : row - ROWS_X;
                if (of_x)
                    bring_row<P::ALIGNED, P::COLUMNS_X, P::OCTETS>(
                        x, runs.n + line / P::ROWS_X, runs.top + base + line % P::ROWS_X, runs.left, channel0,
                        to + P::pixel_x(line / P::ROWS_X, line % P::ROWS_X) * P::PIXEL);
                else
                    bring_row<P::ALIGNED, P::COLUMNS_DY, P::OCTETS>(
                        dy, runs.n + line / P::ROWS, runs.row + base / P::SH + line % P::ROWS, runs.q0, channel0,
                        to + P::DY_AT + P::pixel_dy(line / P::ROWS, line % P::ROWS) * P::PIXEL);
            }
            arrive_with_copies(barrier);
            if (++stage == P::STAGES) stage = 0, phase ^= 1;
        }
}

// A block's sums of a part to those of its cluster that add them, and its own, of all parts in the order of ranks, to
// dw. They lie behind the terms of its warps, where stages were.
template <class P, class Store>
DEVICE void add_in_cluster(const float *terms, unsigned complete, int part, const Store &store) {
    const int tid = threadIdx.x;
    float *const received = const_cast<float *>(terms) + P::TERMS * P::PITCH;
    // No block has stages any more.
    cluster_arrive_relaxed();
    cluster_wait();
#pragma unroll 4
    for (int i = tid; i < P::SUMS; i += P::CONSUMERS) {
        float sum = 0.0f;
#pragma unroll
        for (int other = 0; other < P::TERMS; ++other) sum += terms[other * P::PITCH + i];
        const int owner = i / P::OWN_SUMS;
        float *const to = received + part * P::OWN_SUMS + i - owner * P::OWN_SUMS;
        if (owner == part) *to = sum;
        else send(address_of_rank(shared_address(to), owner), address_of_rank(complete, owner), sum);
    }
    sync_part(1, P::CONSUMERS);
    barrier_wait_for_cluster(complete, 0);
#pragma unroll 1
    for (int begin = 0; begin < P::OWN_SUMS; begin += P::CONSUMERS) {
        const int own = begin + tid;
        float sum = 0.0f;
        if (own < P::OWN_SUMS)
#pragma unroll
            for (int other = 0; other < P::CLUSTER; ++other) sum += received[other * P::OWN_SUMS + own];
        store(part * P::OWN_SUMS + own, own < P::OWN_SUMS, sum);
    }
}

// Warp: what a warp that multiplies has. It begins runs, multiplies stages, of which OF_X have rows of x, and keeps its
// terms of the block's sums.
template <class P, class Warp> DEVICE void wgrad_by_stages(const StagedWgrad &a) {
    using T = typename P::T;
    extern __shared__ __align__(1024) unsigned char memory[];
    const unsigned ring = shared_address(memory), full = ring + (unsigned)a.barriers_at, empty = full + P::STAGES * 8,
                   complete = empty + P::STAGES * 8;
    unsigned block = blockIdx.x / P::CLUSTER;
    const int r0 = block % (unsigned)a.pieces * P::R;
    block /= (unsigned)a.pieces;
    // A last block of fewer channels has some of the one before, too: boxes that lie partly beside x take longer.
    const int own0 = block % (unsigned)a.channel_blocks * P::CHANNELS,
              channel0 = P::COPIERS == 1 && P::CHANNELS < (int)a.c ? min(own0, (int)a.c - P::CHANNELS) : own0;
    const int part = P::CLUSTER > 1 ? blockIdx.x % P::CLUSTER : block / (unsigned)a.channel_blocks;
    const int tid = threadIdx.x, lane = tid % 32, warp = __shfl_sync(~0u, tid / 32, 0);
    if (tid == P::CONSUMERS) {
        if constexpr (P::COPIERS == 1)
#pragma unroll
            for (int i = 0; i < (P::HALVES ? 8 : 1); ++i) prefetch_map(a.map_x[i]), prefetch_map(a.map_dy[i]);
        for (int i = 0; i < P::STAGES; ++i)
            barrier_init(full + i * 8, P::COPIERS > 1 ? 32 * P::COPIERS : 1),
                barrier_init(empty + i * 8, P::COPIERS > 1 ? P::CONSUMERS : P::CONSUMERS / 32);
        if constexpr (P::CLUSTER > 1) {
            const int own = min(P::OWN_SUMS, max(0, P::SUMS - part * P::OWN_SUMS));
            barrier_init(complete, 1);
            barrier_expect(complete, own * (P::CLUSTER - 1) * 4);
        }
        publish_barriers();
    }
    if constexpr (P::ZEROS > 0)
        for (int i = tid; tid < P::CONSUMERS && i < P::STAGES * P::ZEROS / 16; i += P::CONSUMERS) {
            constexpr int EACH = P::ZEROS / 16;
            reinterpret_cast<uint4 *>(memory + i / EACH * P::STAGE + P::BYTES_X)[i % EACH] = {};
        }
    __syncthreads();
    StageRuns<P> runs(a, part, r0);
    bool more = runs.next();
    work_out(more, runs.n, runs.row, runs.q0, runs.top, runs.left, runs.count, runs.ahead, runs.rows, runs.at,
             runs.end);
    // What comes next is placed early: it waits for all of this launch.
    begin_dependent(P::EARLY);
    if (tid >= P::CONSUMERS) {
        if constexpr (P::TAKES > 0) release_registers<P::LEAVES>();
        if constexpr (P::COPIERS > 1)
            bring_stages<P>(runs, more, channel0, ring, full, empty, warp - P::CONSUMERS / 32);
        else if (tid == P::CONSUMERS) copy_stages<P>(runs, more, channel0, ring, full, empty);
        return;
    }
    if constexpr (P::TAKES > 0) take_registers<P::TAKES>();
    Warp own(warp);
    unsigned stage = 0, phase = 0;
    for (; more; more = runs.next()) {
        own.begin(runs, channel0);
        const int end = runs.rows + P::TRAIL;
        for (int base = 0; base < end;)
#pragma unroll
            for (int turn = 0; turn < P::TURNS; ++turn) {
                if (turn > 0 && base >= end) break;
                const bool there = P::TRAIL == 0 || base < runs.rows;
                const unsigned here = ring + stage * P::STAGE;
                if (there) barrier_wait(full + stage * 8, phase);
                own.multiply(here, there && runs.of_x(base), base / P::SH - runs.ahead, there ? runs.count : 0, turn);
                __syncwarp();
                // Of what cp.async writes tools see each lane's own reads alone.
                if (there && (P::COPIERS > 1 || lane == 0)) barrier_arrive(empty + stage * 8);
                if (there && ++stage == P::STAGES) stage = 0, phase ^= 1;
                base += P::ROWS_X;
            }
    }
    sync_part(1, P::CONSUMERS);
    own.keep(reinterpret_cast<float *>(memory));
    sync_part(1, P::CONSUMERS);
    const int taps = (int)a.r * P::S;
    // Sum `i` of the block, which is dw's where it has such a filter and tap.
    const auto store = [&](int i, bool real, float sum) {
        const int k = i / (P::TAPS * P::GROUP), within = i - k * (P::TAPS * P::GROUP);
        const bool mine = real && i < P::SUMS && channel0 + k >= own0 && channel0 + k < (int)a.k &&
                          r0 * P::S + within / P::GROUP < taps;
        const int at = ((channel0 + k) * taps + r0 * P::S) * P::GROUP + within;
        if constexpr (P::SPLIT) {
            if (mine) static_cast<float *>(a.parts)[(long long)part * a.k * taps * P::GROUP + at] = sum;
        } else store_sum<T, true, P::GROUP>(a, mine, at, sum);
    };
    const float *const all = reinterpret_cast<const float *>(memory);
    if constexpr (P::CLUSTER > 1) return add_in_cluster<P>(all, complete, part, store);
    constexpr int ALL = (P::SUMS + P::CONSUMERS - 1) / P::CONSUMERS, TOGETHER = ALL < 4 ? ALL : 4;
#pragma unroll 1
    for (int first = tid; first - tid < P::SUMS; first += TOGETHER * P::CONSUMERS) {
        float sums[TOGETHER] = {};
#pragma unroll
        for (int other = 0; other < P::TERMS; ++other)
#pragma unroll
            for (int i = 0; i < TOGETHER; ++i)
                if (const int at = first + i * P::CONSUMERS; at < P::SUMS) sums[i] += all[other * P::PITCH + at];
#pragma unroll
        for (int i = 0; i < TOGETHER; ++i) store(first + i * P::CONSUMERS, true, sums[i]);
    }
}

template <typename T, int GROUP, int WARPS, int SLICES, bool EARLY> DEVICE void add_staged_parts(const StagedWgrad &a) {
    add_parts_of_sums<T, true, GROUP, WARPS, SLICES>(a, EARLY);
}
