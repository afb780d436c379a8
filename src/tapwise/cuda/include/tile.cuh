// What the tensor cores' tiles share: their sizes, and the way of their sums to y.
#pragma once

#include "epilogue.cuh"
#include "hopper.cuh"
#include "narrow.cuh"

// A block computes tiles of BP pixels x BF filters. The matrix instruction's rows, 64 a step, are pixels or (SWAP) filters,
// its columns the others. WARPGROUPS share a tile's rows, or (PINGPONG) take whole tiles in turns. SPLIT blocks of a cluster
// share gemm_k. SPAN: bytes of a line of channels in shared memory. BUNDLE: groups that share a line, each with its own
// filters. LAST: steps of 32 bytes of a tap's last chunk of channels. FIVE: the map of x has a fifth axis, for groups or
// parts. V elements of y are written at once.
template <typename T_, bool SWAP_, int BP_, int BF_, int WARPGROUPS_, bool PINGPONG_, int STAGES_, int SPLIT_, int SPAN_,
          int BUNDLE_, int LAST_, bool FIVE_, int V_, bool NCHW_, bool BIAS_, bool RESIDUAL_, int ACTIVATION_>
struct Tile {
    using T = T_;
    static constexpr bool SWAP = SWAP_, PINGPONG = PINGPONG_, FIVE = FIVE_, NCHW = NCHW_, BIAS = BIAS_, RESIDUAL = RESIDUAL_;
    static constexpr int BP = BP_, BF = BF_, WARPGROUPS = WARPGROUPS_, STAGES = STAGES_, SPLIT = SPLIT_, SPAN = SPAN_,
                         BUNDLE = BUNDLE_, LAST = LAST_, V = V_;
    static constexpr int ACTIVATION = ACTIVATION_;
    static constexpr int ROWS = SWAP ? BF : BP, COLUMNS = SWAP ? BP : BF;
    // Of one warpgroup: steps of 64 rows, pixels and filters.
    static constexpr int STEPS = ROWS / 64 / (PINGPONG ? 1 : WARPGROUPS);
    static constexpr int PIXELS = SWAP ? COLUMNS : 64 * STEPS, FILTERS = SWAP ? 64 * STEPS : COLUMNS;
    static constexpr int ELEMENTS = SPAN / (int)sizeof(T), WHOLE = SPAN / 32;
    // Lines of filters have their own group's channels.
    static constexpr int FILTER_SPAN = SPAN / BUNDLE, ROW_SPAN = SWAP ? FILTER_SPAN : SPAN,
                         COLUMN_SPAN = SWAP ? SPAN : FILTER_SPAN;
    static constexpr int CONSUMERS = 128 * WARPGROUPS;
    // With two warpgroups a third one copies, and leaves them registers.
    static constexpr bool SHARES = WARPGROUPS == 2;
    // Groups of matrix instructions under way: one where the warpgroups take turns at the tensor cores by themselves.
    static constexpr int FLIGHT = PINGPONG || WARPGROUPS == 1 ? 2 : 1;
    // The part of shared memory through which 64 x 64 sums go to y: lines of y's inner axis, which are the instruction's rows
    // or its columns.
    static constexpr bool TURNED = SWAP != NCHW;
    static constexpr int LINE = sizeof(T) == 2 ? 64 : TURNED ? 68 : 72;
    static constexpr int STAGING = 64 * LINE * (int)sizeof(T);
    static constexpr int SUMS_LINE = BF + 4;
    static_assert(ROWS % 64 == 0 && STEPS >= 1 && COLUMNS % 8 == 0 && COLUMNS <= 256 && COLUMNS == WGMMA_N * BUNDLE);
    static_assert(BUNDLE == 1 || (!SWAP && LAST == WHOLE));
    static_assert(!PINGPONG || (WARPGROUPS == 2 && SPLIT == 1));
};

// Where a warpgroup's outputs go: its tile's first filter, filters in a group, the distance of two filters in y (NCHW), and a
// table of its pixels' places in y, -1 where there is none.
struct Place {
    int filter, filters, group_filter;
    long long step;
    unsigned table, staging;
    int barrier;
};

