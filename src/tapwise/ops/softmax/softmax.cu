// Softmax and its logarithm. Runs of up to KEPT times V elements a thread are read once and held in registers. Longer
// ones (KEPT 0) are read for their largest element and the sum of their exponentials at once, and once more to be
// written.
//
// x and y (outer, length, inner), dense; blocks as in reduce.cu. A thread reads V neighbours of a run at once, and of a
// SKEWED run, whose pieces begin anywhere, an edge or two besides. Of long runs in parts, MEASURE writes the
// accumulators, SCALE puts them together and writes y; BOTH does it in one launch: the parts are a block or, kept in
// registers, CLUSTER blocks.
//
// Source: Milakov and Gimelshein, "Online normalizer calculation for softmax", 2018.
#include "block_reduction.cuh"

enum Stage { BOTH, MEASURE, SCALE };

// 1 / v; of elements of 16 bits to 22 bits.
template <typename T, typename A> __device__ __forceinline__ A inverse(A v) {
    if constexpr (sizeof(T) == 2) return reciprocal(v);
    else return A(1) / v;
}

template <typename T, bool LOG, int ACROSS, int DOWN, int GROUPS, bool UNIT, int V, bool SKEWED, int KEPT, int STAGE,
          int CLUSTER>
__device__ __forceinline__ void softmax(const Runs &a) {
    using A = typename Arithmetic<T>::type;
    constexpr int THREADS = ACROSS * DOWN * GROUPS, WAYS = V > 2 ? 2 : 4, SPAN = 64 / V;
    static_assert(V == 1 || UNIT);
    // bfloat16 holds less than the instruction for an exponential gives.
    constexpr int LIFT = LOG || sizeof(T) != 2 ? 0 : 24;
    begin_dependent();
    __shared__ Accumulator<A> of_block[CLUSTER == 1 && ACROSS * DOWN > 32 && DOWN > 1 ? THREADS : 1];
    extern __shared__ __align__(16) unsigned char memory[];
    Accumulator<A> *const shared = CLUSTER > 1 ? reinterpret_cast<Accumulator<A> *>(memory) : of_block;
    const int tid = threadIdx.x, across = tid % ACROSS, down = tid / ACROSS % DOWN, group = tid / (ACROSS * DOWN);
    const unsigned parts = STAGE == BOTH ? CLUSTER : a.parts, part = blockIdx.x % parts;
    const long long column = ((long long)(blockIdx.x / parts) * GROUPS + group) * ACROSS + across;
    const bool real = column < a.outer * a.inner;
    const long long share = ((SKEWED ? a.length / V * V : a.length) + parts * V - 1) / (parts * V) * V;
    const long long first = part * share, step = UNIT ? 1 : a.inner;
    const long long base = UNIT ? column * a.length : column / step * a.length * step + column % step;
    const T *x = static_cast<const T *>(a.x) + base;
    Accumulator<A> *accumulators = static_cast<Accumulator<A> *>(a.accumulators) + column * parts;

    if constexpr (KEPT > 0) {
        static_assert(STAGE == BOTH, "a whole run");
        // Of a run that registers hold: few elements. Whole pieces, then edges, which the first part has.
        constexpr int EDGES = SKEWED ? (2 * V - 2 + DOWN - 1) / DOWN : 0;
        const Pieces<SKEWED, V> pieces(base, a.length);
        const int begin = first, stop = real ? min(first + share, pieces.count * V) : begin;
        const int edges = real && part == 0 ? pieces.edges : 0;
        A kept[KEPT * V + EDGES];
        Accumulator<A> top = identity<MAX, A>(), sum = identity<SUM, A>();
        // All loads from memory first, with none left out: behind a run's end its last ones are read again.
        Neighbours<T, V> read[KEPT];
        const T *const within = real ? x + pieces.head : static_cast<const T *>(a.x);
        T at_edge[EDGES > 0 ? EDGES : 1];
        const int last_read = real ? stop - V : 0;
#pragma unroll
        for (int i = 0; i < KEPT; ++i) {
            const int r = begin + (down + i * DOWN) * V;
            const T *const from = within + (UNIT ? min(r, last_read) : min(r, last_read) * step);
            read[i] = *reinterpret_cast<const Neighbours<T, V> *>(from);
        }
#pragma unroll
        for (int i = 0; i < EDGES; ++i) {
            const int k = down + i * DOWN;
            if (k < edges) at_edge[i] = x[pieces.edge(k)];
        }
#pragma unroll
        for (int i = 0; i < KEPT; ++i)
#pragma unroll
            for (int v = 0; v < V; ++v) {
                A &value = kept[i * V + v];
                const int r = begin + (down + i * DOWN) * V;
                value = r < stop ? upcast(read[i].v[v]) : A(-POSITIVE_INFINITY);
                // A NaN is lost here, and shows in the sum.
                top.value = max(top.value, value);
            }
#pragma unroll
        for (int i = 0; i < EDGES; ++i) {
            A &value = kept[KEPT * V + i];
            value = down + i * DOWN < edges ? upcast(at_edge[i]) : A(-POSITIVE_INFINITY);
            top.value = max(top.value, value);
        }
        top = block_reduce<MAX, ACROSS, DOWN>(top, shared);
        // A part of nothing but -infinity has no exponentials.
        const A level = CLUSTER > 1 && top.value == A(-POSITIVE_INFINITY) ? A(0) : top.value;
#pragma unroll
        for (int i = 0; i < KEPT * V + EDGES; ++i) {
            const A shifted = kept[i] - level, term = exponential<T, LIFT>(shifted);
            kept[i] = LOG ? shifted : term;
            sum.value += term;
        }
        if constexpr (ACROSS * DOWN > 32) __syncthreads();
        sum = block_reduce<SUM, ACROSS, DOWN>(sum, shared);
        A last = LOG ? log(sum.value) : inverse<T>(sum.value);
        if constexpr (CLUSTER > 1) {
            A *const of_part = reinterpret_cast<A *>(shared + THREADS);
            if (tid == 0) of_part[0] = level, of_part[1] = sum.value;
            cluster_arrive(), cluster_wait();
            A levels[CLUSTER], most = A(-POSITIVE_INFINITY), all = A(0);
#pragma unroll
            for (int i = 0; i < CLUSTER; ++i) {
                const A *const there = in_block_of_rank(of_part, i);
                levels[i] = there[1] == A(0) ? A(-POSITIVE_INFINITY) : there[0];
                most = levels[i] > most ? levels[i] : most;
            }
            most = most == A(-POSITIVE_INFINITY) ? A(0) : most;
#pragma unroll
            for (int i = 0; i < CLUSTER; ++i) all += in_block_of_rank(of_part, i)[1] * exp(levels[i] - most);
            // No block ends while others read its sums.
            cluster_arrive(), cluster_wait();
            last = LOG ? log(all) - (level - most) : exp(level - most) / all;
        }
        T *y = static_cast<T *>(a.y) + base;
#pragma unroll
        for (int i = 0; i < KEPT; ++i) {
            const int r = begin + (down + i * DOWN) * V;
            Neighbours<T, V> results;
#pragma unroll
            for (int v = 0; v < V; ++v)
                results.v[v] = downcast<T>(LOG ? kept[i * V + v] - last : kept[i * V + v] * last);
            if (r < stop) *reinterpret_cast<Neighbours<T, V> *>(y + pieces.head + (UNIT ? r : r * step)) = results;
        }
#pragma unroll
        for (int i = 0; i < EDGES; ++i) {
            const int k = down + i * DOWN;
            const A value = kept[KEPT * V + i];
            if (k < edges) y[pieces.edge(k)] = downcast<T>(LOG ? value - last : value * last);
        }
        return;
    }
    // Of a longer run: pieces, then edges, which the first part has.
    using Piece = Neighbours<T, V>;
    const Pieces<SKEWED, V> pieces(base, a.length);
    const long long begin = first / V, end = real ? min(begin + share / V, pieces.count) : begin;
    const int edges = real && part == 0 ? pieces.edges : 0;
    const Piece *const from = reinterpret_cast<const Piece *>(x + pieces.head);
    Accumulator<A> total = identity<LOGSUMEXP, A>();
    if constexpr (STAGE == SCALE) {
        // All accumulators of a column are put together by each of its threads: few, and in the cache.
        if (real)
            for (int i = 0; i < parts; ++i) total = combine<LOGSUMEXP>(total, accumulators[i]);
    } else {
        for (int k = down; k < edges; k += DOWN) accumulate<LOGSUMEXP>(total, upcast(x[pieces.edge(k)]), 0);
        for (long long start = begin + down; start < end; start += DOWN * SPAN) {
            Accumulator<A> some = identity<LOGSUMEXP, A>();
            const long long stop = min(start + DOWN * SPAN, end);
            long long r = start;
            const auto add = [&](const auto &read) {
                constexpr int COUNT = sizeof(read) / sizeof(T);
                A value[COUNT];
#pragma unroll
                for (int i = 0; i < COUNT; ++i) value[i] = upcast(read[i / V].v[i % V]);
                accumulate_exponentials<T>(some, value, COUNT);
            };
            for (; r + (WAYS - 1) * DOWN < stop; r += WAYS * DOWN) {
                Piece read[WAYS];
#pragma unroll
                for (int i = 0; i < WAYS; ++i) read[i] = from[(r + i * DOWN) * step];
                add(read);
            }
            for (; r < stop; r += DOWN) {
                const Piece read[1] = {from[r * step]};
                add(read);
            }
            total = combine<LOGSUMEXP>(total, some);
        }
        total = block_reduce<LOGSUMEXP, ACROSS, DOWN>(total, shared);
    }
    if constexpr (STAGE == MEASURE) {
        if (real && down == 0) accumulators[part] = total;
    } else {
        // +infinity less +infinity is NaN, and so is its whole run; nothing but -infinity comes out so by itself.
        const A top = total.value, sum = top == A(POSITIVE_INFINITY) ? A(NOT_A_NUMBER) : total.exp_sum;
        const A last = LOG ? log(sum) : inverse<T>(sum) * A(LIFT ? 1.0f / (1 << LIFT) : 1.0f);
        const auto result = [&](T value) {
            const A shifted = upcast(value) - top;
            return downcast<T>(LOG ? shifted - last : exponential<T, LIFT>(shifted) * last);
        };
        T *y = static_cast<T *>(a.y) + base;
        Piece *const to = reinterpret_cast<Piece *>(y + pieces.head);
        for (int k = down; k < edges; k += DOWN) y[pieces.edge(k)] = result(x[pieces.edge(k)]);
#pragma unroll 4
        for (long long r = begin + down; r < end; r += DOWN) {
            const Piece read = from[r * step];
            Piece written;
#pragma unroll
            for (int v = 0; v < V; ++v) written.v[v] = result(read.v[v]);
            to[r * step] = written;
        }
    }
}
