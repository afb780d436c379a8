// Convolution of a few channels on tensor cores (mma.sync), x and y in NCHW. A tile's rows of x lie in shared memory as
// they are, those of an image row's channels one behind the other: a pixel's window is a run of S neighbours in each of
// R * C rows, as far from each other. The matrix instruction's right operand, 8 pixels by 32 bytes of gemm_k, is read
// straight from these runs; its left one are filters, so that a thread's sums are neighbours in a row of y.
//
// Of 16 bytes of gemm_k thread t of four holds a word: RUNS runs have 4 / RUNS neighbouring words each. The order of
// gemm_k is free, and in this one all of a thread's words lie as far behind its first as those of others.
//
// Runs that begin in the middle of a word: few_channels.cu. What is beside a run in its words is masked.
#pragma once

#include "ops/conv/cuda/few_channels.cuh"

// C channels, filters of R x S. FILTERS at a time, 16 a step of the instruction; a warp takes ROWS x 16 pixels at a
// time. ORDER of them are permuted so that a thread has ORDER / 4 neighbours, of which V are written at once. COPY:
// bytes of a piece of x, 0 where rows are no multiple of words. PARITY: whether runs begin at even elements of shared
// memory, at odd ones, or alternately: then pixels of one kind come together in the blocks of 8 that are multiplied.
template <typename T_, int C_, int R_, int S_, int FILTERS_, int ROWS_, int ORDER_, int V_, int COPY_, int PARITY_,
          int RUNS_, bool BIAS_, bool RESIDUAL_, int ACTIVATION_>
struct Planes {
    using T = T_;
    static constexpr int C = C_, R = R_, S = S_, FILTERS = FILTERS_, ORDER = ORDER_, V = V_, COPY = COPY_,
                         PARITY = PARITY_, RUNS = RUNS_, ACTIVATION = ACTIVATION_;
    static constexpr bool BIAS = BIAS_, RESIDUAL = RESIDUAL_;
    static constexpr int SIZE = sizeof(T), EACH = 4 / SIZE, PIXELS = 16 * ROWS_, BLOCKS = PIXELS / 8,
                         SIXTEENS = FILTERS / 16;
    // Rows of x in each row of the image; elements from a pixel to its neighbour.
    static constexpr int PLANES = C, PIXEL = 1;
    static constexpr int KINDS = PARITY == BOTH ? 2 : 1, SHIFT = PARITY != EVEN, GRAIN = (COPY ? COPY : 4) / SIZE;
    // Neighbouring words of a run that threads of four hold, pieces of so many; groups of RUNS runs; 16 bytes of gemm_k
    // each, and steps of two of them.
    static constexpr int WORDS = 4 / RUNS, PIECES = ((S + SHIFT) * SIZE + 4 * WORDS - 1) / (4 * WORDS),
                         GROUPS = (R * C + RUNS - 1) / RUNS, HALVES = GROUPS * PIECES, STEPS = (HALVES + 1) / 2;
    // The last group may have fewer runs. In its first piece, or its last, a run may not have all elements.
    static constexpr bool SHORT = R * C % RUNS, HEAD = SHIFT, TAIL = PARITY == BOTH || (S + SHIFT) * SIZE % (4 * WORDS);
    static constexpr int THREADS = 128, WARPS = THREADS / 32;
    // Neighbours in y of a thread, blocks of 8 pixels that have them.
    static constexpr int BESIDE = ORDER / 4, UNIT = ORDER / 8;
    static_assert(FILTERS % 16 == 0 && PIXELS % ORDER == 0 && BESIDE % V == 0 && V * SIZE <= 16);
    static_assert(SIZE == 2 || (PARITY == EVEN && COPY >= 4));
    static_assert(KINDS == 1 || UNIT % 2 == 0);
    // Of a warp's pixels the one that is a column of a block.
    static DEVICE int pixel(int block, int column) {
        const int t = column / 2, e = column % 2, j = block % UNIT;
        return block / UNIT * ORDER + t * BESIDE + (KINDS == 2 ? j / 2 * 4 + 2 * e + j % 2 : 2 * j + e);
    }
    // Of a thread's neighbour `i` of a unit: the block, and which of two columns.
    static constexpr int block_of(int i) { return KINDS == 2 ? i / 4 * 2 + i % 2 : i / 2; }
    static constexpr int column_of(int i) { return KINDS == 2 ? i / 2 % 2 : i % 2; }
    // The elements of a run's word that are the window's.
    static DEVICE unsigned mask(int word, int odd) {
        const int first = word * EACH - odd;
        if (SIZE == 4) return first < S ? ~0u : 0;
        return ((unsigned)first < (unsigned)S ? 0xffff : 0) | ((unsigned)(first + 1) < (unsigned)S ? 0xffff0000 : 0);
    }
};

