// Sums of bytes on tensor cores, a strip of the result a block, as in tiles.cu: the ring holds pixels as float16, which
// has every byte. A row of taps is a banded matrix of so many elements by 8 outputs: taps of neighbouring outputs lie
// an element further, and those of a row as many elements apart as there are channels. Pixels are the left operand, 16
// rows of them; 8 elements are half of it, so neighbouring outputs share halves.
//
// Windows at once take one such product for each row of taps. A column and a row: the column's taps are a banded matrix
// of 16 outputs by the rows that they see, to the left of the pixels, and its sums go to shared memory as float16, to
// be the left operand of the row's. A weight is a float16 and another one for what it leaves, and so are column sums
// that are not small whole numbers. The smaller parts' products come first.
#include "matrix.cuh"
#include "ops/filter/rows.cuh"

// What a list begins with: KIND of sums; what makes column sums and results of the scaled sums; what column sums are
// multiplied by once they are truncated; whether the products of two smaller parts count.
enum Constant {
    CVAL,
    LOW,
    HIGH,
    START,
    COLUMN_EPSILON,
    EPSILON,
    KIND,
    COLUMN_SCALE,
    COLUMN_RESCALE,
    SCALE,
    ALL,
    CONSTANTS = 16
};
// Weights of one part and column sums of one; weights of two; both of two.
enum Kind { EXACT, PARTS, SPLIT };

// T: of x, a byte; C channels; SEPARABLE; TAPS_H, TAPS_W of a window; SKIP elements of the tile in front of the first;
// ROWS, COLUMNS (elements) of a tile; THREADS; PIECES of 8 elements of a row of the tile with what it sees, PITCH
// elements of it in shared memory; RING: rows there; INTEGRAL: y holds integers, CLIP: within their range; TRUNCATE: so
// do the column's sums.
template <class Traits> struct MmaTile : Traits {
    using B = Traits;
    using STORED = f16;
    static constexpr int PIECE = 8, AT_ONCE = 6;
    static constexpr bool ABREAST = B::PIECES <= B::THREADS;
    // Elements of a row that a warp has at a time; warps, of which some are below each other.
    static constexpr int ACROSS = 32, WARPS = B::THREADS / 32, DOWN = B::ROWS / 16, BESIDE = WARPS / DOWN;
    // Halves of operands that 8 outputs see of a row: whole ones, and whether there is half a one more.
    static constexpr int HALVES = (8 + B::SKIP + (B::TAPS_W - 1) * B::C + 7) / 8, STEPS = HALVES / 2;
    // The same of 16 outputs of a column.
    static constexpr int COLUMN_HALVES = (16 + B::TAPS_H - 1 + 7) / 8, COLUMN_STEPS = COLUMN_HALVES / 2;
    static constexpr bool TAIL = HALVES % 2, COLUMN_TAIL = COLUMN_HALVES % 2;
    // Bytes of the list: all in front of a row's weights, a row's, all.
    static constexpr int COLUMN_AT = 4 * CONSTANTS, COLUMN_BYTES = B::SEPARABLE ? COLUMN_HALVES * 512 : 0;
    static constexpr int ROW_AT = COLUMN_AT + COLUMN_BYTES, ROW_BYTES = HALVES * 256;
    static constexpr int LIST_BYTES = ROW_AT + (B::SEPARABLE ? 1 : B::TAPS_H) * ROW_BYTES;
    // Elements of a row that warps load, of sums where there are some.
    static constexpr int WIDTH = B::COLUMNS + 16 * STEPS, IN_ROWS = B::ROWS + B::TAPS_H - 1;
    static constexpr int PITCH_BYTES = 2 * B::PITCH, RING_BYTES = B::RING * PITCH_BYTES;
    static constexpr int SUMS_BYTES = B::SEPARABLE ? B::ROWS * PITCH_BYTES : 0;
    // Steps whose products are added up by tensor cores alone, which round towards zero: then by addition. Rows of taps
    // that have about so many.
    static constexpr int TOGETHER = 4, ROWS_TOGETHER = HALVES >= 2 * TOGETHER ? 1 : 2 * TOGETHER / HALVES;
    static_assert(sizeof(typename B::T) == 1 && B::ROWS % 16 == 0 && B::COLUMNS % ACROSS == 0 && WARPS % DOWN == 0);
    static_assert(B::PITCH % 16 == 8 && WIDTH <= B::PITCH && PIECE * B::PIECES <= B::PITCH);
};

