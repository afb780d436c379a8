// Direct store: sums to y straight from registers, where the matrix instruction's N is filters. Their order was
// permuted when they were packed, PERMUTED_N of them at a time, so that those of a thread's sums lie side by side in y:
// it stores 4, 8 or 16 bytes, four threads beside each other four times that, and nothing passes through shared memory.
// The instruction gives thread t of four the columns 8 j + 2 t + e; the column has filter PERMUTED_N / 4 t + 2 j + e.
// With 8 the order is as it was, and K may be any number: if it is odd, elements are stored one at a time.
#pragma once

#include "epilogue.cuh"

// bf16 by an instruction of its own: a shift would be moved to where the sums are used, and then ptxas waits for every
// product by itself.
DEVICE float widened(bf16 v) {
    float wide;
    asm("cvt.f32.bf16 %0, %1;" : "=f"(wide) : "h"(v.bits));
    return wide;
}
DEVICE float widened(f16 v) { return Element<f16>::to_float(v); }

// Element i of a piece, as float.
template <class T, int BYTES> DEVICE float element(const Piece<BYTES> &piece, int i) {
    if constexpr (sizeof(T) == 4) return __uint_as_float(piece.v[i]);
    else return widened(T{(unsigned short)(i % 2 ? piece.v[i / 2] >> 16 : piece.v[i / 2] & 0xffff)});
}

// What a thread of a warpgroup holds: EACH neighbours of each PERMUTED_N filters, from 8 x 8 blocks of sums beside each
// other, of ROWS pixels.
template <class Tile> struct ThreadOutputs {
    static constexpr int EACH = Tile::PERMUTED_N / 4, BLOCKS = Tile::PERMUTED_N / 8;
    // Elements that are read and written at once.
    static constexpr int ONCE = Tile::VECTOR > 1 ? EACH : 1, BYTES = ONCE * (int)sizeof(typename Tile::T);
    static constexpr int UNITS = Tile::TILE_N / Tile::PERMUTED_N, ROWS = 2 * Tile::M_STEPS;
    static_assert(!Tile::SWAP_AB && Tile::TILE_N % Tile::PERMUTED_N == 0);
    // Its first filter, and where its pixels are in y.
    int first, places[ROWS];
    // Not `now`: as if it had no pixels.
    DEVICE ThreadOutputs(const OutputTile &at, bool now = true) : first(at.filter + threadIdx.x % 4 * EACH) {
        const int row = threadIdx.x / 32 % 4 * 16 + threadIdx.x % 32 / 4;
#pragma unroll
        for (int i = 0; i < ROWS; ++i) {
            const int place = place_of(at, i / 2 * 64 + i % 2 * 8 + row);
            places[i] = now ? place : -1;
        }
    }
    DEVICE bool has(const OutputTile &at, int row, int unit, int e) const {
        return places[row] >= 0 && first + unit * Tile::PERMUTED_N + e < at.filters;
    }
    // Where element e of a unit stands in a row's sums.
    DEVICE static constexpr int within(int row, int unit, int e) {
        return (unit * BLOCKS + e / 2) * 4 + row % 2 * 2 + e % 2;
    }
};

// The residual to a tile's sums: before its products, which are then added to it, or (AFTER) when they are there. Not
// `now`: nothing to add yet. There is no branch around it, as ptxas would wait for every product by itself.
template <class Tile, bool AFTER>
DEVICE void add_residual(float (&d)[Tile::M_STEPS][Tile::TILE_N / 2], const OutputTile &at, const void *residual,
                         bool now) {
    using T = typename Tile::T;
    using X = ThreadOutputs<Tile>;
    // The table of places is there.
    sync_part(at.barrier, 128);
    const X x(at, now);
    const T *const from = static_cast<const T *>(residual) + x.first;
#pragma unroll
    for (int i = 0; i < X::ROWS * X::UNITS; ++i) {
        const int row = i / X::UNITS, unit = i % X::UNITS;
#pragma unroll
        for (int start = 0; start < X::EACH; start += X::ONCE) {
            Piece<X::BYTES> piece{};
            if (x.has(at, row, unit, start))
                piece = load_global<X::BYTES>(from + x.places[row] + unit * Tile::PERMUTED_N + start);
#pragma unroll
            for (int e = 0; e < X::ONCE; ++e) {
                float &sum = d[row / 2][X::within(row, unit, start + e)];
                sum = (AFTER ? sum : 0.0f) + element<T>(piece, e);
            }
        }
    }
    if (!AFTER) keep_sums(d);
}

// Bias, activation, and to y.
template <class Tile>
DEVICE void store_directly(const float (&d)[Tile::M_STEPS][Tile::TILE_N / 2], const OutputTile &at, void *y,
                           const Biases<Tile> &biases) {
    using T = typename Tile::T;
    using X = ThreadOutputs<Tile>;
    // What is done as two outputs become a word.
    constexpr int LAST = sizeof(T) == 2 && (X::ONCE > 1 || Tile::ACTIVATION == RELU) ? Tile::ACTIVATION : NONE;
    biases.share(at);
    // The bias and the table of places are there.
    sync_part(at.barrier, 128);
    const X x(at);
    T *const to = static_cast<T *>(y) + x.first;
#pragma unroll
    for (int unit = 0; unit < X::UNITS; ++unit) {
        float bias[X::EACH] = {};
        if constexpr (Tile::BIAS) {
#pragma unroll
            for (int e = 0; e < X::EACH; e += 2) {
                const Piece<8> two = load_shared<8>(at.bias + (x.first - at.filter + unit * Tile::PERMUTED_N + e) * 4);
                bias[e] = __uint_as_float(two.v[0]);
                bias[e + 1] = __uint_as_float(two.v[1]);
            }
        }
#pragma unroll
        for (int row = 0; row < X::ROWS; ++row) {
            // ptxas would begin with more activations than there are registers for.
            if (LAST >= SILU) __syncwarp();
            float v[X::EACH];
#pragma unroll
            for (int e = 0; e < X::EACH; ++e) {
                const float sum = d[row / 2][X::within(row, unit, e)] * SCALE<Tile::ACTIVATION> + bias[e];
                v[e] = LAST == NONE ? activated_scaled<Tile::ACTIVATION>(sum) : sum;
            }
#pragma unroll
            for (int start = 0; start < X::EACH; start += X::ONCE) {
                Piece<X::BYTES> piece;
#pragma unroll
                for (int i = 0; i < (X::BYTES + 3) / 4; ++i) {
                    if constexpr (sizeof(T) == 4) piece.v[i] = __float_as_uint(v[start + i]);
                    else
                        piece.v[i] =
                            activated_scaled<T, LAST>(v[start + 2 * i], X::ONCE > 1 ? v[start + 2 * i + 1] : 0.0f);
                }
                if (x.has(at, row, unit, start))
                    store_global<X::BYTES>(to + x.places[row] + unit * Tile::PERMUTED_N + start, piece);
            }
        }
    }
    // The next tile may write its places and its bias.
    sync_part(at.barrier, 128);
}
