// Convolution of a few channels on tensor cores (mma.sync), x channels last. The rows of x that a tile of outputs
// reaches lie in shared memory as they are; there a pixel's window is a run of S * C neighbours in each of R rows, and
// the matrix instruction's left operand, 16 pixels by 32 bytes of gemm_k, is read straight from these runs: a half of
// it, 16 bytes, is a piece of a run, whose thread t of four holds word t.
//
// Elements of two bytes: a run may begin in the middle of a word. It is then read from the word's begin on, and filters
// that were packed an element further leave that element out. What is before a run in its first word, and behind it in
// its last piece, is masked: an infinity there is not the window's.
#pragma once

#include "ops/conv/cuda/few_channels.cuh"

// C channels, filters of R x S. FILTERS at a time, 8 a step of the instruction; a warp takes ROWS x 16 pixels at a
// time. ORDER filters were permuted so that a thread's sums lie side by side in y (include/direct_store.cuh has the
// same order). V of them are written at once. COPY: bytes of a piece of x, 0 where rows are no multiple of words.
// PARITY: whether runs begin at even elements of shared memory, at odd ones, or alternately: then a row's columns of
// one kind come together.
template <typename T_, int C_, int R_, int S_, int FILTERS_, int ROWS_, int ORDER_, int V_, int COPY_, int PARITY_,
          bool BIAS_, bool RESIDUAL_, int ACTIVATION_>
struct Few {
    using T = T_;
    static constexpr int C = C_, R = R_, S = S_, FILTERS = FILTERS_, ROWS = ROWS_, ORDER = ORDER_, V = V_, COPY = COPY_,
                         PARITY = PARITY_, ACTIVATION = ACTIVATION_;
    static constexpr bool BIAS = BIAS_, RESIDUAL = RESIDUAL_;
    static constexpr int SIZE = sizeof(T), EACH = 4 / SIZE, RUN = S * C, BLOCKS = FILTERS / 8;
    // Rows of x in each row of the image; elements from a pixel to its neighbour.
    static constexpr int PLANES = 1, PIXEL = C;
    // Kinds of columns; how far a run may begin within a word; elements of x whose place in shared memory is that in
    // memory.
    static constexpr int KINDS = PARITY == BOTH ? 2 : 1, SHIFT = PARITY != EVEN, GRAIN = (COPY ? COPY : 4) / SIZE;
    // Pieces of 16 bytes of a run, of a window, and steps of two of them.
    static constexpr int PIECES = ((RUN + SHIFT) * SIZE + 15) / 16, HALVES = R * PIECES, STEPS = (HALVES + 1) / 2;
    static constexpr int THREADS = 128, WARPS = THREADS / 32;
    // Neighbours in y of a thread.
    static constexpr int BESIDE = ORDER / 4, UNITS = FILTERS / ORDER;
    static_assert(FILTERS % ORDER == 0 && ORDER % 8 == 0 && BESIDE % V == 0);
    static_assert(SIZE == 2 || (PARITY == EVEN && COPY >= 4));
};

// All windows so many bytes further. The compiler would else work out the places of all rows before, and spill them.
template <int ROWS> DEVICE void move(unsigned (&window)[ROWS][2], int by) {
#pragma unroll
    for (int i = 0; i < 2 * ROWS; ++i) {
        window[i / 2][i % 2] += by;
        asm volatile("" : "+r"(window[i / 2][i % 2]));
    }
}

