// Implicit GEMM on the FMA units, in the arithmetic of T (float or double): windows come to shared memory as
// [gemm_k][pixel] by asynchronous copies of whole elements, packed filters as [gemm_k][filter], and each thread
// multiplies pieces of 16 bytes of both.
#pragma once

#include "activation.cuh"
#include "cp_async.cuh"

struct Operands {
    const void *x, *w;
    void *y;
    const void *bias, *residual;
    // Sums of parts of gemm_k, where it is split, each in the order of y; `count` outputs.
    void *parts;
    long long count, height, width, s, p, q, stride_h, stride_w, pad_h, pad_w, dilation_h, dilation_w;
    // Filters in all, channels and filters of a group, groups; gemm_k; elements of a row of packed filters; pixels of
    // y.
    long long k, group_c, group_k, groups, depth, pitch, pixels;
    // Tiles along a group's filters; steps of gemm_k, and of one part; whether the next launch may be placed at once.
    long long tiles_k, steps, part_steps, early;
    // Distances in x, in elements.
    long long step_n, step_c, step_h, step_w;
};

// A block: BM pixels x BN filters of a group, BK terms a step. LN of a warp's lanes lie along filters; a thread has TM
// x TN outputs in pieces of V x V. FLAT: terms are taps and channels as one number; else a step is BK channels of one
// tap, all of them real if WHOLE. PADDED: windows leave the image. COPY pixels come in one copy. WRITE elements of y go
// out at once. PARTS: gemm_k is split, and sums go to the workspace; CLUSTER blocks that share a tile add theirs up.
template <typename T_, bool NCHW_, bool FLAT_, bool WHOLE_, bool PADDED_, int COPY_, int BM_, int BN_, int TM_, int TN_,
          int LN_, int BK_, int STAGES_, bool PARTS_, int CLUSTER_, int WRITE_, int ACTIVATION_>
struct Block {
    using T = T_;
    static constexpr bool NCHW = NCHW_, FLAT = FLAT_, WHOLE = WHOLE_, PADDED = PADDED_, PARTS = PARTS_;
    static constexpr int COPY = COPY_, BM = BM_, BN = BN_, TM = TM_, TN = TN_, LN = LN_, BK = BK_, STAGES = STAGES_,
                         CLUSTER = CLUSTER_, WRITE = WRITE_, ACTIVATION = ACTIVATION_;
    static constexpr int V = 16 / (int)sizeof(T), LM = 32 / LN, WM = BM / (LM * TM), WN = BN / (LN * TN),
                         THREADS = 32 * WM * WN;
    // Channels-last, a warp writes 8 terms of 4 pixels: rows 16 bytes apart in banks take them without conflicts.
    static constexpr int PITCH = BM + (NCHW ? 0 : V), STAGE = BK * (PITCH + BN);
    // Copies of x: a thread's first term and piece of pixels, the distances to its next ones, and how many.
    static constexpr int ROW = BM / COPY, ACROSS = FLAT ? 32 : THREADS < ROW ? THREADS : ROW;
    static constexpr int K_STEP = NCHW ? THREADS / ACROSS : 8, P_STEP = NCHW ? ACROSS : THREADS / 8;
    static constexpr int K_COUNT = BK / K_STEP, P_COUNT = ROW / P_STEP;
    static_assert(BM == WM * LM * TM && BN == WN * LN * TN && TM % V == 0 && TN % V == 0);
    // A row of the tile's sums in shared memory: pixels of a filter, or channels-last filters of a pixel.
    static constexpr int ALONG = NCHW ? BM : BN, SUM_PITCH = ALONG + V;
    static_assert(!(PARTS && CLUSTER > 1));
    static_assert(K_COUNT * K_STEP == BK && P_COUNT * P_STEP == ROW && (COPY == 1 || (NCHW && !FLAT && !PADDED)));
};

// Where a pixel's window begins in x and in its image; or how far a term lies from there.
struct alignas(16) Place {
    long long at;
    int h, w;
};
// The row of a term behind the last.
constexpr int NO_ROW = -2147483647 - 1;

