// Sums for each channel of an image, over images and pixels: mean and variance of x (MOMENTS); what the gradient of
// batch normalisation adds up, g = dy * activation'(u) and g * xhat, where xhat = (x - mean) * invstd and u = xhat *
// weight + bias (NORM_GRADIENT); the gradient by a bias, g alone, with g written, the gradient before an activation
// (BIAS_GRADIENT).
//
// A block adds up its part (channels.cuh), WAYS rows at once. Its sums go to the workspace (c, 2, parts), and a second
// launch, a warp a channel, puts the parts together in order; where all rows are one part, it is not needed (ALONE).
//
// Moments are those of x less the channel's first element: large means would leave nothing of a small variance. Of
// gradients x is dy, w is x, and bias is (4, c): mean, invstd, weight, bias; of BIAS_GRADIENT w is what the derivative
// is taken at, by the result where that is enough, and there is none without an activation.
#include "derivative.cuh"
#include "ops/batch_norm/channels.cuh"

constexpr int WARPS = THREADS / 32;
enum Sums { MOMENTS, NORM_GRADIENT, BIAS_GRADIENT };

// A channel's results from its sums. WRITES: y is g, the sum is a second result.
template <typename T, bool LAST, int SUMS, bool WRITES, typename A>
__device__ __forceinline__ void finish(const Channels &a, long long channel, A count, A first, A second) {
    A *y = static_cast<A *>(SUMS == NORM_GRADIENT ? a.second : a.y);
    if constexpr (SUMS == BIAS_GRADIENT) {
        static_cast<T *>(WRITES ? a.second : a.y)[channel] = downcast<T>(first);
    } else if constexpr (SUMS == NORM_GRADIENT) {
        y[channel] = first;
        y[a.c + channel] = second * static_cast<const A *>(a.bias)[a.c + channel];
    } else {
        A base = upcast(static_cast<const T *>(a.x)[LAST ? channel : channel * a.pixels]);
        // Infinities and NaN are in the sums.
        base = base - base == A(0) ? base : A(0);
        const A variance = (second - first * (first / count)) / count;
        y[channel] = base + first / count;
        y[a.c + channel] = variance < A(0) ? A(0) : variance;
    }
}

