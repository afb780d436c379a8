// What becomes of a tile's sums: through shared memory to y, with bias, residual and activation.
#pragma once

#include "async.cuh"
#include "epilogue.cuh"
#include "tile.cuh"

// Where a warpgroup's outputs go: its tile's first filter, group and pixel, filters in a group, the distance of two filters in
// y (NCHW), a table of its pixels' places in y, -1 where there is none, and one of its filters' bias. `map`: of y, for the copy
// engine. `delivered`: barriers of the ring of staging parts into which the copy engine brings residuals, which say that one is
// there, and behind them those that say that one may come; `part` of the ring that is next, and its barriers' parity.
struct Place {
    int filter, group, pixel, filters, step;
    unsigned table, bias, staging;
    int barrier;
    const void *map;
    unsigned delivered;
    int part;
    unsigned phase;
};

DEVICE int place_of(const Place &at, int pixel) {
    int place;
    asm volatile("ld.shared.b32 %0, [%1];" : "=r"(place) : "r"(at.table + 4 * pixel) : "memory");
    return place;
}
DEVICE void set_place(unsigned table, int pixel, int place) {
    asm volatile("st.shared.b32 [%0], %1;" ::"r"(table + 4 * pixel), "r"(place) : "memory");
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

// Address of element `at` of a line of the staging part: lines of 128 bytes, swizzled by pieces of 16 as the copy engine wants
// them; what is longer goes on 64 lines further.
template <class O>
DEVICE unsigned staged(unsigned staging, unsigned line, unsigned at) {
    constexpr unsigned SIZE = sizeof(typename O::T), PIECE = 16 / SIZE;
    const unsigned within = at % O::INNER;
    return staging + (at / O::INNER * 64 + line) * 128 + ((within / PIECE ^ line % 8) << 4) + within % PIECE * SIZE;
}

// What a thread moves of the 64 lines of a staging part: V elements of each LINES-th of them. Parts begin on multiples of 1024
// bytes, so that only the bits of a line's swizzle change besides a constant.
template <class O>
struct Lines {
    static constexpr int ACROSS = 64 / O::V, LINES = 128 / ACROSS, COUNT = 64 / LINES;
    int row, first;
    unsigned base;
    DEVICE Lines(const Place &at)
        : row(threadIdx.x % 128 / ACROSS), first(threadIdx.x % ACROSS * O::V), base(staged<O>(at.staging, row, first)) {}
    DEVICE unsigned address(int i) const { return (base ^ LINES * i % 8 * 16) + LINES * i * 128; }
    DEVICE int pixel(int i) const { return O::NCHW ? first : LINES * i + row; }
    DEVICE int filter(int i) const { return O::NCHW ? LINES * i + row : first; }
    // Where a thread's first filter is, and how much further its others. ptxas would add up what leads there for each of them;
    // what it cannot see through is added up once.
    template <class T>
    DEVICE T *mine(const Place &at, T *global, int filter0) const {
        T *to = global + (at.filter + filter0 + filter(0)) * (O::NCHW ? at.step : 1);
        asm("" : "+l"(to));
        return to;
    }
    DEVICE int further(const Place &at, int i) const { return O::NCHW ? LINES * i * at.step : 0; }
};

// Lines between the staging part and y or residual (IN), V elements a thread.
template <class O, bool IN>
DEVICE void move_lines(const Place &at, typename O::T *global, int pixel0, int pixels, int filter0, int filters) {
    constexpr int BYTES = O::V * (int)sizeof(typename O::T);
    const Lines<O> lines(at);
    const int end = min(filters, at.filters - at.filter - filter0);
    typename O::T *const mine = lines.mine(at, global, filter0);
    // All places first, then all loads, then all stores: each step waits once.
    constexpr int AT_ONCE = lines.COUNT < 4 ? lines.COUNT : 4;
#pragma unroll
    for (int start = 0; start < lines.COUNT; start += AT_ONCE) {
        int there[AT_ONCE];
        Piece<BYTES> piece[AT_ONCE];
#pragma unroll
        for (int i = 0; i < AT_ONCE; ++i) {
            const int pixel = lines.pixel(start + i);
            there[i] = pixel < pixels && lines.filter(start + i) < end ? place_of(at, pixel0 + pixel) : -1;
        }
#pragma unroll
        for (int i = 0; i < AT_ONCE; ++i) {
            if (there[i] < 0) continue;
            if constexpr (IN)
                piece[i] = load_global<BYTES>(mine + there[i] + lines.further(at, start + i));
            else
                piece[i] = load_shared<BYTES>(lines.address(start + i));
        }
#pragma unroll
        for (int i = 0; i < AT_ONCE; ++i) {
            if (there[i] < 0) continue;
            if constexpr (IN)
                store_shared<BYTES>(lines.address(start + i), piece[i]);
            else
                store_global<BYTES>(mine + there[i] + lines.further(at, start + i), piece[i]);
        }
    }
}

// The residual of a round on its way to the staging part.
template <class O>
DEVICE void fetch_lines(const Place &at, const typename O::T *residual, int pixel0, int pixels, int filter0, int filters) {
    constexpr int BYTES = O::V * (int)sizeof(typename O::T);
    const Lines<O> lines(at);
    const int end = min(filters, at.filters - at.filter - filter0);
    const typename O::T *const mine = lines.mine(at, residual, filter0);
#pragma unroll
    for (int i = 0; i < lines.COUNT; ++i) {
        const int pixel = lines.pixel(i);
        const int place = pixel < pixels && lines.filter(i) < end ? place_of(at, pixel0 + pixel) : -1;
        if (place >= 0) copy_piece<BYTES>(lines.address(i), mine + place + lines.further(at, i), true);
    }
}

// The bias of a warpgroup's filters on its way: in registers while products run, then in shared memory.
template <class O>
struct Biases {
    static constexpr int EACH = O::BIAS && O::SPLIT == 1 ? (O::FILTERS + 127) / 128 : 0;
    float v[EACH ? EACH : 1];
    DEVICE void load(const Place &at, const void *bias) {
#pragma unroll
        for (int i = 0; i < EACH; ++i) {
            const int filter = i * 128 + threadIdx.x % 128;
            const bool real = filter < O::FILTERS && at.filter + filter < at.filters;
            const long long f = at.group * at.filters + at.filter + filter;
            v[i] = real ? Element<typename O::T>::widen(static_cast<const typename O::T *>(bias)[f]) : 0.0f;
        }
    }
    DEVICE void share(const Place &at) const {
#pragma unroll
        for (int i = 0; i < EACH; ++i) {
            const int filter = i * 128 + threadIdx.x % 128;
            if (filter < O::FILTERS) store_shared<4>(at.bias + filter * 4, Piece<4>{{__float_as_uint(v[i])}});
        }
    }
};
template <class O>
DEVICE float bias_of(const Place &at, int filter) {
    return O::BIAS ? __uint_as_float(load_shared<4>(at.bias + filter * 4).v[0]) : 0.0f;
}

// Which of a warpgroup's sums a round takes: 64 rows x 64 columns, or what is left of them.
template <class O>
struct Round {
    static constexpr int GROUPS = (O::COLUMNS + 63) / 64, COUNT = O::STEPS * GROUPS, LAST = (O::COLUMNS - 1) % 64 + 1;
    int step, group, pixel0, filter0, pixels, filters;
    DEVICE Round(int round) {
        step = round / GROUPS;
        group = round % GROUPS;
        const int columns = group + 1 < GROUPS ? 64 : LAST;
        pixel0 = O::SWAP ? group * 64 : step * 64;
        filter0 = O::SWAP ? step * 64 : group * 64;
        pixels = O::SWAP ? columns : 64;
        filters = O::SWAP ? 64 : columns;
    }
    // Whether it has any of its columns from this one on.
    DEVICE bool reaches(int column) const { return group * 64 + column < O::COLUMNS; }
};

// Columns that a warp stages at once, as four 8 x 8 matrices of its 16 rows.
constexpr int MATRICES = 16, ROUND_MATRICES = 64 / MATRICES;

// Where this lane's line of them begins: of matrices 0 and 2, 1 and 3, rows are 0 and 8 further. `column` of 64, `row0` the first
// of the block's 64 rows of this warp.
template <class O>
DEVICE unsigned staged_matrices(const Place &at, int column, int row0) {
    const int lane = threadIdx.x % 32, matrix = lane / 8, row = row0 + matrix % 2 * 8, over = column + matrix / 2 * 8;
    return O::TURNED ? staged<O>(at.staging, over + lane % 8, row) : staged<O>(at.staging, row + lane % 8, over);
}

// The sums of 16 columns of a round, v[4 j ..] as the matrix instruction leaves them, and their bias: `bias` of the thread's two
// rows, where these are filters. The last eight columns of a tile may be alone: their neighbours are staged, but never written.
template <class O>
DEVICE void biased_sums(float (&v)[8], const float (&d)[O::STEPS][O::COLUMNS / 2], const Place &at, const Round<O> &now,
                        int column, const float (&bias)[2]) {
    constexpr int N = O::COLUMNS / 2;
#pragma unroll
    for (int i = 0; i < 8; ++i) {
        const int from = (now.group * 64 + column) / 2 + i;
        v[i] = from < N ? d[now.step][from < N ? from : 0] : 0.0f;
    }
    if constexpr (O::BIAS && O::SWAP) {
#pragma unroll
        for (int i = 0; i < 8; ++i) v[i] += bias[i % 4 / 2];
    } else if constexpr (O::BIAS) {
#pragma unroll
        for (int i = 0; i < 8; i += 4) {
            const Piece<8> two = load_shared<8>(at.bias + (now.filter0 + column + i / 4 * 8 + threadIdx.x % 4 * 2) * 4);
#pragma unroll
            for (int e = 0; e < 4; ++e) v[i + e] += __uint_as_float(two.v[e % 2]);
        }
    }
}

// Whether there are registers for a whole round's residual, or outputs, beside the sums.
template <class O>
constexpr bool AT_ONCE = O::STEPS * O::COLUMNS / 2 <= 128;

// A round's residual from the staging part, where two elements make a word.
template <class O>
DEVICE void load_round(unsigned (&words)[ROUND_MATRICES][4], const Place &at, const Round<O> &now) {
    if constexpr (O::RESIDUAL && sizeof(typename O::T) == 2)
#pragma unroll
        for (int j = 0; j < ROUND_MATRICES; ++j)
            if (now.reaches(j * MATRICES))
                load_matrices<O::TURNED>(words[j], staged_matrices<O>(at, j * MATRICES, threadIdx.x / 32 % 4 * 16));
}

// A round's sums: bias, residual, activation, and to the staging part, whose rows or columns beyond are not read. All functions
// first, so that none waits for what is staged. `words`: what load_round loaded.
template <class O>
DEVICE void stage_round(unsigned (&words)[ROUND_MATRICES][4], const float (&d)[O::STEPS][O::COLUMNS / 2], const Place &at,
                        const Round<O> &now, const float (&bias)[2]) {
    using T = typename O::T;
    const int row0 = threadIdx.x / 32 % 4 * 16;
#pragma unroll
    for (int j = 0; j < ROUND_MATRICES; ++j) {
        if (!now.reaches(j * MATRICES)) continue;
        float v[8];
        biased_sums<O>(v, d, at, now, j * MATRICES, bias);
        if constexpr (sizeof(T) == 2) {
            const unsigned address = staged_matrices<O>(at, j * MATRICES, row0);
            if constexpr (O::RESIDUAL) {
                if (!AT_ONCE<O>) load_matrices<O::TURNED>(words[j], address);
#pragma unroll
                for (int i = 0; i < 8; ++i)
                    v[i] += Element<T>::widen(T{(unsigned short)(i % 2 ? words[j][i / 2] >> 16 : words[j][i / 2] & 0xffff)});
            }
#pragma unroll
            for (int i = 0; i < 4; ++i) words[j][i] = activated<T, O::ACTIVATION>(v[2 * i], v[2 * i + 1]);
            if (!AT_ONCE<O>) store_matrices<O::TURNED>(address, words[j]);
        } else {
#pragma unroll
            for (int i = 0; i < 8; ++i) {
                const int r = row0 + threadIdx.x % 32 / 4 + i % 4 / 2 * 8;
                const int c = j * MATRICES + i / 4 * 8 + threadIdx.x % 4 * 2 + i % 2;
                const unsigned address = O::TURNED ? staged<O>(at.staging, c, r) : staged<O>(at.staging, r, c);
                if constexpr (O::RESIDUAL) v[i] += __uint_as_float(load_shared<4>(address).v[0]);
                store_shared<4>(address, Piece<4>{{__float_as_uint(activated<O::ACTIVATION>(v[i]))}});
            }
        }
    }
    if constexpr (sizeof(T) == 2 && AT_ONCE<O>)
#pragma unroll
        for (int j = 0; j < ROUND_MATRICES; ++j)
            if (now.reaches(j * MATRICES)) store_matrices<O::TURNED>(staged_matrices<O>(at, j * MATRICES, row0), words[j]);
}

// The copy engine writes boxes of y: of the pixels of one round, a thread each.
template <class O>
DEVICE void store_boxes(const Place &at, int pixel0, int pixels, int filter0) {
    constexpr int EACH = 64 / O::INNER;
    const int box = threadIdx.x % 128;
    if (box < pixels / O::BOX * EACH) {
        const int part = box % EACH, pixel = box / EACH * O::BOX;
        store_box(at.map, at.staging + (part * 64 + pixel) * 128, at.filter + filter0 + part * O::INNER, at.group,
                  at.pixel + pixel0 + pixel);
    }
    // Of no boxes, too: every round is a group.
    commit_stores();
}

// Rounds of a tile whose residual is fetched ahead: all where each has its own staging part.
template <class O>
constexpr int AHEAD = O::STAGINGS >= Round<O>::COUNT ? Round<O>::COUNT : O::STAGINGS - 1;

// The residual of a round on its way, a group of copies.
template <class O>
DEVICE void fetch_round(Place at, const void *residual, int round) {
    const Round<O> now(round);
    at.staging += round % O::STAGINGS * O::STAGING;
    fetch_lines<O>(at, static_cast<const typename O::T *>(residual), now.pixel0, now.pixels, now.filter0, now.filters);
    commit_copies();
}

// Waits until at most so many later rounds are on their way.
template <class O, int COUNT = AHEAD<O>>
DEVICE void wait_for_fetched(int later) {
    if constexpr (COUNT > 0) {
        if (later < COUNT)
            wait_for_fetched<O, COUNT - 1>(later);
        else
            wait_copies<COUNT>();
    } else {
        wait_copies<0>();
    }
}

// A round's residual on its way, the first when the table of places is there and the tile before is gone.
template <class O>
DEVICE void fetch_next(const Place &at, const void *residual, int round) {
    if (round == 0) {
        if constexpr (O::BOXES > 0) wait_for_stores<0>();
        sync_part(at.barrier, 128);
    }
    fetch_round<O>(at, residual, round);
}

// Before a tile's products.
template <class O>
DEVICE void begin_tile(const Place &at, const void *residual) {
    if constexpr (O::FETCHED) {
#pragma unroll
        for (int round = 0; round < AHEAD<O>; ++round) fetch_next<O>(at, residual, round);
    }
}

// All but the PENDING last rounds of a warp have been stored, and the copy engine may bring the next residual to a part.
template <class O, int PENDING>
DEVICE void release_stored(const Place &at, int part) {
    wait_for_stores<PENDING>();
    __syncwarp();
    if (threadIdx.x % 32 == 0) barrier_arrive(at.delivered + (O::STAGINGS + part) * 8, 4);
}

// A warpgroup's sums to y, a round at a time.
template <class O>
DEVICE void finish_tile(float (&d)[O::STEPS][O::COLUMNS / 2], Place at, void *y_, const Biases<O> &biases,
                        const void *residual_) {
    using T = typename O::T;
    using R = Round<O>;
    T *y = static_cast<T *>(y_);
    T *residual = const_cast<T *>(static_cast<const T *>(residual_));
    biases.share(at);
    // The bias is there. A warpgroup waits for its parts of a shared ring when the other has had those before: a barrier's
    // parity tells a part's next filling from the one before it, but no more.
    if (O::DELIVERED) sync_part(O::PINGPONG ? 2 + at.barrier : at.barrier, O::PINGPONG ? 256 : 128);
    const int warp = threadIdx.x / 32 % 4;
    const unsigned staging = at.staging;
    float bias[2] = {};
    // Long activations do not wait for a round's residual, which is on its way to registers while the round before goes to y.
    constexpr bool EARLY = O::DELIVERED && AT_ONCE<O> && O::ACTIVATION > RELU6;
    unsigned words[2][ROUND_MATRICES][4];
#pragma unroll
    for (int round = 0; round < R::COUNT; ++round) {
        const R now(round);
        const bool boxes = O::BOXES == 2 || (O::BOXES == 1 && now.filters == 64), first = round == 0;
        at.staging = staging + (O::DELIVERED ? at.part : round % O::STAGINGS) * O::STAGING;
        // Rounds whose residual is fetched while this one and those before go to y.
        const int next = round + AHEAD<O>;
        if constexpr (O::FETCHED) wait_for_fetched<O>((next < R::COUNT ? next : R::COUNT) - round - 1);
        if constexpr (O::DELIVERED) {
            if (!EARLY || first) barrier_wait(at.delivered + at.part * 8, at.phase);
            if (O::PINGPONG && round + 1 == R::COUNT) arrive_part(5 - at.barrier, 256);
        } else if constexpr (O::BOXES > 0) {
            // The part of shared memory that is staged to, or fetched to, has been written. Tiles of an odd count of rounds end
            // with the part that the next begins with.
            if (O::FETCHED ? round > 0 && next < R::COUNT : first && R::COUNT % 2)
                wait_for_stores<0>();
            else if (!O::FETCHED)
                wait_for_stores<O::STAGINGS - 1>();
        }
        // What was staged before has been written, and the table of places is there.
        if (!O::DELIVERED) sync_part(at.barrier, 128);
        if constexpr (O::FETCHED) {
            if (next < R::COUNT) {
                Place start = at;
                start.staging = staging;
                fetch_round<O>(start, residual, next);
            }
        } else if constexpr (O::RESIDUAL && !O::DELIVERED) {
            move_lines<O, true>(at, residual, now.pixel0, now.pixels, now.filter0, now.filters);
            sync_part(at.barrier, 128);
        }
        if (O::SWAP && now.group == 0) {
#pragma unroll
            for (int half = 0; half < 2; ++half)
                bias[half] = bias_of<O>(at, now.filter0 + warp * 16 + half * 8 + threadIdx.x % 32 / 4);
        }
        if (AT_ONCE<O> && (!EARLY || first)) load_round<O>(words[round % 2], at, now);
        stage_round<O>(words[round % 2], d, at, now, bias);
        if (boxes || EARLY) publish_shared();
        if constexpr (EARLY) {
            Place then = at;
            advance<O::STAGINGS>(then.part, then.phase);
            then.staging = staging + then.part * O::STAGING;
            if (round + 1 < R::COUNT) {
                barrier_wait(then.delivered + then.part * 8, then.phase);
                load_round<O>(words[(round + 1) % 2], then, R(round + 1));
            }
        }
        sync_part(at.barrier, 128);
        if constexpr (O::BOXES > 0) store_boxes<O>(at, now.pixel0, boxes ? now.pixels : 0, now.filter0);
        if (!boxes) move_lines<O, false>(at, y, now.pixel0, now.pixels, now.filter0, now.filters);
        if constexpr (O::DELIVERED) {
            if (!boxes && !EARLY) publish_shared();
            __syncwarp();
            // A warp has read its lines of the part; or the first has stored boxes from it, and waits for them a round later.
            if (!boxes && threadIdx.x % 32 == 0) barrier_arrive(at.delivered + (O::STAGINGS + at.part) * 8, 1);
            if constexpr (O::BOXES > 0)
                if (warp == 0) {
                    if (!first && (O::BOXES == 2 || R(round - 1).filters == 64))
                        release_stored<O, 1>(at, before<O::STAGINGS>(at.part, 1));
                    if (round + 1 == R::COUNT && boxes) release_stored<O, 0>(at, at.part);
                }
            advance<O::STAGINGS>(at.part, at.phase);
        }
    }
    if (O::BOXES != 2) sync_part(at.barrier, 128);
}
