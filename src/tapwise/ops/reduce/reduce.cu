// A run of elements to one value: threads reduce strided pieces, their block puts them together.
//
// x (outer, length, inner), y (outer, inner), dense. A block has GROUPS x ACROSS columns (an element of y each) with
// DOWN threads on each; with one thread a column it is the plain method. The parts of a long run go to `accumulators`,
// and a second launch (AGAIN) puts those together. Sums begin anew every PIECE elements of a thread, so that errors do
// not grow with the length. UNIT: inner is 1.
#include "block_reduction.cuh"

template <typename T, int OP, int ACROSS, int DOWN, int GROUPS, bool UNIT, bool AGAIN, bool LAST>
__device__ __forceinline__ void reduce(const Runs &a) {
    using A = typename Arithmetic<T>::type;
    constexpr int THREADS = ACROSS * DOWN * GROUPS, WAYS = 4, PIECE = 64;
    __shared__ Accumulator<A> shared[ACROSS * DOWN > 32 && DOWN > 1 ? THREADS : 1];
    const int tid = threadIdx.x, across = tid % ACROSS, down = tid / ACROSS % DOWN, group = tid / (ACROSS * DOWN);
    const long long parts = LAST ? 1 : a.parts, part = blockIdx.x % parts;
    const long long column = (blockIdx.x / parts * GROUPS + group) * ACROSS + across, columns = a.outer * a.inner;
    const bool real = column < columns;
    // What is reduced: elements of a part of a column, or the accumulators of its parts.
    const long long length = AGAIN ? a.parts : a.length, share = (length + parts - 1) / parts;
    const long long first = part * share, end = real ? min(first + share, length) : first;
    const long long inner = UNIT ? 1 : a.inner, step = AGAIN ? 1 : inner;
    const long long base = AGAIN ? column * a.parts : column / inner * a.length * inner + column % inner;
    const T *x = static_cast<const T *>(a.x) + base;
    const Accumulator<A> *accumulators = static_cast<const Accumulator<A> *>(a.accumulators) + base;

    Accumulator<A> total = identity<OP, A>();
    for (long long start = first + down; start < end; start += DOWN * PIECE) {
        Accumulator<A> ways[WAYS];
#pragma unroll
        for (int i = 0; i < WAYS; ++i) ways[i] = identity<OP, A>();
        const long long stop = min(start + DOWN * PIECE, end);
        long long r = start;
        if constexpr (!AGAIN)
            for (; r + (WAYS - 1) * DOWN < stop; r += WAYS * DOWN) {
                A value[WAYS];
#pragma unroll
                for (int i = 0; i < WAYS; ++i) value[i] = upcast(x[(r + i * DOWN) * step]);
                if constexpr (OP == LOGSUMEXP) {
                    accumulate_exponentials(ways[0], value, WAYS);
                } else {
#pragma unroll
                    for (int i = 0; i < WAYS; ++i) accumulate<OP>(ways[i], value[i], r + i * DOWN);
                }
            }
        for (; r < stop; r += DOWN) {
            if constexpr (AGAIN) ways[0] = combine<OP>(ways[0], accumulators[r]);
            else accumulate<OP>(ways[0], upcast(x[r * step]), r);
        }
#pragma unroll
        for (int i = WAYS / 2; i > 0; i /= 2)
#pragma unroll
            for (int j = 0; j < i; ++j) ways[j] = combine<OP>(ways[j], ways[j + i]);
        total = combine<OP>(total, ways[0]);
    }
    total = block_reduce<OP, ACROSS, DOWN>(total, shared);
    if (!real || down > 0) return;
    if constexpr (!LAST) {
        static_cast<Accumulator<A> *>(a.accumulators)[column * a.parts + part] = total;
    } else if constexpr (OP == ARGMAX || OP == ARGMIN) {
        static_cast<long long *>(a.y)[column] = total.place;
    } else {
        A value = total.value;
        if constexpr (OP == MEAN) value /= A(a.length);
        if constexpr (OP == NORM2) value = sqrt(value);
        if constexpr (OP == LOGSUMEXP) value += log(total.exp_sum);
        static_cast<T *>(a.y)[column] = downcast<T>(value);
    }
}