// Copies x to shared memory, a step of gemm_k at a time.
template <class O> struct Windows {
    using T = typename O::T;
    const Operands &p;
    Place *begins, *terms;
    int first_k, first_p;
    // The channel and tap of the next step, and where it lies in the window of a pixel at the image's origin.
    const T *x;
    int c, s, h, w;

    DEVICE Windows(const Operands &p_, Place *begins_, Place *terms_, int group, int step)
        : p(p_), begins(begins_), terms(terms_) {
        const int thread = threadIdx.x;
        first_k = O::NCHW ? thread / O::P_STEP : thread % 8;
        first_p = O::NCHW ? thread % O::P_STEP : thread / 8;
        x = static_cast<const T *>(p.x) + group * p.group_c * p.step_c;
        if constexpr (O::FLAT) return;
        const int chunks = ((int)p.group_c + O::BK - 1) / O::BK, tap = step / chunks, r = tap / (int)p.s;
        c = (step - tap * chunks) * O::BK;
        s = tap - r * (int)p.s;
        h = r * (int)p.dilation_h;
        w = s * (int)p.dilation_w;
        x += h * p.step_h + w * p.step_w + c * p.step_c;
    }
    // FLAT: where the terms of a step lie, to their slot of the ring; the warps take turns.
    DEVICE void find_terms(int step, int slot) {
        const unsigned lane = threadIdx.x % 32;
        if (threadIdx.x / 32 != (unsigned)step % (O::THREADS / 32) || lane >= O::BK) return;
        const unsigned k = (unsigned)step * O::BK + lane, tap = k / (unsigned)p.group_c, r = tap / (unsigned)p.s;
        const int channel = k - tap * (unsigned)p.group_c, down = r * (int)p.dilation_h,
                  across = (tap - r * (unsigned)p.s) * (int)p.dilation_w;
        terms[slot * O::BK + lane] = {down * p.step_h + across * p.step_w + channel * p.step_c,
                                      k < p.depth ? down : NO_ROW, across};
    }
    DEVICE bool inside(const Place &begin, int down, int across) const {
        if constexpr (!O::PADDED) return !O::FLAT || down != NO_ROW;
        return (unsigned)begin.h + (unsigned)down < (unsigned)p.height &&
               (unsigned)begin.w + (unsigned)across < (unsigned)p.width;
    }
    DEVICE static void copy_one(unsigned to, int k, int pixel, const T *from, bool real) {
        constexpr int BYTES = O::COPY * (int)sizeof(T);
        cp_async<BYTES>(to + (k * O::PITCH + pixel) * (int)sizeof(T), from, real);
    }
    DEVICE void copy(unsigned to, int slot) {
        if constexpr (O::FLAT) {
            constexpr int HELD = O::K_COUNT < 4 ? O::K_COUNT : 4;
#pragma unroll
            for (int first = 0; first < O::K_COUNT; first += HELD) {
                Place held[HELD];
#pragma unroll
                for (int j = 0; j < HELD; ++j) held[j] = terms[slot * O::BK + first_k + (first + j) * O::K_STEP];
#pragma unroll
                for (int i = 0; i < O::P_COUNT; ++i) {
                    const int pixel = first_p + i * O::P_STEP;
                    const Place begin = begins[pixel];
                    const T *const from = x + begin.at;
#pragma unroll
                    for (int j = 0; j < HELD; ++j)
                        copy_one(to, first_k + (first + j) * O::K_STEP, pixel, from + held[j].at,
                                 inside(begin, held[j].h, held[j].w));
                }
            }
        } else {
            const long long apart = O::NCHW ? O::K_STEP * p.step_c : O::K_STEP;
#pragma unroll
            for (int i = 0; i < O::P_COUNT; ++i) {
                const int pixel = (first_p + i * O::P_STEP) * O::COPY;
                const Place begin = begins[pixel];
                const bool real = inside(begin, h, w);
                const T *from = x + begin.at + (O::NCHW ? first_k * p.step_c : first_k);
#pragma unroll
                for (int j = 0; j < O::K_COUNT; ++j) {
                    const int k = first_k + j * O::K_STEP;
                    copy_one(to, k, pixel, from, real && (O::WHOLE || c + k < (int)p.group_c));
                    from += apart;
                }
            }
            next();
        }
    }
    DEVICE void next() {
        c += O::BK;
        x += O::BK * p.step_c;
        if (c < (int)p.group_c) return;
        x += p.dilation_w * p.step_w - c * p.step_c;
        c = 0;
        w += (int)p.dilation_w;
        if (++s < (int)p.s) return;
        x += p.dilation_h * p.step_h - p.s * p.dilation_w * p.step_w;
        s = w = 0;
        h += (int)p.dilation_h;
    }
};

