// Direct convolution of few channels: a tile of the image in shared memory, sums in registers.
//
// x (n, c, h, w), w (k, c / groups, r, s), y (n, k, p, q), all dense. A block computes BY * TY rows by BX * PX columns
// of K output channels; a thread TY rows by PX columns of each. Input channel after input channel, the block's part of
// the image with its halo, and the channel's filters, lie in shared memory: `STAGES` of them, so that the next channels
// are on their way while one is used. A row of the image is read from shared memory once for all TY rows and all taps
// that need it.
//
// LOAD says how the tile is fetched: HALO, each thread its own place and those at the edge the halo besides; EVEN, the
// tile's elements dealt out evenly; WIDE, evenly in copies of 16 bytes that bypass registers (COPY: of fewer bytes,
// where rows are not aligned to 16). SHIFT elements before the tile make its rows begin on such a multiple.
#include "activation.cuh"
#include "cp_async.cuh"
#include "grid.cuh"
#include "window.cuh"

enum Load { HALO, EVEN, COPY };

__host__ __device__ constexpr int round_up(int value, int multiple) {
    return (value + multiple - 1) / multiple * multiple;
}

// N elements that are read or written by one instruction.
template <typename T, int N> struct __align__(sizeof(T) * N) Pack { T item[N]; };

// LOAD and COPY_BYTES: how elements come in. STORE: PX where rows of y are multiples of it, so that a thread writes its
// columns at once; else 1.
// EACH: tiles that a block computes one below the other; the first channels of the next one are fetched meanwhile.
template <typename T, int K, int R, int S, int STRIDE_H, int STRIDE_W, int BX, int BY, int PX, int TY, int STAGES,
          int LOAD, int COPY_BYTES, int SHIFT, int STORE, int EACH, bool BIAS, bool RESIDUAL, int ACTIVATION>
