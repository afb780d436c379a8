// Weight gradient of groups of few channels, of one too, on tensor cores: pixels are read as they lie, channels last.
//
// Eight channels of eight pixels beside each other are a matrix of eight rows of 16 bytes. Transposed, two of them of
// x, a tap apart, are 16 rows of a product, and one of dy its 8 columns, with 16 pixels summed:
//
//     D (2 taps x 8 channels of x) x (8 filters) += A (2 taps x 8 channels x 16 pixels) * B (16 pixels x 8 filters)
//
// of which the sums within a group are kept: all of groups of 8 channels, the two diagonals of groups of one. A warp
// has 8 channels of x and goes down the rows: a row of x is in registers once for all rows of dy that meet it, which
// stay in registers too. TMA brings rows of x and dy, some stages ahead, zeros beside the images with them; of channels
// that are no multiple of 8, warps of their own.
//
// The sum over pixels is split among warps and blocks, whose sums are added in a fixed order: by a second launch, or by
// the blocks themselves, which then are a cluster and send them to each other.
#include "matrix.cuh"
#include "ops/conv/cuda/unaligned_pixels.cuh"
#include "ops/conv/cuda/wgrad_by_definition.cuh"
#include "tma.cuh"

struct NarrowGroupsWgrad {
    // Tensor maps of x and dy.
    alignas(64) unsigned long long map_x[16], map_dy[16];
    const void *x;
    // dy.
    const void *w;
    void *y;
    // Sums of parts, each in dw's order.
    void *parts;
    long long n, c, height, width, k, r, s, p, q;
    long long stride_h, stride_w, dilation_h, dilation_w, pad_h, pad_w;
    // Parts of the sum, blocks of channels, pieces of a filter's rows; sets of images that come together; rows of dy of
    // a part, of sets and strips of columns one behind the other, and parts with one more; bytes of shared memory in
    // front of barriers.
    long long split, channel_blocks, pieces, sets, part_rows, more_parts, barriers_at;
};

// T; CHANNELS of a block, GROUP channels and filters of a group; SHARE warps of the same channels; UNITS of 8 columns
// of dy in a strip, IMAGES of a set, ROWS of dy of a stage; STAGES; R rows of taps of a block, S; SH, SW, DH, DW:
// strides and dilations; SPLIT: sums go to the workspace; or CLUSTER parts are blocks of one; COPIERS: warps that bring
// rows, one of them by TMA, more where pixels begin at multiples of ALIGNED bytes.
template <class Traits> struct NarrowTile : Traits {
    using B = Traits;
    static constexpr int OCTETS = B::CHANNELS / 8, CONSUMERS = 32 * OCTETS * B::SHARE;
    // Eights of filters that a warp's channels meet; pairs of columns of taps.
    static constexpr int WIDE = B::GROUP > 8 ? B::GROUP / 8 : 1, ACROSS = (B::S + 1) / 2;
    // Sums of a group that are kept for a filter of a block.
    static constexpr int TAPS = B::R * B::S, SUMS = B::CHANNELS * B::GROUP * TAPS;
    // Those that a block of a cluster adds.
    static constexpr int OWN_SUMS = (SUMS + B::CLUSTER - 1) / B::CLUSTER;
    static_assert(B::CLUSTER == 1 || !B::SPLIT);
    // Two units are 16 pixels: neighbours, or the same of two images. Pairs of an image (or of two), and of a warp.
    static constexpr bool BESIDE = B::UNITS % 2 == 0;
    static constexpr int IN_ROW = BESIDE ? B::UNITS / 2 : B::UNITS, PAIRS = B::UNITS * B::IMAGES / 2 / B::SHARE;
    static_assert(B::UNITS * B::IMAGES % (2 * B::SHARE) == 0 && (PAIRS % IN_ROW == 0 || IN_ROW % PAIRS == 0));
    // Pixels of a row and rows of an image of a stage; rows are whole patterns of swizzled pieces.
    static constexpr int COLUMNS_X = ((8 * B::UNITS - 1) * B::SW + (B::S - 1) * B::DW + 8) / 8 * 8,
                         COLUMNS_DY = 8 * B::UNITS, ROWS_X = B::ROWS * B::SH;
    static constexpr int IMAGE_X = ROWS_X * COLUMNS_X, IMAGE_DY = B::ROWS * COLUMNS_DY, PIXEL = 2 * B::CHANNELS;
    static constexpr int BOX_X = B::IMAGES * IMAGE_X * PIXEL, BOX_DY = B::IMAGES * IMAGE_DY * PIXEL;
    static constexpr int DY_AT = (BOX_X + 1023) / 1024 * 1024, STAGE = DY_AT + (BOX_DY + 1023) / 1024 * 1024;
    // Rows of dy that a row of x meets at most.
    static constexpr int LIVE = (B::R - 1) * B::DH / B::SH + 1;

    // Pixels from a warp's first pair to another, and from a pair's first unit to its second.
    static DEVICE constexpr int pair(int i, int image, int unit) {
        return i / IN_ROW * (BESIDE ? 1 : 2) * image + i % IN_ROW * (BESIDE ? 2 : 1) * unit;
    }
    static DEVICE constexpr int second(int image, int unit) { return BESIDE ? unit : image; }
    // Bytes of 8 channels of a pixel, where TMA has them.
    static DEVICE unsigned place(int pixel, int octet) {
        constexpr int MASK = OCTETS - 1, LINE = 8 / OCTETS;
        return pixel * PIXEL + ((octet ^ (pixel / LINE & MASK)) * 16);
    }
};

