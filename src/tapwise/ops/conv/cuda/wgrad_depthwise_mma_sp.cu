// Weight gradient of depthwise convolution of stride 1 on sparse tensor cores: diagonals of products, pixels read as
// they lie.
//
// A place is up to 8 columns of a row of dy of an image, and the columns of x that its taps meet in one row. 16 places
// make a product of two channels:
//
//     D (2 channels x 8 columns of dy) x (8 columns of x) += A (2 x 8 x 16 places x 2) * B (16 places x 2 x 8)
//
// so D[j][i] has the terms of tap i - j of one row of taps. What A has between different channels is zero, two in four,
// and is not multiplied (mma.sp): so a word of shared memory, two channels of a pixel, is a pair of B as it lies, and A
// takes halves of two words. Places of a product are images and units of columns, which go down the rows together: a
// row of x comes to registers once for all rows of dy that meet it, which stay in registers.
#include "ops/conv/cuda/wgrad_stages.cuh"

// T; CHANNELS of a block, EACH of a warp, SHARE warps of the same channels; UNITS of WIDTH columns of dy in a strip,
// with TILES of 8 columns of x; IMAGES of a set, in fours; ROWS of a stage; STAGES; R rows of taps of a block, S; DH,
// DW: dilations; SPLIT, CLUSTER, COPIERS, ALIGNED, PITCH, TAKES, LEAVES: wgrad_stages.cuh.
template <class Traits> struct SparseTile : Traits {
    using B = Traits;
    static constexpr int GROUP = 1, OCTETS = B::CHANNELS / 8, ACROSS = B::CHANNELS / B::EACH, PAIRS = B::EACH / 2,
                         CONSUMERS = 32 * ACROSS * B::SHARE;
    // Fours of images of a unit, that is of places.
    static constexpr int FOURS = B::UNITS * B::IMAGES / 4;
    static_assert((B::S - 1) * B::DW + B::WIDTH <= 8 * B::TILES && B::IMAGES % 4 == 0 && FOURS <= 4 * B::SHARE &&
                  B::SH == 1 && B::SW == 1);
    static constexpr int TAPS = B::R * B::S, SUMS = B::CHANNELS * TAPS, TERMS = B::SHARE * B::WIDTH;
    static constexpr int OWN_SUMS = (SUMS + B::CLUSTER - 1) / B::CLUSTER;
    static_assert(B::CLUSTER == 1 || !B::SPLIT);
    // Pixels of an image's row: two more than a multiple of four, so that lanes that have four images, and columns
    // beside each other, read from all banks.
    // Where even and odd columns, and images, lie in boxes of their own, columns are an even number.
    static constexpr bool HALVES = B::ALIGNED == 8;
    static_assert(!HALVES || B::EACH == 4);
    static constexpr int pitch(int columns) { return HALVES ? (columns + 1) / 2 * 2 : (columns + 1) / 4 * 4 + 2; }
    static constexpr int STRIP = B::UNITS * B::WIDTH, COLUMNS_X = pitch(STRIP + (B::S - 1) * B::DW),
                         COLUMNS_DY = pitch(STRIP);
    // Columns that a row is read beyond its end, whatever lies there: taps that they meet are not kept.
    static constexpr int beyond(int read, int columns) { return read > columns ? read - columns : 0; }
    static constexpr int BEFORE = STRIP - B::WIDTH, BEYOND_X = beyond(BEFORE + 8 * B::TILES, COLUMNS_X),
                         BEYOND_DY = beyond(BEFORE + 8, COLUMNS_DY);
    // Bytes of a pixel of so many channels that may begin 8 bytes further: TMA takes twice as long for 80 as for 64.
    static constexpr int whole_pixel(int channels) { return channels <= 28 ? 64 : 128; }
    // A stage's rows, of all its images, are boxes of whole patterns of swizzled pieces. Bytes from one to the next.
    static constexpr int ROWS_X = B::ROWS, ZEROS = 0, BOXES_X = B::ROWS, BOXES_DY = B::ROWS,
                         PIXEL = HALVES ? whole_pixel(B::CHANNELS) : 2 * B::CHANNELS;
    static constexpr int bytes(int columns) { return B::IMAGES * columns * PIXEL; }
    static constexpr int whole(int bytes) { return (bytes + 1023) / 1024 * 1024; }
    // Bytes from one of a row's boxes to the next: whole patterns of swizzled pieces.
    static constexpr int half(int columns) { return (bytes(columns) / 4 + 8 * PIXEL - 1) / (8 * PIXEL) * (8 * PIXEL); }
    static constexpr int HALF_X = half(COLUMNS_X), HALF_DY = half(COLUMNS_DY);
    static constexpr int row(int columns, int beyond) {
        return whole(HALVES ? 4 * half(columns) + (beyond + 1) / 2 * PIXEL : bytes(columns) + beyond * PIXEL);
    }
    static constexpr int ROW_X = row(COLUMNS_X, BEYOND_X), ROW_DY = row(COLUMNS_DY, BEYOND_DY);
    static constexpr int BYTES_X = B::ROWS * bytes(COLUMNS_X), BYTES_DY = B::ROWS * bytes(COLUMNS_DY);
    static constexpr int DY_AT = B::ROWS * ROW_X, STAGE = DY_AT + B::ROWS * ROW_DY;
    // Rows of dy that a row of x meets at most.
    static constexpr int LIVE = (B::R - 1) * B::DH + 1;
    // Stages that are unrolled, so that rows of dy stay where they are; rows of x that are left when the last stage is.
    static constexpr int turns(int rows) { return rows % LIVE == 0 ? rows / B::ROWS : turns(rows + B::ROWS); }
    static constexpr int TURNS = turns(B::ROWS), TRAIL = ROWS_X;

    static DEVICE constexpr int pixel_x(int image, int row) { return row * (ROW_X / PIXEL) + image * COLUMNS_X; }
    static DEVICE constexpr int pixel_dy(int image, int row) { return row * (ROW_DY / PIXEL) + image * COLUMNS_DY; }
    // Where a channel of a column of an image lies in a row of a stage; COLUMNS of it come.
    template <int COLUMNS> static DEVICE unsigned place(int image, int column, int channel) {
        if constexpr (!HALVES) return swizzled<PIXEL>(image * COLUMNS + column, channel * 2);
        return (image % 2 * 2 + column % 2) * half(COLUMNS) +
               swizzled<PIXEL>(image / 2 * (COLUMNS / 2) + column / 2, channel * 2);
    }
    // The same of another tile: eight columns further, or four of every second one.
    static DEVICE unsigned of_tile(unsigned word, int tile) {
        if constexpr (!HALVES) return word + tile * (8 * PIXEL);
        return (tile % 2 ? word ^ PIXEL / 2 : word) + tile * (4 * PIXEL);
    }
};

