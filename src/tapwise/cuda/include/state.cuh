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

__host__ __device__ constexpr bool places(int op) { return op == ARGMAX || op == ARGMIN; }
__host__ __device__ constexpr bool least(int op) { return op == MIN || op == ARGMIN; }

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
    if constexpr (OP == MAX || OP == MIN) {
        const bool second = b.value != b.value || (least(OP) ? b.value < a.value : b.value > a.value);
        return {second ? b.value : a.value, A(0), 0};
    }
    if constexpr (places(OP)) {
        if (a.place < 0) return b;
        if (b.place < 0) return a;
        const bool a_nan = a.value != a.value, b_nan = b.value != b.value;
        const bool better = least(OP) ? b.value < a.value : b.value > a.value;
        const bool same = a_nan ? b_nan : b.value == a.value;
        const bool second = (!a_nan && (b_nan || better)) || (same && b.place < a.place);
        return {second ? b.value : a.value, A(0), second ? b.place : a.place};
    }
    return {a.value + b.value, A(0), 0};
}

// The exponentials of some elements go into a run: one change of scale for all of them.
template <typename A>
__device__ __forceinline__ void take_all(State<A> &state, const A *x, int count) {
    A top = state.value;
#pragma unroll
    for (int i = 0; i < count; ++i)
        if (x[i] > top) top = x[i];
    if (top > state.value) {
        state.more = state.more == A(0) ? A(0) : state.more * exp(state.value - top);
        state.value = top;
    }
    // -infinity adds nothing, even to nothing; infinity is level with itself.
#pragma unroll
    for (int i = 0; i < count; ++i)
        state.more += x[i] == -POSITIVE_INFINITY ? A(0) : x[i] == top ? A(1) : exp(x[i] - top);
}

// A run and one element behind it.
template <int OP, typename A>
__device__ __forceinline__ void take(State<A> &state, A x, long long place) {
    if constexpr (OP == SUM || OP == MEAN) state.value += x;
    if constexpr (OP == PROD) state.value *= x;
    if constexpr (OP == NORM1) state.value += x < A(0) ? -x : x;
    if constexpr (OP == NORM2 || OP == SUMSQUARE) state.value = fma(x, x, state.value);
    if constexpr (OP == MAX || OP == MIN) {
        if (x != x || (least(OP) ? x < state.value : x > state.value)) state.value = x;
    }
    if constexpr (places(OP)) {
        const bool better = least(OP) ? x < state.value : x > state.value;
        if (state.place < 0 || ((better || x != x) && state.value == state.value)) {
            state.value = x;
            state.place = place;
        }
    }
    if constexpr (OP == LOGSUMEXP) take_all(state, &x, 1);
}

template <typename A>
__device__ __forceinline__ A from_lane(A value, int lane) {
    return __shfl_sync(0xffffffffu, value, lane);
}

template <int OP, typename A>
__device__ __forceinline__ State<A> state_of_lane(const State<A> &mine, int lane) {
    State<A> other{from_lane(mine.value, lane), A(0), 0};
    if constexpr (OP == LOGSUMEXP) other.more = from_lane(mine.more, lane);
    if constexpr (places(OP)) other.place = from_lane(mine.place, lane);
    return other;
}

// Threads of a block: ACROSS columns by DOWN threads a column, GROUPS times. All states of a column put together, in a fixed
// order; every thread of the column gets the result. All threads of the block must call it. `shared` holds a state a thread
// of the block for columns of more than a warp.
template <int OP, int ACROSS, int DOWN, typename A>
__device__ __forceinline__ State<A> gather(State<A> mine, State<A> *shared) {
    const int tid = threadIdx.x, lane = tid % 32;
    // Threads of one column within a warp, ACROSS lanes apart.
    constexpr int WITHIN = DOWN == 1 ? 1 : ACROSS * DOWN <= 32 ? DOWN : 32 / ACROSS, WARPS = DOWN / WITHIN;
#pragma unroll
    for (int half = WITHIN / 2; half > 0; half /= 2)
        mine = together<OP>(mine, state_of_lane<OP>(mine, lane + half * ACROSS));
    if constexpr (WITHIN > 1) mine = state_of_lane<OP>(mine, lane % ACROSS + lane / (ACROSS * WITHIN) * (ACROSS * WITHIN));
    if constexpr (WARPS == 1) return mine;
    shared[tid] = mine;
    __syncthreads();
    const int first = tid / (ACROSS * DOWN) * (ACROSS * DOWN) + tid % ACROSS;
    State<A> total = shared[first];
#pragma unroll
    for (int warp = 1; warp < WARPS; ++warp) total = together<OP>(total, shared[first + warp * WITHIN * ACROSS]);
    return total;
}