template <int COUNT> DEVICE void move(unsigned (&window)[COUNT], int by) {
#pragma unroll
    for (int i = 0; i < COUNT; ++i) {
        window[i] += by;
        // The compiler would else work out all places before, and spill them.
        asm volatile("" : "+r"(window[i]));
    }
}

template <class T, int BYTES> DEVICE float element_of(const Piece<BYTES> &piece, int i) {
    if constexpr (sizeof(T) == 4) return __uint_as_float(piece.v[i]);
    else return Element<T>::to_float(T{(unsigned short)(piece.v[i / 2] >> i % 2 * 16)});
}

// A warp's sums of one chunk of filters to y: pixels from `first` of a tile on; `filter0`: this thread's first filter.
template <class O>
DEVICE void finish_pixels(const Tiles &p, const float (&d)[O::SIXTEENS][O::BLOCKS][4], const TileOrigin &at, int first,
                          int filter0) {
    using T = typename O::T;
    constexpr int V = O::V, SIZE = O::SIZE;
    T *const y = static_cast<T *>(p.y);
    const T *const residual = static_cast<const T *>(p.residual);
    const int k = p.k, q = p.q, plane = (int)p.p * q, across = p.across;
    const int mine = (at.n * k + filter0) * plane;
#pragma unroll
    for (int i = 0; i < O::PIXELS / 4; i += V) {
        const int unit = i / O::BESIDE, within = i % O::BESIDE;
        const int pixel = first + unit * O::ORDER + threadIdx.x % 4 * O::BESIDE + within;
        const int row = divide(pixel, p.per_column), column = pixel - row * across;
        if (row >= (int)p.down || at.h + row >= (int)p.p || at.w + column >= q) continue;
        const int place = mine + (at.h + row) * q + at.w + column;
#pragma unroll
        for (int m = 0; m < O::SIXTEENS; ++m) {
            Piece<V * SIZE> more[2];
            if constexpr (O::RESIDUAL)
#pragma unroll
                for (int high = 0; high < 2; ++high)
                    if (filter0 + m * 16 + high * 8 < k)
                        more[high] = load_global<V * SIZE>(residual + place + (m * 16 + high * 8) * plane);
#pragma unroll
            for (int high = 0; high < 2; ++high) {
                float v[V];
#pragma unroll
                for (int e = 0; e < V; ++e) {
                    const int block = unit * O::UNIT + O::block_of(within + e);
                    v[e] = d[m][block][high * 2 + O::column_of(within + e)];
                    if constexpr (O::RESIDUAL) v[e] += element_of<T>(more[high], e);
                }
                Piece<V * SIZE> out;
                if constexpr (SIZE == 4)
#pragma unroll
                    for (int e = 0; e < V; ++e) out.v[e] = __float_as_uint(activated<O::ACTIVATION>(v[e]));
                else if constexpr (V == 1) out.v[0] = Element<T>::from_float(activated<O::ACTIVATION>(v[0])).bits;
                else
#pragma unroll
                    for (int e = 0; e < V; e += 2) out.v[e / 2] = activated<T, O::ACTIVATION>(v[e], v[e + 1]);
                if (filter0 + m * 16 + high * 8 < k)
                    store_global<V * SIZE>(y + place + (m * 16 + high * 8) * plane, out);
            }
        }
    }
}