// Rows of dy that a block goes down: `count` of a strip of a set of images from `row` on, and where their windows begin
// in x. Stages begin so that one begins with an image's first row, `ahead` rows of dy before the run's.
template <class P> struct NarrowRuns {
    const NarrowGroupsWgrad &a;
    unsigned at, end;
    int r0, n, row, q0, top, left, count, ahead, rows;

    DEVICE NarrowRuns(const NarrowGroupsWgrad &a, int part, int r0)
        : a(a), at(part * (unsigned)a.part_rows + min(part, (int)a.more_parts)),
          end(at + (unsigned)a.part_rows + (part < (int)a.more_parts)), r0(r0) {}
    DEVICE bool next() {
        if (at >= end) return false;
        const unsigned line = at / (unsigned)a.p, strip = line / (unsigned)a.sets;
        row = at - line * (unsigned)a.p, n = (line - strip * (unsigned)a.sets) * P::IMAGES, q0 = strip * P::COLUMNS_DY;
        count = min((unsigned)a.p - row, end - at);
        at += count;
        top = row * P::SH - (int)a.pad_h + r0 * P::DH, left = q0 * P::SW - (int)a.pad_w;
        ahead = top < 0 ? (P::ROWS - -top / P::SH % P::ROWS) % P::ROWS : 0;
        top -= ahead * P::SH, row -= ahead;
        rows = (ahead + count - 1) * P::SH + (P::R - 1) * P::DH + 1;
        return true;
    }
    // Whether rows of the stage that begins `base` rows of x behind the first are in x; whether rows of dy are the
    // run's.
    DEVICE bool of_x(int base) const { return top + base + P::ROWS_X > 0 && top + base < (int)a.height; }
    DEVICE bool of_dy(int base) const { return base / P::SH < ahead + count; }
};

// A thread copies all stages. What is beside the images, or behind the run's rows of dy, does not come.
template <class P>
DEVICE void copy_stages(NarrowRuns<P> runs, int channel0, unsigned ring, unsigned full, unsigned empty) {
    const NarrowGroupsWgrad &a = runs.a;
    unsigned stage = 0, phase = 1;
    while (runs.next())
        for (int base = 0; base < runs.rows; base += P::ROWS_X) {
            const bool x = runs.of_x(base), dy = runs.of_dy(base);
            const unsigned to = ring + stage * P::STAGE, barrier = full + stage * 8;
            barrier_wait(empty + stage * 8, phase);
            barrier_expect(barrier, (x ? P::BOX_X : 0) + (dy ? P::BOX_DY : 0));
            if (x) copy_box(to, a.map_x, barrier, channel0, runs.left, runs.top + base, runs.n);
            if (dy) copy_box(to + P::DY_AT, a.map_dy, barrier, channel0, runs.q0, runs.row + base / P::SH, runs.n);
            if (++stage == P::STAGES) stage = 0, phase ^= 1;
        }
}

