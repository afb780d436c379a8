// Convolution on tensor cores, channels last, filters stationary in registers: rows of x streamed through shared
// memory.
//
// A (16 pixels x 16: eight channels as one tap sees them, and eight more, or the same ones as the next tap does) times
// B (16 x 8 filters). A is x as it lies in shared memory, pixel by pixel: ldmatrix takes pixels from the tap's column
// on, once for all rows of the filter. A warp goes down the rows of TILES times 16 columns, or 8 columns of two images;
// all weights of its filters, and the rows of sums under way, are in registers.
//
// Of groups of fewer than eight channels B is block-diagonal, depthwise a diagonal matrix: one product in eight is of
// use, but no channel has to be sorted out.
#include "matrix.cuh"
#include "ops/conv/cuda/by_definition.cuh"
#include "ops/conv/cuda/streamed_loads.cuh"

// T; R, S; SH, SW: strides in a class (depthwise/columns.cu); GROUP_C channels and filters a group: 1, 2, 4 or a
// multiple of 8; 0 for one group of any. OCTETS of channels of x, and OUT of filters, IMAGES (1 or 2) and GROUPS of
// warps along a row a block; COLUMNS of x, fewer than warps read where a row has fewer outputs; TILES, and OUT_EACH
// octets of filters a warp; STAGES; BY (TMA or PIXELS), and COPY bytes;
// Y_COPY; BIAS, RESIDUAL, ACTIVATION.
template <class Traits> struct RowTile : Traits {
    using B = Traits;
    static constexpr bool TAPS_FIRST = true;
    static constexpr int LIVE = (B::R + B::SH - 1) / B::SH, PERIOD = LIVE * B::SH, WARPS = B::OUT / B::OUT_EACH;
    // The loads': channels of an item, items of a pixel, columns of y of a warp; those of y and of x of a block, groups
    // of eight, so that all rows are swizzled alike.
    static constexpr int V = 8, LANES = B::OUT, TX = 16 / B::IMAGES * B::TILES, THREADS = 32 * WARPS * B::GROUPS;
    static constexpr int Y_COLUMNS = B::GROUPS * TX, COLUMNS = B::COLUMNS;
    static_assert(COLUMNS % 8 == 0);
    // Octets from a pixel to the next: an odd number, or a power of two, swizzled; bytes of a pixel, of a row, of an
    // image's rows, of a stage.
    static constexpr int pitch(int octets) { return octets & (octets - 1) ? octets | 1 : octets; }
    static constexpr int PIXEL = pitch(B::OCTETS) * 16, GRAIN = B::COPY / 2, C = B::OCTETS * 8, MARGIN = 0;
    static constexpr bool PADDED = pitch(B::OCTETS) != B::OCTETS;
    static constexpr int ROW = COLUMNS * PIXEL, IMAGE = PERIOD * ROW, READ = (Y_COLUMNS - 1) * B::SW + B::S;
    // What the last row's warps read behind it is no other stage's, which may be on its way.
    static constexpr int BEHIND = READ > COLUMNS ? (READ - COLUMNS) * PIXEL : 0;
    static constexpr int STAGE = (B::IMAGES * IMAGE + BEHIND + 1023) / 1024 * 1024;
    static constexpr int PIECES_PIXEL = B::OCTETS * 16 / B::COPY, ROW_COPIES = COLUMNS * PIECES_PIXEL,
                         COPIES = B::IMAGES * PERIOD * ROW_COPIES;
    static constexpr int ITEMS = (COPIES + THREADS - 1) / THREADS;
    // Octets of channels that a warp multiplies; slices of a filter's row: an octet as a tap sees it. Two of them are
    // multiplied at once, one that is left together with that of the row above.
    static constexpr int DEPTH = B::GROUP_C == 0  ? B::OCTETS
                                 : B::GROUP_C < 8 ? 1
                                                  : B::GROUP_C / 8,
                         SLICES = B::S * DEPTH, PAIRS = SLICES / 2;
    static constexpr bool LEFT = SLICES % 2;
    // B has zeros between groups: where x is not finite, they make NaN.
    static constexpr bool MASKED = B::GROUP_C > 0 && B::GROUP_C < 8;
    // Outputs of a row of each image, which are kept; rows of which all threads write 16 bytes at once.
    static constexpr int Y_PIXEL = pitch(B::OUT) * 16, Y_PIXELS = Y_COLUMNS * B::IMAGES, Y_ROW = Y_PIXELS * Y_PIXEL,
                         KEPT = (LIVE * Y_ROW + 1023) / 1024 * 1024, ROWS_ONCE = 2 / (B::TILES * B::OUT_EACH);
    static_assert(ROWS_ONCE * Y_PIXELS * B::OUT == THREADS && WARPS * B::OUT_EACH == B::OUT);
    // From a tile's first 8 pixels of x, and of y, to the others; from a tile to the next one.
    static constexpr int SECOND = B::IMAGES == 1 ? 8 * B::SW * PIXEL : IMAGE, Y_SECOND = B::IMAGES == 1 ? 8 : Y_COLUMNS,
                         TILE = 16 / B::IMAGES;
    // Where byte `at` of pixels of so many octets lies: pieces of eight pixels in eight groups of banks, as TMA puts
    // them. Pixels of an odd number of octets are in order.
    template <int OF> static DEVICE unsigned swizzle(unsigned at) {
        constexpr int MASK = pitch(OF) % 2 ? 0 : OF - 1;
        return at ^ ((at >> 7 & MASK) << 4);
    }
    // Of a stage, where all pixels' bytes would lie at `at`.
    static DEVICE unsigned place(unsigned at) {
        if (PADDED) at = at / (B::OCTETS * 16) * PIXEL + at % (B::OCTETS * 16);
        return swizzle<B::OCTETS>(at);
    }
    // Of a slice: from the window's first pixel and the group's first octet.
    static DEVICE int offset(int slice) { return slice / DEPTH * PIXEL + slice % DEPTH * 16; }
};