template <class O> DEVICE void few_channels_planes(const Tiles &p) {
    using T = typename O::T;
    extern __shared__ __align__(16) unsigned char memory[];
    const int thread = threadIdx.x, warp = thread / 32, lane = thread % 32, quad = lane % 4;
    const int chunks = ((int)p.k + O::FILTERS - 1) / O::FILTERS;
    constexpr unsigned CHUNK = O::STEPS * O::SIXTEENS * 512;
    const unsigned filters = shared_address(memory), filter_bytes = O::KINDS * chunks * CHUNK;
    const unsigned images = filters + filter_bytes, pitch = p.pitch, stage = (unsigned)p.image_rows * pitch;
    const TileOrigin first = first_tile(p);
    begin_filters<O>(p, filters, filter_bytes);
    const int across = p.across, down = p.down, tiles = p.tiles;
    // From a group of runs to the next one; where runs are groups, from the last channel to the filter's next row.
    const int next_group = O::RUNS * (int)pitch, next_row = (((int)p.dilation_h - 1) * O::C + 1) * (int)pitch;
    const int image_step = (int)p.stride_h * O::C * (int)pitch, pixel_step = (int)p.stride_w * O::SIZE;
    const int warp_tiles = (across * down + O::PIXELS - 1) / O::PIXELS;
    // This thread's word of each group, and whether the last one has its run.
    const int word = quad % O::WORDS, own = quad / O::WORDS * (int)pitch + word * 4;
    const unsigned last = quad / O::WORDS < O::R * O::C - (O::GROUPS - 1) * O::RUNS ? ~0u : 0;
    const auto begin_tile = [&](const TileOrigin &at, unsigned to) {
        const int begin = at.w * (int)p.stride_w - (int)p.pad_w;
        load_rows<O>(p, to, at.n, at.h * (int)p.stride_h - (int)p.pad_h, begin - (begin & O::GRAIN - 1));
    };
    begin_tile(first, images);
    unsigned image = images;
    for (int tile = blockIdx.x; tile < tiles; tile += gridDim.x) {
        // The next tile's rows are on their way while this one is multiplied.
        const unsigned other = images + images + stage - image;
        if (tile + (int)gridDim.x < tiles)
            begin_tile(TileOrigin(tile + gridDim.x, p.tiles_h, p.tiles_w, down, across), other);
        else cp_async_commit();
        cp_async_wait<1>();
        __syncthreads();
        const TileOrigin at(tile, p.tiles_h, p.tiles_w, down, across);
        const int lead = at.w * (int)p.stride_w - (int)p.pad_w & O::GRAIN - 1;
        // Of blocks by turns: how far their runs begin within a word; what is theirs in its first piece and its last.
        int odd[O::KINDS];
        unsigned head[O::KINDS], tail[O::KINDS];
#pragma unroll
        for (int kind = 0; kind < O::KINDS; ++kind) {
            odd[kind] = O::PARITY == BOTH ? kind ^ lead & 1 : O::PARITY;
            head[kind] = O::mask(word, odd[kind]);
            tail[kind] = O::mask((O::PIECES - 1) * O::WORDS + word, odd[kind]);
        }
        for (int warp_tile = warp; warp_tile < warp_tiles; warp_tile += O::WARPS) {
            unsigned window[O::BLOCKS];
#pragma unroll
            for (int block = 0; block < O::BLOCKS; ++block) {
                const int pixel = warp_tile * O::PIXELS + O::pixel(block, lane / 4);
                const int row = divide(pixel, p.per_column), column = pixel - row * across;
                const bool real = row < down && at.h + row < (int)p.p && at.w + column < (int)p.q;
                // Columns are even and odd by turns, as the blocks of BOTH kinds are.
                const int begin = row * image_step + (lead - odd[block % O::KINDS]) * O::SIZE + column * pixel_step;
                window[block] = image + (real ? begin : 0) + own;
            }
            for (int chunk = 0; chunk < chunks; ++chunk) {
                const int filter0 = chunk * O::FILTERS + lane / 4;
                float d[O::SIXTEENS][O::BLOCKS][4];
#pragma unroll
                for (int m = 0; m < O::SIXTEENS; ++m)
#pragma unroll
                    for (int high = 0; high < 2; ++high) {
                        const int filter = filter0 + m * 16 + high * 8;
                        float bias = 0;
                        if (O::BIAS && filter < (int)p.k)
                            bias = Element<T>::to_float(static_cast<const T *>(p.bias)[filter]);
#pragma unroll
                        for (int block = 0; block < O::BLOCKS; ++block)
                            d[m][block][2 * high] = d[m][block][2 * high + 1] = bias;
                    }
#pragma unroll
                for (int step = 0; step < O::STEPS; ++step) {
                    unsigned right[O::BLOCKS][2];
#pragma unroll
                    for (int half = 0; half < 2; ++half) {
                        const int number = 2 * step + half, piece = number % O::PIECES, group = number / O::PIECES;
                        if (number > 0 && piece == 0)
                            move(window, O::RUNS == 1 && group % O::C == 0 ? next_row : next_group);
#pragma unroll
                        for (int block = 0; block < O::BLOCKS; ++block) {
                            unsigned v = number < O::HALVES ? load_word(window[block] + piece * (4 * O::WORDS)) : 0;
                            if (O::HEAD && piece == 0) v &= head[block % O::KINDS];
                            if (O::TAIL && piece == O::PIECES - 1) v &= tail[block % O::KINDS];
                            if (O::SHORT && group == O::GROUPS - 1) v &= last;
                            right[block][half] = v;
                        }
                    }
#pragma unroll
                    for (int kind = 0; kind < O::KINDS; ++kind) {
                        const unsigned mine =
                            filters + ((O::PARITY == BOTH ? odd[kind] * chunks : 0) + chunk) * CHUNK + lane * 16;
                        Piece<16> left[O::SIXTEENS];
#pragma unroll
                        for (int m = 0; m < O::SIXTEENS; ++m)
                            left[m] = load_shared<16>(mine + (step * O::SIXTEENS + m) * 512);
#pragma unroll
                        for (int m = 0; m < O::SIXTEENS; ++m)
#pragma unroll
                            for (int block = kind; block < O::BLOCKS; block += O::KINDS)
                                mma<T>(d[m][block], left[m].v, right[block]);
                    }
                }
                // Back to the first row; one that only the last half would have begun is counted too.
                constexpr int MOVES = (2 * O::STEPS - 1) / O::PIECES, ROW_MOVES = O::RUNS == 1 ? MOVES / O::C : 0;
                move(window, -(MOVES - ROW_MOVES) * next_group - ROW_MOVES * next_row);
                finish_pixels<O>(p, d, at, warp_tile * O::PIXELS, filter0);
            }
        }
        // This tile has been read.
        __syncthreads();
        image = other;
    }
    cp_async_wait<0>();
}