DEVICE long long place_of(const Place &at, int pixel) {
    long long place;
    asm volatile("ld.shared.b64 %0, [%1];" : "=l"(place) : "r"(at.table + 8 * pixel) : "memory");
    return place;
}
DEVICE void set_place(unsigned table, int pixel, long long place) {
    asm volatile("st.shared.b64 [%0], %1;" ::"r"(table + 8 * pixel), "l"(place) : "memory");
}

// Which outputs a tile has: filters run fastest, then groups, then pixels, so that blocks beside each other share pixels.
template <class O>
struct At {
    int filter, group, pixel;
    DEVICE At(int tile, int tiles_f, int groups) {
        const int rest = tile / tiles_f;
        filter = (tile - rest * tiles_f) * O::BF;
        group = rest % groups;
        pixel = rest / groups * O::BP;
    }
};

// The products of K steps of 32 bytes; `add` to what the sums hold, or else they begin.
template <class O, int K>
DEVICE void multiply(float (&d)[O::STEPS][O::COLUMNS / 2], unsigned rows, unsigned columns, bool add) {
    const unsigned long long a = descriptor<O::ROW_SPAN>(rows), b = descriptor<O::COLUMN_SPAN>(columns);
    // Steps of a group; its products go to its own columns.
    constexpr int EACH = K / O::BUNDLE, SUMS = WGMMA_N / 2;
#pragma unroll
    for (int k = 0; k < K; ++k)
#pragma unroll
        for (int m = 0; m < O::STEPS; ++m) {
            const int group = k / EACH, step = k % EACH;
            float (&sums)[SUMS] = reinterpret_cast<float (&)[SUMS]>(d[m][group * SUMS]);
            wgmma(sums, a + m * 4 * O::ROW_SPAN + k * 2, b + group * (WGMMA_N * O::COLUMN_SPAN / 16) + step * 2,
                  add || step > 0);
        }
}

// One chunk of channels of x, for all lines of a copy. Three products of parts, where there are: large by large, large by
// small, small by large.
template <class O>
DEVICE void copy_chunk(unsigned to, const void *map, unsigned barrier, int chunk, int part, int groups, int w, int h, int n,
                       int group, int tap_w, int tap_h) {
    if constexpr (O::FIVE) {
        const int second = chunk >= 2 * part, c = second ? chunk - 2 * part : chunk >= part ? chunk - part : chunk;
        copy_pixels(to, map, barrier, c * O::ELEMENTS, w, h, n, group + second * groups, tap_w, tap_h);
    } else {
        copy_pixels(to, map, barrier, chunk * O::ELEMENTS, w, h, n, tap_w, tap_h);
    }
}

// The next of COUNT slots of a ring; `phase` turns over with it.
template <int COUNT>
DEVICE void advance(int &slot, unsigned &phase, int by = 1) {
    slot += by;
    if (by == 1 ? slot == COUNT : slot >= COUNT) {
        phase ^= slot / COUNT & 1;
        slot %= COUNT;
    }
}
template <int COUNT>
DEVICE int before(int slot, int by) {
    return slot < by ? slot - by + COUNT : slot - by;
}