// The same by the copying warps, a row each.
template <class P>
DEVICE void bring_stages(NarrowRuns<P> runs, int channel0, unsigned ring, unsigned full, unsigned empty, int warp) {
    constexpr int ROWS_X = P::IMAGES * P::ROWS_X, ROWS_DY = P::IMAGES * P::ROWS;
    const NarrowGroupsWgrad &a = runs.a;
    const Pixels x{a.x, (int)a.n, (int)a.height, (int)a.width, (int)a.c};
    const Pixels dy{a.w, (int)a.n, (int)a.p, (int)a.q, (int)a.c};
    unsigned stage = 0, phase = 1;
    while (runs.next())
        for (int base = 0; base < runs.rows; base += P::ROWS_X) {
            const unsigned to = ring + stage * P::STAGE, barrier = full + stage * 8;
            const int end = runs.of_dy(base) ? ROWS_X + ROWS_DY : ROWS_X;
            barrier_wait(empty + stage * 8, phase);
#pragma unroll 1
            for (int row = runs.of_x(base) ? warp : ROWS_X + warp; row < end; row += P::COPIERS) {
                const bool of_x = row < ROWS_X;
                const int line = of_x ? row : row - ROWS_X;
                if (of_x)
                    bring_row<P::ALIGNED, P::COLUMNS_X, P::OCTETS>(x, runs.n + line / P::ROWS_X,
                                                                   runs.top + base + line % P::ROWS_X, runs.left,
                                                                   channel0, to + line * P::COLUMNS_X * P::PIXEL);
                else
                    bring_row<P::ALIGNED, P::COLUMNS_DY, P::OCTETS>(
                        dy, runs.n + line / P::ROWS, runs.row + base / P::SH + line % P::ROWS, runs.q0, channel0,
                        to + P::DY_AT + line * P::COLUMNS_DY * P::PIXEL);
            }
            arrive_with_copies(barrier);
            if (++stage == P::STAGES) stage = 0, phase ^= 1;
        }
}

// Where a lane's row of a matrix of a warp's first pair lies: of x, of taps 2 * j and 2 * j + 1, both units each (of
// the last tap alone, both units); of dy, both units.
template <class P> struct NarrowPlaces {
    unsigned x[P::ACROSS], dy[P::WIDE];

    DEVICE NarrowPlaces(int octet, int share) {
        const int row = threadIdx.x % 8, matrix = threadIdx.x % 32 / 8;
        const int pair_x = P::pair(share * P::PAIRS, P::IMAGE_X, 8 * P::SW),
                  pair_dy = P::pair(share * P::PAIRS, P::IMAGE_DY, 8);
#pragma unroll
        for (int j = 0; j < P::ACROSS; ++j) {
            const bool alone = 2 * j + 1 == P::S;
            const int unit = alone ? matrix % 2 : matrix / 2, tap = 2 * j + (alone ? 0 : matrix % 2);
            x[j] = P::place(pair_x + unit * P::second(P::IMAGE_X, 8 * P::SW) + row * P::SW + tap * P::DW, octet);
        }
#pragma unroll
        for (int o = 0; o < P::WIDE; ++o)
            dy[o] = P::DY_AT +
                    P::place(pair_dy + matrix % 2 * P::second(P::IMAGE_DY, 8) + row, octet / P::WIDE * P::WIDE + o);
    }
};

