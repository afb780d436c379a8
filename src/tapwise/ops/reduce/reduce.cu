// A run of elements to one value: threads reduce strided pieces, their block puts them together.
//
// x (outer, length, inner), y (outer, inner), dense. A block has GROUPS x ACROSS columns with DOWN threads on each;
// with one thread a column it is the plain method. A column is an element of y, or V neighbours; V divides inner. Or a
// thread reads W neighbours of its column at once, where inner is 1, and of a SKEWED column, whose length W does not
// divide, edges one by one. The parts of a long run go to `accumulators`, and a second launch (AGAIN) puts those
// together. Sums begin anew every PIECE elements of a thread, so that errors do not grow with the length. UNIT: inner
// is 1.
#include "block_reduction.cuh"

template <typename T, int OP, int ACROSS, int DOWN, int GROUPS, bool UNIT, int V, int W, bool SKEWED, bool AGAIN,
          bool LAST>
__device__ __forceinline__ void reduce(const Runs &a) {
    using A = typename Arithmetic<T>::type;
    // Loads under way: more where a thread has a column of its own, or a few, and there are few threads.
    constexpr int WAYS = DOWN == 1 && !UNIT && V * sizeof(T) <= 8 && !has_place(OP) && OP != LOGSUMEXP ? 8 : 4;
    constexpr int THREADS = ACROSS * DOWN * GROUPS, PIECE = 64 / W;
    static_assert(W == 1 || (UNIT && V == 1));
    begin_dependent();
    const int tid = threadIdx.x, across = tid % ACROSS, down = tid / ACROSS % DOWN, group = tid / (ACROSS * DOWN);
    const long long parts = LAST ? 1 : a.parts, part = blockIdx.x % parts;
    const long long inner = UNIT ? 1 : a.inner / V, step = AGAIN ? 1 : inner;
    const long long column = (blockIdx.x / parts * GROUPS + group) * ACROSS + across, columns = a.outer * inner;
    const bool real = column < columns;
    // What is reduced: elements of a part of a column, or the accumulators of its parts.
    const Pieces<SKEWED, W> pieces(SKEWED ? column * a.length : 0, a.length);
    const long long length = AGAIN ? a.parts : a.length / W, share = (length + parts - 1) / parts;
    const long long first = part * share, end = real ? min(first + share, SKEWED ? pieces.count : length) : first;
    const long long base = AGAIN ? column * a.parts : SKEWED ? 0 : column / inner * length * inner + column % inner;
    const T *const run = static_cast<const T *>(a.x) + (SKEWED ? column * a.length : 0);
    const Neighbours<T, V * W> *x = reinterpret_cast<const Neighbours<T, V * W> *>(run + pieces.head) + base;
    const Accumulator<A> *accumulators = static_cast<const Accumulator<A> *>(a.accumulators) + base;

    Accumulator<A> total[V];
#pragma unroll
    for (int v = 0; v < V; ++v) total[v] = identity<OP, A>();
    if constexpr (SKEWED)
        if (real && part == 0)
            for (int k = down; k < pieces.edges; k += DOWN)
                accumulate<OP>(total[0], upcast(run[pieces.edge(k)]), pieces.edge(k));
    for (long long start = first + down; start < end; start += DOWN * PIECE) {
        Accumulator<A> ways[WAYS][V];
#pragma unroll
        for (int i = 0; i < WAYS * V; ++i) ways[i / V][i % V] = identity<OP, A>();
        const long long stop = min(start + DOWN * PIECE, end);
        long long r = start;
        if constexpr (!AGAIN)
            for (; r + (WAYS - 1) * DOWN < stop; r += WAYS * DOWN) {
                Neighbours<T, V * W> read[WAYS];
#pragma unroll
                for (int i = 0; i < WAYS; ++i) read[i] = x[(r + i * DOWN) * step];
                if constexpr (OP == LOGSUMEXP) {
                    A value[WAYS * W];
#pragma unroll
                    for (int i = 0; i < WAYS * W; ++i) value[i] = upcast(read[i / W].v[i % W]);
                    accumulate_exponentials<T>(ways[0][0], value, WAYS * W);
                } else {
#pragma unroll
                    for (int i = 0; i < WAYS * V * W; ++i)
                        accumulate<OP>(ways[i / (V * W)][i % V], upcast(read[i / (V * W)].v[i % (V * W)]),
                                       (r + i / (V * W) * DOWN) * W + i % W + pieces.head);
                }
            }
        for (; r < stop; r += DOWN) {
            if constexpr (AGAIN) {
                ways[0][0] = combine<OP>(ways[0][0], accumulators[r]);
            } else {
                const Neighbours<T, V * W> read = x[r * step];
#pragma unroll
                for (int i = 0; i < V * W; ++i)
                    accumulate<OP>(ways[0][i % V], upcast(read.v[i]), r * W + i % W + pieces.head);
            }
        }
#pragma unroll
        for (int v = 0; v < V; ++v) {
#pragma unroll
            for (int i = WAYS / 2; i > 0; i /= 2)
#pragma unroll
                for (int j = 0; j < i; ++j) ways[j][v] = combine<OP>(ways[j][v], ways[j + i][v]);
            total[v] = combine<OP>(total[v], ways[0][v]);
        }
    }
    if constexpr (V > 1) {
        __shared__ A values[ACROSS * DOWN > 32 ? THREADS / 32 * ACROSS * V : 1];
        block_reduce_neighbours<OP, ACROSS, DOWN>(total, values);
    } else {
        __shared__ Accumulator<A> shared[ACROSS * DOWN > 32 && DOWN > 1 ? THREADS : 1];
        if constexpr (HAS_KEYS && has_place(OP) && sizeof(A) == 4) {
            total[0].place = key_of<OP>(total[0]);
            total[0] = chosen_of<OP>(block_reduce<KEY, ACROSS, DOWN>(total[0], shared).place);
        } else total[0] = block_reduce<OP, ACROSS, DOWN>(total[0], shared);
    }
    if (!real || down > 0) return;
    Neighbours<T, V> written;
#pragma unroll
    for (int v = 0; v < V; ++v) {
        if constexpr (!LAST) {
            static_cast<Accumulator<A> *>(a.accumulators)[(column * V + v) * a.parts + part] = total[v];
        } else if constexpr (OP == ARGMAX || OP == ARGMIN) {
            static_cast<long long *>(a.y)[column] = total[v].place;
        } else {
            A value = total[v].value;
            if constexpr (OP == MEAN) value /= A(a.length);
            if constexpr (OP == NORM2) value = sqrt(value);
            if constexpr (OP == LOGSUMEXP) value += log(total[v].exp_sum);
            written.v[v] = downcast<T>(value);
        }
    }
    if constexpr (LAST && OP != ARGMAX && OP != ARGMIN) static_cast<Neighbours<T, V> *>(a.y)[column] = written;
}