// BYTES between registers and shared or global memory.
template <int BYTES>
struct Piece {
    unsigned v[BYTES > 4 ? BYTES / 4 : 1];
};
template <int BYTES>
DEVICE Piece<BYTES> load_shared(unsigned from) {
    Piece<BYTES> r;
    if constexpr (BYTES == 16)
        asm volatile("ld.shared.v4.b32 {%0, %1, %2, %3}, [%4];"
                     : "=r"(r.v[0]), "=r"(r.v[1]), "=r"(r.v[2]), "=r"(r.v[3])
                     : "r"(from)
                     : "memory");
    if constexpr (BYTES == 8)
        asm volatile("ld.shared.v2.b32 {%0, %1}, [%2];" : "=r"(r.v[0]), "=r"(r.v[1]) : "r"(from) : "memory");
    if constexpr (BYTES == 4) asm volatile("ld.shared.b32 %0, [%1];" : "=r"(r.v[0]) : "r"(from) : "memory");
    if constexpr (BYTES == 2) {
        unsigned short low;
        asm volatile("ld.shared.b16 %0, [%1];" : "=h"(low) : "r"(from) : "memory");
        r.v[0] = low;
    }
    return r;
}
template <int BYTES>
DEVICE void store_shared(unsigned to, const Piece<BYTES> &p) {
    if constexpr (BYTES == 16)
        asm volatile("st.shared.v4.b32 [%0], {%1, %2, %3, %4};" ::"r"(to), "r"(p.v[0]), "r"(p.v[1]), "r"(p.v[2]), "r"(p.v[3])
                     : "memory");
    if constexpr (BYTES == 8) asm volatile("st.shared.v2.b32 [%0], {%1, %2};" ::"r"(to), "r"(p.v[0]), "r"(p.v[1]) : "memory");
    if constexpr (BYTES == 4) asm volatile("st.shared.b32 [%0], %1;" ::"r"(to), "r"(p.v[0]) : "memory");
    if constexpr (BYTES == 2) asm volatile("st.shared.b16 [%0], %1;" ::"r"(to), "h"((unsigned short)p.v[0]) : "memory");
}
template <int BYTES>
DEVICE Piece<BYTES> load_global(const void *from) {
    Piece<BYTES> r;
    if constexpr (BYTES == 16) *reinterpret_cast<uint4 *>(r.v) = *static_cast<const uint4 *>(from);
    if constexpr (BYTES == 8) *reinterpret_cast<uint2 *>(r.v) = *static_cast<const uint2 *>(from);
    if constexpr (BYTES == 4) r.v[0] = *static_cast<const unsigned *>(from);
    if constexpr (BYTES == 2) r.v[0] = *static_cast<const unsigned short *>(from);
    return r;
}
template <int BYTES>
DEVICE void store_global(void *to, const Piece<BYTES> &p) {
    if constexpr (BYTES == 16) *static_cast<uint4 *>(to) = make_uint4(p.v[0], p.v[1], p.v[2], p.v[3]);
    if constexpr (BYTES == 8) *static_cast<uint2 *>(to) = make_uint2(p.v[0], p.v[1]);
    if constexpr (BYTES == 4) *static_cast<unsigned *>(to) = p.v[0];
    if constexpr (BYTES == 2) *static_cast<unsigned short *>(to) = p.v[0];
}

// Address of element `at` of a line of the staging part. 16-bit lines are swizzled by pieces of 16 bytes.
template <class O>
DEVICE unsigned staged(unsigned staging, int line, int at) {
    if constexpr (sizeof(typename O::T) == 2)
        return staging + line * 128 + ((at / 8 ^ line % 8) << 4) + at % 8 * 2;
    else
        return staging + (line * O::LINE + at) * 4;
}

// Lines between the staging part and y or residual (IN), V elements a thread.
template <class O, bool IN>
DEVICE void move_lines(const Place &at, typename O::T *global, int pixel0, int pixels, int filter0, int filters) {
    using T = typename O::T;
    constexpr int V = O::V, BYTES = V * (int)sizeof(T), ACROSS = 64 / V;
    const int thread = threadIdx.x % 128;
    // All places first, then all loads, then all stores: each step waits once.
    constexpr int COUNT = 64 * ACROSS / 128, AT_ONCE = COUNT < 4 ? COUNT : 4;
#pragma unroll
    for (int start = 0; start < COUNT; start += AT_ONCE) {
        T *there[AT_ONCE];
        Piece<BYTES> piece[AT_ONCE];
#pragma unroll
        for (int i = 0; i < AT_ONCE; ++i) {
            const int line = ((start + i) * 128 + thread) / ACROSS, first = ((start + i) * 128 + thread) % ACROSS * V;
            const int pixel = O::NCHW ? first : line, filter = O::NCHW ? line : first;
            const bool inside = pixel < pixels && filter < filters && at.filter + filter0 + filter < at.filters;
            const long long place = inside ? place_of(at, pixel0 + pixel) : -1;
            const long long f = at.filter + filter0 + filter;
            there[i] = place < 0 ? nullptr : global + place + (O::NCHW ? f * at.step : f);
        }
#pragma unroll
        for (int i = 0; i < AT_ONCE; ++i) {
            const int line = ((start + i) * 128 + thread) / ACROSS, first = ((start + i) * 128 + thread) % ACROSS * V;
            if (!there[i]) continue;
            if constexpr (IN)
                piece[i] = load_global<BYTES>(there[i]);
            else
                piece[i] = load_shared<BYTES>(staged<O>(at.staging, line, first));
        }
#pragma unroll
        for (int i = 0; i < AT_ONCE; ++i) {
            const int line = ((start + i) * 128 + thread) / ACROSS, first = ((start + i) * 128 + thread) % ACROSS * V;
            if (!there[i]) continue;
            if constexpr (IN)
                store_shared<BYTES>(staged<O>(at.staging, line, first), piece[i]);
            else
                store_global<BYTES>(there[i], piece[i]);
        }
    }
}

