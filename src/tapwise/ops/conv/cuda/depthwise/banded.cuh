// What the kernels with banded weights share: rows of x on their way to planes of channels, and rows of y from there.
//
// x (n, h, w, c), y (n, p, q, c), of 16 bits. A block computes CHANNELS channels of STRIPS strips: a strip is so many
// rows of outputs of one image, WIDE times 8 columns. A position is 8 outputs beside each other.
#pragma once

#include "activation.cuh"
#include "matrix.cuh"

struct Banded {
    const void *x, *w;
    void *y;
    const void *bias, *residual;
    long long n, c, height, width, p, q;
    long long stride_h, stride_w, dilation_h, pad_h, pad_w, phases_h;
    // Output rows of a strip; strips along a row of y, all strips, blocks of channels.
    long long rows, strips_row, strips, channel_blocks;
    // The filters were written before all that is still to run.
    long long weights_ready;
};

// A strip: residue classes of dilation are as in columns.cu, along rows only.
struct Strip {
    int n, q0, p0, count;
    // Strips of the same rows lie behind each other.
    DEVICE Strip(const Banded &a, int strip, int columns) {
        const bool exists = strip < (int)a.strips;
        const int along = strip / (int)a.strips_row, piece = along / (int)a.n;
        n = along - piece * (int)a.n;
        q0 = (strip - along * (int)a.strips_row) * columns;
        const int phases = a.phases_h, residue = piece % phases, first = piece / phases * (int)a.rows;
        p0 = residue + phases * first;
        count = exists ? max(0, min((int)a.rows, ((int)a.p - residue + phases - 1) / phases - first)) : 0;
    }
};

// T, R, S; SH: stride of rows in a class; SW, DW: stride and dilation of columns; OCTETS of channels, EACH channels a
// warp; TILES of 16 positions a block, MTILES of them a warp; WIDE; STRIP: pieces of 16 bytes from strip to strip of a
// plane's row; ROWS of x a stage and STAGES of them on their way; SUMS: rows of y that are written together; COPY
// bytes; ACTIVATION, BIAS, RESIDUAL.
template <class Traits> struct Tile : Traits {
    using B = Traits;
    static constexpr int CHANNELS = B::OCTETS * 8, POSITIONS = B::TILES * 16, STRIPS = POSITIONS / B::WIDE;
    static constexpr int WARPS = CHANNELS / B::EACH * (B::TILES / B::MTILES), THREADS = 32 * WARPS;
    static constexpr int SPAN = (B::S - 1) * B::DW + 1;
    // Steps of 16 columns that 8 outputs see, and groups of 8 that a strip sees.
    static constexpr int KSTEPS = (B::SW * 7 + SPAN + 15) / 16, GROUPS = (B::SW * (8 * B::WIDE - 1) + SPAN + 7) / 8;
    static constexpr bool BEYOND = B::SW * (B::WIDE - 1) + 2 * KSTEPS > GROUPS;
    static_assert(STRIPS > 0 && B::TILES % B::MTILES == 0 && B::STRIP >= GROUPS);
    static_assert(B::STRIP >= B::SW * (B::WIDE - 1) + 2 * KSTEPS);
    // Four matrices of 8 pixels and 8 channels that a warp transposes at once: so many octets, of so many rows.
    static constexpr int OCTETS_ONCE = B::OCTETS < 4 ? B::OCTETS : 4, TURNS = B::OCTETS / OCTETS_ONCE;
    static constexpr int QUAD_ROWS = 4 / OCTETS_ONCE, QUADS = (B::ROWS + QUAD_ROWS - 1) / QUAD_ROWS;
    static constexpr int SLOTS = STRIPS * GROUPS * 8, RAW_PITCH = (B::OCTETS | 1) * 16, RAW_ROW = SLOTS * RAW_PITCH;
    static constexpr int CHANNEL_PITCH = (STRIPS * B::STRIP | 1) * 16, PLANE_ROW = CHANNELS * CHANNEL_PITCH;
    static constexpr int OUT_PITCH = (POSITIONS + 1) * 16, OUT_HALF = CHANNELS * OUT_PITCH,
                         OUT_ROW = OUT_HALF * (B::RESIDUAL ? 2 : 1);
    static constexpr int RAW_BYTES = QUADS * QUAD_ROWS * RAW_ROW, PLANE_BYTES = QUADS * QUAD_ROWS * PLANE_ROW;
    static constexpr int PIECES = B::OCTETS * 16 / B::COPY, COPIES = SLOTS * PIECES;
};

