// Convolution in many groups of few channels on tensor cores (mma.sync), channels last. The pixels that a tile of
// outputs reaches lie in shared memory with the channels of some groups; a window's tap of a group is 8 or 16 bytes
// there, and the matrix instruction's left operand, 16 pixels by 16 terms, is read straight from them. Each group has
// its own instructions: none multiplies another group's channels by zeros, so an infinity stays in its group.
#pragma once

#include "row_loads.cuh"

struct Tiles {
    const void *x, *w;
    void *y;
    const void *bias, *residual;
    long long n, height, width, c, k, p, q, stride_h, stride_w, pad_h, pad_w, dilation_h, dilation_w;
    // Outputs of a tile along both axes, tiles of an image and all; rows and columns of x of a tile; tiles of groups;
    // 2^32 over the outputs of a row and over the pieces of a row of x for divisions, 0 for 1.
    long long down, across, tiles_h, tiles_w, tiles, image_rows, columns, group_tiles, per_across, per_piece;
};

// GC channels and GK filters of a group, filters of R x S; GROUPS_PER_TILE groups in a block, SUB of them make 32
// filters; a warp takes ROWS x 16 pixels and SUB groups at a time.
template <typename T_, int GC_, int GK_, int R_, int S_, int GROUPS_PER_TILE_, int ROWS_, bool BIAS_, bool RESIDUAL_,
          int ACTIVATION_>
struct Narrow {
    using T = T_;
    static constexpr int GC = GC_, GK = GK_, R = R_, S = S_, GROUPS_PER_TILE = GROUPS_PER_TILE_, ROWS = ROWS_,
                         ACTIVATION = ACTIVATION_;
    static constexpr bool BIAS = BIAS_, RESIDUAL = RESIDUAL_;
    static constexpr int TAPS = R * S, BLOCKS = (GK + 7) / 8, SUB = 32 / GK;
    // Halves of an operand, 8 terms: two taps of 4 channels, or a part of a tap.
    static constexpr int HALVES = GC == 4 ? (TAPS + 1) / 2 : TAPS * (GC / 8), STEPS = (HALVES + 1) / 2;
    // Bytes of a pixel's channels, and from one pixel to the next: 16 more, so that eight neighbours lie in all banks.
    static constexpr int CHANNELS = GROUPS_PER_TILE * GC * 2, PIXEL = CHANNELS + 16;
    static constexpr int FILTERS = GROUPS_PER_TILE * STEPS * BLOCKS * 256;
    static constexpr int THREADS = 128, WARPS = THREADS / 32;
    // A warp's outputs on their way to y, a row of 32 filters for each pixel.
    static constexpr int PITCH = 80, SCRATCH = 16 * PITCH;
    static_assert(GC == 4 || GC % 8 == 0);
    static_assert(32 % GK == 0 && GK >= 4 && GROUPS_PER_TILE % SUB == 0 && CHANNELS % 16 == 0);
};

template <typename T> DEVICE void add_two(float (&v)[2], unsigned word) {
    v[0] += Element<T>::to_float(T{(unsigned short)(word & 0xffff)});
    v[1] += Element<T>::to_float(T{(unsigned short)(word >> 16)});
}

// The pixels that a tile reaches, from row h0 and column w0 on, zeros outside x.
template <class O> DEVICE void load_pixels(const Tiles &p, unsigned to, int n, int h0, int w0, int channel0) {
    using T = typename O::T;
    constexpr int EACH = O::CHANNELS / 16;
    const int columns = p.columns, pieces = columns * EACH, count = (int)p.image_rows * pieces;
    const int height = p.height, width = p.width;
    const T *const image = static_cast<const T *>(p.x) + (long long)n * height * width * p.c + channel0;
#pragma unroll 4
    for (int i = threadIdx.x; i < count; i += O::THREADS) {
        const int image_row = divide(i, p.per_piece), rest = i - image_row * pieces;
        const int column = rest / EACH, piece = rest % EACH;
        const int h = h0 + image_row, w = w0 + column;
        // A last tile may have more groups than are left.
        const bool there =
            (unsigned)h < (unsigned)height && (unsigned)w < (unsigned)width && channel0 + piece * 8 < (int)p.c;
        const T *const from = there ? image + ((long long)h * width + w) * p.c + piece * 8 : image;
        cp_async<16>(to + (image_row * columns + column) * O::PIXEL + piece * 16, from, there);
    }
    cp_async_commit();
}