template <class O>
DEVICE float bias_of(const Place &at, const typename O::T *bias, int filter) {
    const int f = at.filter + filter;
    return O::BIAS && f < at.filters ? Element<typename O::T>::widen(bias[at.group_filter + f]) : 0.0f;
}

// Sums of 16 columns of a warp's 16 rows, v[4 j ..] as the matrix instruction leaves them: bias, residual, activation, and to
// the staging part. `column` of 64, `row0` the first of the block's 64 rows of this warp; rows or columns beyond are not read.
template <class O>
DEVICE void stage_sums(float (&v)[8], const Place &at, const typename O::T *bias, int column, int row0, int filter0) {
    using T = typename O::T;
    const int lane = threadIdx.x % 32;
    if constexpr (O::BIAS) {
        if constexpr (O::SWAP) {
            const float low = bias_of<O>(at, bias, filter0 + row0 + lane / 4),
                        high = bias_of<O>(at, bias, filter0 + row0 + lane / 4 + 8);
#pragma unroll
            for (int i = 0; i < 8; ++i) v[i] += i % 4 < 2 ? low : high;
        } else {
#pragma unroll
            for (int i = 0; i < 8; ++i) v[i] += bias_of<O>(at, bias, filter0 + column + i / 4 * 8 + lane % 4 * 2 + i % 2);
        }
    }
    if constexpr (sizeof(T) == 2) {
        // The line and piece whose 16 bytes this lane addresses: matrices 0 and 2, 1 and 3 are rows 0 and 8 further.
        const int matrix = lane / 8, row = matrix % 2 * 8, over = matrix / 2 * 8;
        const int line = O::TURNED ? column + over + lane % 8 : row0 + row + lane % 8;
        const int first = O::TURNED ? row0 + row : column + over;
        const unsigned address = staged<O>(at.staging, line, first);
        unsigned words[4];
        if constexpr (O::RESIDUAL) {
            load_matrices<O::TURNED>(words, address);
#pragma unroll
            for (int i = 0; i < 8; ++i)
                v[i] += Element<T>::widen(T{(unsigned short)(i % 2 ? words[i / 2] >> 16 : words[i / 2] & 0xffff)});
        }
#pragma unroll
        for (int i = 0; i < 4; ++i)
            words[i] = Element<T>::pack(activate<O::ACTIVATION>(v[2 * i]), activate<O::ACTIVATION>(v[2 * i + 1]));
        store_matrices<O::TURNED>(address, words);
    } else {
#pragma unroll
        for (int i = 0; i < 8; ++i) {
            const int r = row0 + lane / 4 + i % 4 / 2 * 8, c = column + i / 4 * 8 + lane % 4 * 2 + i % 2;
            const unsigned address = O::TURNED ? staged<O>(at.staging, c, r) : staged<O>(at.staging, r, c);
            if constexpr (O::RESIDUAL) v[i] += __uint_as_float(load_shared<4>(address).v[0]);
            store_shared<4>(address, Piece<4>{{__float_as_uint(activate<O::ACTIVATION>(v[i]))}});
        }
    }
}