// Addresses of this lane's row of 16, and half of an operand, and of its row of 8.
DEVICE int lane_row() { return threadIdx.x % 16; }
DEVICE int lane_half() { return threadIdx.x % 32 / 16; }

// A row of taps of 16 rows of 32 outputs. `pixels`: this lane's row and half, `rest` what they leave (SPLIT); `taps`:
// this lane's.
template <class P, int KIND>
DEVICE void add_row(float (&sums)[4][4], unsigned pixels, unsigned rest, unsigned taps, bool all) {
    // Operands of a step and of the next one: they begin with an even half, or with an odd one.
    unsigned even[2][4], odd[2][4], small_even[2][4], small_odd[2][4];
    const auto load = [&](int to, int step) {
        ldmatrix(even[to], pixels + 32 * step), ldmatrix(odd[to], pixels + 32 * step + 16);
        if constexpr (KIND == SPLIT)
            ldmatrix(small_even[to], rest + 32 * step), ldmatrix(small_odd[to], rest + 32 * step + 16);
    };
    if constexpr (P::STEPS > 0) load(0, 0);
    constexpr bool FLUSH = P::STEPS > P::TOGETHER;
    float parts[4][4];
    float (&to)[4][4] = FLUSH ? parts : sums;
#pragma unroll 1
    for (int i0 = 0; i0 < P::STEPS; i0 += P::TOGETHER) {
        if constexpr (FLUSH)
#pragma unroll
            for (int i = 0; i < 16; ++i) parts[i / 4][i % 4] = 0;
#pragma unroll
        for (int j = 0; j < P::TOGETHER; ++j) {
            if (i0 + j >= P::STEPS) break;
            load((j + 1) % 2, i0 + j + 1);
            const Piece<16> w = load_shared<16>(taps + (i0 + j) * 512);
            const unsigned large_taps[2] = {w.v[0], w.v[1]}, small_taps[2] = {w.v[2], w.v[3]};
            const auto multiply = [&](const unsigned (&of_even)[2][4], const unsigned (&of_odd)[2][4],
                                      const unsigned (&of_taps)[2]) {
                mma<f16>(to[0], of_even[j % 2], of_taps), mma<f16>(to[1], of_odd[j % 2], of_taps);
                mma<f16>(to[2], of_even[(j + 1) % 2], of_taps), mma<f16>(to[3], of_odd[(j + 1) % 2], of_taps);
            };
            if (KIND == SPLIT && all) multiply(small_even, small_odd, small_taps);
            if constexpr (KIND != EXACT) multiply(even, odd, small_taps);
            if constexpr (KIND == SPLIT) multiply(small_even, small_odd, large_taps);
            multiply(even, odd, large_taps);
        }
        if constexpr (FLUSH)
#pragma unroll
            for (int i = 0; i < 16; ++i) sums[i / 4][i % 4] += parts[i / 4][i % 4];
    }
    if constexpr (P::TAIL) {
        const Piece<8> w = load_shared<8>(taps - threadIdx.x % 32 * 8 + P::STEPS * 512);
        // Four halves, one behind the other.
        const auto load_halves = [&](unsigned (&to)[2][4], unsigned from) {
            ldmatrix(to[0], from + 32 * P::STEPS), ldmatrix(to[1], from + 32 * P::STEPS + 32);
        };
        const auto multiply = [&](const unsigned (&from)[2][4], unsigned of_taps) {
#pragma unroll
            for (int t = 0; t < 4; ++t) {
                const unsigned half[2] = {from[t / 2][t % 2 * 2], from[t / 2][t % 2 * 2 + 1]};
                mma_half<f16>(sums[t], half, of_taps);
            }
        };
        unsigned halves[2][4], small_halves[2][4];
        load_halves(halves, pixels);
        if constexpr (KIND == SPLIT) load_halves(small_halves, rest);
        if (KIND == SPLIT && all) multiply(small_halves, w.v[1]);
        if constexpr (KIND != EXACT) multiply(halves, w.v[1]);
        if constexpr (KIND == SPLIT) multiply(small_halves, w.v[0]);
        multiply(halves, w.v[0]);
    }
}

