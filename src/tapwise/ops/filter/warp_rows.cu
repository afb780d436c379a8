// A column and a row of taps over bytes, truncated in between. A warp goes down rows of its own: a lane has ACROSS
// neighbouring elements of as many rows as the column has taps in registers, adds up their columns, and has what the
// row's taps see beside them from the lanes next to it. No warp waits for another, and each element of x is converted
// once; a warp's first and last elements are its neighbours' too. A block is a warp.
//
// Sums that cannot be negative, and results that a byte holds, are truncated by adding 3 * 2^22: the list says whether.
#include "grid.cuh"
#include "ops/filter/filter.cuh"
#include "ops/filter/rows.cuh"

struct WarpRows {
    const void *x, *list;
    void *y;
    // Of the picture: rows, elements of a row; rows in front of a window's own; what is beyond the edges.
    long long height, width, before_h, mode_h, mode_w, cval;
    // Rows of a warp, warps beside each other.
    long long rows, across;
};

template <int COUNT> struct Count { static constexpr int value = COUNT; };

// What a list begins with; SIMPLE: no sum is negative and no result more than a byte.
enum Constant { LOW, HIGH, COLUMN_EPSILON, EPSILON, SIMPLE, CONSTANTS = 8 };

// T: a byte; C channels; TAPS_H and TAPS_W; BEFORE: elements in front of a window's own; LEAD: as many or more, whole
// words; ROWS of a warp at most.
template <class Traits> struct WarpTile : Traits {
    using B = Traits;
    static constexpr int ACROSS = 8, AFTER = (B::TAPS_W - 1) * B::C - B::BEFORE;
    // Elements of a warp, and of its results, by words.
    static constexpr int ALL = 32 * ACROSS, RESULTS = (ALL - B::LEAD - AFTER) / 4 * 4;
    // Behind it, floats of either sign are whole numbers.
    static constexpr float MAGIC = 12582912.0f;
    static_assert(B::LEAD >= B::BEFORE && B::LEAD % 4 == 0 && RESULTS > 0);
};

