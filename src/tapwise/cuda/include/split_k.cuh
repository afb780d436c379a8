// Sums of a split gemm_k: from every CTA of a cluster to the one that adds them up, and from there to y.
#pragma once

#include "epilogue.cuh"

// Split sums lie in shared memory as the instruction's 8 x 8 blocks, rows of them of all columns for each source: 64
// floats, in the order of lanes with two each, but swizzled so that blocks beside each other are read from other banks.
DEVICE unsigned place_in_sums(int lane, int block) { return block * 256 + (lane ^ lane / 16 * 8 ^ block % 4 * 4) * 8; }

// Split gemm_k: every CTA's sums go to the CTA of the cluster that adds up their rows, each to its own part there.
template <class Tile>
DEVICE void send_sums(const float (&d)[Tile::M_STEPS][Tile::TILE_N / 2], unsigned sums, unsigned complete, int rank) {
    const int lane = threadIdx.x % 32, warp = threadIdx.x / 32;
#pragma unroll
    for (int m = 0; m < Tile::M_STEPS; ++m)
#pragma unroll
        for (int high = 0; high < 2; ++high) {
            const int row0 = m * 64 + warp * 16 + high * 8, to = row0 / Tile::SPLIT_M;
            const unsigned mine = sums + (rank * Tile::SPLIT_M + row0 % Tile::SPLIT_M) * Tile::TILE_N * 4;
            const unsigned there = address_of_rank(mine, to), barrier = address_of_rank(complete, to);
#pragma unroll
            for (int i = 0; i < Tile::TILE_N / 8; ++i) {
                const float low = d[m][4 * i + 2 * high], next = d[m][4 * i + 2 * high + 1];
                if (to == rank)
                    store_shared<8>(mine + place_in_sums(lane, i),
                                    Piece<8>{{__float_as_uint(low), __float_as_uint(next)}});
                else send_two(there + place_in_sums(lane, i), barrier, low, next);
            }
        }
}

// This CTA's share of the sums to y, the parts in the order of ranks.
template <class Tile>
DEVICE void store_split(const OutputTile &at, unsigned sums, int rank, void *y_, const void *bias_,
                        const void *residual_) {
    using T = typename Tile::T;
    T *y = static_cast<T *>(y_);
    const T *bias = static_cast<const T *>(bias_), *residual = static_cast<const T *>(residual_);
    constexpr int EACH = Tile::SPLIT_M, BLOCKS = Tile::TILE_N / 8, ONCE = Tile::VECTOR < 4 ? Tile::VECTOR : 4,
                  V = Tile::NCHW ? 1 : ONCE;
    // A thread takes four rows of a column (SWAP), or four columns of a row.
    for (int i = threadIdx.x; i < EACH * Tile::TILE_N / 4; i += Tile::CONSUMER_THREADS) {
        const int block = Tile::SWAP_AB ? i / 16 % BLOCKS : i / 2 % BLOCKS;
        const int row = Tile::SWAP_AB ? i / 16 / BLOCKS * 8 + i / 8 % 2 * 4 : i / 2 / BLOCKS;
        const int column = block * 8 + (Tile::SWAP_AB ? i % 8 : i % 2 * 4);
        const int pixel = Tile::SWAP_AB ? column : rank * EACH + row,
                  filter = Tile::SWAP_AB ? rank * EACH + row : column;
        if (at.filter + filter >= at.filters) continue;
        const int place = place_of(at, pixel);
        if (place < 0) continue;
        float v[4] = {};
#pragma unroll
        for (int from = 0; from < Tile::SPLIT_K; ++from) {
            const unsigned part = sums + (from * EACH + row / 8 * 8) * Tile::TILE_N * 4;
            if constexpr (Tile::SWAP_AB) {
#pragma unroll
                for (int e = 0; e < 4; ++e) {
                    const int lane = (row % 8 + e) * 4 + column % 8 / 2;
                    v[e] += __uint_as_float(load_shared<4>(part + place_in_sums(lane, block) + column % 2 * 4).v[0]);
                }
            } else {
                const Piece<16> piece = load_shared<16>(part + place_in_sums(row % 8 * 4 + column % 8 / 2, block));
#pragma unroll
                for (int e = 0; e < 4; ++e) v[e] += __uint_as_float(piece.v[e]);
            }
        }
#pragma unroll
        for (int first = 0; first < 4; first += V) {
            const int f = at.filter + filter + first;
            if (f >= at.filters) continue;
            T out[V];
#pragma unroll
            for (int e = 0; e < V; ++e) {
                const int there = place + (Tile::NCHW ? (f + e) * at.step : f + e);
                float sum = v[first + e];
                if (Tile::BIAS && f + e < at.filters)
                    sum += Element<T>::to_float(bias[bias_place<Tile>(at.group * at.filters + f + e)]);
                if constexpr (Tile::RESIDUAL) sum += Element<T>::to_float(residual[there]);
                out[e] = Element<T>::from_float(activated<Tile::ACTIVATION>(sum));
                if constexpr (Tile::NCHW) y[there] = out[e];
            }
            if constexpr (!Tile::NCHW) {
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