// Two neighbours' column sums, on their way to shared memory.
template <class P, int KIND>
DEVICE void put_sums(unsigned to, float a, float b, float scale, float epsilon, float rescale) {
    if constexpr (KIND == SPLIT) {
        a *= scale, b *= scale;
        if constexpr (P::TRUNCATE)
            a = trunc(a + copysign(epsilon, a)) * rescale, b = trunc(b + copysign(epsilon, b)) * rescale;
        const unsigned large = Element<f16>::pack(a, b);
        store_word(to, large);
        store_word(to + P::SUMS_BYTES, Element<f16>::pack(a - widen(f16{(unsigned short)large}),
                                                          b - widen(f16{(unsigned short)(large >> 16)})));
    } else if constexpr (P::TRUNCATE) {
        // Less than 1024: with 1024 more, float16 has whole numbers alone.
        const float more = 1024.0f + epsilon;
        const unsigned two =
            truncate_f16x2(__fmaf_rz(a, scale, copysign(more, a)), __fmaf_rz(b, scale, copysign(more, b)));
        store_word(to, subtract_f16x2(two, two & 0x80008000u | 0x64006400u));
    } else store_word(to, Element<f16>::pack(a * scale, b * scale));
}

// Column sums of all that the row's taps will see.
template <class P, int KIND>
DEVICE void filter_columns(const float *constants, unsigned list, unsigned ring, int first, unsigned sums) {
    const int lane = threadIdx.x % 32, warp = threadIdx.x / 32, down = warp % P::DOWN * 16;
    const float scale = constants[COLUMN_SCALE], epsilon = constants[COLUMN_EPSILON];
    const float rescale = constants[COLUMN_RESCALE];
    // Few operands of weights stay in registers.
    constexpr bool KEPT = P::COLUMN_STEPS <= 4, FLUSH = !KEPT;
    constexpr int HELD = KEPT ? P::COLUMN_STEPS : 1;
    unsigned large[HELD][4], small[HELD][4], from[HELD], tail_from = 0;
    Piece<16> tail;
    const auto load_taps = [&](int i, unsigned (&to)[4], unsigned (&to_small)[4]) {
        const Piece<16> w = load_shared<16>(list + i * 1024 + lane * 16);
        to[0] = w.v[0], to[1] = w.v[1], to[2] = w.v[2], to[3] = w.v[3];
        if constexpr (KIND == EXACT) return;
        const Piece<16> rest = load_shared<16>(list + i * 1024 + 512 + lane * 16);
        to_small[0] = rest.v[0], to_small[1] = rest.v[1], to_small[2] = rest.v[2], to_small[3] = rest.v[3];
    };
    const auto address = [&](int row, int half) {
        row += first + down;
        row -= row < P::RING ? 0 : P::RING;
        return ring + row * P::PITCH_BYTES + half * 16;
    };
    if constexpr (KEPT)
#pragma unroll
        for (int i = 0; i < P::COLUMN_STEPS; ++i)
            load_taps(i, large[i], small[i]), from[i] = address(16 * i + lane_row(), lane_half());
    if constexpr (P::COLUMN_TAIL) {
        tail = load_shared<16>(list + P::COLUMN_STEPS * 1024 + lane * 16);
        tail_from = address(16 * P::COLUMN_STEPS + lane % 8, lane / 8 % 2);
    }
    const unsigned to = sums + (down + lane / 4) * P::PITCH_BYTES + lane % 4 * 4;
#pragma unroll 1
    for (int at = warp / P::DOWN * 32; at < 2 * P::WIDTH; at += P::BESIDE * 32) {
        float d[2][4] = {}, parts[2][4];
        float (&into)[2][4] = FLUSH ? parts : d;
#pragma unroll 1
        for (int i0 = 0; i0 < P::COLUMN_STEPS; i0 += P::TOGETHER) {
            if constexpr (FLUSH)
#pragma unroll
                for (int i = 0; i < 8; ++i) parts[i / 4][i % 4] = 0;
#pragma unroll
            for (int j = 0; j < P::TOGETHER; ++j) {
                if (i0 + j >= P::COLUMN_STEPS) break;
                const int held = KEPT ? j : 0;
                if constexpr (!KEPT)
                    load_taps(i0 + j, large[0], small[0]), from[0] = address(16 * (i0 + j) + lane_row(), lane_half());
                unsigned pixels[4];
                ldmatrix_transposed(pixels, from[held] + at);
#pragma unroll
                for (int part = KIND == EXACT; part < 2; ++part)
#pragma unroll
                    for (int t = 0; t < 2; ++t) {
                        const unsigned eight[2] = {pixels[2 * t], pixels[2 * t + 1]};
                        mma<f16>(into[t], part ? large[held] : small[held], eight);
                    }
            }
            if constexpr (FLUSH)
#pragma unroll
                for (int i = 0; i < 8; ++i) d[i / 4][i % 4] += parts[i / 4][i % 4];
        }
        if constexpr (P::COLUMN_TAIL) {
            unsigned pixels[2];
            ldmatrix_transposed(pixels, tail_from + at);
#pragma unroll
            for (int part = KIND == EXACT; part < 2; ++part) {
                const unsigned taps[2] = {tail.v[part ? 0 : 2], tail.v[part ? 1 : 3]};
#pragma unroll
                for (int t = 0; t < 2; ++t) mma_half<f16>(d[t], taps, pixels[t]);
            }
        }
#pragma unroll
        for (int i = 0; i < 4; ++i)
            put_sums<P, KIND>(to + at + i / 2 * 16 + i % 2 * 8 * P::PITCH_BYTES, d[i / 2][i % 2 * 2],
                              d[i / 2][i % 2 * 2 + 1], scale, epsilon, rescale);
    }
}