// Sums of 16 pixels and 32 filters, 8 x 8 blocks of a group beside those of the next, through a warp's part of shared
// memory to y. `places` of rows g and g + 8, -1 where there is none; `filter0`: the first of the 32.
template <class O>
DEVICE void finish_groups(const Tiles &p, const float (&d)[O::SUB][O::BLOCKS][4], const int (&places)[2], int filter0,
                          unsigned scratch) {
    using T = typename O::T;
    const int lane = threadIdx.x % 32, quad = lane % 4, row = lane / 4;
    const unsigned whole = scratch + row * O::PITCH + quad * 16;
    const int first = filter0 + quad * 8, k = p.k;
    // What was there before has been read.
    __syncwarp();
    if constexpr (O::RESIDUAL) {
        Piece<16> v[2] = {};
#pragma unroll
        for (int i = 0; i < 2; ++i)
            if (places[i] >= 0 && first < k)
                v[i] = load_global<16>(static_cast<const T *>(p.residual) + places[i] + first);
#pragma unroll
        for (int i = 0; i < 2; ++i) store_shared<16>(whole + i * 8 * O::PITCH, v[i]);
        __syncwarp();
    }
#pragma unroll
    for (int group = 0; group < O::SUB; ++group)
#pragma unroll
        for (int block = 0; block < O::BLOCKS; ++block) {
            const int filter = group * O::GK + block * 8 + quad * 2;
            // ptxas would begin with more activations than there are registers for.
            if (O::ACTIVATION >= SILU) __syncwarp();
            // Tiles of four filters leave half of a block.
            if (O::GK == 4 && quad >= 2) continue;
            unsigned bias = 0;
            if (O::BIAS && filter0 + filter < k)
                bias = *reinterpret_cast<const unsigned *>(static_cast<const T *>(p.bias) + filter0 + filter);
#pragma unroll
            for (int i = 0; i < 2; ++i) {
                const unsigned word = scratch + (row + i * 8) * O::PITCH + filter * 2;
                float v[2] = {d[group][block][i * 2], d[group][block][i * 2 + 1]};
                if constexpr (O::BIAS) add_two<T>(v, bias);
                if constexpr (O::RESIDUAL) add_two<T>(v, load_word(word));
                store_word(word, activated<T, O::ACTIVATION>(v[0], v[1]));
            }
        }
    __syncwarp();
#pragma unroll
    for (int i = 0; i < 2; ++i) {
        const Piece<16> v = load_shared<16>(whole + i * 8 * O::PITCH);
        if (places[i] >= 0 && first < k) store_global<16>(static_cast<T *>(p.y) + places[i] + first, v);
    }
}