// Rows of dy that a row of x meets, the newest first.
template <class P> struct LiveRows {
    unsigned v[P::LIVE][P::PAIRS][P::WIDE][2] = {};

    // Another one, of zeros where it is not of the run.
    DEVICE void next(const NarrowPlaces<P> &places, unsigned stage, int row, int pair, bool of_run) {
        const int at = row * P::COLUMNS_DY + P::pair(pair, P::IMAGE_DY, 8);
#pragma unroll
        for (int o = 0; o < P::WIDE; ++o) {
            unsigned newest[2];
            ldmatrix_transposed(newest, stage + places.dy[o] + at * P::PIXEL);
#pragma unroll
            for (int k = 0; k < 2; ++k) {
#pragma unroll
                for (int l = P::LIVE - 1; l > 0; --l) v[l][pair][o][k] = v[l - 1][pair][o][k];
                v[0][pair][o][k] = of_run ? newest[k] : 0;
            }
        }
    }
};

// A warp's products of a stage; OF_X: it has rows of x.
template <class P, bool OF_X>
DEVICE void multiply_stage(float (&sums)[P::WIDE][P::R][P::ACROSS][4], LiveRows<P> &live, const NarrowPlaces<P> &places,
                           unsigned stage, int of_run, int count) {
#pragma unroll
    for (int row = 0; row < P::ROWS_X; ++row)
#pragma unroll
        for (int pair = 0; pair < P::PAIRS; ++pair) {
            const int of_dy = row / P::SH, at = row * P::COLUMNS_X + P::pair(pair, P::IMAGE_X, 8 * P::SW);
            if (row % P::SH == 0) live.next(places, stage, of_dy, pair, of_run + of_dy >= 0 && of_run + of_dy < count);
            if (!OF_X) continue;
#pragma unroll
            for (int j = 0; j < P::ACROSS; ++j) {
                unsigned v[4];
                if (2 * j + 1 == P::S) {
                    unsigned alone[2];
                    ldmatrix_transposed(alone, stage + places.x[j] + at * P::PIXEL);
                    v[0] = v[1] = alone[0], v[2] = v[3] = alone[1];
                } else ldmatrix_transposed(v, stage + places.x[j] + at * P::PIXEL);
#pragma unroll
                for (int r = 0; r < P::R; ++r) {
                    const int back = r * P::DH - row % P::SH;
                    if (back < 0 || back % P::SH) continue;
#pragma unroll
                    for (int o = 0; o < P::WIDE; ++o)
                        mma<typename P::T>(sums[o][r][j], v, live.v[back / P::SH][pair][o]);
                }
            }
        }
}

