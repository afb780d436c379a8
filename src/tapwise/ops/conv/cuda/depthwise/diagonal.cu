// Depthwise convolution on tensor cores, channels last: a tap of eight channels as a diagonal matrix.
//
// A (16 pixels x 16: eight channels as one tap sees them, and as the next one does) times B (16 x 8 channels), where
// B[j][j] is channel j's weight of the one tap, B[j + 8][j] that of the other, zeros elsewhere. So A is x as it lies in
// shared memory, pixel by pixel, and no channel has to be sorted out: ldmatrix takes pixels from the tap's column on,
// once for all rows of the filter. A warp goes down the rows of TILES times 16 columns of eight channels, or 8 columns
// of two images; all weights and the rows of sums under way are in registers. Of the products one in eight is of use; a
// 5x5 filter takes 13 for 128 outputs all the same, 21 cycles of a multiprocessor.
#include "matrix.cuh"
#include "ops/conv/cuda/depthwise/by_definition.cuh"
#include "ops/conv/cuda/depthwise/streamed_loads.cuh"

// T; R, S; OCTETS of channels, IMAGES (1 or 2) and GROUPS of warps along a row a block; TILES a warp; STAGES; BY (TMA
// or PIXELS), and COPY bytes; BIAS, RESIDUAL, ACTIVATION.
template <class Traits> struct Diagonal : Traits {
    using B = Traits;
    static constexpr bool TAPS_FIRST = true;
    static constexpr int SH = 1, LIVE = B::R, PERIOD = B::R;
    static constexpr int V = 8, LANES = B::OCTETS, TX = 16 / B::IMAGES * B::TILES, THREADS = 32 * B::OCTETS * B::GROUPS;
    // Columns of y and of x of a block, groups of eight, so that all rows are swizzled alike; bytes of a pixel, of a
    // row, of an image's rows, of a stage.
    static constexpr int Y_COLUMNS = B::GROUPS * TX, COLUMNS = (Y_COLUMNS - 1 + B::S + 7) / 8 * 8;
    static constexpr int PIXEL = B::OCTETS * 16, GRAIN = B::COPY / 2, C = B::OCTETS * 8, MARGIN = 0;
    static constexpr int ROW = COLUMNS * PIXEL, IMAGE = PERIOD * ROW, STAGE = (B::IMAGES * IMAGE + 1023) / 1024 * 1024;
    static constexpr int PIECES_PIXEL = PIXEL / B::COPY, ROW_COPIES = ROW / B::COPY,
                         COPIES = B::IMAGES * PERIOD * ROW_COPIES;
    static constexpr int ITEMS = (COPIES + THREADS - 1) / THREADS;
    // Of a filter's row so many taps are multiplied at once, of its last column, where they leave one, two rows' taps.
    static constexpr int PAIRS = B::S / 2;
    static constexpr bool LEFT = B::S % 2;
    // Outputs of a row of each image, which are kept; rows of which all threads write 16 bytes at once.
    static constexpr int Y_PIXELS = Y_COLUMNS * B::IMAGES, Y_ROW = Y_PIXELS * PIXEL, ROWS_ONCE = 2 / B::TILES,
                         KEPT = (LIVE * Y_ROW + 1023) / 1024 * 1024;
    static_assert(ROWS_ONCE * Y_PIXELS * B::OCTETS == THREADS);
    // From a tile's first 8 pixels of x, and of y, to the others; from a tile to the next one.
    static constexpr int SECOND = B::IMAGES == 1 ? 8 * PIXEL : IMAGE, Y_SECOND = B::IMAGES == 1 ? 8 : Y_COLUMNS,
                         TILE = 16 / B::IMAGES;
    // Where byte `at` of a stage, or of rows of y, lies: pieces of eight pixels in eight groups of banks, as TMA puts
    // them. Pixels of an odd number of octets are in order.
    static DEVICE unsigned place(unsigned at) {
        constexpr int MASK = B::OCTETS % 2 ? 0 : B::OCTETS - 1;
        return at ^ ((at >> 7 & MASK) << 4);
    }
};