__device__ __forceinline__ void direct(const Window &a) {
    using A = typename Arithmetic<T>::type;
    constexpr int THREADS = BX * BY;
    // Elements that a thread reads of a row, in vectors of PX; columns and rows of the tile.
    constexpr int READ = round_up(SHIFT + (PX - 1) * STRIDE_W + S, PX);
    constexpr int COLUMNS = round_up((BX - 1) * PX * STRIDE_W + READ, 16 / (int)sizeof(T));
    constexpr int ROWS = (BY * TY - 1) * STRIDE_H + R;
    // Rows of the image that TY rows of sums need at one row of the filter.
    constexpr int WINDOW = (TY - 1) * STRIDE_H + 1;
    constexpr int KP = round_up(K, K > 2 ? 4 : K);
    constexpr int STAGE = ROWS * COLUMNS + round_up(R * S * KP, 16 / (int)sizeof(T));
    // Filters of this many output channels are read together.
    constexpr int TOGETHER = K > 2 ? 16 / (int)sizeof(T) < 4 ? 16 / (int)sizeof(T) : 4 : K;
    static_assert(PX == 1 || PX == 2 || PX == 4, "vectors of 1, 2 or 4 elements");
    static_assert((STORE == PX || STORE == 1) && KP % TOGETHER == 0, "whole vectors");
    static_assert(THREADS % 32 == 0, "whole warps");

    extern __shared__ __align__(16) unsigned char memory[];
    T *stages = reinterpret_cast<T *>(memory);

    unsigned block = blockIdx.x;
    const int tile_q = block % (unsigned)a.tiles_q;
    block /= (unsigned)a.tiles_q;
    const int tile_p = block % (unsigned)a.tiles_p;
    block /= (unsigned)a.tiles_p;
    const int tile_k = block % (unsigned)a.tiles_k;
    const long long n = block / (unsigned)a.tiles_k;

    const int height = a.height, width = a.width, tid = threadIdx.x, tx = tid % BX, ty = tid / BX;
    // Unsigned and of 32 bits: a longer division takes a hundred instructions.
    const unsigned groups = a.groups, tiles_in_group = (unsigned)a.tiles_k / groups,
                   group = (unsigned)tile_k / tiles_in_group;
    const int group_c = (unsigned)a.c / groups, group_k = (unsigned)a.k / groups;
    const int k_in_group = (unsigned)tile_k % tiles_in_group * K, k0 = group * group_k + k_in_group;
    const int live = min(K, group_k - k_in_group);
    const int p_end = a.p, q_end = a.q;
    const int q0 = tile_q * (BX * PX), left = q0 * STRIDE_W - (int)a.pad_w - SHIFT;
    const int first_p = tile_p * (BY * TY * EACH), tiles = min(EACH, (p_end - first_p + BY * TY - 1) / (BY * TY));
    const T *x = static_cast<const T *>(a.x) + (n * a.c + (long long)group * group_c) * height * width;
    const T *w = static_cast<const T *>(a.w) + (long long)k0 * group_c * (R * S);

    // What is fetched next: the channel, the tile's first row in the image, and the stage that it goes to. `from` is
    // where a thread's copies come from, in elements from the channel's first one, -1 for what lies outside the image:
    // the same for every channel of a tile, so that a channel costs a few instructions a copy.
    constexpr int PIECE = COPY_BYTES / (int)sizeof(T), PIECES = COLUMNS / (PIECE > 0 ? PIECE : 1);
    constexpr int COPIES = LOAD == COPY ? (ROWS * PIECES + THREADS - 1) / THREADS : 1;
    int next_c = 0, top = first_p * STRIDE_H - (int)a.pad_h, next_stage = 0;
    int from[COPIES];
    auto aim = [&] {
        if constexpr (LOAD == COPY) {
#pragma unroll
            for (int i = 0; i < COPIES; ++i) {
                const int number = tid + i * THREADS, h = top + number / PIECES, v = left + number % PIECES * PIECE;
                const bool real =
                    number < ROWS * PIECES && (unsigned)h < (unsigned)height && (unsigned)v < (unsigned)width;
                from[i] = real ? h * width + v : -1;
            }
        }
    };

    auto load = [&] {
        const int c = next_c;
        T *tile = stages + next_stage * STAGE;
        T *filters = tile + ROWS * COLUMNS;
        const T *image = x + (long long)c * height * width;
        if constexpr (LOAD == HALO) {
            for (int row = ty; row < ROWS; row += BY)
                for (int column = tx; column < COLUMNS; column += BX) {
                    const int h = top + row, v = left + column;
                    const bool real = (unsigned)h < (unsigned)height && (unsigned)v < (unsigned)width;
                    tile[row * COLUMNS + column] = real ? image[(long long)h * width + v] : downcast<T>(0);
                }
        } else if constexpr (LOAD == EVEN) {
            for (int i = tid; i < ROWS * COLUMNS; i += THREADS) {
                const int h = top + i / COLUMNS, v = left + i % COLUMNS;
                const bool real = (unsigned)h < (unsigned)height && (unsigned)v < (unsigned)width;
                tile[i] = real ? image[(long long)h * width + v] : downcast<T>(0);
            }
        } else {
#pragma unroll
            for (int i = 0; i < COPIES; ++i) {
                const int number = tid + i * THREADS;
                if (i < COPIES - 1 || number < ROWS * PIECES)
                    cp_async<COPY_BYTES>(&tile[number * PIECE], image + max(from[i], 0), from[i] >= 0);
            }
        }
#pragma unroll 1
        for (int i = tid; i < K * R * S; i += THREADS) {
            const int k = i / (R * S), tap = i % (R * S);
            const T *filter = w + ((long long)k * group_c + c) * (R * S) + tap;
            if constexpr (LOAD == COPY && sizeof(T) >= 4)
                cp_async<sizeof(T) >= 4 ? sizeof(T) : 4>(&filters[tap * KP + k], k < live ? filter : w, k < live);
            else filters[tap * KP + k] = k < live ? *filter : downcast<T>(0);
        }
        next_stage = next_stage + 1 == STAGES ? 0 : next_stage + 1;
        if (++next_c == group_c) {
            next_c = 0;
            top += BY * TY * STRIDE_H;
            if constexpr (EACH > 1) aim();
        }
    };

    A sum[TY][K][PX];

    auto compute = [&](int stage) {
        const T *tile = stages + stage * STAGE + ty * TY * STRIDE_H * COLUMNS + tx * PX * STRIDE_W;
        const T *filters = stages + stage * STAGE + ROWS * COLUMNS;
        A rows[WINDOW][READ];
        auto read_row = [&](int row) {
#pragma unroll
            for (int j = 0; j < READ; j += PX) {
                const auto pack = *reinterpret_cast<const Pack<T, PX> *>(&tile[row * COLUMNS + j]);
#pragma unroll
                for (int i = 0; i < PX; ++i) rows[min(row, WINDOW - 1)][j + i] = upcast(pack.item[i]);
            }
        };
#pragma unroll
        for (int row = 0; row < WINDOW - 1; ++row) read_row(row);
#pragma unroll
        for (int r = 0; r < R; ++r) {
            read_row(r + WINDOW - 1);
#pragma unroll
            for (int s = 0; s < S; ++s) {
                A filter[KP];
#pragma unroll
                for (int k = 0; k < KP; k += TOGETHER) {
                    const auto pack = *reinterpret_cast<const Pack<T, TOGETHER> *>(&filters[(r * S + s) * KP + k]);
#pragma unroll
                    for (int i = 0; i < TOGETHER; ++i) filter[k + i] = upcast(pack.item[i]);
                }
#pragma unroll
                for (int t = 0; t < TY; ++t)
#pragma unroll
                    for (int k = 0; k < K; ++k)
#pragma unroll
                        for (int j = 0; j < PX; ++j)
                            sum[t][k][j] = fma(rows[t * STRIDE_H][SHIFT + j * STRIDE_W + s], filter[k], sum[t][k][j]);
            }
            // Unrolled, moving the rows up is only a matter of names.
#pragma unroll
            for (int row = 0; row < WINDOW - 1; ++row)
#pragma unroll
                for (int j = 0; j < READ; ++j) rows[row][j] = rows[row + 1][j];
        }
    };

    begin_dependent();
    // Sums go out as they lie where rows of y are multiples of PX. Else a thread's columns would be written one by one,
    // PX apart from the next thread's: transposed in shared memory, a warp writes neighbours. Places are counted from
    // the block's first channel and worked out once: with addresses and tests for each of the sums, this took a seventh
    // of the time.
    const long long plane = (long long)p_end * q_end, first_k = n * a.k + k0;
    T *y = static_cast<T *>(a.y) + first_k * plane;
    const T *bias = BIAS ? static_cast<const T *>(a.bias) + k0 : nullptr;
    const T *residual = RESIDUAL ? static_cast<const T *>(a.residual) + first_k * plane : nullptr;
    auto store = [&](int p0) {
        constexpr int WIDTH = STORE == PX ? PX : 1, STORES = PX / WIDTH;
        A *transposed = reinterpret_cast<A *>(stages + STAGES * STAGE) + tid / 32 * (32 * PX);
        T *out[TY][STORES];
        bool real[TY][STORES];
#pragma unroll
        for (int i = 0; i < STORES; ++i) {
            const int element = WIDTH == PX ? tid % 32 * PX : i * 32 + tid % 32, from = tid / 32 * 32 + element / PX;
            const int p = p0 + from / BX * TY, q = q0 + from % BX * PX + element % PX;
#pragma unroll
            for (int t = 0; t < TY; ++t) {
                out[t][i] = y + ((p + t) * q_end + q);
                real[t][i] = p + t < p_end && q < q_end;
            }
        }
#pragma unroll
        for (int k = 0; k < K; ++k) {
            if (k >= live) break;
#pragma unroll
            for (int t = 0; t < TY; ++t) {
                Pack<A, PX> sums;
#pragma unroll
                for (int j = 0; j < PX; ++j) sums.item[j] = sum[t][k][j];
                if constexpr (WIDTH < PX) {
                    __syncwarp();
                    *reinterpret_cast<Pack<A, PX> *>(&transposed[tid % 32 * PX]) = sums;
                    __syncwarp();
#pragma unroll
                    for (int i = 0; i < STORES; ++i) sums.item[i] = transposed[i * 32 + tid % 32];
                }
#pragma unroll
                for (int i = 0; i < STORES; ++i) {
                    T *to = out[t][i];
                    out[t][i] += plane;
                    if (!real[t][i]) continue;
                    Pack<T, WIDTH> pack;
#pragma unroll
                    for (int j = 0; j < WIDTH; ++j)
                        pack.item[j] = finish<T, ACTIVATION>(sums.item[i * WIDTH + j], bias,
                                                             residual + (RESIDUAL ? to - y : 0), k, j);
                    *reinterpret_cast<Pack<T, WIDTH> *>(to) = pack;
                }
            }
        }
    };

    // Channels of all tiles are one sequence; `ahead` of them are under way.
    constexpr int AHEAD = STAGES > 1 ? STAGES - 1 : 0;
    int waiting = tiles * group_c, stage = 0;
    aim();
#pragma unroll 1
    for (int i = 0; i < AHEAD; ++i) {
        if (waiting > 0) load();
        --waiting;
        cp_async_commit();
    }
    for (int tile = 0; tile < tiles; ++tile) {
#pragma unroll
        for (int t = 0; t < TY; ++t)
#pragma unroll
            for (int k = 0; k < K; ++k)
#pragma unroll
                for (int j = 0; j < PX; ++j) sum[t][k][j] = A(0);
        for (int c = 0; c < group_c; ++c) {
            if constexpr (STAGES > 1) cp_async_wait<AHEAD - 1>();
            // Everybody is done with the stage that is filled next, and sees the one that has come in.
            __syncthreads();
            if (waiting > 0) load();
            --waiting;
            cp_async_commit();
            if constexpr (STAGES == 1) {
                cp_async_wait<0>();
                __syncthreads();
            }
            compute(stage);
            stage = stage + 1 == STAGES ? 0 : stage + 1;
        }
        store(first_p + tile * (BY * TY));
    }
}
