// Implicit GEMM with warp-level tensor core instructions (sm_80 and newer): threads gather the windows into shared
// memory, any channel count and memory order. gemm_k runs over taps and channels as one, so narrow groups fill its
// steps too.
#pragma once

#include "activation.cuh"
#include "float16.cuh"
#include "grid.cuh"
#include "matrix.cuh"

struct Gather {
    const void *x, *w;
    void *y;
    const void *bias, *residual;
    // fp32 sums of parts of gemm_k, where it is split.
    float *parts;
    long long height, width, k, s, p, q, stride_h, stride_w, pad_h, pad_w, dilation_h, dilation_w;
    // Channels and filters of a group; gemm_k; elements of a packed filter; pixels of y.
    long long group_c, group_k, depth, pitch, pixels;
    // Tiles along a group's filters and along tiles of groups; steps of gemm_k, and of one part.
    long long tiles_k, tiles_g, steps, part_steps;
    // Distances in x, in elements.
    long long step_n, step_c, step_h, step_w;
    // STRIDED: distances in y.
    long long image_stride, row_stride, column_stride;
};

// Where a pixel's filters begin in y that has strides.
template <class A> DEVICE long long strided_place(const A &a, int pixel, int plane, int width) {
    const int n = pixel / plane, rest = pixel - n * plane, row = rest / width;
    return n * a.image_stride + row * a.row_stride + (rest - row * width) * a.column_stride;
}

// A block: BM pixels x BN filters of each of GROUPS_PER_TILE groups; WM x WN warps a group. PIECE: bytes of an
// asynchronous copy of x, or 0 where elements pass through registers (any strides), pixels side by side in a warp if
// PIXELS_INNER. PARTS: gemm_k is split, sums go to `parts`. THREE: products of parts of fp32. V elements of y at once.
// STRIDED: rows and columns of y lie a stride apart.
template <typename T_, int PIECE_, bool PIXELS_INNER_, int BM_, int BN_, int GROUPS_PER_TILE_, int WM_, int WN_,
          int STAGES_, bool PARTS_, bool THREE_, int V_, bool NCHW_, bool BIAS_, bool RESIDUAL_, int ACTIVATION_,
          bool STRIDED_>
struct Block {
    using T = T_;
    static constexpr int PIECE = PIECE_, BM = BM_, BN = BN_, GROUPS_PER_TILE = GROUPS_PER_TILE_, WM = WM_, WN = WN_,
                         STAGES = STAGES_, V = V_;
    static constexpr bool PIXELS_INNER = PIXELS_INNER_, PARTS = PARTS_, THREE = THREE_, NCHW = NCHW_, BIAS = BIAS_,
                          RESIDUAL = RESIDUAL_, STRIDED = STRIDED_;
    static constexpr int ACTIVATION = ACTIVATION_;
    static constexpr int THREADS = 32 * GROUPS_PER_TILE * WM * WN, SPAN = 64, ELEMENTS = SPAN / (int)sizeof(T);
    // Rows of 16 and columns of 8 of a warp.
    static constexpr int MT = BM / WM / 16, NT = BN / WN / 8;
    static constexpr int A_BYTES = GROUPS_PER_TILE * BM * SPAN, STAGE = A_BYTES + GROUPS_PER_TILE * BN * SPAN;
    static constexpr int COLUMNS = GROUPS_PER_TILE * BN, SUMS_PITCH = COLUMNS + 4;
    static_assert(BM % (16 * WM) == 0 && BN % (8 * WN) == 0);
};

// Where a pixel's window begins in x, and in its image.
struct Begin {
    long long at;
    int h, w;
};