// What makes a sum a result.
template <class P, typename Y> struct Results {
    float scale, low, high, start, epsilon;
    DEVICE Results(const float *constants)
        : scale(constants[SCALE]), low(constants[LOW]), high(constants[HIGH]), start(constants[START]),
          epsilon(constants[EPSILON]) {}
    DEVICE Y operator()(float sum) const {
        if constexpr (!P::INTEGRAL) return Arithmetic<Y>::narrow(sum * scale);
        else return to_integer<Y, false, P::CLIP>(fma(sum, scale, P::CLIP ? start : copysign(epsilon, sum)), low, high);
    }
};

// 16 rows of 32 results from (row, w) on, those of the picture. A thread has two neighbours of each 8: those of 4 bytes
// fill sectors, others go by way of `scratch`, the warp's, where 16 bytes of a row come together.
template <class P, typename Y>
DEVICE void store_results(const FilterTiles &a, Y *y, int row, int w, const float (&sums)[4][4],
                          const Results<P, Y> &result, unsigned char *scratch) {
    const int lane = threadIdx.x % 32, height = a.height, width = a.width;
    Y *const corner = y + (long long)row * width + w;
    if constexpr (sizeof(Y) == 4) {
        const bool aligned = (reinterpret_cast<unsigned long long>(y) | width * 4u) % 8 == 0;
#pragma unroll
        for (int i = 0; i < 8; ++i) {
            const int h = lane / 4 + i % 2 * 8, e = i / 2 * 8 + lane % 4 * 2;
            if (row + h >= height) continue;
            Y *const to = corner + (long long)h * width + e;
            const Neighbours<Y, 2> two = {result(sums[i / 2][i % 2 * 2]), result(sums[i / 2][i % 2 * 2 + 1])};
            if (aligned && w + e + 1 < width) *reinterpret_cast<Neighbours<Y, 2> *>(to) = two;
            else {
                if (w + e < width) to[0] = two.v[0];
                if (w + e + 1 < width) to[1] = two.v[1];
            }
        }
    } else {
        constexpr int BYTES = P::ACROSS * sizeof(Y), PITCH = BYTES + 16;
        unsigned char *const mine = scratch + lane / 4 * PITCH + lane % 4 * 2 * sizeof(Y);
#pragma unroll
        for (int i = 0; i < 8; ++i) {
            const Neighbours<Y, 2> two = {result(sums[i / 2][i % 2 * 2]), result(sums[i / 2][i % 2 * 2 + 1])};
            *reinterpret_cast<Neighbours<Y, 2> *>(mine + i % 2 * 8 * PITCH + i / 2 * 8 * sizeof(Y)) = two;
        }
        __syncwarp();
        const bool aligned = (reinterpret_cast<unsigned long long>(y) | width * (unsigned)sizeof(Y)) % 16 == 0;
        if (aligned && w + P::ACROSS <= width) {
            constexpr int EACH = BYTES / 16;
#pragma unroll
            for (int i = lane; i < 16 * EACH; i += 32)
                if (const int h = i / EACH; row + h < height)
                    *reinterpret_cast<uint4 *>(reinterpret_cast<char *>(corner + (long long)h * width) +
                                               i % EACH * 16) =
                        *reinterpret_cast<const uint4 *>(scratch + h * PITCH + i % EACH * 16);
        } else if (w + lane < width) {
            const int rows = min(16, height - row);
#pragma unroll 4
            for (int h = 0; h < rows; ++h)
                corner[(long long)h * width + lane] = reinterpret_cast<const Y *>(scratch + h * PITCH)[lane];
        }
        __syncwarp();
    }
}