// Rows of y: a warp's sums to shared memory, and from there eight channels of a pixel at a time.
template <class P> struct Outputs {
    using T = typename P::T;
    const Streamed &a;
    const int lane = threadIdx.x % 32, count, filters;
    // What a lane keeps: of pixels from column `q` on, two channels from `pair` on, of each octet; what it writes.
    int n, q, pair, q_step, first, row_step, written_q, written;
    unsigned kept[P::OUT_EACH], from;
    T *y;
    const T *residual;
    float bias[P::OUT_EACH][2] = {};

    DEVICE Outputs(const Streamed &a, const Strip &part, int octet, int group, unsigned outs)
        : a(a), count(part.count), filters(a.k) {
        n = part.n, q_step = part.q_step, first = part.residue + (int)a.phases_h * part.first;
        row_step = (int)a.phases_h * (int)a.y_row;
        q = part.q0 + (group * P::TX + lane / 4) * q_step, pair = part.k + octet * 8 + lane % 4 * 2;
        const unsigned place = (group * P::TX + lane / 4) * P::Y_PIXEL + octet * 16 + lane % 4 * 4;
#pragma unroll
        for (int k = 0; k < P::OUT_EACH; ++k) kept[k] = outs + P::template swizzle<P::OUT>(place + k * 16);
        const int pixel = (int)threadIdx.x / P::OUT % P::Y_PIXELS, image = pixel / P::Y_COLUMNS;
        from = outs + P::template swizzle<P::OUT>((int)threadIdx.x / P::OUT * P::Y_PIXEL + threadIdx.x % P::OUT * 16);
        written_q = n + image < (int)a.n ? part.q0 + pixel % P::Y_COLUMNS * q_step : (int)a.q;
        written = part.k + (int)threadIdx.x % P::OUT * 8;
        const long long at = part.n * a.y_image + (long long)first * a.y_row;
        y = static_cast<T *>(a.y) + at + image * a.y_image + (written_q * filters + written);
        residual = static_cast<const T *>(a.residual) + at;
        if constexpr (P::BIAS)
#pragma unroll
            for (int k = 0; k < P::OUT_EACH; ++k) read(bias[k], static_cast<const T *>(a.bias), k);
    }
    // Adds the two elements of octet `k`, in an array of channels.
    DEVICE void read(float (&v)[2], const T *from, int k) const {
        if (pair + k * 8 >= filters) return;
        const unsigned word = load_global<4>(from + pair + k * 8).v[0];
        v[0] += Element<T>::to_float(T{(unsigned short)word});
        v[1] += Element<T>::to_float(T{(unsigned short)(word >> 16)});
    }
    // Column and image of the pixels of half `e` of tile `m`.
    DEVICE int column_of(int m, int e) const { return q + (m * P::TILE + (P::IMAGES == 1 ? e * 8 : 0)) * q_step; }
    DEVICE static int image_of(int e) { return P::IMAGES == 1 ? 0 : e; }
    // Row `o` to its place among those that are kept; `check` becomes NaN with an output.
    DEVICE void keep(const float (&sums)[P::OUT_EACH][P::TILES][4], int o, int slot, int buffer,
                     unsigned &check) const {
        if ((unsigned)o >= (unsigned)count) return;
#pragma unroll
        for (int at = 0; at < P::OUT_EACH * P::TILES * 2; ++at) {
            const int k = at / (P::TILES * 2), m = at / 2 % P::TILES, e = at % 2;
            float v[2] = {sums[k][m][2 * e], sums[k][m][2 * e + 1]};
            if constexpr (P::RESIDUAL)
                if (const int column = column_of(m, e); column < (int)a.q && n + image_of(e) < (int)a.n)
                    read(v, residual + image_of(e) * a.y_image + o * row_step + column * filters, k);
            const unsigned word = activated<T, P::ACTIVATION>(v[0], v[1]);
            // What other outputs have seen lies behind the rows.
            if constexpr (P::MASKED)
                if (column_of(m, e) < (int)a.q) check = add_zeros<T>(word, check);
            const int pixel = m * P::TILE + e * P::Y_SECOND;
            store_word(kept[k] + buffer * P::KEPT + slot * P::Y_ROW + pixel * P::Y_PIXEL, word);
        }
    }
    // Rows from `o` on, the first of which is in `slot`.
    DEVICE void write(int o, int slot, int buffer) const {
        if (written_q >= (int)a.q || written >= filters) return;
        const int share = P::ROWS_ONCE == 1 ? 0 : threadIdx.x / (P::OUT * P::Y_PIXELS);
#pragma unroll
        for (int t = 0; t < P::LIVE; t += P::ROWS_ONCE) {
            const int row = o + t + share, here = (slot + t + share) % P::LIVE - share;
            if ((t + 1 >= P::LIVE && share > 0) || (unsigned)row >= (unsigned)count) continue;
            const Piece<16> v = load_shared<16>(from + buffer * P::KEPT + here * P::Y_ROW);
            T *const to = y + row * row_step;
#pragma unroll
            for (int e = 0; e < 8; e += P::Y_COPY / 2) {
                if (e > 0 && written + e >= filters) break;
                Piece<P::Y_COPY> some;
#pragma unroll
                for (int k = 0; k < P::Y_COPY / 4; ++k) some.v[k] = v.v[e / 2 + k];
                store_global<P::Y_COPY>(to + e, some);
            }
        }
    }
    // All of a lane's sums again: where products with zeros may have made NaN.
    DEVICE void again() const {
        for (int i = 0; i < 4 * P::TILES; ++i) {
            const int column = column_of(i / 4, i / 2 % 2), image = n + image_of(i / 2 % 2), c = pair + i % 2;
            if (column < (int)a.q && image < (int)a.n && c < filters)
                for (int o = 0; o < count; ++o) by_definition<P>(a, image, c, first + o * (int)a.phases_h, column);
        }
    }
};

