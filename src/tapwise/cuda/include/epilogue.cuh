// The epilogue through shared memory: bias, residual and activation, a round of 64 x 64 sums at a time through the
// epilogue buffers, whose rows then go to y whole.
#pragma once

#include "activation.cuh"
#include "output_runs.cuh"

// Where the bias of filter f lies: there are BIAS_PERIOD of them, or (0) as many as filters.
template <class Tile> DEVICE long long bias_place(long long f) {
    if constexpr (Tile::BIAS_PERIOD > 0) return (unsigned)f % Tile::BIAS_PERIOD;
    return f;
}

// The bias of a warpgroup's filters on its way: in registers while products run, then in shared memory, scaled as the
// activation needs it.
template <class Tile> struct Biases {
    static constexpr int EACH = Tile::BIAS && Tile::SPLIT_K == 1 ? (Tile::WARPGROUP_FILTERS + 127) / 128 : 0;
    float v[EACH ? EACH : 1];
    DEVICE void load(const OutputTile &at, const void *bias) {
#pragma unroll
        for (int i = 0; i < EACH; ++i) {
            const int filter = i * 128 + threadIdx.x % 128;
            const bool real = filter < Tile::WARPGROUP_FILTERS && at.filter + filter < at.filters;
            const long long f = at.group * at.filters + at.filter + filter;
            const typename Tile::T *from = static_cast<const typename Tile::T *>(bias) + bias_place<Tile>(f);
            v[i] = real ? Element<typename Tile::T>::to_float(*from) * SCALE<Tile::ACTIVATION> : 0.0f;
        }
    }
    DEVICE void share(const OutputTile &at) const {
#pragma unroll
        for (int i = 0; i < EACH; ++i) {
            const int filter = i * 128 + threadIdx.x % 128;
            if (filter < Tile::WARPGROUP_FILTERS)
                store_shared<4>(at.bias + filter * 4, Piece<4>{{__float_as_uint(v[i])}});
        }
    }
};
template <class Tile> DEVICE float bias_of(const OutputTile &at, int filter) {
    return Tile::BIAS ? __uint_as_float(load_shared<4>(at.bias + filter * 4).v[0]) : 0.0f;
}

// Which of a warpgroup's sums a round takes: 64 rows x 64 columns, or what is left of them.
template <class Tile> struct Round {
    static constexpr int GROUPS = (Tile::TILE_N + 63) / 64, COUNT = Tile::M_STEPS * GROUPS,
                         LAST = (Tile::TILE_N - 1) % 64 + 1;
    int step, group, pixel0, filter0, pixels, filters;
    DEVICE Round(int round) {
        step = round / GROUPS;
        group = round % GROUPS;
        const int columns = group + 1 < GROUPS ? 64 : LAST;
        pixel0 = Tile::SWAP_AB ? group * 64 : step * 64;
        filter0 = Tile::SWAP_AB ? step * 64 : group * 64;
        pixels = Tile::SWAP_AB ? columns : 64;
        filters = Tile::SWAP_AB ? 64 : columns;
    }
    // Whether it has any of its columns from this one on.
    DEVICE bool reaches(int column) const { return group * 64 + column < Tile::TILE_N; }
};

// A round's outputs between its buffer and y or residual (IN).
template <class Tile, bool IN>
DEVICE void move_outputs(const OutputTile &at, typename Tile::T *global, const Round<Tile> &now) {
    if constexpr (Tile::RUN_VECTOR > 0) move_runs<Tile, IN>(at, global, now.pixel0, now.filter0, now.filters);
    else move_rows<Tile, IN>(at, global, now.pixel0, now.pixels, now.filter0, now.filters);
}

// Columns that a warp writes to a buffer at once, as four 8 x 8 matrices of its 16 rows.
constexpr int MATRICES = 16, ROUND_MATRICES = 64 / MATRICES;

