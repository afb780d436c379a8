// What a run of elements is folded into, in parts that are put together in a fixed order.
#pragma once

#include "types.cuh"

enum Op { SUM, MEAN, MAX, MIN, PROD, ARGMAX, ARGMIN, NORM1, NORM2, SUMSQUARE, LOGSUMEXP };

// `value`: the sum, product or chosen element, or the largest one; `more`: the sum of e^(x - value); `place`: where a chosen
// element stands.
template <typename A>
struct State {
    A value, more;
    long long place;
};

__host__ __device__ constexpr bool chooses(int op) { return op == MAX || op == MIN || op == ARGMAX || op == ARGMIN; }

template <int OP, typename A>
__device__ __forceinline__ State<A> nothing() {
    if constexpr (OP == MAX || OP == ARGMAX || OP == LOGSUMEXP) return {A(-POSITIVE_INFINITY), A(0), -1};
    if constexpr (OP == MIN || OP == ARGMIN) return {A(POSITIVE_INFINITY), A(0), -1};
    return {OP == PROD ? A(1) : A(0), A(0), 0};
}

// Two runs as one. A NaN wins where an element is chosen, the first of equals where its place counts.
template <int OP, typename A>
__device__ __forceinline__ State<A> together(const State<A> &a, const State<A> &b) {
    if constexpr (OP == PROD) return {a.value * b.value, A(0), 0};
    if constexpr (OP == LOGSUMEXP) {
        // A NaN is in `more`, so the largest of a run is never one.
        if (a.value == b.value) return {a.value, a.more + b.more, 0};
        const bool first = a.value > b.value;
        const A high = first ? a.value : b.value, low = first ? b.value : a.value;
        const A kept = first ? a.more : b.more, more = first ? b.more : a.more;
        return {high, kept + (more == A(0) ? A(0) : more * exp(low - high)), 0};
    }
    if constexpr (chooses(OP)) {
        if (a.place < 0) return b;
        if (b.place < 0) return a;
        const bool a_nan = a.value != a.value, b_nan = b.value != b.value;
        const bool better = OP == MIN || OP == ARGMIN ? b.value < a.value : b.value > a.value;
        const bool same = a_nan ? b_nan : b.value == a.value;
        const bool second = (!a_nan && (b_nan || better)) || (same && b.place < a.place);
        return {second ? b.value : a.value, A(0), second ? b.place : a.place};
    }
    return {a.value + b.value, A(0), 0};
}

// A run and one element behind it.
template <int OP, typename A>
__device__ __forceinline__ void take(State<A> &state, A x, long long place) {
    if constexpr (OP == SUM || OP == MEAN) state.value += x;
    if constexpr (OP == PROD) state.value *= x;
    if constexpr (OP == NORM1) state.value += x < A(0) ? -x : x;
    if constexpr (OP == NORM2 || OP == SUMSQUARE) state.value = fma(x, x, state.value);
    if constexpr (chooses(OP)) {
        const bool better = OP == MIN || OP == ARGMIN ? x < state.value : x > state.value;
        if (state.place < 0 || ((better || x != x) && state.value == state.value)) {
            state.value = x;
            state.place = place;
        }
    }
    if constexpr (OP == LOGSUMEXP) {
        if (x > state.value) {
            state.more = (state.more == A(0) ? A(0) : state.more * exp(state.value - x)) + A(1);
            state.value = x;
        } else if (x == state.value) {
            // -infinity adds nothing to nothing.
            state.more += x == A(-POSITIVE_INFINITY) ? A(0) : A(1);
        } else {
            state.more += exp(x - state.value);
        }
    }
}

// Threads of a block: ACROSS columns by DOWN threads a column, GROUPS times. All states of a column put together, in a fixed
// order; every thread of the column gets the result. All threads of the block must call it.
template <int OP, int ACROSS, int DOWN, typename A>
__device__ __forceinline__ State<A> gather(State<A> mine, State<A> *shared) {
    if constexpr (DOWN == 1) return mine;
    const int tid = threadIdx.x, down = tid / ACROSS % DOWN;
    shared[tid] = mine;
#pragma unroll
    for (int half = DOWN / 2; half > 0; half /= 2) {
        __syncthreads();
        if (down < half) shared[tid] = together<OP>(shared[tid], shared[tid + half * ACROSS]);
    }
    __syncthreads();
    return shared[tid - down * ACROSS];
}
