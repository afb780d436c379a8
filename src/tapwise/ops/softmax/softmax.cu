// Softmax and its logarithm. Runs of up to KEPT elements a thread are read once and held in registers. Longer ones (KEPT 0) are
// read for their largest element and the sum of their exponentials at once, and once more to be written.
//
// x and y (outer, length, inner), dense; blocks as in reduce.cu. Long runs are cut in `parts`: MEASURE writes their states, SCALE
// puts them together and writes y; BOTH does it in one launch.
//
// Source: Milakov and Gimelshein, "Online normalizer calculation for softmax", 2018.
#include "state.cuh"

enum Stage { BOTH, MEASURE, SCALE };

struct Softmax {
    const void *x;
    void *y, *states;
    long long outer, length, inner, parts;
};

template <typename T, bool LOG, int ACROSS, int DOWN, int GROUPS, bool UNIT, int KEPT, int STAGE>
__device__ __forceinline__ void softmax(const Softmax &a) {
    using A = typename Arithmetic<T>::type;
    constexpr int THREADS = ACROSS * DOWN * GROUPS, WAYS = 4, PIECE = 64;
    __shared__ State<A> shared[ACROSS * DOWN > 32 && DOWN > 1 ? THREADS : 1];
    const int tid = threadIdx.x, across = tid % ACROSS, down = tid / ACROSS % DOWN, group = tid / (ACROSS * DOWN);
    const long long parts = a.parts, part = blockIdx.x % parts;
    const long long column = (blockIdx.x / parts * GROUPS + group) * ACROSS + across;
    const bool real = column < a.outer * a.inner;
    const long long share = (a.length + parts - 1) / parts;
    const long long first = part * share, end = real ? min(first + share, a.length) : first, step = UNIT ? 1 : a.inner;
    const long long base = column / step * a.length * step + column % step;
    const T *x = static_cast<const T *>(a.x) + base;
    State<A> *states = static_cast<State<A> *>(a.states) + column * parts;

    if constexpr (KEPT > 0) {
        static_assert(STAGE == BOTH, "a whole run");
        A kept[KEPT];
        State<A> top = nothing<MAX, A>(), sum = nothing<SUM, A>();
#pragma unroll
        for (int i = 0; i < KEPT; ++i) {
            const long long r = first + down + i * DOWN;
            kept[i] = r < end ? widen(x[r * step]) : A(-POSITIVE_INFINITY);
            // A NaN is lost here, and shows in the sum.
            top.value = kept[i] > top.value ? kept[i] : top.value;
        }
        top = gather<MAX, ACROSS, DOWN>(top, shared);
#pragma unroll
        for (int i = 0; i < KEPT; ++i) {
            const A shifted = kept[i] - top.value, term = exp(shifted);
            kept[i] = LOG ? shifted : term;
            sum.value += term;
        }
        if constexpr (ACROSS * DOWN > 32) __syncthreads();
        sum = gather<SUM, ACROSS, DOWN>(sum, shared);
        const A last = LOG ? log(sum.value) : A(1) / sum.value;
        T *y = static_cast<T *>(a.y) + base;
#pragma unroll
        for (int i = 0; i < KEPT; ++i) {
            const long long r = first + down + i * DOWN;
            if (r < end) y[r * step] = narrow<T>(LOG ? kept[i] - last : kept[i] * last);
        }
        return;
    }
    State<A> total = nothing<LOGSUMEXP, A>();
    if constexpr (STAGE == SCALE) {
        // All states of a column are put together by each of its threads: few, and in the cache.
        if (real)
            for (int i = 0; i < parts; ++i) total = together<LOGSUMEXP>(total, states[i]);
    } else {
        for (long long start = first + down; start < end; start += DOWN * PIECE) {
            State<A> piece = nothing<LOGSUMEXP, A>();
            const long long stop = min(start + DOWN * PIECE, end);
            long long r = start;
            for (; r + (WAYS - 1) * DOWN < stop; r += WAYS * DOWN) {
                A value[WAYS];
#pragma unroll
                for (int i = 0; i < WAYS; ++i) value[i] = widen(x[(r + i * DOWN) * step]);
                take_all(piece, value, WAYS);
            }
            for (; r < stop; r += DOWN) take<LOGSUMEXP>(piece, widen(x[r * step]), 0);
            total = together<LOGSUMEXP>(total, piece);
        }
        total = gather<LOGSUMEXP, ACROSS, DOWN>(total, shared);
    }
    if constexpr (STAGE == MEASURE) {
        if (real && down == 0) states[part] = total;
        return;
    } else {
        // +infinity less +infinity is NaN, and so is its whole run; nothing but -infinity comes out so by itself.
        const A top = total.value, sum = top == A(POSITIVE_INFINITY) ? A(NOT_A_NUMBER) : total.more;
        const A last = LOG ? log(sum) : A(1) / sum;
        T *y = static_cast<T *>(a.y) + base;
#pragma unroll 4
        for (long long r = first + down; r < end; r += DOWN) {
            const A shifted = widen(x[r * step]) - top;
            y[r * step] = narrow<T>(LOG ? shifted - last : exp(shifted) * last);
        }
    }
}
