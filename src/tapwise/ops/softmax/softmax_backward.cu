// The gradient of softmax, dx = (dy - sum(dy * y)) * y, and of its logarithm, dx = dy - e^y * sum(dy).
//
// x is dy, w is y, y is dx: (outer, length, inner), dense; blocks as in reduce.cu. A thread loads V neighbours of a run
// at once (inner is 1, or V is 1), and of a SKEWED run, whose length V does not divide, an edge or two besides. Runs of
// up to KEPT such loads a thread are read once and held in registers; longer ones (KEPT 0) are read for their sum, and
// once more to be written. Of long runs in parts, MEASURE writes the accumulators, SCALE puts them together and writes
// dx; BOTH does it in one launch.
#include "block_reduction.cuh"

enum Stage { BOTH, MEASURE, SCALE };

// V neighbours of dy and y, in the type that they are computed in.
template <typename T, int V> struct Pair {
    using A = typename Arithmetic<T>::type;
    A dy[V], y[V];

    __device__ __forceinline__ void load(const T *from_dy, const T *from_y) {
        const auto one = *reinterpret_cast<const Neighbours<T, V> *>(from_dy);
        const auto other = *reinterpret_cast<const Neighbours<T, V> *>(from_y);
#pragma unroll
        for (int v = 0; v < V; ++v) dy[v] = upcast(one.v[v]), y[v] = upcast(other.v[v]);
    }
    __device__ __forceinline__ void clear() {
#pragma unroll
        for (int v = 0; v < V; ++v) dy[v] = A(0), y[v] = A(0);
    }
    template <bool LOG> __device__ __forceinline__ A sum() const {
        A total = LOG ? dy[0] : dy[0] * y[0];
#pragma unroll
        for (int v = 1; v < V; ++v) total += LOG ? dy[v] : dy[v] * y[v];
        return total;
    }
    template <bool LOG> __device__ __forceinline__ void store(T *to, A total) const {
        Neighbours<T, V> written;
#pragma unroll
        for (int v = 0; v < V; ++v)
            written.v[v] = downcast<T>(LOG ? dy[v] - exp(y[v]) * total : (dy[v] - total) * y[v]);
        *reinterpret_cast<Neighbours<T, V> *>(to) = written;
    }
};

template <typename T, bool LOG, int ACROSS, int DOWN, int GROUPS, bool UNIT, int V, bool SKEWED, int KEPT, int STAGE>
__device__ __forceinline__ void softmax_backward(const Runs &a) {
    using A = typename Arithmetic<T>::type;
    constexpr int THREADS = ACROSS * DOWN * GROUPS, WAYS = V > 1 ? 2 : 4, PIECE = 64 / V;
    static_assert(V == 1 || UNIT, "neighbours in memory");
    begin_dependent();
    __shared__ Accumulator<A> shared[ACROSS * DOWN > 32 && DOWN > 1 ? THREADS : 1];
    const int tid = threadIdx.x, across = tid % ACROSS, down = tid / ACROSS % DOWN, group = tid / (ACROSS * DOWN);
    const long long parts = a.parts, part = blockIdx.x % parts, length = a.length / V;
    const long long column = (blockIdx.x / parts * GROUPS + group) * ACROSS + across;
    const bool real = column < a.outer * a.inner;
    const long long share = (length + parts - 1) / parts, step = UNIT ? V : a.inner;
    const long long first = part * share, end = real ? min(first + share, length) : first;
    const long long base = UNIT ? column * a.length : column / step * a.length * step + column % step;
    const T *dy = static_cast<const T *>(a.x) + base, *y = static_cast<const T *>(a.w) + base;
    T *dx = static_cast<T *>(a.y) + base;
    Accumulator<A> *accumulators = static_cast<Accumulator<A> *>(a.accumulators) + column * parts;
    Accumulator<A> total = identity<SUM, A>();

    if constexpr (KEPT > 0) {
        static_assert(STAGE == BOTH, "a whole run");
        constexpr int EDGES = SKEWED ? (2 * V - 2 + DOWN - 1) / DOWN : 0;
        const Pieces<SKEWED, V> pieces(base, a.length);
        Pair<T, V> kept[KEPT];
        Pair<T, 1> at_edge[EDGES > 0 ? EDGES : 1];
#pragma unroll
        for (int i = 0; i < KEPT; ++i) {
            const long long r = first + down + i * DOWN, at = pieces.head + r * step;
            if (r < (SKEWED && real ? pieces.count : end)) kept[i].load(dy + at, y + at);
            else kept[i].clear();
        }
#pragma unroll
        for (int i = 0; i < EDGES; ++i) {
            const int k = down + i * DOWN;
            if (real && k < pieces.edges) at_edge[i].load(dy + pieces.edge(k), y + pieces.edge(k));
            else at_edge[i].clear();
        }
#pragma unroll
        for (int i = 0; i < KEPT; ++i) total.value += kept[i].template sum<LOG>();
#pragma unroll
        for (int i = 0; i < EDGES; ++i) total.value += at_edge[i].template sum<LOG>();
        total = block_reduce<SUM, ACROSS, DOWN>(total, shared);
#pragma unroll
        for (int i = 0; i < KEPT; ++i) {
            const long long r = first + down + i * DOWN;
            if (r < (SKEWED && real ? pieces.count : end))
                kept[i].template store<LOG>(dx + pieces.head + r * step, total.value);
        }
#pragma unroll
        for (int i = 0; i < EDGES; ++i) {
            const int k = down + i * DOWN;
            if (real && k < pieces.edges) at_edge[i].template store<LOG>(dx + pieces.edge(k), total.value);
        }
        return;
    }
    if constexpr (STAGE == SCALE) {
        // All accumulators of a column are put together by each of its threads: few, and in the cache.
        if (real)
            for (int i = 0; i < parts; ++i) total = combine<SUM>(total, accumulators[i]);
    } else {
        for (long long start = first + down; start < end; start += DOWN * PIECE) {
            A piece = 0;
            const long long stop = min(start + DOWN * PIECE, end);
            long long r = start;
            for (; r + (WAYS - 1) * DOWN < stop; r += WAYS * DOWN) {
                Pair<T, V> read[WAYS];
#pragma unroll
                for (int i = 0; i < WAYS; ++i) read[i].load(dy + (r + i * DOWN) * step, y + (r + i * DOWN) * step);
#pragma unroll
                for (int i = 0; i < WAYS; ++i) piece += read[i].template sum<LOG>();
            }
            for (; r < stop; r += DOWN) {
                Pair<T, V> read;
                read.load(dy + r * step, y + r * step);
                piece += read.template sum<LOG>();
            }
            total.value += piece;
        }
        total = block_reduce<SUM, ACROSS, DOWN>(total, shared);
    }
    if constexpr (STAGE == MEASURE) {
        if (real && down == 0) accumulators[part] = total;
    } else {
#pragma unroll 4
        for (long long r = first + down; r < end; r += DOWN) {
            Pair<T, V> read;
            read.load(dy + r * step, y + r * step);
            read.template store<LOG>(dx + r * step, total.value);
        }
    }
}