// Where this lane's row of them begins: of matrices 0 and 2, 1 and 3, rows are 0 and 8 further. `column` of 64, `row0`
// the first of the block's 64 rows of this warp.
template <class Tile> DEVICE unsigned matrix_address(const OutputTile &at, int column, int row0) {
    const int lane = threadIdx.x % 32, matrix = lane / 8, row = row0 + matrix % 2 * 8, over = column + matrix / 2 * 8;
    return Tile::TRANSPOSED ? buffer_address<Tile>(at.buffer, over + lane % 8, row)
                            : buffer_address<Tile>(at.buffer, row + lane % 8, over);
}

// The sums of 16 columns of a round, v[4 j ..] as the matrix instruction leaves them, scaled, and their bias: `bias` of
// the thread's two rows, where these are filters. The last eight columns of a tile may be alone, and have zeros beside
// them.
template <class Tile>
DEVICE void biased_sums(float (&v)[8], const float (&d)[Tile::M_STEPS][Tile::TILE_N / 2], const OutputTile &at,
                        const Round<Tile> &now, int column, const float (&bias)[2]) {
#pragma unroll
    for (int i = 0; i < 8; i += 4) {
        const bool real = now.reaches(column + i * 2);
        float added[2] = {};
        if (Tile::BIAS && !Tile::SWAP_AB && real) {
            const Piece<8> two = load_shared<8>(at.bias + (now.filter0 + column + i * 2 + threadIdx.x % 4 * 2) * 4);
            added[0] = __uint_as_float(two.v[0]), added[1] = __uint_as_float(two.v[1]);
        }
#pragma unroll
        for (int e = 0; e < 4; ++e) {
            v[i + e] =
                real ? d[now.step][real ? (now.group * 64 + column) / 2 + i + e : 0] * SCALE<Tile::ACTIVATION> : 0.0f;
            if (Tile::BIAS && real) v[i + e] += Tile::SWAP_AB ? bias[e / 2] : added[e % 2];
        }
    }
}

// Whether there are registers for a whole round's residual, or outputs, beside the sums.
template <class Tile> constexpr bool AT_ONCE = Tile::M_STEPS * Tile::TILE_N / 2 <= 128;

// A round's residual from its buffer, where two elements make a word.
template <class Tile>
DEVICE void load_round(unsigned (&words)[ROUND_MATRICES][4], const OutputTile &at, const Round<Tile> &now) {
    if constexpr (Tile::RESIDUAL && sizeof(typename Tile::T) == 2)
#pragma unroll
        for (int j = 0; j < ROUND_MATRICES; ++j)
            if (now.reaches(j * MATRICES))
                ldmatrix<Tile::TRANSPOSED>(words[j], matrix_address<Tile>(at, j * MATRICES, threadIdx.x / 32 % 4 * 16));
}