template <typename T, int V, int ACROSS, int WAYS, bool LAST, int SUMS, int ACTIVATION, bool ALONE>
__device__ __forceinline__ void channel_sums(const Channels &a) {
    using A = typename Arithmetic<T>::type;
    using Mine = Part<V, ACROSS, LAST>;
    constexpr int DOWN = Mine::DOWN, CHANNELS = Mine::CHANNELS;
    constexpr bool GRADIENT = SUMS != MOMENTS, TWO = SUMS != BIAS_GRADIENT, WRITES = !TWO && ACTIVATION != NONE;
    begin_dependent();
    __shared__ A shared[WARPS * ACROSS * CHANNELS * 2];
    const Mine part(a);
    const int tid = threadIdx.x;
    const long long slab = part.slab, channel = part.channel, end = part.end;

    A base[CHANNELS], scale[CHANNELS], shift[CHANNELS], sum[CHANNELS], product[CHANNELS];
#pragma unroll
    for (int v = 0; v < CHANNELS; ++v) {
        base[v] = scale[v] = shift[v] = sum[v] = product[v] = A(0);
        if (!part.real) continue;
        if constexpr (SUMS == NORM_GRADIENT) {
            const A *parameters = static_cast<const A *>(a.bias) + channel + v;
            base[v] = parameters[0], scale[v] = parameters[a.c] * parameters[2 * a.c], shift[v] = parameters[3 * a.c];
        } else if constexpr (SUMS == MOMENTS) {
            const A one = upcast(static_cast<const T *>(a.x)[LAST ? channel + v : channel * a.pixels]);
            base[v] = one - one == A(0) ? one : A(0);
        }
    }

    const Neighbours<T, V> *x = static_cast<const Neighbours<T, V> *>(GRADIENT ? a.w : a.x);
    const Neighbours<T, V> *dy = static_cast<const Neighbours<T, V> *>(a.x);
    for (long long row = part.first + part.down; row < end; row += WAYS * DOWN) {
        Neighbours<T, V> values[WAYS], gradients[GRADIENT ? WAYS : 1];
#pragma unroll
        for (int i = 0; i < WAYS; ++i)
            if (row + i * DOWN < end) {
                const long long at = part.place(row + i * DOWN);
                if constexpr (TWO || WRITES) values[i] = x[at];
                if constexpr (GRADIENT) gradients[i] = dy[at];
            }
#pragma unroll
        for (int i = 0; i < WAYS; ++i)
            if (row + i * DOWN < end) {
                Neighbours<T, WRITES ? V : 1> written;
#pragma unroll
                for (int v = 0; v < V; ++v) {
                    const int k = LAST ? v : 0;
                    A apart = A(0), g;
                    if constexpr (TWO) g = apart = upcast(values[i].v[v]) - base[k];
                    if constexpr (SUMS == NORM_GRADIENT)
                        g = upcast(gradients[i].v[v]) * derivative<ACTIVATION>(apart * scale[k] + shift[k]);
                    if constexpr (SUMS == BIAS_GRADIENT) g = upcast(gradients[i].v[v]);
                    if constexpr (WRITES) {
                        const A slope = derivative_by_result<ACTIVATION>(upcast(values[i].v[v]));
                        g = slope == A(0) ? A(0) : g * slope;
                        written.v[v] = downcast<T>(g);
                    }
                    sum[k] += g;
                    if constexpr (TWO) product[k] = fma(g, apart, product[k]);
                }
                if constexpr (WRITES) static_cast<Neighbours<T, V> *>(a.y)[part.place(row + i * DOWN)] = written;
            }
    }

    // Lanes of the same channels, then warps.
#pragma unroll
    for (int v = 0; v < CHANNELS; ++v)
#pragma unroll
        for (int half = 16; half >= ACROSS; half /= 2) {
            sum[v] += __shfl_xor_sync(0xffffffffu, sum[v], half);
            if constexpr (TWO) product[v] += __shfl_xor_sync(0xffffffffu, product[v], half);
        }
    if (tid % 32 < ACROSS)
#pragma unroll
        for (int v = 0; v < CHANNELS; ++v) {
            A *mine = shared + ((tid / 32 * ACROSS + part.across) * CHANNELS + v) * 2;
            mine[0] = sum[v], mine[1] = product[v];
        }
    __syncthreads();
    for (int i = tid; i < ACROSS * CHANNELS && slab + i < a.c; i += THREADS) {
        A one = A(0), other = A(0);
#pragma unroll
        for (int warp = 0; warp < WARPS; ++warp) {
            one += shared[(warp * ACROSS * CHANNELS + i) * 2];
            other += shared[(warp * ACROSS * CHANNELS + i) * 2 + 1];
        }
        if constexpr (ALONE) {
            finish<T, LAST, SUMS, WRITES>(a, slab + i, A(a.rows * (LAST ? 1 : V)), one, other);
        } else {
            A *parts = static_cast<A *>(a.workspace) + (slab + i) * 2 * a.parts + blockIdx.y;
            parts[0] = one;
            if constexpr (TWO) parts[a.parts] = other;
        }
    }
}

template <typename T, int V, bool LAST, int SUMS, bool WRITES>
__device__ __forceinline__ void channel_sums_parts(const Channels &a) {
    using A = typename Arithmetic<T>::type;
    begin_dependent();
    const long long channel = static_cast<long long>(blockIdx.x) * WARPS + threadIdx.x / 32;
    if (channel >= a.c) return;
    const A *parts = static_cast<const A *>(a.workspace) + channel * 2 * a.parts;
    A sum = A(0), product = A(0);
#pragma unroll 4
    for (long long i = threadIdx.x % 32; i < a.parts; i += 32) {
        sum += parts[i];
        if constexpr (SUMS != BIAS_GRADIENT) product += parts[a.parts + i];
    }
#pragma unroll
    for (int half = 16; half > 0; half /= 2) {
        sum += __shfl_xor_sync(0xffffffffu, sum, half);
        product += __shfl_xor_sync(0xffffffffu, product, half);
    }
    if (threadIdx.x % 32 == 0) finish<T, LAST, SUMS, WRITES>(a, channel, A(a.rows * (LAST ? 1 : V)), sum, product);
}