template <typename T> struct alignas(16) Vector { T v[16 / sizeof(T)]; };

template <class O> DEVICE void implicit_gemm_simt(const Operands &p) {
    using T = typename O::T;
    constexpr int V = O::V, SIZE = sizeof(T), MP = O::TM / V, NP = O::TN / V;
    extern __shared__ __align__(1024) unsigned char memory[];
    T *const ring = reinterpret_cast<T *>(memory);
    Place *const begins = reinterpret_cast<Place *>(ring + O::STAGES * O::STAGE), *const terms = begins + O::BM;
    const unsigned ring_at = shared_address(memory);
    const int thread = threadIdx.x, groups = p.groups, tiles_k = p.tiles_k;
    // Blocks beside each other share pixels.
    unsigned tile = blockIdx.x / O::CLUSTER;
    const int filter0 = (int)(tile % tiles_k) * O::BN;
    tile /= tiles_k;
    const int group = tile % groups;
    const long long pixel0 = (long long)(tile / groups) * O::BM;
    const unsigned plane = p.p * p.q, width = p.q;
    const long long image0 = pixel0 / plane;
    const unsigned rest0 = (unsigned)(pixel0 - image0 * plane);
    const int part = O::CLUSTER > 1 ? blockIdx.x % O::CLUSTER : blockIdx.y;
    const int from = part * (int)p.part_steps, to = min(from + (int)p.part_steps, (int)p.steps);
    // Beyond the last pixel the last ones come again, and are not written.
    const unsigned last = (unsigned)min((long long)O::BM, p.pixels - pixel0) - O::COPY;
    for (int i = thread; i < O::BM; i += O::THREADS) {
        const unsigned at = rest0 + min((unsigned)i, last), image = at / plane, rest = at - image * plane,
                       row = rest / width;
        const int h = (int)(row * (unsigned)p.stride_h - (unsigned)p.pad_h),
                  w = (int)((rest - row * width) * (unsigned)p.stride_w - (unsigned)p.pad_w);
        begins[i] = {(image0 + image) * p.step_n + h * p.step_h + w * p.step_w, h, w};
    }
    Windows<O> windows(p, begins, terms, group, from);
    if constexpr (O::FLAT)
        for (int ahead = 0; ahead < O::STAGES; ++ahead) windows.find_terms(from + ahead, ahead);
    // Filters: pieces of 16 bytes, whole rows of a tile apart; threads beyond the last whole row have none.
    constexpr int FILTER_ROW = O::BN / V, ROWS = O::THREADS / FILTER_ROW, TURNS = (O::BK + ROWS - 1) / ROWS;
    static_assert(ROWS > 0);
    const int filter_row = thread / FILTER_ROW, filter = thread % FILTER_ROW * V;
    const bool filter_real = filter0 + filter < (int)p.pitch;
    const T *w =
        static_cast<const T *>(p.w) + ((group * p.steps + from) * O::BK + filter_row) * p.pitch + filter0 + filter;
    const unsigned filter_at = ring_at + (O::BK * O::PITCH + filter_row * O::BN + filter) * SIZE;
    const auto copy = [&](int slot) {
        windows.copy(ring_at + slot * (O::STAGE * SIZE), slot);
#pragma unroll
        for (int i = 0; i < TURNS; ++i)
            if ((O::BK % ROWS == 0 || filter_row + i * ROWS < O::BK) &&
                (O::THREADS % FILTER_ROW == 0 || filter_row < ROWS))
                cp_async<16>(filter_at + slot * (O::STAGE * SIZE) + i * ROWS * O::BN * SIZE, w + i * ROWS * p.pitch,
                             filter_real);
        w += O::BK * p.pitch;
    };
    wait_for_previous();
    if (p.early) let_next_begin();
    __syncthreads();
#pragma unroll
    for (int ahead = 0; ahead < O::STAGES - 1; ++ahead) {
        if (from + ahead < to) copy(ahead);
        cp_async_commit();
    }
    // Four along filters: lanes 2 i and 2 i + 1 read the same pixels, lanes i and i ^ 2 the same filters: then a read
    // of 16 bytes takes two turns of the banks instead of four.
    const int warp = thread / 32, lane = thread % 32;
    const int lane_n = O::LN == 4 ? (lane & 1) | lane >> 4 << 1 : lane % O::LN,
              lane_m = O::LN == 4 ? lane >> 1 & 7 : lane / O::LN;
    const int m0 = warp / O::WN * (O::LM * O::TM) + lane_m * V, n0 = warp % O::WN * (O::LN * O::TN) + lane_n * V;
    T sums[O::TM][O::TN] = {};
    int slot = 0;
#pragma unroll 1
    for (int step = from; step < to; ++step) {
        cp_async_wait<O::STAGES - 2>();
        __syncthreads();
        const int before = slot == 0 ? O::STAGES - 1 : slot - 1;
        if (step + O::STAGES - 1 < to) copy(before);
        cp_async_commit();
        // The slot of this step's terms is free.
        if constexpr (O::FLAT) windows.find_terms(step + O::STAGES, slot);
        const T *const a = ring + slot * O::STAGE + m0, *const b = ring + slot * O::STAGE + O::BK * O::PITCH + n0;
        Vector<T> left[2][MP], right[2][NP];
        const auto load = [&](int k) {
#pragma unroll
            for (int i = 0; i < MP; ++i)
                left[k % 2][i] = *reinterpret_cast<const Vector<T> *>(a + k * O::PITCH + i * O::LM * V);
#pragma unroll
            for (int j = 0; j < NP; ++j)
                right[k % 2][j] = *reinterpret_cast<const Vector<T> *>(b + k * O::BN + j * O::LN * V);
        };
        load(0);
#pragma unroll
        for (int k = 0; k < O::BK; ++k) {
            if (k + 1 < O::BK) load(k + 1);
#pragma unroll
            for (int i = 0; i < O::TM; ++i)
#pragma unroll
                for (int j = 0; j < O::TN; ++j)
                    sums[i][j] = fma(left[k % 2][i / V].v[i % V], right[k % 2][j / V].v[j % V], sums[i][j]);
        }
        slot = slot == O::STAGES - 1 ? 0 : slot + 1;
    }
    cp_async_wait<0>();
    // Placed before, its blocks would fill the multiprocessors that end first.
    if (!p.early) let_next_begin();
    const T *bias = static_cast<const T *>(p.bias), *residual = static_cast<const T *>(p.residual);
    T *y = static_cast<T *>(O::PARTS ? p.parts : p.y) + (O::PARTS ? part * p.count : 0);
    const int first_k = group * (int)p.group_k;
    const auto pixel_of = [&](int i) { return m0 + i / V * (O::LM * V) + i % V; };
    const auto filter_of = [&](int j) { return filter0 + n0 + j / V * (O::LN * V) + j % V; };
    if (O::CLUSTER == 1 && !O::PARTS && bias) {
#pragma unroll
        for (int j = 0; j < O::TN; ++j) {
            const T added = filter_of(j) < (int)p.group_k ? bias[first_k + filter_of(j)] : T(0);
#pragma unroll
            for (int i = 0; i < O::TM; ++i) sums[i][j] += added;
        }
    }
    // WRITE outputs side by side along y's inner axis; `at`: the place of the first.
    struct alignas(O::WRITE * SIZE) Written { T v[O::WRITE]; };
    const auto write = [&](long long at, Written v) {
        if constexpr (!O::PARTS) {
            if (residual) {
                const Written added = *reinterpret_cast<const Written *>(residual + at);
#pragma unroll
                for (int e = 0; e < O::WRITE; ++e) v.v[e] += added.v[e];
            }
#pragma unroll
            for (int e = 0; e < O::WRITE; ++e) v.v[e] = activate<O::ACTIVATION>(v.v[e]);
        }
        *reinterpret_cast<Written *>(y + at) = v;
    };
    // Where a pixel of the tile lies in y, of the group's first filter.
    const auto place_of = [&](int m) {
        if constexpr (!O::NCHW) return (pixel0 + m) * p.k + first_k;
        const unsigned within = rest0 + m, image = within / plane;
        return ((image0 + image) * p.k + first_k) * plane + (within - image * plane);
    };
    constexpr int PIXELS = O::NCHW ? O::WRITE : 1, FILTERS = O::NCHW ? 1 : O::WRITE;
    if constexpr (O::CLUSTER > 1) {
        using Piece = Vector<T>;
        __syncthreads();
#pragma unroll
        for (int i = 0; i < O::TM; i += O::NCHW ? V : 1)
#pragma unroll
            for (int j = 0; j < O::TN; j += O::NCHW ? 1 : V) {
                Piece piece;
#pragma unroll
                for (int e = 0; e < V; ++e) piece.v[e] = sums[O::NCHW ? i + e : i][O::NCHW ? j : j + e];
                const int m = pixel_of(i), n = filter_of(j) - filter0;
                *reinterpret_cast<Piece *>(ring + (O::NCHW ? n * O::SUM_PITCH + m : m * O::SUM_PITCH + n)) = piece;
            }
        cluster_arrive();
        cluster_wait();
        // Each block adds up a share of the tile, in the order of gemm_k.
        constexpr int ROW = O::ALONG / V;
        for (int i = part * O::THREADS + thread; i < O::BM * O::BN / V; i += O::CLUSTER * O::THREADS) {
            const int row = i / ROW, along = i % ROW * V, m = O::NCHW ? along : row,
                      n = filter0 + (O::NCHW ? row : along);
            if (pixel0 + m >= p.pixels || n >= (int)p.group_k) continue;
            const T *const here = ring + row * O::SUM_PITCH + along;
            Piece sum = *reinterpret_cast<const Piece *>(in_block_of_rank(here, 0));
#pragma unroll
            for (int rank = 1; rank < O::CLUSTER; ++rank) {
                const Piece more = *reinterpret_cast<const Piece *>(in_block_of_rank(here, rank));
#pragma unroll
                for (int e = 0; e < V; ++e) sum.v[e] += more.v[e];
            }
#pragma unroll
            for (int first = 0; first < V; first += O::WRITE) {
                const int first_m = m + (O::NCHW ? first : 0), first_n = n + (O::NCHW ? 0 : first);
                if (pixel0 + first_m >= p.pixels || first_n >= (int)p.group_k) continue;
                Written v;
#pragma unroll
                for (int e = 0; e < O::WRITE; ++e) {
                    v.v[e] = sum.v[first + e];
                    if (bias) v.v[e] += bias[first_k + first_n + (O::NCHW ? 0 : e)];
                }
                write(place_of(first_m) + (O::NCHW ? first_n * (long long)plane : first_n), v);
            }
        }
        // What others read here has to stay.
        __syncwarp();
        cluster_arrive();
        cluster_wait();
    } else {
#pragma unroll
        for (int i = 0; i < O::TM; i += PIXELS) {
            const int m = pixel_of(i);
            if (pixel0 + m >= p.pixels) continue;
            const long long at = place_of(m);
#pragma unroll
            for (int j = 0; j < O::TN; j += FILTERS) {
                if (filter_of(j) >= (int)p.group_k) continue;
                Written v;
#pragma unroll
                for (int e = 0; e < O::WRITE; ++e) v.v[e] = sums[O::NCHW ? i + e : i][O::NCHW ? j : j + e];
                write(at + (O::NCHW ? filter_of(j) * (long long)plane : filter_of(j)), v);
            }
        }
    }
}
