// Gradient of batch normalisation by its input, from its sums: an element by itself.
//
// dx = invstd * weight * (g - sum(g) / N - xhat * sum(g * xhat) / N), where g = dy * activation'(u), xhat = (x - mean)
// * invstd and u = xhat * weight + bias. x is dy, w is x, bias is (4, c): mean, invstd, weight, bias; second has the
// sums (2, c), y is dx. A block has the part that it added up (channels.cuh), and goes through it from the end on: what
// was read last is still in the cache.
#include "derivative.cuh"
#include "ops/batch_norm/channels.cuh"

template <typename T, int V, int ACROSS, int WAYS, bool LAST, int ACTIVATION>
__device__ __forceinline__ void norm_input(const Channels &a) {
    using A = typename Arithmetic<T>::type;
    using Mine = Part<V, ACROSS, LAST>;
    constexpr int DOWN = Mine::DOWN, CHANNELS = Mine::CHANNELS;
    begin_dependent();
    const Mine part(a);
    const long long c = a.c;
    const A inverse = A(1) / A(a.rows * (LAST ? 1 : V));
    // dx = scale * (g - mean_g - apart * slope), where apart = x - mean.
    A mean[CHANNELS], scale[CHANNELS], shift[CHANNELS], mean_g[CHANNELS], slope[CHANNELS];
#pragma unroll
    for (int v = 0; v < CHANNELS; ++v) {
        mean[v] = scale[v] = shift[v] = mean_g[v] = slope[v] = A(0);
        if (!part.real) continue;
        const A *const parameters = static_cast<const A *>(a.bias) + part.channel + v, *const sums =
                                                                                           static_cast<const A *>(
                                                                                               a.second) +
                                                                                           part.channel + v;
        mean[v] = parameters[0], scale[v] = parameters[c] * parameters[2 * c], shift[v] = parameters[3 * c];
        mean_g[v] = sums[0] * inverse, slope[v] = sums[c] * inverse * parameters[c];
    }
    const Neighbours<T, V> *const x = static_cast<const Neighbours<T, V> *>(a.w),
                                  *const dy = static_cast<const Neighbours<T, V> *>(a.x);
    Neighbours<T, V> *const dx = static_cast<Neighbours<T, V> *>(a.y);
    for (long long row = part.end - 1 - part.down; row >= part.first; row -= WAYS * DOWN) {
        Neighbours<T, V> values[WAYS], gradients[WAYS];
#pragma unroll
        for (int i = 0; i < WAYS; ++i)
            if (row - i * DOWN >= part.first) {
                const long long at = part.place(row - i * DOWN);
                values[i] = x[at], gradients[i] = dy[at];
            }
#pragma unroll
        for (int i = 0; i < WAYS; ++i)
            if (row - i * DOWN >= part.first) {
                Neighbours<T, V> written;
#pragma unroll
                for (int v = 0; v < V; ++v) {
                    const int k = LAST ? v : 0;
                    const A apart = upcast(values[i].v[v]) - mean[k],
                            g = upcast(gradients[i].v[v]) * derivative<ACTIVATION>(apart * scale[k] + shift[k]);
                    written.v[v] = downcast<T>(scale[k] * (g - mean_g[k] - apart * slope[k]));
                }
                dx[part.place(row - i * DOWN)] = written;
            }
    }
}
