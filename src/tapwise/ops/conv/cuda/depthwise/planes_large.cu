// Depthwise convolution, NCHW, large filters: a block has planes of x, or a band of one, and their filters in shared
// memory, as they are computed with.
//
// A thread computes TX columns of a row. It reads a row of x for all taps of the filter's row; threads beside each
// other have rows beside each other. They go through the filter's rows together, which they read as one, each with
// another row of x; or through rows of x (BY_X), each with another row of its filter, where images have fewer rows than
// that. Where a thread has whole rows, products with padding are left out: of 27x27 on 14x14 pixels three in four.
// Outputs go through the memory of the planes, so that neighbours in memory are written together.
#include "ops/conv/cuda/depthwise/columns.cuh"
#include "ops/conv/cuda/depthwise/planes.cuh"

// T; R, S; SH, SW: strides; H, W, OUT_H, OUT_W: rows and columns of x and y; PAD_H, PAD_W; TX columns a thread; BAND
// rows and PLANES a block; BY_X; BIAS, RESIDUAL, ACTIVATION.
template <class Traits> struct LargeOf : Traits {
    using B = Traits;
    using A = typename Arithmetic<typename B::T>::type;
    static constexpr int GROUPS = (B::OUT_W + B::TX - 1) / B::TX;
    static constexpr bool WHOLE = GROUPS == 1;
    static constexpr int USED = B::BAND * GROUPS * B::PLANES, THREADS = (USED + 31) / 32 * 32;
    // Columns of x that a thread reads; of a row in shared memory, from column -LEFT on; rows there.
    static constexpr int WINDOW = WHOLE ? B::W : (B::TX - 1) * B::SW + B::S, LEFT = WHOLE ? 0 : B::PAD_W;
    static constexpr int COLUMNS = WHOLE ? B::W : (GROUPS * B::TX - 1) * B::SW + B::S;
    static constexpr int SEEN = (B::BAND - 1) * B::SH + B::R, ROWS_X = B::PLANES == 1 && SEEN < B::H ? SEEN : B::H;
    // Rows of odd numbers of elements lie in banks of their own.
    static constexpr int PITCH = COLUMNS | 1, TAP_PITCH = B::S | 1, PLANE = ROWS_X * PITCH, FILTER = B::R * TAP_PITCH;
    static constexpr int OUT_PITCH = B::OUT_W | 1, OUTPUTS = B::BAND * OUT_PITCH;
    static constexpr int FILTERS_AT = B::PLANES * (PLANE > OUTPUTS ? PLANE : OUTPUTS);
};

