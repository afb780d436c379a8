// Reductions by blocks of threads: an accumulator a thread, all of a run put together in a fixed order.
#pragma once

#include "approximate.cuh"
#include "grid.cuh"
#include "types.cuh"

// Runs of `length` elements of x (outer, length, inner), dense; a long one is cut in `parts`, each with an accumulator.
// w: a second array like x, of those that have one.
struct Runs {
    const void *x, *w;
    void *y, *accumulators;
    long long outer, length, inner, parts;
};

// A run of `length` elements that begins at element `base`: whole pieces of V elements that lie in memory as loads take
// them, and edges, which are elements in front of these and behind them. SKEWED: V does not divide the length.
template <bool SKEWED, int V> struct Pieces {
    long long count;
    int head, edges;

    __device__ __forceinline__ Pieces(long long base, long long length) : head(SKEWED ? (V - (int)(base % V)) % V : 0) {
        count = (length - head) / V, edges = (int)(length - count * V);
    }
    // Edge k's element of the run.
    __device__ __forceinline__ long long edge(int k) const { return k < head ? k : count * V + k; }
};

// KEY: the largest place, which is a key_of.
enum Op { SUM, MEAN, MAX, MIN, PROD, ARGMAX, ARGMIN, NORM1, NORM2, SUMSQUARE, LOGSUMEXP, KEY };

// `value`: the sum, product or chosen element, or the largest one; `exp_sum`: the sum of e^(x - value); `place`: where
// a chosen element stands.
template <typename A> struct Accumulator {
    A value, exp_sum;
    long long place;
};

__host__ __device__ constexpr bool has_place(int op) { return op == ARGMAX || op == ARGMIN; }
__host__ __device__ constexpr bool is_minimum(int op) { return op == MIN || op == ARGMIN; }

template <int OP, typename A> __device__ __forceinline__ Accumulator<A> identity() {
    if constexpr (OP == MAX || OP == ARGMAX || OP == LOGSUMEXP) return {A(-POSITIVE_INFINITY), A(0), -1};
    if constexpr (OP == MIN || OP == ARGMIN) return {A(POSITIVE_INFINITY), A(0), -1};
    return {OP == PROD ? A(1) : A(0), A(0), 0};
}

// The larger or smaller of two; a NaN wins.
template <bool MINIMUM> __device__ __forceinline__ float extreme(float a, float b) {
    float chosen;
    if constexpr (MINIMUM) asm("min.NaN.f32 %0, %1, %2;" : "=f"(chosen) : "f"(a), "f"(b));
    else asm("max.NaN.f32 %0, %1, %2;" : "=f"(chosen) : "f"(a), "f"(b));
    return chosen;
}
template <bool MINIMUM> __device__ __forceinline__ double extreme(double a, double b) {
    return b != b || (MINIMUM ? b < a : b > a) ? b : a;
}

// Two runs as one. A NaN wins where an element is chosen, the first of equals where its place counts.
template <int OP, typename A>
__device__ __forceinline__ Accumulator<A> combine(const Accumulator<A> &a, const Accumulator<A> &b) {
    if constexpr (OP == PROD) return {a.value * b.value, A(0), 0};
    if constexpr (OP == KEY) return (unsigned long long)b.place > (unsigned long long)a.place ? b : a;
    if constexpr (OP == LOGSUMEXP) {
        // A NaN is in `exp_sum`, so the largest of a run is never one.
        if (a.value == b.value) return {a.value, a.exp_sum + b.exp_sum, 0};
        const bool first = a.value > b.value;
        const A high = first ? a.value : b.value, low = first ? b.value : a.value;
        const A kept = first ? a.exp_sum : b.exp_sum, exp_sum = first ? b.exp_sum : a.exp_sum;
        return {high, kept + (exp_sum == A(0) ? A(0) : exp_sum * exp(low - high)), 0};
    }
    if constexpr (OP == MAX || OP == MIN) return {extreme<OP == MIN>(a.value, b.value), A(0), 0};
    if constexpr (has_place(OP)) {
        if (a.place < 0) return b;
        if (b.place < 0) return a;
        const bool a_nan = a.value != a.value, b_nan = b.value != b.value;
        const bool better = is_minimum(OP) ? b.value < a.value : b.value > a.value;
        const bool same = a_nan ? b_nan : b.value == a.value;
        const bool second = (!a_nan && (b_nan || better)) || (same && b.place < a.place);
        return {second ? b.value : a.value, A(0), second ? b.place : a.place};
    }
    return {a.value + b.value, A(0), 0};
}