template <class O> struct Loader {
    using T = typename O::T;
    static constexpr int EACH = O::PIECE ? O::PIECE : 16, ACROSS = O::SPAN / EACH, V = EACH / (int)sizeof(T);
    // Pieces of a row and groups are fixed for a thread; it takes every PIXELS-th pixel.
    static constexpr int PIXELS = O::THREADS / (ACROSS * O::GROUPS_PER_TILE), COUNT = (O::BM + PIXELS - 1) / PIXELS;
    static_assert(O::THREADS % (ACROSS * O::GROUPS_PER_TILE) == 0);
    const Gather &p;
    unsigned begins;
    int piece, group, first, tap, c, r, s, k;
    const T *x;

    DEVICE Loader(const Gather &p_, unsigned begins_, int group0, int step) : p(p_), begins(begins_) {
        const int thread = threadIdx.x;
        // In a warp: groups, or pixels, side by side.
        group = O::PIXELS_INNER ? thread / PIXELS / ACROSS : thread % O::GROUPS_PER_TILE;
        piece = O::PIXELS_INNER ? thread / PIXELS % ACROSS : thread / O::GROUPS_PER_TILE % ACROSS;
        first = O::PIXELS_INNER ? thread % PIXELS : thread / (O::GROUPS_PER_TILE * ACROSS);
        x = static_cast<const T *>(p.x) + (long long)(group0 + group) * p.group_c * p.step_c;
        k = step * O::ELEMENTS + piece * V;
        c = k % (int)p.group_c;
        tap = k / (int)p.group_c;
        r = tap / (int)p.s;
        s = tap - r * (int)p.s;
    }
    DEVICE void move(int &c_, int &r_, int &s_, int by) const {
        c_ += by;
        while (c_ >= (int)p.group_c) {
            c_ -= (int)p.group_c;
            if (++s_ == (int)p.s) {
                s_ = 0;
                ++r_;
            }
        }
    }
    DEVICE Begin begin(int tile_pixel) const {
        Begin b;
        asm volatile("ld.shared.v2.b64 {%0, %1}, [%2];"
                     : "=l"(b.at), "=l"(*reinterpret_cast<long long *>(&b.h))
                     : "r"(begins + tile_pixel * 16)
                     : "memory");
        return b;
    }
    DEVICE unsigned place(unsigned stage, int tile_pixel) const {
        return stage + group * O::BM * O::SPAN + swizzled<O::SPAN>(tile_pixel, piece * EACH);
    }
    // Begin the asynchronous copies of one step, and go on to the next.
    DEVICE void copy(unsigned stage) {
        const int h = r * (int)p.dilation_h, w = s * (int)p.dilation_w;
        const long long shift = h * p.step_h + w * p.step_w + c;
        const bool real = k < (int)p.depth;
#pragma unroll
        for (int i = 0; i < COUNT; ++i) {
            const int tile_pixel = first + i * PIXELS;
            if (O::BM % PIXELS && tile_pixel >= O::BM) break;
            const Begin b = begin(tile_pixel);
            const bool inside =
                real && (unsigned)(b.h + h) < (unsigned)p.height && (unsigned)(b.w + w) < (unsigned)p.width;
            cp_async<EACH>(place(stage, tile_pixel), inside ? x + b.at + shift : static_cast<const T *>(p.x), inside);
        }
        next();
    }
    DEVICE void next() {
        k += O::ELEMENTS;
        move(c, r, s, O::ELEMENTS);
    }
    // The same through registers: fetch() one step, store() it later.
    T held[O::PIECE ? 1 : COUNT][V];
    DEVICE void fetch() {
        int c_ = c, r_ = r, s_ = s;
#pragma unroll
        for (int e = 0; e < V; ++e) {
            const int h = r_ * (int)p.dilation_h, w = s_ * (int)p.dilation_w;
            const long long shift = h * p.step_h + w * p.step_w + c_ * p.step_c;
            const bool real = k + e < (int)p.depth;
#pragma unroll
            for (int i = 0; i < COUNT; ++i) {
                const int tile_pixel = first + i * PIXELS;
                if (O::BM % PIXELS && tile_pixel >= O::BM) break;
                const Begin b = begin(tile_pixel);
                const bool inside =
                    real && (unsigned)(b.h + h) < (unsigned)p.height && (unsigned)(b.w + w) < (unsigned)p.width;
                held[i][e] = inside ? x[b.at + shift] : T{};
            }
            move(c_, r_, s_, 1);
        }
        next();
    }
    DEVICE void store(unsigned stage) {
#pragma unroll
        for (int i = 0; i < COUNT; ++i) {
            const int tile_pixel = first + i * PIXELS;
            if (O::BM % PIXELS && tile_pixel >= O::BM) break;
            Piece<16> v{};
#pragma unroll
            for (int e = 0; e < V; ++e)
                v.v[e * (int)sizeof(T) / 4] |= bits(held[i][e]) << (sizeof(T) == 2 ? e % 2 * 16 : 0);
            store_shared<16>(place(stage, tile_pixel), v);
        }
    }
};

