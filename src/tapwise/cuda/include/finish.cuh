// What becomes of a tile's sums: through shared memory to y, with bias, residual and activation.
#pragma once

#include "epilogue.cuh"
#include "staging.cuh"

// The bias of a warpgroup's filters on its way: in registers while products run, then in shared memory, scaled as the activation
// needs it.
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
            const typename O::T *from = static_cast<const typename O::T *>(bias) + f;
            v[i] = real ? Element<typename O::T>::widen(*from) * SCALE<O::ACTIVATION> : 0.0f;
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

// The sums of 16 columns of a round, v[4 j ..] as the matrix instruction leaves them, scaled, and their bias: `bias` of the
// thread's two rows, where these are filters. The last eight columns of a tile may be alone, and have zeros beside them.
template <class O>
DEVICE void biased_sums(float (&v)[8], const float (&d)[O::STEPS][O::COLUMNS / 2], const Place &at, const Round<O> &now,
                        int column, const float (&bias)[2]) {
#pragma unroll
    for (int i = 0; i < 8; i += 4) {
        const bool real = now.reaches(column + i * 2);
        float added[2] = {};
        if (O::BIAS && !O::SWAP && real) {
            const Piece<8> two = load_shared<8>(at.bias + (now.filter0 + column + i * 2 + threadIdx.x % 4 * 2) * 4);
            added[0] = __uint_as_float(two.v[0]), added[1] = __uint_as_float(two.v[1]);
        }
#pragma unroll
        for (int e = 0; e < 4; ++e) {
            v[i + e] = real ? d[now.step][real ? (now.group * 64 + column) / 2 + i + e : 0] * SCALE<O::ACTIVATION> : 0.0f;
            if (O::BIAS && real) v[i + e] += O::SWAP ? bias[e / 2] : added[e % 2];
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
        const bool whole = now.reaches(j * MATRICES + 8);
        float v[8];
        biased_sums<O>(v, d, at, now, j * MATRICES, bias);
        if constexpr (sizeof(T) == 2) {
            const unsigned address = staged_matrices<O>(at, j * MATRICES, row0);
            if constexpr (O::RESIDUAL) {
                if (!AT_ONCE<O>) load_matrices<O::TURNED>(words[j], address);
#pragma unroll
                for (int i = 0; i < 8; ++i)
                    v[i] += Element<T>::widen(T{(unsigned short)(i % 2 ? words[j][i / 2] >> 16 : words[j][i / 2] & 0xffff)}) *
                            SCALE<O::ACTIVATION>;
            }
#pragma unroll
            for (int i = 0; i < 4; ++i)
                words[j][i] = i < 2 || whole ? activated_scaled<T, O::ACTIVATION>(v[2 * i], v[2 * i + 1]) : 0;
            if (!AT_ONCE<O>) store_matrices<O::TURNED>(address, words[j]);
        } else {
            unsigned address[8];
#pragma unroll
            for (int i = 0; i < 8; ++i) {
                const int r = row0 + threadIdx.x % 32 / 4 + i % 4 / 2 * 8;
                const int c = j * MATRICES + i / 4 * 8 + threadIdx.x % 4 * 2 + i % 2;
                address[i] = O::TURNED ? staged<O>(at.staging, c, r) : staged<O>(at.staging, r, c);
                if (O::RESIDUAL && (i < 4 || whole))
                    v[i] += __uint_as_float(load_shared<4>(address[i]).v[0]) * SCALE<O::ACTIVATION>;
            }
#pragma unroll
            for (int i = 0; i < 8; ++i)
                if (i < 4 || whole)
                    store_shared<4>(address[i], Piece<4>{{__float_as_uint(activated_scaled<O::ACTIVATION>(v[i]))}});
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
