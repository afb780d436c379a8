// Depthwise convolution, NCHW: planes of x, or a band of rows of one, lie in memory without a gap, and come to shared
// memory as they lie.
//
// A block copies them in pieces of 16 bytes. A thread then goes down the rows of TX columns of a plane, all weights and
// the rows of sums under way in registers as in columns.cu. Outputs go through shared memory, too, so that they are
// written in pieces of 16 bytes: rows of few columns are no whole sectors.
#include "ops/conv/cuda/depthwise/columns.cuh"
#include "ops/conv/cuda/depthwise/planes.cuh"

// T; R, S; SH, SW: strides; H, W, OUT_H, OUT_W: rows and columns of x and y; PAD_H, PAD_W; TX columns and ROWS rows a
// thread; SEGMENTS of rows and PLANES a block; BIAS, RESIDUAL, ACTIVATION.
template <class Traits> struct PlaneOf : Traits {
    using B = Traits;
    static constexpr int LIVE = (B::R + B::SH - 1) / B::SH, PERIOD = LIVE * B::SH;
    static constexpr int WINDOW = (B::TX - 1) * B::SW + B::S, GROUPS = (B::OUT_W + B::TX - 1) / B::TX;
    static constexpr int USED = GROUPS * B::SEGMENTS * B::PLANES, THREADS = (USED + 31) / 32 * 32;
    static constexpr int GRAIN = 16 / sizeof(typename B::T), BAND = B::ROWS * B::SEGMENTS;
    // Rows of x of a band, and elements of a block with what is in front of them in their piece of 16 bytes.
    static constexpr int SEEN = (BAND - 1) * B::SH + B::R, ROWS_X = B::PLANES == 1 && SEEN < B::H ? SEEN : B::H;
    static constexpr int ELEMENTS = ((B::PLANES - 1) * B::H + ROWS_X) * B::W + GRAIN - 1;
    static constexpr int OUTPUTS_AT = (ELEMENTS + GRAIN - 1) / GRAIN * 16;
};