// 2^LIFT e^x of what elements of T are less their largest. Those of 16 bits round more than the one instruction that
// theirs is; lifted, it loses none that they can hold.
template <typename T, int LIFT = 0, typename A> __device__ __forceinline__ A exponential(A x) {
    if constexpr (sizeof(T) == 2) return power_of_two(fma(x, 1.44269504f, float(LIFT)));
    else return exp(x);
}

// The exponentials of some elements of T go into a run: one change of scale for all of them.
template <typename T, typename A>
__device__ __forceinline__ void accumulate_exponentials(Accumulator<A> &accumulator, const A *x, int count) {
    A top = accumulator.value;
#pragma unroll
    for (int i = 0; i < count; ++i) top = max(top, x[i]);
    if (top > accumulator.value) {
        accumulator.exp_sum = accumulator.exp_sum == A(0) ? A(0) : accumulator.exp_sum * exp(accumulator.value - top);
        accumulator.value = top;
    }
    // -infinity adds nothing, even to nothing. Where infinity is the largest, a sum of infinity says so.
    const A level = top - top == A(0) ? top : A(0);
#pragma unroll
    for (int i = 0; i < count; ++i) accumulator.exp_sum += exponential<T>(x[i] - level);
}

// A run and one element behind it.
template <int OP, typename A>
__device__ __forceinline__ void accumulate(Accumulator<A> &accumulator, A x, long long place) {
    if constexpr (OP == SUM || OP == MEAN) accumulator.value += x;
    if constexpr (OP == PROD) accumulator.value *= x;
    if constexpr (OP == NORM1) accumulator.value += x < A(0) ? -x : x;
    if constexpr (OP == NORM2 || OP == SUMSQUARE) accumulator.value = fma(x, x, accumulator.value);
    if constexpr (OP == MAX || OP == MIN) accumulator.value = extreme<OP == MIN>(accumulator.value, x);
    if constexpr (has_place(OP)) {
        const bool better = is_minimum(OP) ? x < accumulator.value : x > accumulator.value;
        if (accumulator.place < 0 || ((better || x != x) && accumulator.value == accumulator.value)) {
            accumulator.value = x;
            accumulator.place = place;
        }
    }
    if constexpr (OP == LOGSUMEXP) accumulate_exponentials<A>(accumulator, &x, 1);
}

// Chosen float32 elements with their places as numbers: the better of two has the larger one. Places have 32 bits.
#ifdef WIDE_COORDINATES
constexpr bool HAS_KEYS = false;
#else
constexpr bool HAS_KEYS = true;
#endif
template <int OP> __device__ __forceinline__ long long key_of(const Accumulator<float> &chosen) {
    if (chosen.place < 0) return 0;
    // Both zeros are one; floats in order as unsigned numbers, a NaN above all.
    const unsigned bits = __float_as_uint((is_minimum(OP) ? -chosen.value : chosen.value) + 0.0f);
    const unsigned ordered =
        chosen.value != chosen.value ? 0xffffffffu : bits ^ ((unsigned)((int)bits >> 31) | 0x80000000u);
    return (long long)((unsigned long long)ordered << 32 | ~(unsigned)chosen.place);
}
template <int OP> __device__ __forceinline__ Accumulator<float> chosen_of(long long key) {
    const unsigned ordered = (unsigned long long)key >> 32;
    const float value = __uint_as_float(
        ordered == 0xffffffffu ? 0x7fffffffu : ordered ^ ((int)ordered < 0 ? 0x80000000u : 0xffffffffu));
    return {is_minimum(OP) ? -value : value, 0.0f, key == 0 ? -1 : (long long)~(unsigned)key};
}