template <class Traits, typename Y> DEVICE void filter_warp_rows(const WarpRows &a) {
    using P = WarpTile<Traits>;
    using T = typename P::T;
    constexpr int R = P::TAPS_H, S = P::TAPS_W, N = P::ACROSS;
    begin_dependent();
    const int lane = threadIdx.x, height = a.height, width = a.width;
    const int across = a.across, strip = blockIdx.x / across, first = blockIdx.x - strip * across;
    const int top = strip * (int)a.rows, rows = min((int)a.rows, height - top), all = rows + R - 1;
    // Which row of x each row is; none for the constant.
    __shared__ int sources[P::ROWS + R - 1];
    for (int i = lane; i < all; i += 32) sources[i] = source_index(top - (int)a.before_h + i, height, a.mode_h);
    __syncthreads();
    // The lane's first element, and whether its words lie within the row.
    const int e0 = first * P::RESULTS - P::LEAD + N * lane;
    const long long picture = (long long)blockIdx.z * height * width;
    const unsigned char *const x = static_cast<const unsigned char *>(a.x) + picture;
    Y *const y = static_cast<Y *>(a.y) + picture;
    const bool aligned = (reinterpret_cast<unsigned long long>(x) | (unsigned)width) % 4 == 0;
    const bool within = aligned && e0 >= 0 && e0 + N <= width;
    // Which of the lane's words of results are its own, and within the row.
    bool own[N / 4];
#pragma unroll
    for (int i = 0; i < N / 4; ++i) {
        const int at = N * lane + 4 * i - P::LEAD;
        own[i] = at >= 0 && at < P::RESULTS && e0 + 4 * i < width;
    }
    const bool whole = aligned && (within || (!own[0] && !own[1]) || (e0 + 4 == width && !own[1]));
    // Else, elements one by one: none for the constant.
    int there[N];
    if (!within)
#pragma unroll
        for (int i = 0; i < N; ++i) {
            const int e = e0 + i, pixel = e < 0 ? -((P::C - 1 - e) / P::C) : e / P::C;
            const int from = source_index(pixel, width / P::C, a.mode_w);
            there[i] = from < 0 ? -1 : from * P::C + e - pixel * P::C;
        }
    const unsigned constant = (unsigned char)a.cval * 0x01010101u;
    unsigned words[R][N / 4];
    const auto begin = [&](int buffer, int row) {
        const int h = sources[row];
        const unsigned char *const from = x + (unsigned)h * (unsigned long long)(unsigned)width;
        if (h < 0) words[buffer][0] = words[buffer][1] = constant;
        else if (within) {
            words[buffer][0] = *reinterpret_cast<const unsigned *>(from + e0);
            words[buffer][1] = *reinterpret_cast<const unsigned *>(from + e0 + 4);
        } else
#pragma unroll
            for (int i = 0; i < N / 4; ++i) {
                words[buffer][i] = 0;
#pragma unroll
                for (int j = 0; j < 4; ++j) {
                    const int at = there[4 * i + j];
                    words[buffer][i] |= (at < 0 ? constant & 0xff : (unsigned)from[at]) << 8 * j;
                }
            }
    };
    const float *const list = static_cast<const float *>(a.list);
    float weights[R + S];
#pragma unroll
    for (int i = 0; i < R + S; ++i) weights[i] = list[CONSTANTS + i];
    const float low = list[LOW], high = list[HIGH];
    // Down all rows; SIMPLE: as the list says.
    const auto down = [&](auto simple) {
        constexpr bool EASY = decltype(simple)::value != 0;
        // What is added to sums before they are rounded, or truncated; whole sums have no epsilon.
        const float of_columns = list[COLUMN_EPSILON], of_results = list[EPSILON];
        const float start = EASY && of_columns > 0.0f ? of_columns - 0.5f : 0.0f;
        const float begin_row = EASY && of_results > 0.0f ? of_results - 0.5f : 0.0f;
        float values[R][N];
        Y *to = y + (long long)top * width + e0;
#pragma unroll
        for (int i = 0; i < R; ++i)
            if (i < all) begin(i, i);
#pragma unroll 1
        for (int base = 0; base < all; base += R)
#pragma unroll
            for (int buffer = 0; buffer < R; ++buffer) {
                const int row = base + buffer;
                if (buffer > 0 && row >= all) break;
#pragma unroll
                for (int i = 0; i < N; ++i) values[buffer][i] = element<T>(words[buffer], i);
                if (row + R < all) begin(buffer, row + R);
                if (row < R - 1) continue;
                // Rows in order: the oldest is the next buffer's.
                float sums[N];
#pragma unroll
                for (int i = 0; i < N; ++i) sums[i] = start;
#pragma unroll
                for (int r = 0; r < R; ++r)
#pragma unroll
                    for (int i = 0; i < N; ++i) sums[i] += weights[r] * values[(buffer + 1 + r) % R][i];
#pragma unroll
                for (int i = 0; i < N; ++i)
                    if constexpr (EASY) sums[i] = (sums[i] + P::MAGIC) - P::MAGIC;
                    else sums[i] = trunc(sums[i] + copysign(of_columns, sums[i]));
                // What the row's taps see, from other lanes what is theirs.
                float seen[N + (S - 1) * P::C];
#pragma unroll
                for (int i = 0; i < N + (S - 1) * P::C; ++i) {
                    const int at = i - P::BEFORE + 32 * N, beside = at / N - 32;
                    seen[i] = beside == 0 ? sums[at % N] : __shfl_sync(0xffffffffu, sums[at % N], (lane + beside) & 31);
                }
                float results[N];
#pragma unroll
                for (int i = 0; i < N; ++i) results[i] = begin_row;
#pragma unroll
                for (int s = 0; s < S; ++s)
#pragma unroll
                    for (int i = 0; i < N; ++i) results[i] += weights[R + s] * seen[i + s * P::C];
                unsigned bytes[N / 4];
#pragma unroll
                for (int i = 0; i < N; i += 4) {
                    unsigned v[4];
#pragma unroll
                    for (int j = 0; j < 4; ++j)
                        if constexpr (EASY) v[j] = __float_as_uint(results[i + j] + P::MAGIC);
                        else v[j] = (unsigned char)store<Y, true, false, false>(results[i + j], low, high, of_results);
                    bytes[i / 4] =
                        __byte_perm(__byte_perm(v[0], v[1], 0x0040), __byte_perm(v[2], v[3], 0x0040), 0x5410);
                }
                if (whole) {
#pragma unroll
                    for (int i = 0; i < N / 4; ++i)
                        if (own[i]) reinterpret_cast<unsigned *>(to)[i] = bytes[i];
                } else {
                    const unsigned long long both = bytes[0] | (unsigned long long)bytes[1] << 32;
                    const int from = own[0] ? 0 : 4, end = min(own[1] ? 8 : 4, width - e0);
#pragma unroll 1
                    for (int i = from; i < end; ++i) to[i] = (Y)(unsigned char)(both >> 8 * i);
                }
                to += width;
            }
    };
    if (list[SIMPLE] != 0.0f) down(Count<1>{});
    else down(Count<0>{});
}