// A warp's sums of one chunk of filters to y; `filter0`: this thread's first.
template <class O>
DEVICE void finish_rows(const Tiles &p, const float (&d)[O::ROWS][O::BLOCKS][4], const int (&places)[O::ROWS][2],
                        int filter0) {
    using T = typename O::T;
    struct alignas(sizeof(T) * O::V) Vector { T v[O::V]; };
    const T *bias = static_cast<const T *>(p.bias), *residual = static_cast<const T *>(p.residual);
    T *y = static_cast<T *>(p.y);
    const int k = p.k;
#pragma unroll
    for (int first = 0; first < O::UNITS * O::BESIDE; first += O::V) {
        const int unit = first / O::BESIDE, within = first % O::BESIDE, filter = filter0 + unit * O::ORDER + within;
        if (filter >= k) continue;
        Vector added{};
        if constexpr (O::BIAS) added = *reinterpret_cast<const Vector *>(bias + filter);
#pragma unroll
        for (int i = 0; i < 2 * O::ROWS; ++i) {
            const int m = i / 2, high = i % 2;
            if (places[m][high] < 0) continue;
            Vector out, more;
            if constexpr (O::RESIDUAL) more = *reinterpret_cast<const Vector *>(residual + places[m][high] + filter);
#pragma unroll
            for (int e = 0; e < O::V; ++e) {
                float v = d[m][unit * (O::ORDER / 8) + (within + e) / 2][high * 2 + (within + e) % 2];
                if constexpr (O::BIAS) v += Element<T>::to_float(added.v[e]);
                if constexpr (O::RESIDUAL) v += Element<T>::to_float(more.v[e]);
                out.v[e] = Element<T>::from_float(activated<O::ACTIVATION>(v));
            }
            *reinterpret_cast<Vector *>(y + places[m][high] + filter) = out;
        }
    }
}

template <class O> DEVICE void few_channels(const Tiles &p) {
    using T = typename O::T;
    extern __shared__ uint4 memory[];
    const int thread = threadIdx.x, warp = thread / 32, lane = thread % 32, quad = lane % 4;
    const int chunks = ((int)p.k + O::FILTERS - 1) / O::FILTERS, k = p.k;
    constexpr unsigned CHUNK = O::STEPS * O::BLOCKS * 256;
    const unsigned filters = shared_address(memory), filter_bytes = O::KINDS * chunks * CHUNK;
    const unsigned images = filters + filter_bytes, pitch = p.pitch, stage = (unsigned)p.image_rows * pitch;
    const TileOrigin first = first_tile(p);
    begin_filters<O>(p, filters, filter_bytes);
    const int across = p.across, down = p.down, tiles = p.tiles;
    const int columns = p.columns, outputs = columns * down, next_row = (int)p.dilation_h * (int)pitch;
    const int warp_tiles = (outputs + 16 * O::ROWS - 1) / (16 * O::ROWS);
    const auto begin_tile = [&](const TileOrigin &at, unsigned to) {
        const int begin = (at.w * (int)p.stride_w - (int)p.pad_w) * O::C;
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
        const int lead = (at.w * (int)p.stride_w - (int)p.pad_w) * O::C & O::GRAIN - 1;
        for (int warp_tile = warp; warp_tile < O::KINDS * warp_tiles; warp_tile += O::WARPS) {
            // Runs that begin at an even element, then those at an odd one.
            const int odd = O::PARITY == BOTH ? warp_tile >= warp_tiles : O::PARITY;
            const int first = (O::PARITY == BOTH ? warp_tile - odd * warp_tiles : warp_tile) * 16 * O::ROWS;
            const unsigned head = odd && quad == 0 ? 0xffff0000 : ~0u;
            // Elements of a run's last piece that this thread holds.
            const int tail = ((O::PIECES - 1) * 4 + quad) * O::EACH, run = O::RUN + odd;
            const unsigned mask = tail >= run ? 0 : O::SIZE == 2 && tail + 1 == run ? 0xffff : ~0u;
            unsigned window[O::ROWS][2];
            int places[O::ROWS][2];
#pragma unroll
            for (int m = 0; m < O::ROWS; ++m)
#pragma unroll
                for (int high = 0; high < 2; ++high) {
                    const int pixel = first + m * 16 + high * 8 + lane / 4, row = divide(pixel, p.per_column);
                    int column = pixel - row * columns;
                    // lead has the parity of the tile's first run.
                    if (O::PARITY == BOTH) column = 2 * column + (odd ^ lead & 1);
                    const bool real =
                        row < down && column < across && at.h + row < (int)p.p && at.w + column < (int)p.q;
                    const int image_row = real ? row * (int)p.stride_h : 0;
                    const int element = real ? lead + column * (int)p.stride_w * O::C - odd : 0;
                    window[m][high] = image + image_row * pitch + element * O::SIZE + quad * 4;
                    places[m][high] = real ? ((at.n * (int)p.p + at.h + row) * (int)p.q + at.w + column) * k : -1;
                }
            for (int chunk = 0; chunk < chunks; ++chunk) {
                float d[O::ROWS][O::BLOCKS][4] = {};
                const unsigned mine = filters + ((O::PARITY == BOTH ? odd * chunks : 0) + chunk) * CHUNK + lane * 8;
#pragma unroll
                for (int step = 0; step < O::STEPS; ++step) {
                    unsigned left[O::ROWS][4];
                    Piece<8> right[O::BLOCKS];
#pragma unroll
                    for (int half = 0; half < 2; ++half) {
                        const int number = 2 * step + half, piece = number % O::PIECES;
                        if (number > 0 && piece == 0) move(window, next_row);
#pragma unroll
                        for (int m = 0; m < O::ROWS; ++m)
#pragma unroll
                            for (int high = 0; high < 2; ++high) {
                                unsigned v = number < O::HALVES ? load_word(window[m][high] + piece * 16) : 0;
                                if (O::SHIFT && piece == 0) v &= head;
                                if ((O::RUN * O::SIZE % 16 || O::SHIFT) && piece == O::PIECES - 1) v &= mask;
                                left[m][2 * half + high] = v;
                            }
                    }
#pragma unroll
                    for (int block = 0; block < O::BLOCKS; ++block)
                        right[block] = load_shared<8>(mine + (step * O::BLOCKS + block) * 256);
#pragma unroll
                    for (int m = 0; m < O::ROWS; ++m)
#pragma unroll
                        for (int block = 0; block < O::BLOCKS; ++block) mma<T>(d[m][block], left[m], right[block].v);
                }
                // Back to the first row; one that only the last half would have begun is counted too.
                move(window, (2 * O::STEPS - 1) / O::PIECES * -next_row);
                finish_rows<O>(p, d, places, chunk * O::FILTERS + quad * O::BESIDE);
            }
        }
        // This tile has been read.
        __syncthreads();
        image = other;
    }
    cp_async_wait<0>();
}