// A round's sums: bias, residual, activation, and to its buffer, whose rows or columns beyond are not read. All
// functions first, so that none waits for what is written. `words`: what load_round loaded.
template <class Tile>
DEVICE void buffer_round(unsigned (&words)[ROUND_MATRICES][4], const float (&d)[Tile::M_STEPS][Tile::TILE_N / 2],
                         const OutputTile &at, const Round<Tile> &now, const float (&bias)[2]) {
    using T = typename Tile::T;
    const int row0 = threadIdx.x / 32 % 4 * 16;
#pragma unroll
    for (int j = 0; j < ROUND_MATRICES; ++j) {
        if (!now.reaches(j * MATRICES)) continue;
        const bool whole = now.reaches(j * MATRICES + 8);
        float v[8];
        biased_sums<Tile>(v, d, at, now, j * MATRICES, bias);
        if constexpr (sizeof(T) == 2) {
            const unsigned address = matrix_address<Tile>(at, j * MATRICES, row0);
            if constexpr (Tile::RESIDUAL) {
                if (!AT_ONCE<Tile>) ldmatrix<Tile::TRANSPOSED>(words[j], address);
#pragma unroll
                for (int i = 0; i < 8; ++i)
                    v[i] += Element<T>::to_float(
                                T{(unsigned short)(i % 2 ? words[j][i / 2] >> 16 : words[j][i / 2] & 0xffff)}) *
                            SCALE<Tile::ACTIVATION>;
            }
#pragma unroll
            for (int i = 0; i < 4; ++i)
                words[j][i] = i < 2 || whole ? activated_scaled<T, Tile::ACTIVATION>(v[2 * i], v[2 * i + 1]) : 0;
            if (!AT_ONCE<Tile>) store_matrices<Tile::TRANSPOSED>(address, words[j]);
        } else {
            unsigned address[8];
#pragma unroll
            for (int i = 0; i < 8; ++i) {
                const int r = row0 + threadIdx.x % 32 / 4 + i % 4 / 2 * 8;
                const int c = j * MATRICES + i / 4 * 8 + threadIdx.x % 4 * 2 + i % 2;
                address[i] =
                    Tile::TRANSPOSED ? buffer_address<Tile>(at.buffer, c, r) : buffer_address<Tile>(at.buffer, r, c);
                if (Tile::RESIDUAL && (i < 4 || whole))
                    v[i] += __uint_as_float(load_shared<4>(address[i]).v[0]) * SCALE<Tile::ACTIVATION>;
            }
#pragma unroll
            for (int i = 0; i < 8; ++i)
                if (i < 4 || whole)
                    store_shared<4>(address[i], Piece<4>{{__float_as_uint(activated_scaled<Tile::ACTIVATION>(v[i]))}});
        }
    }
    if constexpr (sizeof(T) == 2 && AT_ONCE<Tile>)
#pragma unroll
        for (int j = 0; j < ROUND_MATRICES; ++j)
            if (now.reaches(j * MATRICES))
                store_matrices<Tile::TRANSPOSED>(matrix_address<Tile>(at, j * MATRICES, row0), words[j]);
}

// A round's outputs to y by TMA. A box is 128 bytes along y's inner axis by 64 filters or pixels across it, one a
// thread: 64 outputs of 16 bits are one, of float32 two. A tile's last columns have a map of their own.
template <class Tile> DEVICE void tma_store_round(const OutputTile &at, const Round<Tile> &now) {
    constexpr int PARTS = 64 / Tile::BUFFER_ROW;
    const int part = threadIdx.x % 128, along = part * Tile::BUFFER_ROW;
    if (part < PARTS && (Tile::TRANSPOSED || now.reaches(along))) {
        const int filter = at.filter + now.filter0 + (Tile::NCHW ? 0 : along),
                  first = at.pixel + now.pixel0 + (Tile::NCHW ? along : 0);
        const bool last = Tile::LAST_STORED > 0 && !now.reaches(Tile::TRANSPOSED ? 63 : along + Tile::BUFFER_ROW - 1);
        const void *const map = last ? at.last_map : at.map;
        const unsigned from = at.buffer + part * 64 * 128;
        const int plane = at.step;
        if constexpr (Tile::NCHW) {
            int n = at.image, pixel = first - n * plane;
            // A tile of windows may have several small planes.
            if (!Tile::PLANES)
                for (; pixel >= plane; pixel -= plane) ++n;
            if (pixel < plane) store_box(map, from, pixel, filter, at.group, n);
        } else if constexpr (Tile::STRIDED) {
            const int n = first / plane, rest = first - n * plane, row = rest / at.width;
            if (first < at.pixels) store_pixels(map, from, filter, rest - row * at.width, row, n);
        } else {
            store_box(map, from, filter, at.group, first);
        }
    }
    // Of none, too: every round is a group.
    commit_stores();
}

// Rounds of a tile whose residual is fetched ahead: all where each has its own buffer.
template <class Tile>
constexpr int AHEAD = Tile::EPILOGUE_BUFFERS >= Round<Tile>::COUNT ? Round<Tile>::COUNT : Tile::EPILOGUE_BUFFERS - 1;

// The residual of a round on its way, a group of copies.
template <class Tile> DEVICE void fetch_round(OutputTile at, const void *residual, int round) {
    const Round<Tile> now(round);
    at.buffer += round % Tile::EPILOGUE_BUFFERS * Tile::BUFFER_BYTES;
    fetch_rows<Tile>(at, static_cast<const typename Tile::T *>(residual), now.pixel0, now.pixels, now.filter0,
                     now.filters);
    cp_async_commit();
}