// A lane's words of B, two rows beside each other of column lane / 4, from [tap][filter][channel of the group], or of
// filters of one channel as they lie.
template <class P, int KS> DEVICE void load_weights(unsigned (&w)[KS][P::R][P::SLICES], const Streamed &a, int filter) {
    const int lane = threadIdx.x % 32, column = lane / 4, row = lane % 4 * 2;
    const int depth = P::GROUP_C ? P::GROUP_C : (int)a.c;
#pragma unroll
    for (int k = 0; k < KS; ++k)
#pragma unroll
        for (int i = 0; i < P::R * P::SLICES; ++i) {
            const int tap = i / P::DEPTH, own = filter + k * 8 + column;
            const int c = P::MASKED ? row % P::GROUP_C : i % P::DEPTH * 8 + row;
            bool real = own < (int)a.k && c < depth;
            if (P::MASKED) real &= P::GROUP_C == 1 ? row / 2 == column / 2 : row / P::GROUP_C == column / P::GROUP_C;
            const int at = P::FILTER_TAPS ? own * P::FILTER_TAPS + place_in_filter<P>(tap / P::S, tap % P::S)
                                          : (tap * (int)a.k + own) * depth + c;
            const unsigned short *const from = static_cast<const unsigned short *>(a.w) + at;
            unsigned &to = w[k][tap / P::S][i % P::SLICES];
            if (P::GROUP_C == 1) to = real ? from[0] : 0u;
            else to = real ? load_global<4>(from).v[0] : 0u;
        }
}