template <typename A> __device__ __forceinline__ A from_lane(A value, int lane) {
    return __shfl_sync(0xffffffffu, value, lane);
}

template <int OP, typename A> __device__ __forceinline__ Accumulator<A> of_lane(const Accumulator<A> &mine, int lane) {
    Accumulator<A> other{OP == KEY ? mine.value : from_lane(mine.value, lane), A(0), 0};
    if constexpr (OP == LOGSUMEXP) other.exp_sum = from_lane(mine.exp_sum, lane);
    if constexpr (has_place(OP) || OP == KEY) other.place = from_lane(mine.place, lane);
    return other;
}

// Threads of a block: ACROSS columns by DOWN threads a column, GROUPS times. All accumulators of a column put together,
// in a fixed order; every thread of the column gets the result. All threads of the block must call it. `shared` holds
// an accumulator a thread of the block for columns of more than a warp.
template <int OP, int ACROSS, int DOWN, typename A>
__device__ __forceinline__ Accumulator<A> block_reduce(Accumulator<A> mine, Accumulator<A> *shared) {
    const int tid = threadIdx.x, lane = tid % 32;
    // Threads of one column within a warp, ACROSS lanes apart.
    constexpr int WITHIN = DOWN == 1 ? 1 : ACROSS * DOWN <= 32 ? DOWN : 32 / ACROSS, WARPS = DOWN / WITHIN;
#pragma unroll
    for (int half = WITHIN / 2; half > 0; half /= 2) mine = combine<OP>(mine, of_lane<OP>(mine, lane + half * ACROSS));
    if constexpr (WITHIN > 1) mine = of_lane<OP>(mine, lane % ACROSS + lane / (ACROSS * WITHIN) * (ACROSS * WITHIN));
    if constexpr (WARPS == 1) return mine;
    shared[tid] = mine;
    __syncthreads();
    const int first = tid / (ACROSS * DOWN) * (ACROSS * DOWN) + tid % ACROSS;
    if constexpr (ACROSS == 1 && WARPS > 8) {
        Accumulator<A> total = shared[first + lane % WARPS * WITHIN];
#pragma unroll
        for (int half = WARPS / 2; half > 0; half /= 2) total = combine<OP>(total, of_lane<OP>(total, lane + half));
        return of_lane<OP>(total, 0);
    }
    Accumulator<A> total = shared[first];
#pragma unroll
    for (int warp = 1; warp < WARPS; ++warp) total = combine<OP>(total, shared[first + warp * WITHIN * ACROSS]);
    return total;
}

// V neighbouring columns a thread: values alone, of ops that keep nothing else. The first of a column's threads gets
// the results. `shared` holds V values for ACROSS threads of each warp.
template <int OP, int ACROSS, int DOWN, int V, typename A>
__device__ __forceinline__ void block_reduce_neighbours(Accumulator<A> (&mine)[V], A *shared) {
    constexpr int WITHIN = DOWN == 1 ? 1 : ACROSS * DOWN <= 32 ? DOWN : 32 / ACROSS, WARPS = DOWN / WITHIN;
    static_assert(!has_place(OP) && OP != LOGSUMEXP);
    const int tid = threadIdx.x, lane = tid % 32, across = tid % ACROSS;
#pragma unroll
    for (int v = 0; v < V; ++v)
#pragma unroll
        for (int half = WITHIN / 2; half > 0; half /= 2)
            mine[v] = combine<OP>(mine[v], of_lane<OP>(mine[v], lane + half * ACROSS));
    if constexpr (WARPS == 1) return;
    if (lane < ACROSS)
#pragma unroll
        for (int v = 0; v < V; ++v) shared[(tid / 32 * V + v) * ACROSS + across] = mine[v].value;
    __syncthreads();
    if (tid / ACROSS % DOWN > 0) return;
#pragma unroll
    for (int warp = 1; warp < WARPS; ++warp)
#pragma unroll
        for (int v = 0; v < V; ++v)
            mine[v] = combine<OP>(mine[v], {shared[((tid / 32 + warp) * V + v) * ACROSS + across], A(0), 0});
}