template <class Traits> DEVICE void depthwise_planes_large(const Planes &a) {
    using P = LargeOf<Traits>;
    using T = typename P::T;
    using A = typename P::A;
    constexpr int TX = P::TX, R = P::R, S = P::S, H = P::H, W = P::W, SW = P::SW;
    extern __shared__ __align__(128) unsigned char memory[];
    A *const planes_x = reinterpret_cast<A *>(memory), *const filters = planes_x + P::FILTERS_AT;
    const long long all = a.n * a.c, begin = (long long)(blockIdx.x / (unsigned)a.pieces) * P::PLANES;
    const int planes = (int)min((long long)P::PLANES, all - begin), tid = threadIdx.x, first_channel = begin % a.c;
    const int band = blockIdx.x % (unsigned)a.pieces * P::BAND;
    const int from_row = P::PLANES == 1 ? max(0, band * P::SH - P::PAD_H) : 0;
    if (!a.weights_ready) begin_dependent();
    bool finite = true;
    const T *const w = static_cast<const T *>(a.w);
    // A block has no more planes than an image.
    const auto channel_of = [&](int plane) {
        const int channel = first_channel + plane;
        return channel < (int)a.c ? channel : channel - (int)a.c;
    };
#pragma unroll 8
    for (int i = tid; i < planes * (R * S); i += P::THREADS) {
        const int line = i / S, plane = line / R;
        const A tap = upcast(w[(long long)channel_of(plane) * (R * S) + (line - plane * R) * S + i % S]);
        finite &= tap - tap == A(0);
        filters[line * P::TAP_PITCH + i % S] = tap;
    }
    if (a.weights_ready) begin_dependent();
    const T *const x = static_cast<const T *>(a.x) + begin * (H * W);
#pragma unroll 8
    for (int i = tid; i < planes * P::PLANE; i += P::THREADS) {
        const int line = i / P::PITCH, row = from_row + line % P::ROWS_X, column = i % P::PITCH - P::LEFT;
        const bool real = row < H && (unsigned)column < (unsigned)W;
        planes_x[i] = real ? upcast(x[(line / P::ROWS_X * H + row) * W + column]) : A(0);
    }
    finite = __syncthreads_and(finite);
    const int out = band + tid % P::BAND, group = tid / P::BAND % P::GROUPS, mine = tid / P::BAND / P::GROUPS;
    const bool exists = mine < planes && out < P::OUT_H;
    const int top = out * P::SH - P::PAD_H, q0 = group * TX;
    const A *const from = planes_x + mine * P::PLANE + q0 * SW, *const taps = filters + mine * P::FILTER;
    A sums[TX] = {};
#pragma unroll 1
    for (int i = 0; exists && i < (P::BY_X ? H : R); ++i) {
        const int row = P::BY_X ? i : top + i, r = P::BY_X ? i - top : i;
        if ((unsigned)row >= (unsigned)H || (unsigned)r >= (unsigned)R) continue;
        A now[P::WINDOW];
#pragma unroll
        for (int m = 0; m < P::WINDOW; ++m) now[m] = from[(row - from_row) * P::PITCH + m];
#pragma unroll
        for (int s = 0; s < S; ++s) {
            const A tap = taps[r * P::TAP_PITCH + s];
#pragma unroll
            for (int j = 0; j < TX; ++j) {
                const int m = j * SW + s - (P::WHOLE ? P::PAD_W : 0);
                if (m >= 0 && m < P::WINDOW) sums[j] += now[m] * tap;
            }
        }
    }
    // Padding times an infinity or NaN is NaN.
    if (!finite && exists)
        for (int tap = 0; tap < R * S; ++tap) {
            const int row = top + tap / S, column = q0 * SW - P::PAD_W + tap % S;
            const A weight = taps[tap / S * P::TAP_PITCH + tap % S];
#pragma unroll
            for (int j = 0; j < TX; ++j)
                if ((unsigned)row >= (unsigned)H || (unsigned)(column + j * SW) >= (unsigned)W)
                    sums[j] += weight * A(0);
        }
    __syncthreads();
    if (exists)
#pragma unroll
        for (int j = 0; j < TX; ++j)
            if (P::OUT_W % TX == 0 || q0 + j < P::OUT_W)
                planes_x[(mine * P::BAND + out - band) * P::OUT_PITCH + q0 + j] = sums[j];
    __syncthreads();
    const int last = min(P::BAND, P::OUT_H - band);
#pragma unroll 4
    for (int i = tid; i < planes * (P::BAND * P::OUT_W); i += P::THREADS) {
        const int line = i / P::OUT_W, column = i % P::OUT_W, plane = line / P::BAND, row = line % P::BAND;
        if (row >= last) continue;
        const long long place = (begin + plane) * (P::OUT_H * P::OUT_W) + (band + row) * P::OUT_W + column;
        A v = planes_x[line * P::OUT_PITCH + column];
        if constexpr (P::BIAS) v += upcast(static_cast<const T *>(a.bias)[channel_of(plane)]);
        if constexpr (P::RESIDUAL) v += upcast(static_cast<const T *>(a.residual)[place]);
        if constexpr (sizeof(A) == 4) v = activated<P::ACTIVATION>(v);
        else v = activate<P::ACTIVATION>(v);
        static_cast<T *>(a.y)[place] = downcast<T>(v);
    }
}
