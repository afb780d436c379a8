// A run of elements to one value: threads reduce strided pieces, their block puts them together.
//
// x (outer, length, inner), y (outer, inner), dense. A block has GROUPS x ACROSS columns with DOWN threads on each;
// with one thread a column it is the plain method. A column is an element of y, or V neighbours; V divides inner. The
// parts of a long run go to `accumulators`, and a second launch (AGAIN) puts those together. Sums begin anew every
// PIECE elements of a thread, so that errors do not grow with the length. UNIT: inner is 1.
#include "block_reduction.cuh"

template <typename T, int OP, int ACROSS, int DOWN, int GROUPS, bool UNIT, int V, bool AGAIN, bool LAST>
__device__ __forceinline__ void reduce(const Runs &a) {
    using A = typename Arithmetic<T>::type;
    constexpr int THREADS = ACROSS * DOWN * GROUPS, WAYS = 4, PIECE = 64;
    begin_dependent();
    const int tid = threadIdx.x, across = tid % ACROSS, down = tid / ACROSS % DOWN, group = tid / (ACROSS * DOWN);
    const long long parts = LAST ? 1 : a.parts, part = blockIdx.x % parts;
    const long long inner = UNIT ? 1 : a.inner / V, step = AGAIN ? 1 : inner;
    const long long column = (blockIdx.x / parts * GROUPS + group) * ACROSS + across, columns = a.outer * inner;
    const bool real = column < columns;
    // What is reduced: elements of a part of a column, or the accumulators of its parts.
    const long long length = AGAIN ? a.parts : a.length, share = (length + parts - 1) / parts;
    const long long first = part * share, end = real ? min(first + share, length) : first;
    const long long base = AGAIN ? column * a.parts : column / inner * a.length * inner + column % inner;
    const Neighbours<T, V> *x = static_cast<const Neighbours<T, V> *>(a.x) + base;
    const Accumulator<A> *accumulators = static_cast<const Accumulator<A> *>(a.accumulators) + base;

    Accumulator<A> total[V];
#pragma unroll
    for (int v = 0; v < V; ++v) total[v] = identity<OP, A>();
    for (long long start = first + down; start < end; start += DOWN * PIECE) {
        Accumulator<A> ways[WAYS][V];
#pragma unroll
        for (int i = 0; i < WAYS * V; ++i) ways[i / V][i % V] = identity<OP, A>();
        const long long stop = min(start + DOWN * PIECE, end);
        long long r = start;
        if constexpr (!AGAIN)
            for (; r + (WAYS - 1) * DOWN < stop; r += WAYS * DOWN) {
                Neighbours<T, V> read[WAYS];
#pragma unroll
                for (int i = 0; i < WAYS; ++i) read[i] = x[(r + i * DOWN) * step];
                if constexpr (OP == LOGSUMEXP) {
                    A value[WAYS];
#pragma unroll
                    for (int i = 0; i < WAYS; ++i) value[i] = upcast(read[i].v[0]);
                    accumulate_exponentials(ways[0][0], value, WAYS);
                } else {
#pragma unroll
                    for (int i = 0; i < WAYS * V; ++i)
                        accumulate<OP>(ways[i / V][i % V], upcast(read[i / V].v[i % V]), r + i / V * DOWN);
                }
            }
        for (; r < stop; r += DOWN) {
            if constexpr (AGAIN) {
                ways[0][0] = combine<OP>(ways[0][0], accumulators[r]);
            } else {
                const Neighbours<T, V> read = x[r * step];
#pragma unroll
                for (int v = 0; v < V; ++v) accumulate<OP>(ways[0][v], upcast(read.v[v]), r);
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
        total[0] = block_reduce<OP, ACROSS, DOWN>(total[0], shared);
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
