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
#include "ops/conv/cuda/wgrad_stages.cuh"

// T; CHANNELS of a block, GROUP channels and filters of a group; SHARE warps of the same channels; UNITS of 8 columns
// of dy in a strip, COLUMNS_X of x, IMAGES of a set, ROWS of dy of a stage; STAGES; R rows of taps of a block, S; SH,
// SW, DH, DW: strides and dilations; SPLIT: sums go to the workspace; or CLUSTER parts are blocks of one; COPIERS:
// warps that bring rows, one of them by TMA, more where pixels begin at multiples of ALIGNED bytes.
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
    // Pixels of a row and rows of an image of a stage; rows are whole patterns of swizzled pieces. Of x a row may have
    // fewer than are read: columns of dy that are not there, zeros, meet the next row's, or zeros behind the last one.
    static constexpr int COLUMNS_DY = 8 * B::UNITS, STRIP = COLUMNS_DY, ROWS_X = B::ROWS * B::SH;
    static constexpr int READ_X = (COLUMNS_DY - 1) * B::SW + (B::S - 1) * B::DW + 1, COLUMNS_X = B::COLUMNS_X;
    static_assert(COLUMNS_X % 8 == 0);
    static constexpr int IMAGE_X = ROWS_X * COLUMNS_X, IMAGE_DY = B::ROWS * COLUMNS_DY, PIXEL = 2 * B::CHANNELS;
    static constexpr int BOXES_X = 1, BOXES_DY = 1;
    static constexpr bool HALVES = false;
    static constexpr int BYTES_X = B::IMAGES * IMAGE_X * PIXEL, BYTES_DY = B::IMAGES * IMAGE_DY * PIXEL;
    static constexpr int ZEROS = READ_X > COLUMNS_X ? (READ_X - COLUMNS_X) * PIXEL : 0;
    static constexpr int DY_AT = (BYTES_X + ZEROS + 1023) / 1024 * 1024,
                         STAGE = DY_AT + (BYTES_DY + 1023) / 1024 * 1024;
    static constexpr int TERMS = B::SHARE, TURNS = 1, TRAIL = 0;
    // Rows of dy that a row of x meets at most.
    static constexpr int LIVE = (B::R - 1) * B::DH / B::SH + 1;

    // Pixels from a warp's first pair to another, and from a pair's first unit to its second.
    static DEVICE constexpr int pair(int i, int image, int unit) {
        return i / IN_ROW * (BESIDE ? 1 : 2) * image + i % IN_ROW * (BESIDE ? 2 : 1) * unit;
    }
    static DEVICE constexpr int second(int image, int unit) { return BESIDE ? unit : image; }
    static DEVICE constexpr int pixel_x(int image, int row) { return image * IMAGE_X + row * COLUMNS_X; }
    static DEVICE constexpr int pixel_dy(int image, int row) { return image * IMAGE_DY + row * COLUMNS_DY; }
    // Bytes of 8 channels of a pixel, where TMA has them.
    static DEVICE unsigned place(int pixel, int octet) {
        constexpr int MASK = OCTETS - 1, LINE = 8 / OCTETS;
        return pixel * PIXEL + ((octet ^ (pixel / LINE & MASK)) * 16);
    }
};

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

template <class P> struct NarrowWarp {
    NarrowPlaces<P> places;
    LiveRows<P> live;
    int octet, share;
    float sums[P::WIDE][P::R][P::ACROSS][4] = {};

    DEVICE NarrowWarp(int warp)
        : places(warp % P::OCTETS, warp / P::OCTETS), octet(warp % P::OCTETS), share(warp / P::OCTETS) {}
    DEVICE void begin(const StageRuns<P> &, int) { live = {}; }
    DEVICE void multiply(unsigned stage, bool of_x, int of_run, int count, int) {
        if (of_x) multiply<true>(stage, of_run, count);
        else multiply<false>(stage, of_run, count);
    }
    template <bool OF_X> DEVICE void multiply(unsigned stage, int of_run, int count) {
#pragma unroll
        for (int row = 0; row < P::ROWS_X; ++row)
#pragma unroll
            for (int pair = 0; pair < P::PAIRS; ++pair) {
                const int of_dy = row / P::SH, at = row * P::COLUMNS_X + P::pair(pair, P::IMAGE_X, 8 * P::SW);
                if (row % P::SH == 0)
                    live.next(places, stage, of_dy, pair, of_run + of_dy >= 0 && of_run + of_dy < count);
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
    // What is kept of the sums, in dw's order.
    DEVICE void keep(float *all) const {
        const int lane = threadIdx.x % 32, c = octet * 8 + lane / 4, first = octet / P::WIDE * P::WIDE;
        float *const terms = all + share * P::PITCH;
#pragma unroll
        for (int o = 0; o < P::WIDE; ++o)
#pragma unroll
            for (int e = 0; e < 2; ++e) {
                const int k = (first + o) * 8 + lane % 4 * 2 + e;
                if (c / P::GROUP != k / P::GROUP) continue;
                float *const filter = terms + k * P::TAPS * P::GROUP + c % P::GROUP;
#pragma unroll
                for (int r = 0; r < P::R; ++r)
#pragma unroll
                    for (int s = 0; s < P::S; ++s) filter[(r * P::S + s) * P::GROUP] = sums[o][r][s / 2][s % 2 * 2 + e];
            }
    }
};

template <class Traits> DEVICE void wgrad_narrow_groups(const StagedWgrad &a) {
    using P = NarrowTile<Traits>;
    wgrad_by_stages<P, NarrowWarp<P>>(a);
}
