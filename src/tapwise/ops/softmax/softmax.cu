// Softmax and its logarithm. Runs of up to KEPT elements a thread are read once and held in registers. Longer ones
// (KEPT 0) are read for their largest element and the sum of their exponentials at once, and once more to be written.
//
// x and y (outer, length, inner), dense; blocks as in reduce.cu. Of long runs in parts, MEASURE writes the
// accumulators, SCALE puts them together and writes y; BOTH does it in one launch.
//
// Source: Milakov and Gimelshein, "Online normalizer calculation for softmax", 2018.
#include "block_reduction.cuh"

enum Stage { BOTH, MEASURE, SCALE };

template <typename T, bool LOG, int ACROSS, int DOWN, int GROUPS, bool UNIT, int KEPT, int STAGE>
__device__ __forceinline__ void softmax(const Runs &a) {
    using A = typename Arithmetic<T>::type;
    constexpr int THREADS = ACROSS * DOWN * GROUPS, WAYS = 4, PIECE = 64;
    begin_dependent();
    __shared__ Accumulator<A> shared[ACROSS * DOWN > 32 && DOWN > 1 ? THREADS : 1];
    const int tid = threadIdx.x, across = tid % ACROSS, down = tid / ACROSS % DOWN, group = tid / (ACROSS * DOWN);
    const long long parts = a.parts, part = blockIdx.x % parts;
    const long long column = (blockIdx.x / parts * GROUPS + group) * ACROSS + across;
    const bool real = column < a.outer * a.inner;
    const long long share = (a.length + parts - 1) / parts;
    const long long first = part * share, end = real ? min(first + share, a.length) : first, step = UNIT ? 1 : a.inner;
    const long long base = column / step * a.length * step + column % step;
    const T *x = static_cast<const T *>(a.x) + base;
    Accumulator<A> *accumulators = static_cast<Accumulator<A> *>(a.accumulators) + column * parts;

    if constexpr (KEPT > 0) {
        static_assert(STAGE == BOTH, "a whole run");
        A kept[KEPT];
        Accumulator<A> top = identity<MAX, A>(), sum = identity<SUM, A>();
#pragma unroll
        for (int i = 0; i < KEPT; ++i) {
            const long long r = first + down + i * DOWN;
            kept[i] = r < end ? upcast(x[r * step]) : A(-POSITIVE_INFINITY);
            // A NaN is lost here, and shows in the sum.
            top.value = kept[i] > top.value ? kept[i] : top.value;
        }
        top = block_reduce<MAX, ACROSS, DOWN>(top, shared);
#pragma unroll
        for (int i = 0; i < KEPT; ++i) {
            const A shifted = kept[i] - top.value, term = exp(shifted);
            kept[i] = LOG ? shifted : term;
            sum.value += term;
        }
        if constexpr (ACROSS * DOWN > 32) __syncthreads();
        sum = block_reduce<SUM, ACROSS, DOWN>(sum, shared);
        const A last = LOG ? log(sum.value) : A(1) / sum.value;
        T *y = static_cast<T *>(a.y) + base;
#pragma unroll
        for (int i = 0; i < KEPT; ++i) {
            const long long r = first + down + i * DOWN;
            if (r < end) y[r * step] = downcast<T>(LOG ? kept[i] - last : kept[i] * last);
        }
        return;
    }
    Accumulator<A> total = identity<LOGSUMEXP, A>();
    if constexpr (STAGE == SCALE) {
        // All accumulators of a column are put together by each of its threads: few, and in the cache.
        if (real)
            for (int i = 0; i < parts; ++i) total = combine<LOGSUMEXP>(total, accumulators[i]);
    } else {
        for (long long start = first + down; start < end; start += DOWN * PIECE) {
            Accumulator<A> piece = identity<LOGSUMEXP, A>();
            const long long stop = min(start + DOWN * PIECE, end);
            long long r = start;
            for (; r + (WAYS - 1) * DOWN < stop; r += WAYS * DOWN) {
                A value[WAYS];
#pragma unroll
                for (int i = 0; i < WAYS; ++i) value[i] = upcast(x[(r + i * DOWN) * step]);
                accumulate_exponentials(piece, value, WAYS);
            }
            for (; r < stop; r += DOWN) accumulate<LOGSUMEXP>(piece, upcast(x[r * step]), 0);
            total = combine<LOGSUMEXP>(total, piece);
        }
        total = block_reduce<LOGSUMEXP, ACROSS, DOWN>(total, shared);
    }
    if constexpr (STAGE == MEASURE) {
        if (real && down == 0) accumulators[part] = total;
        return;
    } else {
        // +infinity less +infinity is NaN, and so is its whole run; nothing but -infinity comes out so by itself.
        const A top = total.value, sum = top == A(POSITIVE_INFINITY) ? A(NOT_A_NUMBER) : total.exp_sum;
        const A last = LOG ? log(sum) : A(1) / sum;
        T *y = static_cast<T *>(a.y) + base;
#pragma unroll 4
        for (long long r = first + down; r < end; r += DOWN) {
            const A shifted = upcast(x[r * step]) - top;
            y[r * step] = downcast<T>(LOG ? shifted - last : exp(shifted) * last);
        }
    }
}