// The row's sums of the column's at `from`, or windows at once of the ring, whose place `first` is the first row's.
template <class P, int KIND, typename Y>
DEVICE void filter_rows(const FilterTiles &a, const float *constants, unsigned list, unsigned from, int first, Y *y,
                        int h0, int w0, unsigned char *scratch) {
    const int warp = threadIdx.x / 32, down = warp % P::DOWN * 16;
    const bool all = constants[ALL] != 0.0f;
    const Results<P, Y> result(constants);
    list += threadIdx.x % 32 * 16;
    if (h0 + down >= a.height) return;
#pragma unroll 1
    for (int e = warp / P::DOWN * P::ACROSS; e < P::COLUMNS; e += P::BESIDE * P::ACROSS) {
        if (w0 + e >= a.width) break;
        float sums[4][4] = {};
        const unsigned at = from + (e + lane_half() * 8) * 2;
        if constexpr (P::SEPARABLE) {
            const unsigned pixels = at + (down + lane_row()) * P::PITCH_BYTES;
            add_row<P, KIND>(sums, pixels, pixels + P::SUMS_BYTES, list, all);
        } else {
            constexpr int TOGETHER = P::ROWS_TOGETHER;
            constexpr bool FLUSH = P::TAPS_H > TOGETHER;
            int row = first + down + lane_row();
            row -= row < P::RING ? 0 : P::RING;
            unsigned pixels = at + row * P::PITCH_BYTES, taps = list;
            float parts[4][4];
            float (&to)[4][4] = FLUSH ? parts : sums;
#pragma unroll 1
            for (int r0 = 0; r0 < P::TAPS_H; r0 += TOGETHER) {
                if constexpr (FLUSH)
#pragma unroll
                    for (int i = 0; i < 16; ++i) parts[i / 4][i % 4] = 0;
#pragma unroll
                for (int j = 0; j < TOGETHER; ++j) {
                    if (r0 + j >= P::TAPS_H) break;
                    add_row<P, KIND>(to, pixels, 0, taps, false);
                    pixels += P::PITCH_BYTES, taps += P::ROW_BYTES;
                    if (++row == P::RING) pixels -= P::RING_BYTES;
                }
                if constexpr (FLUSH)
#pragma unroll
                    for (int i = 0; i < 16; ++i) sums[i / 4][i % 4] += parts[i / 4][i % 4];
            }
        }
        store_results(a, y, h0 + down, w0 + e, sums, result, scratch);
    }
}