// Waits until at most so many later rounds are on their way.
template <class Tile, int COUNT = AHEAD<Tile>> DEVICE void wait_for_fetched(int later) {
    if constexpr (COUNT > 0) {
        if (later < COUNT) wait_for_fetched<Tile, COUNT - 1>(later);
        else cp_async_wait<COUNT>();
    } else {
        cp_async_wait<0>();
    }
}

// A round's residual on its way, the first when the table of places is there and the tile before is gone.
template <class Tile> DEVICE void fetch_next(const OutputTile &at, const void *residual, int round) {
    if (round == 0) {
        if constexpr (Tile::TMA_STORE) wait_for_stores<0>();
        sync_part(at.barrier, 128);
    }
    fetch_round<Tile>(at, residual, round);
}

// Before a tile's products.
template <class Tile> DEVICE void begin_tile(const OutputTile &at, const void *residual) {
    if constexpr (Tile::ASYNC_RESIDUAL) {
#pragma unroll
        for (int round = 0; round < AHEAD<Tile>; ++round) fetch_next<Tile>(at, residual, round);
    }
}

// What a round does before its sums can go to its buffer: that has gone to y, and the residual is there. One way each.

// No residual, or one that threads load as the round begins.
template <class Tile> struct LoadedResidual {
    static constexpr bool EARLY = false;
    DEVICE LoadedResidual(OutputTile &) {}
    DEVICE void acquire(OutputTile &at, unsigned buffers, const void *residual, int round) {
        const Round<Tile> now(round);
        at.buffer = buffers + round % Tile::EPILOGUE_BUFFERS * Tile::BUFFER_BYTES;
        // Tiles of an odd count of rounds end with the buffer that the next begins with.
        if constexpr (Tile::TMA_STORE) {
            if (round == 0 && Round<Tile>::COUNT % 2) wait_for_stores<0>();
            else wait_for_stores<Tile::EPILOGUE_BUFFERS - 1>();
        }
        // What was there before has been written, and the table of places is there.
        sync_part(at.barrier, 128);
        if constexpr (Tile::RESIDUAL) {
            using T = typename Tile::T;
            T *const from = const_cast<T *>(static_cast<const T *>(residual));
            move_outputs<Tile, true>(at, from, now);
            sync_part(at.barrier, 128);
        }
    }
    DEVICE void release(OutputTile &) {}
};

// cp.async, rounds ahead.
template <class Tile> struct AsyncResidual {
    static constexpr bool EARLY = false;
    DEVICE AsyncResidual(OutputTile &) {}
    DEVICE void acquire(OutputTile &at, unsigned buffers, const void *residual, int round) {
        constexpr int COUNT = Round<Tile>::COUNT;
        // The round that is fetched while this one and those before go to y.
        const int next = round + AHEAD<Tile>;
        at.buffer = buffers + round % Tile::EPILOGUE_BUFFERS * Tile::BUFFER_BYTES;
        wait_for_fetched<Tile>((next < COUNT ? next : COUNT) - round - 1);
        if constexpr (Tile::TMA_STORE)
            if (round > 0 && next < COUNT) wait_for_stores<0>();
        sync_part(at.barrier, 128);
        if (next < COUNT) {
            OutputTile start = at;
            start.buffer = buffers;
            fetch_round<Tile>(start, residual, next);
        }
    }
    DEVICE void release(OutputTile &) {}
};

