// Weight gradient as an implicit GEMM with warp-level tensor core instructions (sm_80 and newer): a CTA sums a tile of
// dw, columns x filters, over a part of the pixels.
#pragma once

#include "ops/conv/cuda/wgrad_operands.cuh"

// Elements of 32 bits of pixels four apart and columns eight apart, as the instruction wants them: of its columns
// (ROWS) the second eight follow the first, of its filters pixels do.
template <int SPAN, bool ROWS, bool ALONE = false> DEVICE void load_own(unsigned (&v)[4], unsigned from) {
#pragma unroll
    for (int i = 0; i < 4; ++i) {
        const int pixels = ROWS ? i / 2 : i % 2, eight = ROWS ? i % 2 : i / 2;
        v[i] = load_word((from ^ (ALONE ? 0 : eight * 32)) + pixels * 4 * SPAN);
    }
}

template <class O> DEVICE void wgrad_mma(const Gradient &p) {
    using T = typename O::T;
    using X = Operand<O, true>;
    using Dy = Operand<O, false>;
    constexpr int STAGE = X::STAGE + Dy::STAGE, RING = O::STAGES * STAGE,
                  SUMS = O::GROUPS_PER_TILE * O::FILTERS * O::SUMS_PITCH * 4;
    extern __shared__ __align__(1024) unsigned char memory[];
    const unsigned ring = shared_address(memory), places = ring + (RING > SUMS ? RING : SUMS),
                   tables = places + O::STAGES * BK * 16;
    int tile = blockIdx.x;
    const int column0 = tile % (int)p.tiles_c * O::COLUMNS;
    tile /= (int)p.tiles_c;
    const int filter0 = tile % (int)p.tiles_f * O::FILTERS, group0 = tile / (int)p.tiles_f * O::GROUPS_PER_TILE;
    const int from = blockIdx.y * (int)p.part_steps, to = min(from + (int)p.part_steps, (int)p.steps);
    const int thread = threadIdx.x, warp = thread / 32, lane = thread % 32;
    for (int i = thread; i < O::STAGES * BK; i += O::THREADS)
        find_place<O>(p, (unsigned)from * BK + i, places + i * 16);
    Loader<O, true, O::X_COPIES> x(p, tables, column0, group0);
    Loader<O, false, O::DY_COPIES> dy(p, tables, filter0, group0);
    begin_dependent();
    __syncthreads();
#pragma unroll
    for (int ahead = 0; ahead < O::STAGES - 1; ++ahead) {
        if (from + ahead < to) {
            const unsigned stage = ring + ahead * STAGE, there = places + ahead * BK * 16;
            x.copy(stage, there);
            dy.copy(stage + X::STAGE, there);
            x.fetch(there);
            x.store(stage);
            dy.fetch(there);
            dy.store(stage + X::STAGE);
        }
        cp_async_commit();
    }
    // A warp's fragments. Of 16 bits, and where pixels lie side by side, lanes give the rows of four matrices of 8 x 8;
    // else each lane reads its own elements.
    constexpr bool OWN = O::SIZE == 4;
    const int group = warp / (O::WARPS_C * O::WARPS_F),
              column = group * O::COLUMNS + warp / O::WARPS_F % O::WARPS_C * (O::MT * 16),
              filter = group * O::FILTERS + warp % O::WARPS_F * (O::NT * 8);
    constexpr int NP = (O::NT + 1) / 2, HALF = O::K / 2;
    // Of rows of columns the swizzle is the same in each sixteen of them.
    unsigned x_at[X::TRANSPOSED ? O::MT : 1], dy_at[Dy::TRANSPOSED ? NP : 1];
    if constexpr (X::TRANSPOSED) {
#pragma unroll
        for (int m = 0; m < O::MT; ++m)
            x_at[m] = OWN ? X::place(lane % 4, column + m * 16 + lane / 4)
                          : X::place(lane % 8 + lane / 16 * 8, column + m * 16 + lane / 8 % 2 * 8);
    } else {
        x_at[0] = X::place(lane / 16 * HALF, column + lane % 16);
    }
    // Of an odd number of eights the last is read twice.
    const int second = lane / 16 * 8;
    if constexpr (Dy::TRANSPOSED) {
#pragma unroll
        for (int n = 0; n < NP; ++n) {
            const bool alone = O::NT % 2 && n == NP - 1;
            dy_at[n] = OWN ? Dy::place(lane % 4, filter + n * 16 + lane / 4)
                           : Dy::place(lane % 16, filter + n * 16 + (alone ? 0 : second));
        }
    } else {
        dy_at[0] = Dy::place(lane / 8 % 2 * HALF, filter + (O::NT == 1 ? 0 : second) + lane % 8);
        static_assert(O::NT == 1 || O::NT % 2 == 0);
    }
    unsigned a[2][O::MT][4], b[2][NP][4];
    const auto load = [&](int to_buffer, unsigned stage, int k) {
#pragma unroll
        for (int m = 0; m < O::MT; ++m) {
            if constexpr (!X::TRANSPOSED) ldmatrix<4>(a[to_buffer][m], stage + (x_at[0] ^ k * 32) + m * 16 * X::SPAN);
            else if constexpr (OWN) load_own<X::SPAN, true>(a[to_buffer][m], stage + x_at[m] + k * 8 * X::SPAN);
            else ldmatrix_transposed(a[to_buffer][m], stage + x_at[m] + k * 16 * X::SPAN);
        }
        stage += X::STAGE;
#pragma unroll
        for (int n = 0; n < NP; ++n) {
            if constexpr (!Dy::TRANSPOSED)
                ldmatrix<4>(b[to_buffer][n], stage + (dy_at[0] ^ k * 32) + n * 16 * Dy::SPAN);
            else if constexpr (OWN)
                load_own<Dy::SPAN, false, O::NT == 1>(b[to_buffer][n], stage + dy_at[n] + k * 8 * Dy::SPAN);
            else ldmatrix_transposed(b[to_buffer][n], stage + dy_at[n] + k * 16 * Dy::SPAN);
        }
    };
    float d[O::MT][O::NT][4] = {};
    const auto multiply = [&](int buffer) {
#pragma unroll
        for (int m = 0; m < O::MT; ++m)
#pragma unroll
            for (int n = 0; n < O::NT; ++n) {
                const unsigned (&four)[4] = b[buffer][n / 2];
                const unsigned two[2] = {four[n % 2 * 2], four[n % 2 * 2 + 1]};
                mma<T>(d[m][n], a[buffer][m], two);
            }
    };
    cp_async_wait<O::STAGES - 2>();
    __syncthreads();
    load(0, ring, 0);
    int slot = 0, free = O::STAGES - 1;
    for (int step = from; step < to; ++step) {
        const unsigned now = ring + slot * STAGE;
        load(1, now, 1);
        // The next copies go where the step before lay; then the place of a step is free, too.
        const bool more = step + O::STAGES - 1 < to;
        const unsigned stage = ring + free * STAGE, there = places + free * BK * 16;
        if (more) {
            x.copy(stage, there);
            dy.copy(stage + X::STAGE, there);
            x.fetch(there);
            dy.fetch(there);
        }
        cp_async_commit();
        if (warp == slot % O::WARPS)
            find_place<O>(p, (unsigned)(step + O::STAGES) * BK + lane, places + (slot * BK + lane) * 16);
        free = slot;
        if (++slot == O::STAGES) slot = 0;
        multiply(0);
#pragma unroll
        for (int k = 1; k < O::K_STEPS - 1; ++k) {
            load((k + 1) % 2, now, k + 1);
            multiply(k % 2);
        }
        cp_async_wait<O::STAGES - 2>();
        __syncthreads();
        load(0, ring + slot * STAGE, 0);
        multiply(1);
        if (more) {
            x.store(stage);
            dy.store(stage + X::STAGE);
        }
    }
    cp_async_wait<0>();
    __syncthreads();
    // The sums, a row a filter, in the ring's memory.
#pragma unroll
    for (int m = 0; m < O::MT; ++m)
#pragma unroll
        for (int n = 0; n < O::NT; ++n)
#pragma unroll
            for (int e = 0; e < 4; ++e) {
                const int row = filter + n * 8 + lane % 4 * 2 + e % 2,
                          at = column - group * O::COLUMNS + m * 16 + lane / 4 + e / 2 * 8;
                store_word(ring + (row * O::SUMS_PITCH + at) * 4, __float_as_uint(d[m][n][e]));
            }
    __syncthreads();
    constexpr int ACROSS = O::COLUMNS / O::WRITE, BYTES = O::WRITE * (O::PARTS ? 4 : O::SIZE);
    for (int i = thread; i < O::GROUPS_PER_TILE * O::FILTERS * ACROSS; i += O::THREADS) {
        const int row = i / ACROSS, at = i % ACROSS * O::WRITE, g = group0 + row / O::FILTERS,
                  f = filter0 + row % O::FILTERS, j = column0 + at;
        if (g >= (int)p.groups || f >= (int)p.group_k || j >= (int)p.columns) continue;
        float v[O::WRITE];
        constexpr int READ = O::WRITE < 4 ? O::WRITE : 4;
#pragma unroll
        for (int first = 0; first < O::WRITE; first += READ) {
            const auto piece = load_shared<READ * 4>(ring + (row * O::SUMS_PITCH + at + first) * 4);
#pragma unroll
            for (int e = 0; e < READ; ++e) v[first + e] = __uint_as_float(piece.v[e]);
        }
        int in_row = j;
        if constexpr (O::RUNS) {
            const int r = j / (int)p.s, there = j - r * (int)p.s - (int)p.before;
            if ((unsigned)there >= (unsigned)p.real) continue;
            in_row = r * (int)p.real + there;
        }
        const long long place = (g * p.group_k + f) * p.row + in_row;
        Piece<BYTES> out{};
        if constexpr (O::PARTS || O::SIZE == 4) {
#pragma unroll
            for (int e = 0; e < O::WRITE; ++e) out.v[e] = __float_as_uint(v[e]);
            float *const sums =
                O::PARTS ? static_cast<float *>(p.parts) + blockIdx.y * p.part_pitch : static_cast<float *>(p.y);
            store_global<BYTES>(sums + place, out);
        } else {
#pragma unroll
            for (int e = 0; e < O::WRITE; ++e) out.v[e / 2] |= bits(Element<T>::from_float(v[e])) << e % 2 * 16;
            store_global<BYTES>(static_cast<T *>(p.y) + place, out);
        }
    }
}