template <class Traits, typename Y> DEVICE void filter_tiles_mma(const FilterTiles &a) {
    using P = MmaTile<Traits>;
    extern __shared__ __align__(16) unsigned char memory[];
    const float *const constants = reinterpret_cast<const float *>(memory);
    constexpr int SCRATCH = sizeof(Y) == 4 ? 0 : 16 * (P::ACROSS * sizeof(Y) + 16);
    unsigned char *const ring = memory + P::LIST_BYTES, *const all_scratch = ring + P::RING_BYTES;
    unsigned char *const scratch = all_scratch + threadIdx.x / 32 * SCRATCH;
    // Behind all others, as their smaller parts are there for one kind alone.
    unsigned char *const sums = all_scratch + P::WARPS * SCRATCH;
    begin_dependent();
    const uint4 *const list = static_cast<const uint4 *>(a.list);
    for (int i = threadIdx.x; i < P::LIST_BYTES / 16; i += P::THREADS) reinterpret_cast<uint4 *>(memory)[i] = list[i];
    // Zeros times what no row was brought to: it must be a number.
    for (int i = threadIdx.x; i < P::RING_BYTES / 16; i += P::THREADS)
        reinterpret_cast<uint4 *>(ring)[i] = make_uint4(0, 0, 0, 0);
    __syncthreads();
    const unsigned weights = shared_address(memory), pixels = shared_address(ring), column_sums = shared_address(sums);
    const int w0 = blockIdx.x * P::COLUMNS;
    Y *const y = static_cast<Y *>(a.y) + (long long)blockIdx.z * a.height * a.width;
    const int kind = (int)constants[KIND];
    const auto columns = [&](int first) {
        if constexpr (P::SEPARABLE) {
            const unsigned taps = weights + P::COLUMN_AT;
            if (kind == EXACT) filter_columns<P, EXACT>(constants, taps, pixels, first, column_sums);
            else if (kind == PARTS) filter_columns<P, PARTS>(constants, taps, pixels, first, column_sums);
            else filter_columns<P, SPLIT>(constants, taps, pixels, first, column_sums);
            __syncthreads();
        }
    };
    const auto outputs = [&](int first, int h) {
        const unsigned taps = weights + P::ROW_AT, from = P::SEPARABLE ? column_sums : pixels;
        if (kind == EXACT) filter_rows<P, EXACT>(a, constants, taps, from, first, y, h, w0, scratch);
        else if (!P::SEPARABLE || kind == PARTS)
            filter_rows<P, PARTS>(a, constants, taps, from, first, y, h, w0, scratch);
        else filter_rows<P, SPLIT>(a, constants, taps, from, first, y, h, w0, scratch);
    };
    down_strip<P>(a, reinterpret_cast<const float *>(a.list) + CVAL, reinterpret_cast<f16 *>(ring), columns, outputs);
}