// Index of a filter's tap that column `k` of a step meets for output `lane / 4` of a position, less than 0 for none.
template <class P> DEVICE int tap_of(int k, int output) {
    const int distance = k - P::SW * output;
    return distance >= 0 && distance % P::DW == 0 && distance / P::DW < P::S ? distance / P::DW : -1;
}

// One output by the definition.
template <class P> __device__ __noinline__ void define(const Banded &a, int n, int c, int p, int q) {
    using T = typename P::T;
    const T *x = static_cast<const T *>(a.x) + (long long)n * a.height * a.width * a.c + c;
    const T *w = static_cast<const T *>(a.w) + (long long)c * P::R * P::S;
    float sum = 0.0f;
    for (int r = 0; r < P::R; ++r)
        for (int s = 0; s < P::S; ++s) {
            const long long h = p * a.stride_h - a.pad_h + r * a.dilation_h, v = q * P::SW - a.pad_w + s * P::DW;
            const bool real = h >= 0 && h < a.height && v >= 0 && v < a.width;
            sum += (real ? Element<T>::to_float(x[(h * a.width + v) * a.c]) : 0.0f) *
                   Element<T>::to_float(w[r * P::S + s]);
        }
    const long long at = ((n * a.p + p) * a.q + q) * a.c + c;
    if constexpr (P::BIAS) sum += Element<T>::to_float(static_cast<const T *>(a.bias)[c]);
    if constexpr (P::RESIDUAL) sum += Element<T>::to_float(static_cast<const T *>(a.residual)[at]);
    const unsigned word = activated<T, P::ACTIVATION>(sum, 0.0f);
    static_cast<T *>(a.y)[at] = T{(unsigned short)word};
}

struct Place { int at, limit; };

