// Weight gradient of groups of few channels, of one too, on tensor cores: pixels are read as they lie, channels last.
//
// Eight channels of eight pixels beside each other are a matrix of eight rows of 16 bytes. Transposed, two of them of x,
// a tap apart, are 16 rows of a product, and one of dy its 8 columns, with 16 pixels summed:
//
//     D (2 taps x 8 channels of x) x (8 filters) += A (2 taps x 8 channels x 16 pixels) * B (16 pixels x 8 filters)
//
// of which the sums within a group are kept: all of groups of 8 channels, the two diagonals of groups of one. A warp
// has 8 channels of x and goes down the rows: a row of x is in registers once for all rows of dy that meet it, which
// stay in registers too. TMA brings rows of x and dy, some stages ahead, zeros beside the images with them.
//
// The sum over pixels is split among warps and blocks, whose sums are added in a fixed order.
#include "matrix.cuh"
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
    // Parts of the sum, blocks of channels, pieces of a filter's rows; sets of images that come together, rows of dy of
    // all of them and of all strips of columns.
    long long split, channel_blocks, pieces, sets, all_rows;
};

// T; CHANNELS of a block, GROUP channels and filters of a group; SHARE warps of the same channels; UNITS of 8 columns of
// dy in a strip, IMAGES of a set, ROWS of dy of a stage; STAGES; R rows of taps of a block, S; SH, SW, DH, DW: strides
// and dilations; SPLIT: sums go to the workspace.
template <class Traits> struct NarrowTile : Traits {
    using B = Traits;
    static constexpr int OCTETS = B::CHANNELS / 8, CONSUMERS = 32 * OCTETS * B::SHARE;
    // Eights of filters that a warp's channels meet; pairs of columns of taps. An odd column is left over: its taps come
    // by twos as well, of neighbouring rows, where a row's next tap meets x a row further.
    static constexpr int WIDE = B::GROUP > 8 ? B::GROUP / 8 : 1, ACROSS = B::S / 2;
    static constexpr bool LEFT = B::S % 2 == 1, JOINED = LEFT && B::DH == 1;
    static constexpr int DOWN = LEFT ? JOINED ? (B::R + 1) / 2 : B::R : 0;
    // Sums of a group that are kept for a filter of a block.
    static constexpr int TAPS = B::R * B::S, SUMS = B::CHANNELS * B::GROUP * TAPS;
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
    // Of a tap: its pair's sums, and which half of their rows.
    static DEVICE constexpr int sums_of(int r, int s) {
        return s < 2 * ACROSS ? r * ACROSS + s / 2 : B::R * ACROSS + (JOINED ? r / 2 : r);
    }
    static DEVICE constexpr int half_of(int r, int s) {
        // A row of taps beside the one before it has the lower half, one alone has both.
        return s < 2 * ACROSS ? s % 2 : JOINED && r % 2 == 0 && r + 1 < B::R;
    }
    // Bytes of 8 channels of a pixel, where TMA has them.
    static DEVICE unsigned place(int pixel, int octet) {
        constexpr int MASK = OCTETS - 1, LINE = 8 / OCTETS;
        return pixel * PIXEL + ((octet ^ (pixel / LINE & MASK)) * 16);
    }
};

// Rows of dy that a block goes down: `count` of a strip of a set of images, and where their windows begin in x.
template <class P> struct NarrowRuns {
    const NarrowGroupsWgrad &a;
    unsigned at, end;
    int r0, n, row, q0, top, left, count, rows;

    DEVICE NarrowRuns(const NarrowGroupsWgrad &a, int part, int r0)
        : a(a), at(a.all_rows * part / a.split), end(a.all_rows * (part + 1) / a.split), r0(r0) {}
    DEVICE bool next() {
        if (at >= end) return false;
        const unsigned line = at / (unsigned)a.p, strip = line / (unsigned)a.sets;
        row = at - line * (unsigned)a.p, n = (line - strip * (unsigned)a.sets) * P::IMAGES, q0 = strip * P::COLUMNS_DY;
        count = min((unsigned)a.p - row, end - at);
        at += count;
        top = row * P::SH - (int)a.pad_h + r0 * P::DH, left = q0 * P::SW - (int)a.pad_w;
        rows = (count - 1) * P::SH + (P::R - 1) * P::DH + 1;
        return true;
    }
};