// TMA, into a ring of buffers that two warpgroups share.
template <class Tile> struct TmaResidual {
    // Long activations do not wait for a round's residual, which is on its way to registers while the round before goes
    // to y.
    static constexpr bool EARLY = AT_ONCE<Tile> && Tile::ACTIVATION >= SILU;
    // A warpgroup waits for its buffers until the other has had those before: a barrier's parity tells a buffer's next
    // filling from the one before it, but no more.
    DEVICE TmaResidual(OutputTile &at) { sync_part(RESIDUAL_TURN - WARPGROUP_BARRIER + at.barrier, 256); }
    DEVICE static void wait(const OutputTile &at) {
        barrier_wait(at.residual_full + at.residual_slot * 8, at.residual_phase);
    }
    DEVICE void acquire(OutputTile &at, unsigned buffers, const void *, int round) {
        at.buffer = buffers + at.residual_slot * Tile::BUFFER_BYTES;
        if (!EARLY || round == 0) wait(at);
        if (round + 1 == Round<Tile>::COUNT) arrive_part(RESIDUAL_TURN + 1 + WARPGROUP_BARRIER - at.barrier, 256);
    }
    // The residual of the round behind this one to registers.
    DEVICE void load_next(unsigned (&words)[ROUND_MATRICES][4], const OutputTile &at, unsigned buffers, int round) {
        OutputTile then = at;
        advance<Tile::EPILOGUE_BUFFERS>(then.residual_slot, then.residual_phase);
        then.buffer = buffers + then.residual_slot * Tile::BUFFER_BYTES;
        if (round + 1 < Round<Tile>::COUNT) {
            wait(then);
            load_round<Tile>(words, then, Round<Tile>(round + 1));
        }
    }
    // The next residual may come to a buffer.
    DEVICE static void arrive(const OutputTile &at, int slot) {
        barrier_arrive(at.residual_full + (Tile::EPILOGUE_BUFFERS + slot) * 8);
    }
    // A warp has read its rows of the buffer.
    DEVICE void release(OutputTile &at) {
        if (!EARLY) publish_shared();
        __syncwarp();
        if (threadIdx.x % 32 == 0) arrive(at, at.residual_slot);
        advance<Tile::EPILOGUE_BUFFERS>(at.residual_slot, at.residual_phase);
    }
};

template <bool TMA, bool ASYNC, class Tile> struct ResidualPolicy { using Type = LoadedResidual<Tile>; };
template <class Tile> struct ResidualPolicy<false, true, Tile> { using Type = AsyncResidual<Tile>; };
template <class Tile> struct ResidualPolicy<true, false, Tile> { using Type = TmaResidual<Tile>; };

// A warpgroup's sums to y, a round at a time.
template <class Tile>
DEVICE void store_through_buffers(float (&d)[Tile::M_STEPS][Tile::TILE_N / 2], OutputTile at, void *y,
                                  const Biases<Tile> &biases, const void *residual) {
    using R = Round<Tile>;
    using Policy = typename ResidualPolicy<Tile::TMA_RESIDUAL, Tile::ASYNC_RESIDUAL, Tile>::Type;
    biases.share(at);
    Policy policy(at);
    const int warp = threadIdx.x / 32 % 4;
    const unsigned buffers = at.buffer;
    float bias[2] = {};
    unsigned words[2][ROUND_MATRICES][4];
#pragma unroll
    for (int round = 0; round < R::COUNT; ++round) {
        const R now(round);
        policy.acquire(at, buffers, residual, round);
        if (Tile::SWAP_AB && now.group == 0) {
#pragma unroll
            for (int half = 0; half < 2; ++half)
                bias[half] = bias_of<Tile>(at, now.filter0 + warp * 16 + half * 8 + threadIdx.x % 32 / 4);
        }
        if (AT_ONCE<Tile> && (!Policy::EARLY || round == 0)) load_round<Tile>(words[round % 2], at, now);
        buffer_round<Tile>(words[round % 2], d, at, now, bias);
        if (Tile::TMA_STORE || Policy::EARLY) publish_shared();
        if constexpr (Policy::EARLY) policy.load_next(words[(round + 1) % 2], at, buffers, round);
        sync_part(at.barrier, 128);
        if constexpr (Tile::TMA_STORE) tma_store_round<Tile>(at, now);
        else move_outputs<Tile, false>(at, static_cast<typename Tile::T *>(y), now);
        policy.release(at);
    }
    if (!Tile::TMA_STORE) sync_part(at.barrier, 128);
}