template <class P> struct Rows {
    using T = typename P::T;
    const Banded &a;
    const int tid = threadIdx.x, lane = tid % 32, warp = tid / 32;
    int channel0, strip0, rows, apart;
    // Of columns of x: the place of a strip's first row, and that row. Of positions: the place of their first output,
    // and (rows << 8) + columns.
    Place *columns, *positions;
    unsigned raw, planes, out;

    DEVICE Rows(const Banded &a, unsigned char *tables, unsigned raw, unsigned planes, unsigned out)
        : a(a), raw(raw), planes(planes), out(out) {
        channel0 = blockIdx.x % (unsigned)a.channel_blocks * P::CHANNELS;
        strip0 = blockIdx.x / (unsigned)a.channel_blocks * P::STRIPS;
        rows = ((int)a.rows - 1) * P::SH + P::R;
        apart = a.dilation_h;
        columns = reinterpret_cast<Place *>(tables), positions = columns + P::SLOTS;
    }
    // What no later step writes, and the tables. A barrier is to follow.
    DEVICE void begin() const {
        if constexpr (P::BEYOND)
            for (int i = tid * 16; i < P::PLANE_BYTES; i += P::THREADS * 16) store_shared<16>(planes + i, {});
        for (int i = tid; i < P::SLOTS; i += P::THREADS) {
            const Strip strip(a, strip0 + i / (P::GROUPS * 8), P::WIDE * 8);
            const int column = strip.q0 * P::SW - (int)a.pad_w + i % (P::GROUPS * 8);
            const int top = strip.p0 * (int)a.stride_h - (int)a.pad_h;
            const bool real = strip.count > 0 && (unsigned)column < (unsigned)a.width;
            columns[i] = {((strip.n * (int)a.height + top) * (int)a.width + column) * (int)a.c + channel0,
                          real ? top : -(1 << 30)};
        }
        for (int i = tid; i < P::POSITIONS; i += P::THREADS) {
            const Strip strip(a, strip0 + i / P::WIDE, P::WIDE * 8);
            const int q = strip.q0 + i % P::WIDE * 8, wide = max(0, min(8, (int)a.q - q));
            const bool real = i < P::STRIPS * P::WIDE && wide > 0;
            positions[i] = {((strip.n * (int)a.p + strip.p0) * (int)a.q + q) * (int)a.c + channel0,
                            real ? strip.count * 256 + wide : 0};
        }
    }
    // `count` rows of x from `first` to a stage as they lie there, padding as zeros.
    DEVICE void copy(int first, int count, int stage) const {
        const T *x = static_cast<const T *>(a.x);
        const unsigned to = raw + stage * P::RAW_BYTES;
        const int row_step = apart * (int)a.width * (int)a.c;
#pragma unroll
        for (int i = 0; i < (P::COPIES + P::THREADS - 1) / P::THREADS; ++i) {
            const int item = i * P::THREADS + tid, slot = item / P::PIECES, channel = item % P::PIECES * (P::COPY / 2);
            if (P::COPIES % P::THREADS != 0 && item >= P::COPIES) break;
            const Place place = columns[slot];
            const bool exists = channel0 + channel < (int)a.c;
#pragma unroll
            for (int t = 0; t < P::ROWS; ++t) {
                if (t >= count) break;
                const int row = first + t;
                const bool real = exists && row < rows && (unsigned)(place.limit + row * apart) < (unsigned)a.height;
                const T *from = x + (real ? place.at + channel + row * row_step : 0);
                const unsigned there = to + t * P::RAW_ROW + slot * P::RAW_PITCH + channel * 2;
                cp_async<P::COPY>(there, from, real);
            }
        }
    }
    // A stage's rows to planes of channels.
    DEVICE void transpose(int stage) const {
        const unsigned from = raw + stage * P::RAW_BYTES;
        constexpr int GROUPS = P::STRIPS * P::GROUPS, PER_ROW = GROUPS * P::TURNS, ONCE = P::OCTETS_ONCE;
        const int matrix = lane / 8;
        const unsigned source = from + matrix / ONCE * P::RAW_ROW + lane % 8 * P::RAW_PITCH + matrix % ONCE * 16,
                       target = planes + lane / 4 * P::CHANNEL_PITCH + lane % 4 * 4;
        for (int i = warp; i < PER_ROW * P::QUADS; i += P::WARPS) {
            const int quad = i / PER_ROW, rest = i - quad * PER_ROW, turn = rest / GROUPS, group = rest - turn * GROUPS;
            unsigned v[4];
            ldmatrix_transposed(v, source + quad * P::QUAD_ROWS * P::RAW_ROW + group * 8 * P::RAW_PITCH + turn * 64);
            const unsigned to = target + quad * P::QUAD_ROWS * P::PLANE_ROW + turn * 32 * P::CHANNEL_PITCH +
                                (group + group / P::GROUPS * (P::STRIP - P::GROUPS)) * 16;
#pragma unroll
            for (int m = 0; m < 4; ++m)
                store_word(to + m / ONCE * P::PLANE_ROW + m % ONCE * 8 * P::CHANNEL_PITCH, v[m]);
        }
    }
    // Where a lane's row of operands of a tile begins in a plane's row.
    DEVICE unsigned operand(int channel, int tile) const {
        int position = tile * 16 + lane % 16;
        if (P::STRIPS * P::WIDE < P::POSITIONS && position >= P::STRIPS * P::WIDE) position = 0;
        const int piece = position / P::WIDE * P::STRIP + position % P::WIDE * P::SW + lane / 16;
        return planes + channel * P::CHANNEL_PITCH + piece * 16;
    }
    // Two outputs of a position, in 16 bits or, where a residual is to be added, as two halves of floats.
    DEVICE void keep(int row, int channel, int position, float low, float high, float bias) const {
        if constexpr (P::BIAS) low += bias, high += bias;
        const unsigned to =
            out + row * P::OUT_ROW + channel * P::OUT_PITCH + (position ^ channel / 8 % 4 * 2) * 16 + lane % 4 * 4;
        if constexpr (P::RESIDUAL) {
            const unsigned a = __float_as_uint(low), b = __float_as_uint(high);
            store_word(to, (a & 0xffff) | b << 16);
            store_word(to + P::OUT_HALF, a >> 16 | (b & 0xffff0000u));
        } else {
            store_word(to, activated<T, P::ACTIVATION>(low, high));
        }
    }
    // `count` rows of outputs from `first` to y. Lanes take 8 channels of a pixel: a matrix has two channels of each
    // octet.
    DEVICE void write(int first, int count) const {
        constexpr int ONCE = P::OCTETS_ONCE, STEP = 2 * ONCE, UNITS = P::POSITIONS * ONCE / 4,
                      PER_ROW = UNITS * P::TURNS;
        const auto octet_of = [](int quarter) { return quarter % ONCE; };
        const auto position_of = [](int quarter) { return quarter / ONCE * STEP; };
        const int given = lane % 8 / 2, taken = lane % 4, column = lane / 4;
        const unsigned source = out + (octet_of(given) * 8 + lane / 8 * 2 + lane % 2) * P::OUT_PITCH;
        const int row_step = (int)a.phases_h * (int)a.q * (int)a.c;
        for (int i = warp; i < count * PER_ROW; i += P::WARPS) {
            const int row = i / PER_ROW, rest = i - row * PER_ROW, turn = rest / UNITS, unit = rest - turn * UNITS;
            const int base = unit / STEP * 8 + unit % STEP, octet = turn * 4 + octet_of(taken);
            const int channel = channel0 + octet * 8;
            const unsigned from = source + row * P::OUT_ROW + turn * 32 * P::OUT_PITCH +
                                  ((base + position_of(given)) ^ octet_of(given) * 2) * 16;
            unsigned v[4], upper[4];
            ldmatrix_transposed(v, from);
            if constexpr (P::RESIDUAL) ldmatrix_transposed(upper, from + P::OUT_HALF);
            const Place place = positions[base + position_of(taken)];
            const int o = first + row;
            if (o < 0 || o >= place.limit >> 8 || column >= (place.limit & 255)) continue;
            const int at = place.at + octet * 8 + o * row_step + column * (int)a.c;
            if constexpr (P::RESIDUAL) add(v, upper, at, channel);
            store(v, at, channel);
        }
    }
    DEVICE void add(unsigned (&v)[4], const unsigned (&upper)[4], int at, int channel) const {
        const T *residual = static_cast<const T *>(a.residual) + at;
#pragma unroll
        for (int i = 0; i < 4; ++i) {
            float low = __uint_as_float((v[i] & 0xffff) | upper[i] << 16),
                  high = __uint_as_float(v[i] >> 16 | (upper[i] & 0xffff0000u));
            if (channel + 2 * i < (int)a.c) low += Element<T>::to_float(residual[2 * i]);
            if (channel + 2 * i + 1 < (int)a.c) high += Element<T>::to_float(residual[2 * i + 1]);
            v[i] = activated<T, P::ACTIVATION>(low, high);
        }
    }
    DEVICE void store(const unsigned (&v)[4], int at, int channel) const {
        T *y = static_cast<T *>(a.y) + at;
        constexpr int EACH = P::COPY / 2;
#pragma unroll
        for (int e = 0; e < 8; e += EACH) {
            if (channel + e >= (int)a.c) break;
            Piece<P::COPY> piece;
#pragma unroll
            for (int i = 0; i < P::COPY / 4; ++i) piece.v[i] = v[e / 2 + i];
            store_global<P::COPY>(y + e, piece);
        }
    }
    // A lane's outputs of a tile again, by the definition: where products with the zeros beside the weights may have
    // made NaN. To be called when all rows were written.
    DEVICE void again(int channel, int tile) const {
        for (int e = 0; e < 4; ++e) {
            const int position = tile * 16 + lane / 4 + e / 2 * 8, column = lane % 4 * 2 + e % 2;
            const Place place = positions[position];
            if (column >= (place.limit & 255) || channel0 + channel >= (int)a.c) continue;
            const Strip strip(a, strip0 + position / P::WIDE, P::WIDE * 8);
            for (int o = 0; o < place.limit >> 8; ++o)
                define<P>(a, strip.n, channel0 + channel, strip.p0 + o * (int)a.phases_h,
                          strip.q0 + position % P::WIDE * 8 + column);
        }
    }
};