// One thread copies all stages. What is beside the images, or behind the run's rows of dy, does not come.
template <class P>
DEVICE void copy_stages(const NarrowGroupsWgrad &a, NarrowRuns<P> runs, int channel0, unsigned ring, unsigned full,
                        unsigned empty) {
    unsigned stage = 0, phase = 1;
    while (runs.next())
        for (int base = 0; base < runs.rows; base += P::ROWS_X) {
            const int h = runs.top + base, row = base / P::SH;
            const bool of_x = h + P::ROWS_X > 0 && h < (int)a.height, of_dy = row < runs.count;
            const unsigned to = ring + stage * P::STAGE, barrier = full + stage * 8;
            barrier_wait(empty + stage * 8, phase);
            barrier_expect(barrier, (of_x ? P::BOX_X : 0) + (of_dy ? P::BOX_DY : 0));
            if (of_x) copy_box(to, a.map_x, barrier, channel0, runs.left, h, runs.n);
            if (of_dy) copy_box(to + P::DY_AT, a.map_dy, barrier, channel0, runs.q0, runs.row + row, runs.n);
            if (++stage == P::STAGES) stage = 0, phase ^= 1;
        }
}

template <class Traits> DEVICE void wgrad_narrow_groups(const NarrowGroupsWgrad &a) {
    using P = NarrowTile<Traits>;
    using T = typename P::T;
    constexpr int R = P::R, S = P::S, SH = P::SH, LIVE = P::LIVE, WIDE = P::WIDE, PAIRS = P::PAIRS, ACROSS = P::ACROSS;
    extern __shared__ __align__(1024) unsigned char memory[];
    const unsigned ring = shared_address(memory), full = ring + P::STAGES * P::STAGE, empty = full + P::STAGES * 8;
    unsigned block = blockIdx.x;
    const int r0 = block % (unsigned)a.pieces * R;
    block /= (unsigned)a.pieces;
    const int channel0 = block % (unsigned)a.channel_blocks * P::CHANNELS, part = block / (unsigned)a.channel_blocks;
    const int tid = threadIdx.x, lane = tid % 32, warp = __shfl_sync(~0u, tid / 32, 0);
    if (tid == P::CONSUMERS) {
        prefetch_map(a.map_x), prefetch_map(a.map_dy);
        for (int i = 0; i < P::STAGES; ++i)
            barrier_init(full + i * 8, 1), barrier_init(empty + i * 8, P::OCTETS * P::SHARE);
        publish_barriers();
    }
    __syncthreads();
    wait_for_previous();
    NarrowRuns<P> runs(a, part, r0);
    if (tid >= P::CONSUMERS) {
        if (tid == P::CONSUMERS) copy_stages<P>(a, runs, channel0, ring, full, empty);
        return;
    }
    const int octet = warp % P::OCTETS, share = warp / P::OCTETS, first = octet / WIDE * WIDE;
    // Where a lane's row of a matrix of the first pair lies: of x, of taps 2 * j and 2 * j + 1, both units each, and of
    // the last tap, both units; of dy, both units.
    const int row = lane % 8, matrix = lane / 8;
    const int pair_x = P::pair(share * PAIRS, P::IMAGE_X, 8 * P::SW), pair_dy = P::pair(share * PAIRS, P::IMAGE_DY, 8);
    constexpr int SECOND_X = P::second(P::IMAGE_X, 8 * P::SW);
    unsigned x[ACROSS + 1], dy[WIDE];
#pragma unroll
    for (int j = 0; j < ACROSS; ++j)
        x[j] = P::place(pair_x + matrix / 2 * SECOND_X + row * P::SW + (2 * j + matrix % 2) * P::DW, octet);
    x[ACROSS] = P::place(pair_x + matrix % 2 * SECOND_X + row * P::SW + (S - 1) * P::DW, octet);
#pragma unroll
    for (int o = 0; o < WIDE; ++o)
        dy[o] = P::DY_AT + P::place(pair_dy + matrix % 2 * P::second(P::IMAGE_DY, 8) + row, first + o);
    float sums[WIDE][R * ACROSS + P::DOWN][4] = {};
    unsigned stage = 0, phase = 0;
    while (runs.next()) {
        const int count = runs.count, rows = runs.rows, top = runs.top, height = a.height;
        unsigned live[LIVE][PAIRS][WIDE][2] = {}, before[PAIRS][2] = {};
        for (int base = 0; base < rows; base += P::ROWS_X) {
            const unsigned here = ring + stage * P::STAGE;
            barrier_wait(full + stage * 8, phase);
#pragma unroll
            for (int t = 0; t < P::ROWS; ++t) {
                const bool comes = base / SH + t < count;
#pragma unroll
                for (int i = 0; i < PAIRS; ++i)
#pragma unroll
                    for (int o = 0; o < WIDE; ++o) {
#pragma unroll
                        for (int l = LIVE - 1; l > 0; --l)
                            live[l][i][o][0] = live[l - 1][i][o][0], live[l][i][o][1] = live[l - 1][i][o][1];
                        live[0][i][o][0] = live[0][i][o][1] = 0;
                        const int at = t * P::COLUMNS_DY + P::pair(i, P::IMAGE_DY, 8);
                        if (comes) ldmatrix_transposed(live[0][i][o], here + dy[o] + at * P::PIXEL);
                    }
#pragma unroll
                for (int b = 0; b < SH; ++b) {
                    const int of_x = t * SH + b, h = top + base + of_x;
                    if (h < 0 || h > height - !P::JOINED || base + of_x >= rows) continue;
#pragma unroll
                    for (int i = 0; i < PAIRS; ++i) {
                        const int at = of_x * P::COLUMNS_X + P::pair(i, P::IMAGE_X, 8 * P::SW);
                        const auto multiply = [&](int r, int of, const unsigned(&v)[4]) {
                            const int back = r * P::DH - b;
                            if (back < 0 || back % SH) return;
#pragma unroll
                            for (int o = 0; o < WIDE; ++o) mma<T>(sums[o][of], v, live[back / SH][i][o]);
                        };
                        if (h < height)
#pragma unroll
                            for (int j = 0; j < ACROSS; ++j) {
                                unsigned v[4];
                                ldmatrix_transposed(v, here + x[j] + at * P::PIXEL);
#pragma unroll
                                for (int r = 0; r < R; ++r) multiply(r, P::sums_of(r, 2 * j), v);
                            }
                        if constexpr (P::LEFT) {
                            // The row behind the last is of zeros.
                            unsigned last[2] = {};
                            if (h < height) ldmatrix_transposed(last, here + x[ACROSS] + at * P::PIXEL);
                            const unsigned v[4] = {last[0], before[i][0], last[1], before[i][1]};
#pragma unroll
                            for (int r = P::JOINED; r < R; r += 1 + P::JOINED) multiply(r, P::sums_of(r, S - 1), v);
                            if (P::JOINED && R % 2 == 1) multiply(R - 1, P::sums_of(R - 1, S - 1), v);
                            before[i][0] = last[0], before[i][1] = last[1];
                        }
                    }
                }
            }
            __syncwarp();
            if (lane == 0) barrier_arrive(empty + stage * 8);
            if (++stage == P::STAGES) stage = 0, phase ^= 1;
        }
    }
    let_next_begin();
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
                for (int s = 0; s < S; ++s)
                    filter[(r * S + s) * P::GROUP] = sums[o][P::sums_of(r, s)][P::half_of(r, s) * 2 + e];
        }
    sync_part(1, P::CONSUMERS);
    const int taps = (int)a.r * S;
#pragma unroll 1
    for (int begin = 0; begin < P::SUMS; begin += P::CONSUMERS) {
        const int i = begin + tid, k = i / (P::TAPS * P::GROUP), within = i - k * (P::TAPS * P::GROUP);
        const bool mine = i < P::SUMS && channel0 + k < (int)a.k && r0 * S + within / P::GROUP < taps;
        const int at = ((channel0 + k) * taps + r0 * S) * P::GROUP + within;
        float sum = 0.0f;
        if (mine)
#pragma unroll
            for (int other = 0; other < P::SHARE; ++other)
                sum += reinterpret_cast<const float *>(memory)[other * P::SUMS + i];
        if constexpr (P::SPLIT) {
            if (mine) static_cast<float *>(a.parts)[(long long)part * a.k * taps * P::GROUP + at] = sum;
        } else store_sum<T, true, P::GROUP>(a, mine, at, sum);
    }
}

template <typename T, int GROUP, int WARPS> DEVICE void add_narrow_groups_parts(const NarrowGroupsWgrad &a) {
    add_parts_of_sums<T, true, GROUP, WARPS>(a);
}