template <class O> DEVICE void narrow_groups(const Tiles &p) {
    using T = typename O::T;
    extern __shared__ uint4 memory[];
    const int thread = threadIdx.x, warp = thread / 32, lane = thread % 32, quad = lane % 4;
    // Zeros for halves behind the last tap; the filters; outputs on their way; pixels of two tiles.
    const unsigned zeros = shared_address(memory), filters = zeros + 16, scratches = filters + O::FILTERS;
    const unsigned images = scratches + O::WARPS * O::SCRATCH, stage = (unsigned)(p.image_rows * p.columns) * O::PIXEL;
    const int group_tile = blockIdx.x % (int)p.group_tiles, tiles = p.tiles,
              step_tiles = gridDim.x / (int)p.group_tiles;
    const int across = p.across, down = p.down, outputs = across * down;
    const int image_row_bytes = (int)p.columns * O::PIXEL, next_row = (int)p.dilation_h * image_row_bytes,
              next_tap = (int)p.dilation_w * O::PIXEL;
    begin_dependent();
    if (thread == 0) store_shared<16>(zeros, {});
    for (unsigned at = thread * 16; at < O::FILTERS; at += O::THREADS * 16)
        cp_async<16>(filters + at, static_cast<const unsigned char *>(p.w) + (long long)group_tile * O::FILTERS + at,
                     true);
    const auto begin_tile = [&](int tile, unsigned to) {
        const TileOrigin at(tile, p.tiles_h, p.tiles_w, down, across);
        load_pixels<O>(p, to, at.n, at.h * (int)p.stride_h - (int)p.pad_h, at.w * (int)p.stride_w - (int)p.pad_w,
                       group_tile * O::GROUPS_PER_TILE * O::GC);
    };
    const int first_tile = blockIdx.x / (int)p.group_tiles;
    begin_tile(first_tile, images);
    unsigned image = images;
    constexpr int PARTS = O::GROUPS_PER_TILE / O::SUB;
    const int warp_tiles = (outputs + 16 * O::ROWS - 1) / (16 * O::ROWS);
    for (int tile = first_tile; tile < tiles; tile += step_tiles) {
        // The next tile's pixels are on their way while this one is multiplied.
        const unsigned other = images + images + stage - image;
        if (tile + step_tiles < tiles) begin_tile(tile + step_tiles, other);
        else cp_async_commit();
        cp_async_wait<1>();
        __syncthreads();
        const TileOrigin at(tile, p.tiles_h, p.tiles_w, down, across);
        for (int warp_tile = warp; warp_tile < warp_tiles * PARTS; warp_tile += O::WARPS) {
            const int part = warp_tile % PARTS, first = warp_tile / PARTS * 16 * O::ROWS, group0 = part * O::SUB;
            const int filter0 = (group_tile * O::GROUPS_PER_TILE + group0) * O::GK;
            // Of 8 channels and more a lane addresses a row of eight, the same of both halves; of 4 a word for each
            // row.
            constexpr int WINDOWS = O::GC == 4 ? 2 : 1;
            unsigned window[O::ROWS][WINDOWS];
            int places[O::ROWS][2];
#pragma unroll
            for (int m = 0; m < O::ROWS; ++m) {
                const auto find = [&](int row16, int &place) {
                    const int pixel = first + m * 16 + row16, row = divide(pixel, p.per_across),
                              column = pixel - row * across;
                    const bool real = row < down && at.h + row < (int)p.p && at.w + column < (int)p.q;
                    place = real ? ((at.n * (int)p.p + at.h + row) * (int)p.q + at.w + column) * (int)p.k : -1;
                    return real ? row * (int)p.stride_h * image_row_bytes + column * (int)p.stride_w * O::PIXEL : 0;
                };
                const int low = find(lane / 4, places[m][0]), high = find(lane / 4 + 8, places[m][1]);
                const unsigned here = image + group0 * O::GC * 2;
                if constexpr (O::GC == 4) {
                    window[m][0] = here + low + quad % 2 * 4;
                    window[m][WINDOWS - 1] = here + high + quad % 2 * 4;
                } else {
                    // Lane l addresses row l % 8 of the first or second eight.
                    const int from = lane % 8 * 4, mine = __shfl_sync(~0u, low, from),
                              second = __shfl_sync(~0u, high, from);
                    window[m][0] = here + (lane / 8 % 2 ? second : mine);
                }
            }
            float d[O::ROWS][O::SUB][O::BLOCKS][4] = {};
            const unsigned mine = filters + group0 * (O::STEPS * O::BLOCKS * 256) + lane * 8;
#pragma unroll
            for (int step = 0; step < O::STEPS; ++step) {
                // Where this lane's terms of both halves lie; behind the last tap there are zeros.
                int further[2];
                bool there[2];
#pragma unroll
                for (int half = 0; half < 2; ++half) {
                    const int number = 2 * step + half;
                    if constexpr (O::GC == 4) {
                        const int tap = 2 * number + quad / 2;
                        there[half] = tap < O::TAPS;
                        further[half] = tap / O::S * next_row + tap % O::S * next_tap;
                    } else {
                        const int tap = number / (O::GC / 8);
                        there[half] = number < O::HALVES;
                        further[half] = tap / O::S * next_row + tap % O::S * next_tap + number % (O::GC / 8) * 16;
                    }
                }
                const bool mine_there = lane < 16 ? there[0] : there[1];
                const int mine_further = lane < 16 ? further[0] : further[1];
#pragma unroll
                for (int group = 0; group < O::SUB; ++group) {
                    Piece<8> right[O::BLOCKS];
#pragma unroll
                    for (int block = 0; block < O::BLOCKS; ++block)
                        right[block] = load_shared<8>(mine + ((group * O::STEPS + step) * O::BLOCKS + block) * 256);
#pragma unroll
                    for (int m = 0; m < O::ROWS; ++m) {
                        unsigned left[4];
                        if constexpr (O::GC == 4) {
#pragma unroll
                            for (int i = 0; i < 4; ++i)
                                left[i] = load_word(there[i / 2] ? window[m][i % 2] + further[i / 2] + group * O::GC * 2
                                                                 : zeros);
                        } else {
                            ldmatrix<4>(left, mine_there ? window[m][0] + mine_further + group * O::GC * 2 : zeros);
                        }
#pragma unroll
                        for (int block = 0; block < O::BLOCKS; ++block)
                            mma<T>(d[m][group][block], left, right[block].v);
                    }
                }
            }
#pragma unroll
            for (int m = 0; m < O::ROWS; ++m)
                finish_groups<O>(p, d[m], places[m], filter0, scratches + warp * O::SCRATCH);
        }
        // This tile has been read.
        __syncthreads();
        image = other;
    }
    cp_async_wait<0>();
}

struct Fragments {
    const void *w;
    void *y;
    // Words of y, filters, and of w in elements: distances of filters, channels and taps.
    long long words, k, step_k, step_c, step_r, step_s;
};

// Filters as the instruction's right operands: y[group][step][8 filters][thread][2 words].
template <class O> DEVICE void pack_fragments(const Fragments &p) {
    begin_dependent();
    for (int i = blockIdx.x * 256 + threadIdx.x; i < (int)p.words; i += gridDim.x * 256) {
        const int half = i % 2, lane = i / 2 % 32, block = i / 64 % O::BLOCKS, rest = i / 64 / O::BLOCKS,
                  step = rest % O::STEPS;
        const int within = block * 8 + lane / 4, filter = rest / O::STEPS * O::GK + within;
        const int number = 2 * step + half, quad = lane % 4;
        const int tap = O::GC == 4 ? 2 * number + quad / 2 : number / (O::GC / 8 ? O::GC / 8 : 1);
        const int c = O::GC == 4 ? quad % 2 * 2 : number % (O::GC / 8 ? O::GC / 8 : 1) * 8 + quad * 2;
        unsigned word = 0;
        if (within < O::GK && tap < O::TAPS && filter < (int)p.k) {
            const auto *w = static_cast<const typename O::T *>(p.w) + filter * p.step_k + c * p.step_c +
                            tap / O::S * p.step_r + tap % O::S * p.step_s;
            word = w[0].bits | (unsigned)w[p.step_c].bits << 16;
        }
        static_cast<unsigned *>(p.y)[i] = word;
    }
}