template <class O> DEVICE void implicit_gemm_mma(const Gather &p) {
    using T = typename O::T;
    extern __shared__ __align__(1024) unsigned char memory[];
    const unsigned ring = shared_address(memory),
                   begins =
                       ring + (unsigned)(O::STAGES * O::STAGE > O::BM * O::SUMS_PITCH * 4 ? O::STAGES * O::STAGE
                                                                                          : O::BM * O::SUMS_PITCH * 4);
    const int tiles_k = p.tiles_k, tiles_g = p.tiles_g;
    int tile = blockIdx.x;
    const int filter0 = tile % tiles_k * O::BN;
    tile /= tiles_k;
    const int group0 = tile % tiles_g * O::GROUPS_PER_TILE, pixel0 = tile / tiles_g * O::BM;
    const int from = blockIdx.y * (int)p.part_steps, to = min(from + (int)p.part_steps, (int)p.steps);
    const int thread = threadIdx.x, plane = p.p * p.q, width = p.q, groups = p.k / p.group_k;
    for (int tile_pixel = thread; tile_pixel < O::BM; tile_pixel += O::THREADS) {
        const int pixel = pixel0 + tile_pixel, n = pixel / plane, rest = pixel - n * plane, row = rest / width;
        const int h = row * (int)p.stride_h - (int)p.pad_h, w = (rest - row * width) * (int)p.stride_w - (int)p.pad_w;
        Begin b{n * p.step_n + h * p.step_h + w * p.step_w, pixel < p.pixels ? h : -(1 << 30), w};
        asm volatile("st.shared.v2.b64 [%0], {%1, %2};" ::"r"(begins + tile_pixel * 16), "l"(b.at),
                     "l"(*reinterpret_cast<long long *>(&b.h))
                     : "memory");
    }
    begin_dependent();
    __syncthreads();
    Loader<O> loader(p, begins, group0, from);
    // Filters: pieces of 16 bytes, four a filter.
    constexpr int FILTERS = O::COLUMNS * 4, TURNS = (FILTERS + O::THREADS - 1) / O::THREADS;
    const auto copy_filters = [&](unsigned stage, int step) {
#pragma unroll
        for (int i = 0; i < TURNS; ++i) {
            const int at = thread + i * O::THREADS, tile_filter = at / 4, piece = at % 4 * 16;
            if (FILTERS % O::THREADS && at >= FILTERS) break;
            const int group = group0 + tile_filter / O::BN, filter = filter0 + tile_filter % O::BN,
                      k = step * O::ELEMENTS + piece / (int)sizeof(T);
            const bool real = group < groups && filter < (int)p.group_k && k < (int)p.pitch;
            const T *w = static_cast<const T *>(p.w) + (real ? (group * p.group_k + filter) * p.pitch + k : 0);
            cp_async<16>(stage + O::A_BYTES + tile_filter / O::BN * O::BN * O::SPAN +
                             swizzled<O::SPAN>(tile_filter % O::BN, piece),
                         w, real);
        }
    };
    const auto begin_step = [&](int step) {
        const unsigned stage = ring + (step - from) % O::STAGES * O::STAGE;
        if constexpr (O::PIECE > 0) loader.copy(stage);
        copy_filters(stage, step);
    };
    if (O::GROUPS_PER_TILE > 1 && group0 + loader.group >= groups) loader.k = 1 << 30;
#pragma unroll
    for (int ahead = 0; ahead < O::STAGES - 1; ++ahead) {
        if (from + ahead < to) {
            if constexpr (O::PIECE == 0) {
                loader.fetch();
                loader.store(ring + ahead * O::STAGE);
            }
            begin_step(from + ahead);
        }
        cp_async_commit();
    }
    const int warp = thread / 32, lane = thread % 32;
    const int tile_group = warp / (O::WM * O::WN), m0 = warp / O::WN % O::WM * (O::BM / O::WM),
              n0 = warp % O::WN * (O::BN / O::WN);
    float d[O::MT][O::NT][4] = {};
    for (int step = from; step < to; ++step) {
        cp_async_wait<O::STAGES - 2>();
        __syncthreads();
        const int next = step + O::STAGES - 1;
        if (next < to) {
            if constexpr (O::PIECE == 0) loader.fetch();
            begin_step(next);
        }
        cp_async_commit();
        const unsigned stage = ring + (step - from) % O::STAGES * O::STAGE;
        const unsigned a = stage + tile_group * O::BM * O::SPAN, b = stage + O::A_BYTES + tile_group * O::BN * O::SPAN;
#pragma unroll
        for (int k = 0; k < O::SPAN / 32; ++k) {
            unsigned left[O::MT][4], right[O::NT][2];
#pragma unroll
            for (int m = 0; m < O::MT; ++m)
                ldmatrix<4>(left[m], a + swizzled<O::SPAN>(m0 + m * 16 + lane % 16, k * 32 + lane / 16 * 16));
#pragma unroll
            for (int n = 0; n < O::NT; ++n)
                ldmatrix<2>(right[n], b + swizzled<O::SPAN>(n0 + n * 8 + lane % 8, k * 32 + lane / 8 % 2 * 16));
            if constexpr (O::THREE) {
                unsigned left_rest[O::MT][4], right_rest[O::NT][2];
#pragma unroll
                for (int m = 0; m < O::MT; ++m) split_tf32(left[m], left_rest[m]);
#pragma unroll
                for (int n = 0; n < O::NT; ++n) split_tf32(right[n], right_rest[n]);
#pragma unroll
                for (int m = 0; m < O::MT; ++m)
#pragma unroll
                    for (int n = 0; n < O::NT; ++n) {
                        mma<T>(d[m][n], left_rest[m], right[n]);
                        mma<T>(d[m][n], left[m], right_rest[n]);
                    }
            }
#pragma unroll
            for (int m = 0; m < O::MT; ++m)
#pragma unroll
                for (int n = 0; n < O::NT; ++n) mma<T>(d[m][n], left[m], right[n]);
        }
        if constexpr (O::PIECE == 0)
            if (next < to) loader.store(ring + (next - from) % O::STAGES * O::STAGE);
    }
    cp_async_wait<0>();
    __syncthreads();
    // The sums, a row a pixel, in the ring's memory.
#pragma unroll
    for (int m = 0; m < O::MT; ++m)
#pragma unroll
        for (int n = 0; n < O::NT; ++n)
#pragma unroll
            for (int half = 0; half < 2; ++half) {
                const int row = m0 + m * 16 + lane / 4 + half * 8,
                          column = tile_group * O::BN + n0 + n * 8 + lane % 4 * 2;
                store_pair(ring + (row * O::SUMS_PITCH + column) * 4, d[m][n][half * 2], d[m][n][half * 2 + 1]);
            }
    __syncthreads();
    constexpr int V = O::NCHW ? 1 : O::V, ACROSS = O::COLUMNS / V;
    const T *bias = static_cast<const T *>(p.bias), *residual = static_cast<const T *>(p.residual);
    T *y = static_cast<T *>(p.y);
    for (int i = thread; i < O::BM * ACROSS; i += O::THREADS) {
        const int tile_pixel = O::NCHW ? i % O::BM : i / ACROSS, column = O::NCHW ? i / O::BM : i % ACROSS * V;
        const int pixel = pixel0 + tile_pixel, group = group0 + column / O::BN, filter = filter0 + column % O::BN;
        if (pixel >= (int)p.pixels || group >= groups || filter >= (int)p.group_k) continue;
        const int k = group * (int)p.group_k + filter;
        long long place = (long long)pixel * p.k + k;
        float v[V];
#pragma unroll
        for (int e = 0; e < V; ++e) v[e] = load_float(ring + (tile_pixel * O::SUMS_PITCH + column + e) * 4);
        if constexpr (O::PARTS) {
            float *part = p.parts + blockIdx.y * p.pixels * p.k + place;
#pragma unroll
            for (int e = 0; e < V; ++e) part[e] = v[e];
            continue;
        }
        if constexpr (O::NCHW) {
            const int n = pixel / plane;
            place = ((long long)n * p.k + k) * plane + (pixel - n * plane);
        }
        if constexpr (O::STRIDED) place = strided_place(p, pixel, plane, width) + k;
        struct alignas(sizeof(T) * V) Vector { T v[V]; } out, added;
        if constexpr (O::RESIDUAL) added = *reinterpret_cast<const Vector *>(residual + place);
#pragma unroll
        for (int e = 0; e < V; ++e) {
            if constexpr (O::BIAS) v[e] += Element<T>::to_float(bias[k + e]);
            if constexpr (O::RESIDUAL) v[e] += Element<T>::to_float(added.v[e]);
            out.v[e] = Element<T>::from_float(activated<O::ACTIVATION>(v[e]));
        }
        *reinterpret_cast<Vector *>(y + place) = out;
    }
}

