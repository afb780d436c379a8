// What the kernels with banded weights share: rows of x on their way to planes of channels, and rows of y from there.
//
// x (n, h, w, c), y (n, p, q, c), of 16 bits. A block computes CHANNELS channels of STRIPS strips: a strip is so many
// rows of outputs of one image, WIDE times 8 columns. A position is 8 outputs beside each other.
#pragma once

#include "activation.cuh"
#include "matrix.cuh"
#include "ops/conv/cuda/by_definition.cuh"
#if __CUDA_ARCH__ >= 900
#include "tma.cuh"
#endif

struct Banded {
    // The tensor map of x.
    alignas(64) unsigned long long map[16];
    const void *x, *w;
    void *y;
    const void *bias, *residual;
    long long n, c, height, width, p, q;
    long long stride_h, stride_w, dilation_h, dilation_w, pad_h, pad_w;
    // Output rows of a strip; all strips, blocks of channels.
    long long rows, strips, channel_blocks;
    // The filters were written before all that is still to run.
    long long weights_ready;
};

// A strip of a block with traits P: residue classes of dilation are as in columns.cu, along rows only.
template <class P> struct Strip {
    int n, q0, p0, count;
    // Strips of the same rows lie behind each other.
    DEVICE Strip(const Banded &a, int strip) {
        const bool exists = strip < (int)a.strips;
        const int along = strip / P::STRIPS_ROW, piece = along / (int)a.n;
        n = along - piece * (int)a.n;
        q0 = (strip - along * P::STRIPS_ROW) * (P::WIDE * 8);
        const int residue = piece % P::PHASES, first = piece / P::PHASES * (int)a.rows;
        p0 = residue + P::PHASES * first;
        count = exists ? max(0, min((int)a.rows, ((int)a.p - residue + P::PHASES - 1) / P::PHASES - first)) : 0;
    }
};

// T, R, S; SH: stride of rows in a class; SW, DW: stride and dilation of columns; OCTETS of channels, EACH channels a
// warp; TILES of 16 positions a block, MTILES of them a warp; WIDE, and STRIPS_ROW strips along a row of y; PHASES:
// residue classes of rows; STRIP: pieces of 16 bytes from strip to strip of a plane's row; ROWS of x a stage and STAGES
// of them on their way, which TMA or threads bring; SUMS: rows of y that are written together; COPY bytes; ACTIVATION,
// BIAS, RESIDUAL.
template <class Traits> struct Tile : Traits {
    using B = Traits;
    static constexpr bool TAPS_FIRST = false;
    static constexpr int GROUP_C = 1;
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
    // Rows as they come: those of all strips beside each other, or by TMA strip by strip, pieces of 16 bytes swizzled.
    static constexpr int SLOTS = STRIPS * GROUPS * 8, RAW_PITCH = (B::TMA ? B::OCTETS : B::OCTETS | 1) * 16;
    static constexpr int RAW_ROW = (B::TMA ? GROUPS * 8 : SLOTS) * RAW_PITCH, RAW_STRIP = B::ROWS * RAW_ROW;
    static constexpr int CHANNEL_PITCH = (STRIPS * B::STRIP | 1) * 16, PLANE_ROW = CHANNELS * CHANNEL_PITCH;
    static constexpr int OUT_PITCH = (POSITIONS + 1) * 16, OUT_HALF = CHANNELS * OUT_PITCH,
                         OUT_ROW = OUT_HALF * (B::RESIDUAL ? 2 : 1);
    static constexpr int MORE_ROWS = QUADS * QUAD_ROWS, PLANE_BYTES = MORE_ROWS * PLANE_ROW;
    static constexpr int RAW_BYTES = B::TMA ? STRIPS * RAW_STRIP : MORE_ROWS * RAW_ROW;
    // Of all stages, with what is read and not used behind the last one; where they begin.
    static constexpr int ALL_RAW = B::STAGES * RAW_BYTES + (B::TMA ? (MORE_ROWS - B::ROWS) * RAW_ROW : 0);
    static constexpr int RAW_ALIGNMENT = B::TMA ? 1024 : 16;
    // Pieces of a pixel; copies of a row, and by a thread; their distance in columns.
    static constexpr int PIECES = B::OCTETS * 16 / B::COPY, COPIES = SLOTS * PIECES;
    static constexpr int ITEMS = B::TMA ? 1 : (COPIES + THREADS - 1) / THREADS, APART = THREADS / PIECES;
    // Of a stage: what is transposed at once, in all and by a warp.
    static constexpr int TRANSPOSED = STRIPS * GROUPS * TURNS * QUADS,
                         TRANSPOSED_EACH = (TRANSPOSED + WARPS - 1) / WARPS;
    // Of a row of outputs: what is written at once, and by a warp; or so many warps take turns with rows.
    static constexpr int STEP = 2 * OCTETS_ONCE, UNITS = POSITIONS * OCTETS_ONCE / 4, WRITTEN = UNITS * TURNS;
    static constexpr int WRITTEN_EACH = WRITTEN > WARPS ? WRITTEN / WARPS : 1,
                         SHARES = WARPS > WRITTEN ? WARPS / WRITTEN : 1;
    static_assert(THREADS % PIECES == 0 && WRITTEN_EACH * WARPS == WRITTEN * SHARES);
};