template <class Traits> DEVICE void depthwise_planes(const Planes &a) {
    using P = PlaneOf<Traits>;
    using T = typename P::T;
    using A = typename Arithmetic<T>::type;
    constexpr int TX = P::TX, R = P::R, S = P::S, SH = P::SH, H = P::H, W = P::W, LIVE = P::LIVE, GRAIN = P::GRAIN;
    extern __shared__ __align__(128) unsigned char memory[];
    const long long all = a.n * a.c, begin = (long long)(blockIdx.x / (unsigned)a.pieces) * P::PLANES;
    const int planes = P::PLANES == 1 ? 1 : (int)min((long long)P::PLANES, all - begin), tid = threadIdx.x;
    // Rows of outputs, and of x.
    const int band = blockIdx.x % (unsigned)a.pieces * P::BAND, rows_y = min(P::BAND, P::OUT_H - band);
    const int top = P::PLANES == 1 ? max(0, band * SH - P::PAD_H) : 0;
    const int bottom = P::PLANES == 1 ? min(H, (band + rows_y - 1) * SH - P::PAD_H + R) : H;

    // A thread's columns, rows and plane.
    const int q0 = tid % P::GROUPS * TX, segment = tid / P::GROUPS % P::SEGMENTS, mine = tid / P::GROUPS / P::SEGMENTS;
    const int o0 = segment * P::ROWS, count = mine < planes ? min(P::ROWS, rows_y - o0) : 0;
    const long long channel = (begin + min(mine, planes - 1)) % a.c;
    if (!a.weights_ready) begin_dependent();
    T taps[R * S];
#pragma unroll
    for (int tap = 0; tap < R * S; ++tap) taps[tap] = static_cast<const T *>(a.w)[channel * (R * S) + tap];
    if (a.weights_ready) begin_dependent();

    const long long from = begin * (H * W) + top * W, end = all * (H * W);
    const int lead = from % GRAIN, elements = max(0, ((planes - 1) * H + bottom - top) * W);
    const T *const x = static_cast<const T *>(a.x) + (from - lead);
    for (int i = tid * GRAIN; i < lead + elements; i += P::THREADS * GRAIN)
        cp_async_part<16>(shared_address(memory) + i * (int)sizeof(T), x + i,
                          (int)min((long long)GRAIN, end - (from - lead) - i) * (int)sizeof(T));
    cp_async_commit();
    A w[R * S][1], bias = 0;
#pragma unroll
    for (int tap = 0; tap < R * S; ++tap) w[tap][0] = upcast(taps[tap]);
    if constexpr (P::BIAS) bias = upcast(static_cast<const T *>(a.bias)[channel]);
    const int left = q0 * P::SW - P::PAD_W;
    bool inside[P::WINDOW];
#pragma unroll
    for (int m = 0; m < P::WINDOW; ++m) inside[m] = (unsigned)(left + m) < (unsigned)W;
    cp_async_wait<0>();
    __syncthreads();

    // Outputs of the block, and where they begin in their piece of 16 bytes.
    const long long y0 = begin * (P::OUT_H * P::OUT_W) + band * P::OUT_W;
    const int lead_y = y0 % GRAIN, outputs = ((planes - 1) * P::OUT_H + rows_y) * P::OUT_W;
    const unsigned staged = shared_address(memory) + P::OUTPUTS_AT;
    const int at = (mine * P::OUT_H + o0) * P::OUT_W + q0;
    T *out = reinterpret_cast<T *>(memory + P::OUTPUTS_AT) + lead_y + at;
    const T *residual = static_cast<const T *>(a.residual) + (y0 + at);
    int row = (band + o0) * SH - P::PAD_H;
    const T *from_row = reinterpret_cast<const T *>(memory) + lead + (mine * H - top + row) * W + left;
    const int rows = count > 0 ? (count - 1) * SH + R : 0;
    A sums[LIVE][TX][1];
    for (int base = 0, first = 0; base < rows; base += P::PERIOD, first += LIVE) {
#pragma unroll
        for (int i = 0; i < P::PERIOD; ++i) {
            if (i > 0 && base + i >= rows) break;
            const bool real = (unsigned)row < (unsigned)H;
            A now[P::WINDOW][1];
#pragma unroll
            for (int m = 0; m < P::WINDOW; ++m) now[m][0] = real && inside[m] ? upcast(from_row[m]) : A(0);
            from_row += W, ++row;
            multiply_row<P>(i, first, sums, now, w, [&](int slot, int back) {
                if (first + back >= count) return;
#pragma unroll
                for (int j = 0; j < TX; ++j) {
                    if (P::OUT_W % TX && q0 + j >= P::OUT_W) break;
                    A v = sums[slot][j][0];
                    if constexpr (P::BIAS) v += bias;
                    if constexpr (P::RESIDUAL) v += upcast(residual[j]);
                    if constexpr (sizeof(A) == 4) v = activated<P::ACTIVATION>(v);
                    else v = activate<P::ACTIVATION>(v);
                    out[j] = downcast<T>(v);
                }
                out += P::OUT_W;
                if constexpr (P::RESIDUAL) residual += P::OUT_W;
            });
        }
    }
    __syncthreads();
    T *const y = static_cast<T *>(a.y) + (y0 - lead_y);
    for (int i = tid * GRAIN; i < lead_y + outputs; i += P::THREADS * GRAIN) {
        if (i >= lead_y && i + GRAIN <= lead_y + outputs) {
            store_global<16>(y + i, load_shared<16>(staged + i * (int)sizeof(T)));
            continue;
        }
        for (int j = max(i, lead_y); j < min(i + GRAIN, lead_y + outputs); ++j)
            y[j] = reinterpret_cast<const T *>(memory + P::OUTPUTS_AT)[j];
    }
}