template <class Traits> DEVICE void implicit_gemm_rows(const Streamed &a) {
    using P = RowTile<Traits>;
    using T = typename P::T;
    constexpr int R = P::R, SH = P::SH, LIVE = P::LIVE, PERIOD = P::PERIOD, TILES = P::TILES, KS = P::OUT_EACH;
    constexpr int STEPS = P::PAIRS + P::LEFT, LAST = P::SLICES - 1;
    extern __shared__ __align__(1024) unsigned char memory[];
    Strip part = Strip::of<P>(a);
    if (part.count <= 0) return;
    const unsigned outs = (shared_address(memory) + 1023) / 1024 * 1024, stages = outs + 2 * P::KEPT;
    const int lane = threadIdx.x % 32, octet = threadIdx.x / 32 % P::WARPS * KS, group = threadIdx.x / 32 / P::WARPS;
    const int filter0 = part.k;
    if (P::GROUP_C == 0) part.k = 0;
    Loads<P, P::BY> loads(a, part, stages);
    part.k = filter0;
    if (!a.weights_ready) begin_dependent();
    unsigned w[KS][R][P::SLICES];
    load_weights<P>(w, a, part.k + octet * 8);
    if (a.weights_ready) begin_dependent();
    loads.begin();
    if (P::GROUP_C == 1)
#pragma unroll
        for (int tap = 0; tap < R * P::S; ++tap) w[0][tap / P::S][tap % P::S] <<= lane / 4 % 2 * 16;
    const Outputs<P> outputs(a, part, octet, group, outs);
    // Of a lane the rows of A that it tells of, from its group's first octet on.
    const int octet0 = P::GROUP_C == 0 ? 0 : octet / P::DEPTH * P::DEPTH;
    const unsigned mine = (group * P::TX + lane % 8) * (P::SW * P::PIXEL) + lane / 8 % 2 * P::SECOND + octet0 * 16;
    unsigned rows[STEPS];
#pragma unroll
    for (int j = 0; j < STEPS; ++j) {
        const int slice = min(2 * j + lane / 16, LAST);
        rows[j] = stages + P::template swizzle<P::OCTETS>(mine + P::offset(slice));
    }
    // A row of x: of the slice that is left, this row and the one before.
    unsigned x[TILES][STEPS][4], before[TILES][2] = {};
    const auto load = [&](int row) {
#pragma unroll
        for (int j = 0; j < STEPS; ++j)
#pragma unroll
            for (int m = 0; m < TILES; ++m) {
                const unsigned from = rows[j] + row + m * P::TILE * P::SW * P::PIXEL;
                if (j < P::PAIRS) {
                    ldmatrix(x[m][j], from);
                    continue;
                }
                unsigned one[2];
                ldmatrix(one, from);
#pragma unroll
                for (int e = 0; e < 2; ++e) x[m][j][e] = before[m][e], x[m][j][e + 2] = before[m][e] = one[e];
            }
    };
    // Zeros, or NaN once an output was.
    unsigned check = 0;
    float sums[LIVE][KS][TILES][4] = {};
    int buffer = 0;
    for (int base = 0, first = 0; base < part.rows; base += PERIOD, first += LIVE, buffer ^= 1) {
        const int here = loads.next(base);
        load(here);
#pragma unroll
        for (int i = 0; i < PERIOD; ++i) {
            if (i > 0 && base + i >= part.rows) break;
            if (i % SH == 0)
#pragma unroll
                for (int at = 0; at < KS * TILES * 4; ++at)
                    sums[i / SH][at / (TILES * 4)][at / 4 % TILES][at % 4] = outputs.bias[at / (TILES * 4)][at % 2];
            // Output first + (i - r) / SH sees this row with tap r: those of this stage, and of the one before. The one
            // that the row completes comes first.
            const auto multiply = [&](bool these, bool others) {
#pragma unroll
                for (int j = 0; j < STEPS; ++j)
#pragma unroll
                    for (int r = R - 1 - (R - 1 - i % SH + SH) % SH; r >= 0; r -= SH) {
                        if (!(r <= i ? these : others) || (j == P::PAIRS && r % 2 == 0 && r < R - 1)) continue;
#pragma unroll
                        for (int at = 0; at < KS * TILES; ++at) {
                            const int k = at / TILES, m = at % TILES;
                            float (&sum)[4] = sums[(i - r + PERIOD) / SH % LIVE][k][m];
                            if (j == P::PAIRS && r % 2 == 0) {
                                const unsigned half[2] = {x[m][j][2], x[m][j][3]};
                                mma_half<T>(sum, half, w[k][r][LAST]);
                                continue;
                            }
                            // Of what is left the row before with the tap above.
                            const unsigned low = j < P::PAIRS ? w[k][r][2 * j] : w[k][r - r % 2][LAST];
                            const unsigned both[2] = {low, w[k][r][min(2 * j + 1, LAST)]};
                            mma<T>(sum, x[m][j], both);
                        }
                    }
            };
            if (first > 0 && first < part.count) multiply(true, true);
            else if (first == 0) multiply(true, false);
            else multiply(false, true);
            // Under way while the row that is complete is kept.
            if (i < PERIOD - 1) load(here + (i + 1) * P::ROW);
            if ((R - 1 - i) % SH) continue;
            const int back = (i - R + 1 + PERIOD) / SH - LIVE, slot = (back + LIVE) % LIVE;
            outputs.keep(sums[slot], first + back, slot, buffer, check);
        }
        loads.done();
        __syncthreads();
        constexpr int BACK = -((R - 1) / SH);
        outputs.write(first + BACK, (BACK + LIVE) % LIVE, buffer);
    }
    if constexpr (P::MASKED) {
        if (__syncthreads_and(check == 0) || check == 0) return;
        outputs.again();
    }
}