// Index of a filter's tap that column `k` of a step meets for output `lane / 4` of a position, less than 0 for none.
template <class P> DEVICE int tap_of(int k, int output) {
    const int distance = k - P::SW * output;
    return distance >= 0 && distance % P::DW == 0 && distance / P::DW < P::S ? distance / P::DW : -1;
}

// What a thread does with rows of x and y. All places are worked out once.
template <class P> struct Rows {
    using T = typename P::T;
    const Banded &a;
    const int tid = threadIdx.x, lane = tid % 32, warp = tid / 32;
    int channel0, strip0, rows, apart;
    unsigned raw, out, full;
    // Stages of TMA: the parity that is waited for; of a lane's strip the place of its first row.
    unsigned phase = 0;
    int box_column, box_row, box_image;
    // Of copies: their place in the first row of x, that row (far below zero where there is none), and where they go.
    int from[P::ITEMS], top[P::ITEMS];
    unsigned to;
    // Of matrices of a stage: from where and to where.
    unsigned source[P::TRANSPOSED_EACH], target[P::TRANSPOSED_EACH];
    // Of pieces of y: from where, to where in the first row, and the rows that there are.
    unsigned written[P::WRITTEN_EACH];
    int at[P::WRITTEN_EACH], count[P::WRITTEN_EACH];

    // The places of copies alone: they come first.
    DEVICE Rows(const Banded &a, unsigned raw, unsigned out) : a(a), raw(raw), out(out), full(raw + P::ALL_RAW) {
        channel0 = blockIdx.x % (unsigned)a.channel_blocks * P::CHANNELS;
        strip0 = blockIdx.x / (unsigned)a.channel_blocks * P::STRIPS;
        rows = ((int)a.rows - 1) * P::SH + P::R, apart = a.dilation_h;
        if constexpr (P::TMA) {
            const Strip<P> strip(a, strip0 + lane);
            box_column = strip.q0 * P::SW - (int)a.pad_w, box_row = strip.p0 * (int)a.stride_h - (int)a.pad_h;
            // Of strips that are none all is outside.
            box_image = strip.count > 0 ? strip.n : (int)a.n;
            return;
        }
        const int piece = tid % P::PIECES * (P::COPY / 2);
        to = raw + tid / P::PIECES * P::RAW_PITCH + piece * 2;
#pragma unroll
        for (int i = 0; i < P::ITEMS; ++i) {
            const int slot = tid / P::PIECES + i * P::APART;
            const Strip<P> strip(a, strip0 + slot / (P::GROUPS * 8));
            const int column = strip.q0 * P::SW - (int)a.pad_w + slot % (P::GROUPS * 8);
            top[i] = strip.p0 * (int)a.stride_h - (int)a.pad_h;
            from[i] = ((strip.n * (int)a.height + top[i]) * (int)a.width + column) * (int)a.c + channel0 + piece;
            if (strip.count <= 0 || (unsigned)column >= (unsigned)a.width || channel0 + piece >= (int)a.c)
                top[i] = -(1 << 30);
        }
    }
    // All other places, and what no later step writes. A barrier is to follow.
    DEVICE void prepare(unsigned planes) {
        if constexpr (P::BEYOND)
            for (int i = tid * 16; i < P::PLANE_BYTES; i += P::THREADS * 16) store_shared<16>(planes + i, {});
        const int matrix = lane / 8, once = P::OCTETS_ONCE;
#pragma unroll
        for (int i = 0; i < P::TRANSPOSED_EACH; ++i) {
            const int unit = warp + i * P::WARPS, group = unit % (P::STRIPS * P::GROUPS),
                      rest = unit / (P::STRIPS * P::GROUPS), turn = rest % P::TURNS,
                      row = rest / P::TURNS * P::QUAD_ROWS;
            const int of_strip = P::TMA ? group / P::GROUPS : 0, column = (group - of_strip * P::GROUPS) * 8 + lane % 8;
            const int swizzle = !P::TMA          ? 0
                                : P::OCTETS == 8 ? lane % 8
                                : P::OCTETS == 4 ? lane % 8 / 2
                                : P::OCTETS == 2 ? lane % 8 / 4
                                                 : 0;
            source[i] = raw + of_strip * P::RAW_STRIP + (row + matrix / once) * P::RAW_ROW + column * P::RAW_PITCH +
                        ((turn * 4 + matrix % once) ^ swizzle) * 16;
            target[i] = planes + row * P::PLANE_ROW + (turn * 32 + lane / 4) * P::CHANNEL_PITCH +
                        (group + group / P::GROUPS * (P::STRIP - P::GROUPS)) * 16 + lane % 4 * 4;
        }
        // Lanes take 8 channels of a pixel: a matrix has two channels of each octet.
        const int given = lane % 8 / 2, taken = lane % 4, column = lane / 4;
#pragma unroll
        for (int i = 0; i < P::WRITTEN_EACH; ++i) {
            const int unit = warp % P::WRITTEN + i * P::WARPS, turn = unit / P::UNITS, rest = unit % P::UNITS;
            const int base = rest / P::STEP * 8 + rest % P::STEP;
            written[i] = out + warp / P::WRITTEN * P::OUT_ROW +
                         (turn * 32 + given % once * 8 + matrix * 2 + lane % 2) * P::OUT_PITCH +
                         ((base + given / once * P::STEP) ^ given % once * 2) * 16;
            const int position = base + taken / once * P::STEP, channel = channel0 + (turn * 4 + taken % once) * 8;
            const Strip<P> strip(a, strip0 + position / P::WIDE);
            const int q = strip.q0 + position % P::WIDE * 8 + column;
            at[i] = ((strip.n * (int)a.p + strip.p0) * (int)a.q + q) * (int)a.c + channel;
            const bool real = position < P::STRIPS * P::WIDE && q < (int)a.q && channel < (int)a.c;
            count[i] = real ? strip.count : 0;
        }
    }
    // `most` rows of x from `first` to a stage as they lie there, padding as zeros. Nothing is read where it is not
    // real, whatever its address.
    DEVICE void copy(int first, int most, int stage) const {
#if __CUDA_ARCH__ >= 900
        if constexpr (P::TMA) {
            if (first >= rows || warp > 0) return;
            if (lane == 0) barrier_expect(full + stage * 8, P::RAW_BYTES);
            __syncwarp();
            if (lane < P::STRIPS)
                copy_box(raw + stage * P::RAW_BYTES + lane * P::RAW_STRIP, a.map, full + stage * 8, channel0,
                         box_column, box_row + first, box_image);
            return;
        }
#endif
        const T *x = static_cast<const T *>(a.x);
        const int row_step = apart * (int)a.width * (int)a.c, height = a.height;
#pragma unroll
        for (int t = 0; t < P::ROWS; ++t) {
            if (t >= most || first + t >= rows) break;
            const int down = (first + t) * apart, along = (first + t) * row_step;
#pragma unroll
            for (int i = 0; i < P::ITEMS; ++i) {
                if (i * P::THREADS + P::THREADS > P::COPIES && i * P::THREADS + tid >= P::COPIES) break;
                const bool real = (unsigned)(top[i] + down) < (unsigned)height;
                cp_async<P::COPY>(to + stage * P::RAW_BYTES + t * P::RAW_ROW + i * P::APART * P::RAW_PITCH,
                                  x + (from[i] + along), real);
            }
        }
        cp_async_commit();
    }
    // Parts of rows come in order: `begin` and `count` tell of the first row of a part and of how many it has.
    template <class Begin, class Count> DEVICE void start(const Begin &begin, const Count &count) {
#if __CUDA_ARCH__ >= 900
        if constexpr (P::TMA)
            if (tid == 0) {
                prefetch_map(a.map);
                for (int i = 0; i < P::STAGES; ++i) barrier_init(full + i * 8, 1);
                publish_barriers();
            }
#endif
#pragma unroll
        for (int stage = 0; stage < P::STAGES - !P::TMA; ++stage) copy(begin(stage), count(stage), stage);
    }
    // A stage's rows to planes, where all threads find them behind it; with `sync` others may still have read planes.
    // `ahead` tells of a part that is so many further.
    template <class Ahead> DEVICE void next(int &stage, bool sync, const Ahead &ahead) {
        if constexpr (!P::TMA) {
            cp_async_wait<P::STAGES - 2>();
            __syncthreads();
            ahead(P::STAGES - 1, stage == 0 ? P::STAGES - 1 : stage - 1);
        } else {
#if __CUDA_ARCH__ >= 900
            if (sync) __syncthreads();
            barrier_wait(full + stage * 8, phase);
#endif
        }
        transpose(stage);
        __syncthreads();
        if constexpr (P::TMA) ahead(P::STAGES, stage);
        if (++stage == P::STAGES) stage = 0, phase ^= 1;
    }
    // A stage's rows to planes of channels.
    DEVICE void transpose(int stage) const {
        constexpr int BATCH = 4;
#pragma unroll
        for (int i = 0; i < P::TRANSPOSED_EACH; i += BATCH) {
            unsigned v[BATCH][4];
#pragma unroll
            for (int j = i; j < i + BATCH && j < P::TRANSPOSED_EACH; ++j)
                if (is_unit(j)) ldmatrix_transposed(v[j - i], source[j] + stage * P::RAW_BYTES);
#pragma unroll
            for (int j = i; j < i + BATCH && j < P::TRANSPOSED_EACH; ++j) {
                if (!is_unit(j)) break;
#pragma unroll
                for (int m = 0; m < 4; ++m)
                    store_word(target[j] + m / P::OCTETS_ONCE * P::PLANE_ROW +
                                   m % P::OCTETS_ONCE * 8 * P::CHANNEL_PITCH,
                               v[j - i][m]);
            }
        }
    }
    DEVICE bool is_unit(int i) const {
        return i * P::WARPS + P::WARPS <= P::TRANSPOSED || warp + i * P::WARPS < P::TRANSPOSED;
    }
    // Where a lane's row of operands of a tile begins in a plane's row.
    DEVICE unsigned operand(unsigned planes, int channel, int tile) const {
        int position = tile * 16 + lane % 16;
        if (P::STRIPS * P::WIDE < P::POSITIONS && position >= P::STRIPS * P::WIDE) position = 0;
        const int piece = position / P::WIDE * P::STRIP + position % P::WIDE * P::SW + lane / 16;
        return planes + channel * P::CHANNEL_PITCH + piece * 16;
    }
    // Where two outputs of a lane's position of a tile are kept; its other position's lie 128 bytes behind, the next
    // tile's 256.
    DEVICE unsigned place(int channel, int tile) const {
        return out + channel * P::OUT_PITCH + tile * 256 + (lane / 4 ^ channel / 8 % 4 * 2) * 16 + lane % 4 * 4;
    }
    // In 16 bits or, where a residual is to be added, as two halves of floats. `check` becomes NaN with one of them.
    DEVICE void keep(unsigned there, float low, float high, float bias, unsigned &check) const {
        if constexpr (P::BIAS) low += bias, high += bias;
        if constexpr (P::RESIDUAL) {
            const unsigned a = __float_as_uint(low), b = __float_as_uint(high);
            check = add_zeros<T>(Element<T>::pack(low, high), check);
            store_word(there, (a & 0xffff) | b << 16);
            store_word(there + P::OUT_HALF, a >> 16 | (b & 0xffff0000u));
        } else {
            const unsigned word = activated<T, P::ACTIVATION>(low, high);
            check = add_zeros<T>(word, check);
            store_word(there, word);
        }
    }
    // `most` rows of outputs from `first` to y.
    DEVICE void write(int first, int most) const {
        const int row_step = P::PHASES * (int)a.q * (int)a.c, share = warp / P::WRITTEN;
#pragma unroll
        for (int row = 0; row < P::SUMS; row += P::SHARES) {
            if (row >= most) break;
            if (P::SHARES > 1 && row + P::SHARES > most && row + share >= most) break;
            const int o = first + row + share;
#pragma unroll
            for (int i = 0; i < P::WRITTEN_EACH; ++i) {
                unsigned v[4], upper[4];
                ldmatrix_transposed(v, written[i] + row * P::OUT_ROW);
                if constexpr (P::RESIDUAL) ldmatrix_transposed(upper, written[i] + row * P::OUT_ROW + P::OUT_HALF);
                if ((unsigned)o >= (unsigned)count[i]) continue;
                const int there = at[i] + o * row_step;
                const int channel =
                    channel0 + ((warp % P::WRITTEN + i * P::WARPS) / P::UNITS * 4 + lane % 4 % P::OCTETS_ONCE) * 8;
                if constexpr (P::RESIDUAL) add(v, upper, there, channel);
                store(v, there, channel);
            }
        }
    }
    DEVICE void add(unsigned (&v)[4], const unsigned (&upper)[4], int at, int channel) const {
        const T *residual = static_cast<const T *>(a.residual) + at;
#pragma unroll
        for (int i = 0; i < 4; ++i) {
            float low = __uint_as_float((v[i] & 0xffff) | upper[i] << 16),
                  high = __uint_as_float(v[i] >> 16 | (upper[i] & 0xffff0000u));
            if (channel + 2 * i < (int)a.c) {
                const unsigned word = load_global<4>(residual + 2 * i).v[0];
                low += Element<T>::to_float(T{(unsigned short)word});
                high += Element<T>::to_float(T{(unsigned short)(word >> 16)});
            }
            v[i] = activated<T, P::ACTIVATION>(low, high);
        }
    }
    DEVICE void store(const unsigned (&v)[4], int at, int channel) const {
        T *y = static_cast<T *>(a.y) + at;
        constexpr int EACH = P::COPY / 2;
#pragma unroll
        for (int e = 0; e < 8; e += EACH) {
            if (e > 0 && channel + e >= (int)a.c) break;
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
            const int position = tile * 16 + lane / 4 + e / 2 * 8;
            const Strip<P> strip(a, strip0 + position / P::WIDE);
            const int q = strip.q0 + position % P::WIDE * 8 + lane % 4 * 2 + e % 2;
            if (position >= P::STRIPS * P::WIDE || q >= (int)a.q || channel0 + channel >= (int)a.c) continue;
            for (int o = 0; o < strip.count; ++o)
                by_definition<P>(a, strip.n, channel0 + channel, strip.p0 + o * P::PHASES, q);
        }
    }
};
