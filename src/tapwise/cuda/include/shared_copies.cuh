// CTAs of a cluster that share what is copied to shared memory: each copies some of it, to all that need it.
#pragma once

#include "tma.cuh"

// A CTA's place in its cluster of Tile::CLUSTER_K x CLUSTER_M x CLUSTER_N, whose CTAs have parts of one tile's gemm_k
// (the innermost axis), or tiles beside each other along the columns (n) and the rows (m) of the product.
template <class Tile> struct ClusterPlace {
    static constexpr int CTAS = Tile::CLUSTER_K * Tile::CLUSTER_M * Tile::CLUSTER_N;
    int part = 0, m = 0, n = 0;
    DEVICE ClusterPlace() {
        if constexpr (CTAS > 1) {
            const int rank = cluster_rank(), rest = rank / Tile::CLUSTER_K;
            part = rank % Tile::CLUSTER_K, n = rest % Tile::CLUSTER_N, m = rest / Tile::CLUSTER_N;
        }
    }
    DEVICE int rank_of(int m_, int n_) const { return part + Tile::CLUSTER_K * (n_ + Tile::CLUSTER_N * m_); }
    // The CTAs that the operand of this one's rows, and that of its columns, is copied to.
    DEVICE unsigned short with_rows() const {
        unsigned mask = 0;
#pragma unroll
        for (int i = 0; i < Tile::CLUSTER_N; ++i) mask |= 1u << rank_of(m, i);
        return mask;
    }
    DEVICE unsigned short with_columns() const {
        unsigned mask = 0;
#pragma unroll
        for (int i = 0; i < Tile::CLUSTER_M; ++i) mask |= 1u << rank_of(i, n);
        return mask;
    }
};

// CTAs that copy to a CTA's stages.
template <class Tile> constexpr int COPYING = Tile::CLUSTER_M + Tile::CLUSTER_N - 1;

// Where lanes of a warp say that a stage was read: one to each CTA that copies to it.
template <class Tile> DEVICE unsigned empty_of_lane(unsigned empty) {
    if constexpr (COPYING<Tile> == 1) return empty;
    const ClusterPlace<Tile> own;
    const int lane = threadIdx.x % 32, other = lane - Tile::CLUSTER_N;
    const int rank = other < 0 ? own.rank_of(own.m, lane) : own.rank_of(other + (other >= own.m), own.n);
    return lane < COPYING<Tile> ? address_of_rank(empty, rank) : 0;
}
template <class Tile> DEVICE void release(unsigned empty, int stage) {
    if (threadIdx.x % 32 >= COPYING<Tile>) return;
    if constexpr (COPYING<Tile> == 1) barrier_arrive(empty + stage * 8);
    else barrier_arrive_in_cluster(empty + stage * 8);
}