// A warpgroup's sums to y, 64 rows x 64 columns at a time.
template <class O>
DEVICE void finish_tile(float (&d)[O::STEPS][O::COLUMNS / 2], const Place &at, void *y_, const void *bias_,
                        const void *residual_) {
    using T = typename O::T;
    T *y = static_cast<T *>(y_);
    const T *bias = static_cast<const T *>(bias_);
    T *residual = const_cast<T *>(static_cast<const T *>(residual_));
    const int warp = threadIdx.x / 32 % 4;
#pragma unroll
    for (int step = 0; step < O::STEPS; ++step)
#pragma unroll
        for (int group = 0; group < (O::COLUMNS + 63) / 64; ++group) {
            constexpr int LAST = (O::COLUMNS - 1) % 64 + 1;
            const int columns = group * 64 + 64 <= O::COLUMNS ? 64 : LAST;
            const int pixel0 = O::SWAP ? group * 64 : step * 64, filter0 = O::SWAP ? step * 64 : group * 64;
            const int pixels = O::SWAP ? columns : 64, filters = O::SWAP ? 64 : columns;
            // What was staged before has been written, and the table of places is there.
            sync_part(at.barrier, 128);
            if constexpr (O::RESIDUAL) {
                move_lines<O, true>(at, residual, pixel0, pixels, filter0, filters);
                sync_part(at.barrier, 128);
            }
#pragma unroll
            for (int column = 0; column < 64; column += 16) {
                if (group * 64 + column >= O::COLUMNS) continue;
                // The last eight columns may be alone: their neighbours are staged, but never written to y.
                constexpr int N = O::COLUMNS / 2;
                float v[8];
#pragma unroll
                for (int i = 0; i < 8; ++i) {
                    const int from = (group * 64 + column) / 2 + i;
                    v[i] = from < N ? d[step][from < N ? from : 0] : 0.0f;
                }
                stage_sums<O>(v, at, bias, column, warp * 16, filter0);
            }
            sync_part(at.barrier, 128);
            move_lines<O, false>(at, y, pixel0, pixels, filter0, filters);
        }
    sync_part(at.barrier, 128);
}

// Split gemm_k: every block of the cluster has left its sums at `sums` as BP lines of pixels. This block adds up its share of
// the pixels in the order of ranks, and writes them to y.
template <class O>
DEVICE void finish_split(const Place &at, unsigned sums, int rank, void *y_, const void *bias_, const void *residual_) {
    using T = typename O::T;
    T *y = static_cast<T *>(y_);
    const T *bias = static_cast<const T *>(bias_), *residual = static_cast<const T *>(residual_);
    constexpr int EACH = (O::BP + O::SPLIT - 1) / O::SPLIT, ACROSS = O::BF / 4, V = O::NCHW ? 1 : O::V < 4 ? O::V : 4;
    for (int i = threadIdx.x; i < EACH * ACROSS; i += O::CONSUMERS) {
        const int pixel = rank * EACH + i / ACROSS, filter = i % ACROSS * 4;
        if (pixel >= O::BP || at.filter + filter >= at.filters) continue;
        const long long place = place_of(at, pixel);
        if (place < 0) continue;
        float4 part[O::SPLIT];
#pragma unroll
        for (int from = 0; from < O::SPLIT; ++from) part[from] = load_of_rank(sums + (pixel * O::SUMS_LINE + filter) * 4, from);
        float v[4] = {};
#pragma unroll
        for (int from = 0; from < O::SPLIT; ++from) {
            v[0] += part[from].x;
            v[1] += part[from].y;
            v[2] += part[from].z;
            v[3] += part[from].w;
        }
#pragma unroll
        for (int first = 0; first < 4; first += V) {
            const long long f = at.filter + filter + first;
            if (f >= at.filters) continue;
            T out[V], added[V];
#pragma unroll
            for (int e = 0; e < V; ++e) {
                const long long there = place + (O::NCHW ? (f + e) * at.step : f + e);
                float sum = v[first + e] + bias_of<O>(at, bias, filter + first + e);
                if constexpr (O::RESIDUAL) sum += Element<T>::widen(residual[there]);
                out[e] = Element<T>::narrow(activate<O::ACTIVATION>(sum));
                if constexpr (O::NCHW) y[there] = out[e];
            }
            if constexpr (!O::NCHW) {
                constexpr int BYTES = V * (int)sizeof(T);
                Piece<BYTES> piece{};
                if constexpr (sizeof(T) == 4) {
#pragma unroll
                    for (int e = 0; e < V; ++e) piece.v[e] = *reinterpret_cast<unsigned *>(&out[e]);
                } else {
#pragma unroll
                    for (int e = 0; e < V; ++e)
                        piece.v[e / 2] |= (unsigned)*reinterpret_cast<unsigned short *>(&out[e]) << e % 2 * 16;
                }
                store_global<BYTES>(y + place + f, piece);
            }
        }
    }
}