// Filters as the instruction's right operands: y[kind][chunk][step][8 filters][thread][2 words], zeros before and
// behind runs, and behind the last filter.
template <class O> DEVICE void pack_fragments(const Fragments &p) {
    using T = typename O::T;
    begin_dependent();
    for (int i = blockIdx.x * 256 + threadIdx.x; i < (int)p.words; i += gridDim.x * 256) {
        const int half = i % 2, lane = i / 2 % 32, block = i / 64 % O::BLOCKS, rest = i / 64 / O::BLOCKS,
                  step = rest % O::STEPS;
        const int chunk = rest / O::STEPS, kind = chunk / (int)p.chunks, odd = O::PARITY == BOTH ? kind : O::PARITY;
        const int column = (chunk - kind * (int)p.chunks) * O::FILTERS + block * 8 + lane / 4;
        const int permuted = column % O::ORDER;
        const int filter = column - permuted + permuted % 8 / 2 * O::BESIDE + permuted / 8 * 2 + permuted % 2;
        const int at = 2 * step + half, r = at / O::PIECES;
        const int first = (at % O::PIECES * 4 + lane % 4) * O::EACH - odd;
        unsigned word = 0;
#pragma unroll
        for (int e = 0; e < O::EACH; ++e) {
            const int element = first + e, s = element / O::C, c = element % O::C;
            if (r >= O::R || element < 0 || element >= O::RUN || filter >= (int)p.k) continue;
            const T v = static_cast<const T *>(p.w)[filter * p.step_k + c * p.step_c + r * p.step_r + s * p.step_s];
            if constexpr (O::SIZE == 4) word = __float_as_uint(to_tf32(v));
            else word |= (unsigned)v.bits << 16 * e;
        }
        static_cast<unsigned *>(p.y)[i] = word;
    }
}