// What a warp has: where its lanes' words lie, rows of dy that a row of x meets, and sums.
template <class P> struct SparseWarp {
    using Words = Piece<2 * P::EACH>;
    unsigned x[4], dy[4];
    // Whether there are such places of dy.
    bool real[4];
    unsigned live[P::LIVE][P::PAIRS][4];
    // Of pixels of odd multiples of 8 bytes: which words of x (bits 0 to 3) and of dy (bits 4 to 7) are of odd columns
    // and images, and which lie 8 bytes further in the row that is next; the bits of an address that do, and of those
    // which change from row to row.
    static constexpr unsigned X = 0x0f, DY = 0xf0;
    unsigned columns_odd = 0, images_odd = 0, further = 0, bits, changes_x, changes_dy;
    // Of the row of x that is multiplied next, if there is one.
    unsigned columns[P::TILES][P::PAIRS][4];
    bool waits;
    float sums[P::PAIRS][P::TILES][P::R][4] = {};
    int channel, share;

    // A lane has column lane / 4 of a unit. Of x it has place 4 * i + lane % 4 in word i, of dy 8 * (i / 2) + 2 *
    // (lane % 4) + i % 2. Lanes beside each other have other images of a four in both.
    DEVICE explicit SparseWarp(int warp) : channel(warp % P::ACROSS * P::EACH), share(warp / P::ACROSS) {
        const int column = threadIdx.x % 32 / 4, t = threadIdx.x % 4;
        const auto four = [&](int place) { return min(share * 4 + place / 4, P::FOURS - 1); };
        const auto image = [&](int place) { return four(place) / P::UNITS * 4 + (place % 4 ^ place / 4 % 2); };
        const auto column_of = [&](int place) { return four(place) % P::UNITS * P::WIDTH + column; };
#pragma unroll
        for (int i = 0; i < 4; ++i) {
            const int of_x = 4 * i + t, place = i / 2 * 8 + t * 2 + i % 2;
            x[i] = P::template place<P::COLUMNS_X>(image(of_x), column_of(of_x), channel);
            dy[i] = P::DY_AT + P::template place<P::COLUMNS_DY>(image(place), column_of(place), channel);
            real[i] = share * 4 + place / 4 < P::FOURS;
            // Of images of an even number of pixels.
            columns_odd |= (column_of(of_x) & 1) << i | (column_of(place) & 1) << (4 + i);
            images_odd |= (image(of_x) & 1) << i | (image(place) & 1) << (4 + i);
        }
    }
    DEVICE void begin(const StageRuns<P> &runs, int channel0) {
        waits = false;
        if constexpr (P::HALVES) begin_halves(runs, channel0);
#pragma unroll
        for (int l = 0; l < P::LIVE; ++l)
#pragma unroll
            for (int pair = 0; pair < P::PAIRS; ++pair)
#pragma unroll
                for (int k = 0; k < 4; ++k) live[l][pair][k] = 0;
    }
    DEVICE void begin_halves(const StageRuns<P> &runs, int channel0) {
        const StagedWgrad &a = runs.a;
        const auto both = [](int of_x, int of_dy) { return (of_x & 1 ? X : 0) | (of_dy & 1 ? DY : 0); };
        const int width = a.width, q = a.q, piece = channel / 8;
        const unsigned first = columns_odd ^ images_odd & both((int)a.height * width, (int)a.p * q) ^
                               both(runs.top * width + runs.left + channel0 / 4, runs.row * q + runs.q0 + channel0 / 4);
        bits = channel % 8 ? 8 | (piece ^ (piece + 1)) << 4 : 8;
        changes_x = width & 1 ? bits : 0, changes_dy = q & 1 ? bits : 0;
#pragma unroll
        for (int i = 0; i < 4; ++i) {
            x[i] ^= (first ^ further) >> i & 1 ? bits : 0;
            dy[i] ^= (first ^ further) >> (4 + i) & 1 ? bits : 0;
        }
        further = first;
    }
    DEVICE void next_row_of_halves() {
        further ^= (changes_x ? X : 0) | (changes_dy ? DY : 0);
#pragma unroll
        for (int i = 0; i < 4; ++i) x[i] ^= changes_x, dy[i] ^= changes_dy;
    }
    // A stage comes to registers row by row, while the row before is multiplied.
    DEVICE void multiply(unsigned stage, bool of_x, int of_run, int count, int turn) {
#pragma unroll
        for (int row = 0; row < P::ROWS; ++row) {
            const int slot = (turn * P::ROWS + row) % P::LIVE;
            Words from_x[P::TILES][4], from_dy[4] = {};
            if (of_x)
#pragma unroll
                for (int tile = 0; tile < P::TILES; ++tile)
#pragma unroll
                    for (int i = 0; i < 4; ++i)
                        from_x[tile][i] = load_shared<2 * P::EACH>(stage + row * P::ROW_X + P::of_tile(x[i], tile));
            if ((unsigned)(of_run + row) < (unsigned)count)
#pragma unroll
                for (int i = 0; i < 4; ++i) {
                    from_dy[i] = load_shared<2 * P::EACH>(stage + row * P::ROW_DY + dy[i]);
                    if (P::FOURS % 4 && !real[i]) from_dy[i] = {};
                }
            if constexpr (P::HALVES) next_row_of_halves();
            if (waits) multiply_row((slot + P::LIVE - 1) % P::LIVE);
            // Both places of a channel: of the first one, of the second one.
#pragma unroll
            for (int pair = 0; pair < P::PAIRS; ++pair)
#pragma unroll
                for (int k = 0; k < 4; ++k)
                    live[slot][pair][k] = __byte_perm(from_dy[k / 2 * 2].v[pair], from_dy[k / 2 * 2 + 1].v[pair],
                                                      k % 2 ? 0x7632 : 0x5410);
            waits = of_x;
#pragma unroll
            for (int tile = 0; tile < P::TILES; ++tile)
#pragma unroll
                for (int pair = 0; pair < P::PAIRS; ++pair)
#pragma unroll
                    for (int i = 0; i < 4; ++i) {
                        columns[tile][pair][i] = from_x[tile][i].v[pair];
                        keep_in_register(columns[tile][pair][i]);
                    }
        }
    }
    // The row of x that waits, with the rows of dy that it meets: the newest lies in `slot`.
    DEVICE void multiply_row(int slot) {
#pragma unroll
        for (int tile = 0; tile < P::TILES; ++tile)
#pragma unroll
            for (int pair = 0; pair < P::PAIRS; ++pair)
#pragma unroll
                for (int r = 0; r < P::R; ++r)
                    mma_two_channels<typename P::T>(
                        sums[pair][tile][r], live[(slot + P::LIVE - r * P::DH) % P::LIVE][pair], columns[tile][pair]);
    }
    // Terms of taps, of each column of a unit.
    DEVICE void keep(float *all) const {
        const int lane = threadIdx.x % 32, column = lane / 4;
        float *const terms = all + (share * P::WIDTH + column) * P::PITCH;
#pragma unroll
        for (int tile = 0; tile < P::TILES; ++tile)
#pragma unroll
            for (int e = 0; e < 2; ++e) {
                const int distance = 8 * tile + lane % 4 * 2 + e - column, s = distance / P::DW;
                if (distance < 0 || s * P::DW != distance || s >= P::S || column >= P::WIDTH) continue;
#pragma unroll
                for (int pair = 0; pair < P::PAIRS; ++pair)
#pragma unroll
                    for (int second = 0; second < 2; ++second)
#pragma unroll
                        for (int r = 0; r < P::R; ++r)
                            terms[(channel + 2 * pair + second) * P::TAPS + r * P::S + s] =
                                sums[pair][tile][r][2 * second + e];
            }
    }
};

template <class Traits> DEVICE void wgrad_depthwise_mma_sp(const StagedWgrad &a) {
    using P = SparseTile<Traits>;
    wgrad_by_stages<P, SparseWarp<P>>(a);
}