// Filters as the instruction's left operands: y[kind][chunk][step][16 filters][thread][4 words], zeros before and
// behind runs, and behind the last filter.
template <class O> DEVICE void pack_fragments(const Fragments &p) {
    using T = typename O::T;
    begin_dependent();
    for (int i = blockIdx.x * 256 + threadIdx.x; i < (int)p.words; i += gridDim.x * 256) {
        const int high = i % 2, half = i / 2 % 2, lane = i / 4 % 32, quad = lane % 4, rest = i / 128 / O::SIXTEENS;
        const int step = rest % O::STEPS, chunk = rest / O::STEPS, kind = chunk / (int)p.chunks;
        const int odd = O::PARITY == BOTH ? kind : O::PARITY;
        const int filter =
            (chunk - kind * (int)p.chunks) * O::FILTERS + i / 128 % O::SIXTEENS * 16 + high * 8 + lane / 4;
        const int number = 2 * step + half, run = number / O::PIECES * O::RUNS + quad / O::WORDS;
        const int first = (number % O::PIECES * O::WORDS + quad % O::WORDS) * O::EACH - odd, r = run / O::C,
                  c = run % O::C;
        unsigned word = 0;
#pragma unroll
        for (int e = 0; e < O::EACH; ++e) {
            const int s = first + e;
            if (run >= O::R * O::C || s < 0 || s >= O::S || filter >= (int)p.k) continue;
            const T v = static_cast<const T *>(p.w)[filter * p.step_k + c * p.step_c + r * p.step_r + s * p.step_s];
            if constexpr (O::SIZE == 4) word = __float_as_uint(to_tf32(v));
            else word |= (unsigned)v.bits << 16 * e;
        }
        static_cast<unsigned *>(p.y)[i] = word;
    }
}