// Rows of y: a warp's sums to shared memory, and from there eight channels of a pixel at a time.
template <class P> struct Outputs {
    using T = typename P::T;
    const Streamed &a;
    const int lane = threadIdx.x % 32, count;
    // What a lane keeps: of pixels from column `q` on, two channels from `pair` on; what it writes.
    int n, q, pair, q_step, first, row_step, written_q, written;
    unsigned kept, from;
    T *y;
    const T *residual;
    float bias[2] = {};

    DEVICE Outputs(const Streamed &a, const Strip &part, int octet, int group, unsigned outs)
        : a(a), count(part.count) {
        n = part.n, q_step = part.q_step, first = part.residue + (int)a.phases_h * part.first;
        row_step = (int)a.phases_h * (int)a.y_row;
        q = part.q0 + (group * P::TX + lane / 4) * q_step, pair = part.k + octet * 8 + lane % 4 * 2;
        kept = P::place(outs + (group * P::TX + lane / 4) * P::PIXEL + octet * 16 + lane % 4 * 4);
        from = P::place(outs + threadIdx.x * 16);
        const int pixel = (int)threadIdx.x / P::OCTETS % P::Y_PIXELS, image = pixel / P::Y_COLUMNS;
        written_q = n + image < (int)a.n ? part.q0 + pixel % P::Y_COLUMNS * q_step : (int)a.q;
        written = part.k + (int)threadIdx.x % P::OCTETS * 8;
        const long long at = part.n * a.y_image + (long long)first * a.y_row;
        y = static_cast<T *>(a.y) + at + image * a.y_image + (written_q * (int)a.c + written);
        residual = static_cast<const T *>(a.residual) + at;
        if constexpr (P::BIAS) read(bias, static_cast<const T *>(a.bias) + pair);
    }
    DEVICE void read(float (&v)[2], const T *from) const {
        if (pair >= (int)a.c) return;
        const unsigned word = load_global<4>(from).v[0];
        v[0] += Element<T>::to_float(T{(unsigned short)word});
        v[1] += Element<T>::to_float(T{(unsigned short)(word >> 16)});
    }
    // Column and image of the pixels of half `e` of tile `m`.
    DEVICE int column_of(int m, int e) const { return q + (m * P::TILE + (P::IMAGES == 1 ? e * 8 : 0)) * q_step; }
    DEVICE static int image_of(int e) { return P::IMAGES == 1 ? 0 : e; }
    // Row `o` to its place among those that are kept; `check` becomes NaN with an output.
    DEVICE void keep(const float (&sums)[P::TILES][4], int o, int slot, int buffer, unsigned &check) const {
        if ((unsigned)o >= (unsigned)count) return;
#pragma unroll
        for (int m = 0; m < P::TILES; ++m)
#pragma unroll
            for (int e = 0; e < 2; ++e) {
                float v[2] = {sums[m][2 * e], sums[m][2 * e + 1]};
                if constexpr (P::RESIDUAL)
                    if (const int column = column_of(m, e); column < (int)a.q && n + image_of(e) < (int)a.n)
                        read(v, residual + image_of(e) * a.y_image + o * row_step + (column * (int)a.c + pair));
                const unsigned word = activated<T, P::ACTIVATION>(v[0], v[1]);
                check = add_zeros<T>(word, check);
                const int pixel = m * P::TILE + e * P::Y_SECOND;
                store_word(kept + buffer * P::KEPT + slot * P::Y_ROW + pixel * P::PIXEL, word);
            }
    }
    // Rows from `o` on, the first of which is in `slot`.
    DEVICE void write(int o, int slot, int buffer) const {
        if (written_q >= (int)a.q || written >= (int)a.c) return;
        const int share = P::ROWS_ONCE == 1 ? 0 : threadIdx.x / (P::OCTETS * P::Y_PIXELS);
#pragma unroll
        for (int t = 0; t < P::LIVE; t += P::ROWS_ONCE) {
            const int row = o + t + share, here = (slot + t + share) % P::LIVE - share;
            if ((t + 1 >= P::LIVE && share > 0) || (unsigned)row >= (unsigned)count) continue;
            const Piece<16> v = load_shared<16>(from + buffer * P::KEPT + here * P::Y_ROW);
            T *const to = y + row * row_step;
#pragma unroll
            for (int e = 0; e < 8; e += P::COPY / 2) {
                if (e > 0 && written + e >= (int)a.c) break;
                Piece<P::COPY> some;
#pragma unroll
                for (int k = 0; k < P::COPY / 4; ++k) some.v[k] = v.v[e / 2 + k];
                store_global<P::COPY>(to + e, some);
            }
        }
    }
    // All of a lane's sums again: where products with zeros may have made NaN.
    DEVICE void again() const {
        for (int i = 0; i < 4 * P::TILES; ++i) {
            const int column = column_of(i / 4, i / 2 % 2), image = n + image_of(i / 2 % 2), c = pair + i % 2;
            if (column < (int)a.q && image < (int)a.n && c < (int)a.c)
                for (int o = 0; o < count; ++o) by_definition<P>(a, image, c, first + o * (int)a.phases_h, column);
        }
    }
};