struct Parts {
    const float *parts;
    void *y;
    const void *bias, *residual;
    // Outputs, filters, output pixels of an image, parts of gemm_k.
    long long count, k, plane, split_k;
    // STRIDED: pixels of a row, and distances in y.
    long long q, image_stride, row_stride, column_stride;
};

// y from the sums of parts [part][pixel][filter], added in the order of gemm_k.
template <typename T, bool NCHW, bool BIAS, bool RESIDUAL, int ACTIVATION, bool STRIDED>
DEVICE void add_parts(const Parts &p) {
    begin_dependent();
    for (long long i = blockIdx.x * 256ll + threadIdx.x; i < p.count; i += gridDim.x * 256ll) {
        const long long pixel = i / p.k, k = i - pixel * p.k;
        float sum = 0;
        for (int part = 0; part < (int)p.split_k; ++part) sum += p.parts[part * p.count + i];
        const long long n = pixel / p.plane;
        long long place = NCHW ? (n * p.k + k) * p.plane + (pixel - n * p.plane) : i;
        if constexpr (STRIDED) place = strided_place(p, pixel, p.plane, p.q) + k;
        if constexpr (BIAS) sum += Element<T>::to_float(static_cast<const T *>(p.bias)[k]);
        if constexpr (RESIDUAL) sum += Element<T>::to_float(static_cast<const T *>(p.residual)[place]);
        static_cast<T *>(p.y)[place] = Element<T>::from_float(activated<ACTIVATION>(sum));
    }
}