// A block's sums of a part to those of its cluster that add them, and its own, of all parts in the order of ranks, to
// dw. They lie behind the terms of its warps, where stages were.
template <class P, class Store>
DEVICE void add_in_cluster(const float *terms, unsigned complete, int part, const Store &store) {
    const int tid = threadIdx.x;
    float *const received = const_cast<float *>(terms) + P::SHARE * P::SUMS;
    // No block has stages any more.
    cluster_arrive_relaxed();
    cluster_wait();
#pragma unroll 4
    for (int i = tid; i < P::SUMS; i += P::CONSUMERS) {
        float sum = 0.0f;
#pragma unroll
        for (int other = 0; other < P::SHARE; ++other) sum += terms[other * P::SUMS + i];
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

template <class Traits> DEVICE void wgrad_narrow_groups(const NarrowGroupsWgrad &a) {
    using P = NarrowTile<Traits>;
    using T = typename P::T;
    constexpr int R = P::R, S = P::S, WIDE = P::WIDE;
    extern __shared__ __align__(1024) unsigned char memory[];
    const unsigned ring = shared_address(memory), full = ring + (unsigned)a.barriers_at, empty = full + P::STAGES * 8,
                   complete = empty + P::STAGES * 8;
    unsigned block = blockIdx.x / P::CLUSTER;
    const int r0 = block % (unsigned)a.pieces * R;
    block /= (unsigned)a.pieces;
    const int channel0 = block % (unsigned)a.channel_blocks * P::CHANNELS;
    const int part = P::CLUSTER > 1 ? blockIdx.x % P::CLUSTER : block / (unsigned)a.channel_blocks;
    const int tid = threadIdx.x, lane = tid % 32, warp = __shfl_sync(~0u, tid / 32, 0);
    if (tid == P::CONSUMERS) {
        if constexpr (P::COPIERS == 1) prefetch_map(a.map_x), prefetch_map(a.map_dy);
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
    __syncthreads();
    // What comes next is placed early: it waits for all of this launch.
    begin_dependent();
    NarrowRuns<P> runs(a, part, r0);
    if (tid >= P::CONSUMERS) {
        if constexpr (P::COPIERS > 1) bring_stages<P>(runs, channel0, ring, full, empty, warp - P::CONSUMERS / 32);
        else if (tid == P::CONSUMERS) copy_stages<P>(runs, channel0, ring, full, empty);
        return;
    }
    const int octet = warp % P::OCTETS, share = warp / P::OCTETS, first = octet / WIDE * WIDE;
    const NarrowPlaces<P> places(octet, share);
    float sums[WIDE][R][P::ACROSS][4] = {};
    unsigned stage = 0, phase = 0;
    while (runs.next()) {
        LiveRows<P> live;
        for (int base = 0; base < runs.rows; base += P::ROWS_X) {
            const unsigned here = ring + stage * P::STAGE;
            const int of_run = base / P::SH - runs.ahead;
            barrier_wait(full + stage * 8, phase);
            if (runs.of_x(base)) multiply_stage<P, true>(sums, live, places, here, of_run, runs.count);
            else multiply_stage<P, false>(sums, live, places, here, of_run, runs.count);
            __syncwarp();
            // Of what cp.async writes tools see each lane's own reads alone.
            if (P::COPIERS > 1 || lane == 0) barrier_arrive(empty + stage * 8);
            if (++stage == P::STAGES) stage = 0, phase ^= 1;
        }
    }
    // What is kept of the sums, of each warp that shares the channels, in dw's order.
    sync_part(1, P::CONSUMERS);
    float *const terms = reinterpret_cast<float *>(memory) + share * P::SUMS;
    const int c = octet * 8 + lane / 4;
#pragma unroll
    for (int o = 0; o < WIDE; ++o)
#pragma unroll
        for (int e = 0; e < 2; ++e) {
            const int k = (first + o) * 8 + lane % 4 * 2 + e;
            if (c / P::GROUP != k / P::GROUP) continue;
            float *const filter = terms + k * P::TAPS * P::GROUP + c % P::GROUP;
#pragma unroll
            for (int r = 0; r < R; ++r)
#pragma unroll
                for (int s = 0; s < S; ++s) filter[(r * S + s) * P::GROUP] = sums[o][r][s / 2][s % 2 * 2 + e];
        }
    sync_part(1, P::CONSUMERS);
    const int taps = (int)a.r * S;
    // Sum `i` of the block, which is dw's where it has such a filter and tap.
    const auto store = [&](int i, bool real, float sum) {
        const int k = i / (P::TAPS * P::GROUP), within = i - k * (P::TAPS * P::GROUP);
        const bool mine = real && i < P::SUMS && channel0 + k < (int)a.k && r0 * S + within / P::GROUP < taps;
        const int at = ((channel0 + k) * taps + r0 * S) * P::GROUP + within;
        if constexpr (P::SPLIT) {
            if (mine) static_cast<float *>(a.parts)[(long long)part * a.k * taps * P::GROUP + at] = sum;
        } else store_sum<T, true, P::GROUP>(a, mine, at, sum);
    };
    const float *const all = reinterpret_cast<const float *>(memory);
    if constexpr (P::CLUSTER > 1) return add_in_cluster<P>(all, complete, part, store);
#pragma unroll 1
    for (int i = tid; i - tid < P::SUMS; i += P::CONSUMERS) {
        float sum = 0.0f;
        if (i < P::SUMS)
#pragma unroll
            for (int other = 0; other < P::SHARE; ++other) sum += all[other * P::SUMS + i];
        store(i, true, sum);
    }
}

template <typename T, int GROUP, int WARPS, int SLICES>
DEVICE void add_narrow_groups_parts(const NarrowGroupsWgrad &a) {
    add_parts_of_sums<T, true, GROUP, WARPS, SLICES>(a);
}