template <class Traits> DEVICE void depthwise_diagonal(const Streamed &a) {
    using P = Diagonal<Traits>;
    using T = typename P::T;
    constexpr int R = P::R, S = P::S, LIVE = P::LIVE, TILES = P::TILES, STEPS = P::PAIRS + P::LEFT;
    extern __shared__ __align__(1024) unsigned char memory[];
    const Strip part = Strip::of<P>(a);
    if (part.count <= 0) return;
    const unsigned outs = (shared_address(memory) + 1023) / 1024 * 1024, stages = outs + 2 * P::KEPT;
    const int lane = threadIdx.x % 32, octet = threadIdx.x / 32 % P::OCTETS, group = threadIdx.x / 32 / P::OCTETS;
    Loads<P, P::BY> loads(a, part, stages);
    if (!a.weights_ready) begin_dependent();
    // Of B a lane has two rows beside each other of column lane / 4: those of its channel are not zeros.
    const int own = lane / 4, from = min(part.k + octet * 8 + own, (int)a.c - 1);
    const bool real = lane % 4 == own / 2;
    unsigned w[R][S];
#pragma unroll
    for (int tap = 0; tap < R * S; ++tap)
        w[tap / S][tap % S] = real ? static_cast<const unsigned short *>(a.w)[tap * (int)a.c + from] : 0u;
    if (a.weights_ready) begin_dependent();
    loads.begin();
#pragma unroll
    for (int tap = 0; tap < R * S; ++tap) w[tap / S][tap % S] <<= own % 2 * 16;
    const Outputs<P> outputs(a, part, octet, group, outs);
    // Of a lane the rows of A that it tells of.
    const unsigned mine =
        stages + (group * P::TX + lane % 8 + lane / 16) * P::PIXEL + lane / 8 % 2 * P::SECOND + octet * 16;
    unsigned rows[STEPS];
#pragma unroll
    for (int j = 0; j < STEPS; ++j) rows[j] = P::place(mine + j * 2 * P::PIXEL);
    // A row of x: of its last column, where it has no other one beside it, this row and the one before.
    unsigned x[TILES][STEPS][4], before[TILES][2] = {};
    const auto load = [&](int row) {
#pragma unroll
        for (int j = 0; j < STEPS; ++j)
#pragma unroll
            for (int m = 0; m < TILES; ++m) {
                const unsigned from = rows[j] + row + m * P::TILE * P::PIXEL;
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
    float sums[LIVE][TILES][4] = {};
    int buffer = 0;
    for (int first = 0; first < part.rows; first += R, buffer ^= 1) {
        const int here = loads.next(first);
        load(here);
#pragma unroll
        for (int i = 0; i < R; ++i) {
            if (i > 0 && first + i >= part.rows) break;
#pragma unroll
            for (int k = 0; k < TILES * 4; ++k) sums[i][k / 4][k % 4] = outputs.bias[k % 2];
            // Output first + i - r sees this row with tap r: those of this stage, and of the one before. The one
            // that the row completes comes first.
            const auto multiply = [&](bool these, bool others) {
#pragma unroll
                for (int j = 0; j < STEPS; ++j)
#pragma unroll
                    for (int r = R - 1; r >= 0; --r) {
                        if (!(r <= i ? these : others) || (j == P::PAIRS && r % 2 == 0 && r < R - 1)) continue;
                        // Of the last column the row before with the tap above, or nothing with the last one.
                        const unsigned upper = r % 2 ? w[r - r % 2][S - 1] : 0;
                        const unsigned taps[2] = {j < P::PAIRS ? w[r][2 * j] : upper, w[r][min(2 * j + 1, S - 1)]};
#pragma unroll
                        for (int m = 0; m < TILES; ++m) mma<T>(sums[(i - r + R) % R][m], x[m][j], taps);
                    }
            };
            if (first > 0 && first < part.count) multiply(true, true);
            else if (first == 0) multiply(true, false);
            else multiply(false, true);
            // Under way while the row that is complete is kept.
            if (i < R - 1) load(here + (i + 1) * P::ROW);
            outputs.keep(sums[(i + 1) % R], first + i + 1 - R, (i + 1) % R, buffer, check);
        }
        loads.done();
        __syncthreads();
        outputs.write(first + 1 - R, 1 % R, buffer);
    }
    if (__syncthreads_and(check == 0) || check == 0) return;
    outputs.again();
}
