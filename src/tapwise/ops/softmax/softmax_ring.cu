// Softmax and its logarithm of long runs along the last axis, which lie in shared memory one after another: while a
// block's threads go through one for its largest element, for the sum and for what is written, copies bring the next
// ones. So memory is read once, and some of it is always on its way.
//
// x and y (outer, length), dense. A block has runs of its own, `gridDim.x` apart, in SLOTS places of shared memory. A
// run begins anywhere between the pieces of 16 bytes that copies, loads and stores take: it lies in its slot as it does
// in memory, with what stands before it in its first piece and behind it in its last one.
//
// Source of sums that are put together, each less its own largest element: Milakov and Gimelshein, "Online normalizer
// calculation for softmax", 2018.
#include "approximate.cuh"
#include "block_reduction.cuh"
#include "ring.cuh"
#include "tma.cuh"

// The largest of some elements, -infinity of none; the sum of the exponentials of all of them, each less the largest.
struct Level { float top, sum; };

// The sum of exponentials of what elements are less `top`, which is as large as the largest or larger.
DEVICE float rescaled(Level one, float top) { return one.sum * (one.top == top ? 1.0f : exp(one.top - top)); }

// SKEWED: runs begin between pieces.
template <typename T, bool LOG, bool SKEWED, int THREADS, int SLOTS> DEVICE void softmax_ring(const Runs &a) {
    constexpr int V = 16 / sizeof(T), WARPS = THREADS / 32;
    constexpr int LIFT = LOG || sizeof(T) != 2 ? 0 : 24;
    using Piece = Neighbours<T, V>;
    extern __shared__ __align__(128) unsigned char memory[];
    Level *const of_warps = reinterpret_cast<Level *>(memory + 8 * SLOTS);
    const unsigned barriers = shared_address(memory);
    const int length = a.length, tid = threadIdx.x, lane = tid % 32;
    // As ops/softmax/cuda_ring.py has it.
    const int slot_bytes = ((length + 2 * V - 2) / V * 16 + 127) / 128 * 128;
    unsigned char *const slots = memory + (8 * SLOTS + WARPS * (int)sizeof(Level) + 127) / 128 * 128;
    const T *const x = static_cast<const T *>(a.x);
    const auto load = [&](long long row, int slot) {
        const long long begin = row * length / V * V, end = (row + 1) * length;
        // Behind the last run, nothing is read: its last elements that are no piece are read one by one.
        const unsigned bytes = ((row + 1 < a.outer ? end + V - 1 : end) / V * V - begin) * sizeof(T);
        barrier_expect(barriers + 8 * slot, bytes);
        copy_bytes(shared_address(slots) + slot * slot_bytes, x + begin, bytes, barriers + 8 * slot);
    };
    if (tid == 0) {
#pragma unroll
        for (int i = 0; i < SLOTS; ++i) barrier_init(barriers + 8 * i, 1);
        publish_barriers();
    }
    begin_dependent();
    __syncthreads();
    if (tid == 0)
        for (int i = 0; i < SLOTS; ++i)
            if (const long long row = blockIdx.x + (long long)i * gridDim.x; row < a.outer) load(row, i);

    int slot = 0;
    unsigned phase = 0;
    for (long long row = blockIdx.x; row < a.outer; row += gridDim.x, advance<SLOTS>(slot, phase)) {
        T *const elements = reinterpret_cast<T *>(slots + slot * slot_bytes);
        const Piece *const pieces = reinterpret_cast<const Piece *>(elements);
        const int head = SKEWED ? (int)(row * length % V) : 0, end = head + length, count = (end + V - 1) / V;
        barrier_wait(barriers + 8 * slot, phase);
        if (SKEWED) {
            // What others have in the first and the last piece counts as nothing. Copies come to these places again.
            if (tid < V) {
                const T nothing = downcast<T>(-POSITIVE_INFINITY);
                const int last = end / V * V, at = last + tid;
                if (tid < head) elements[tid] = nothing;
                if (at < end && row + 1 == a.outer) elements[at] = x[row * length - head + at];
                if (at >= end && last < end) elements[at] = nothing;
                publish_shared();
            }
            __syncthreads();
        }
        Level mine{-POSITIVE_INFINITY, 0.0f};
#pragma unroll 2
        for (int p = tid; p < count; p += THREADS) {
            const Piece read = pieces[p];
#pragma unroll
            // A NaN is lost here, and shows in the sum.
            for (int v = 0; v < V; ++v) mine.top = max(mine.top, upcast(read.v[v]));
        }
        // A thread that has nothing but -infinity has no sum.
        const float level = mine.top == -POSITIVE_INFINITY ? 0.0f : mine.top;
#pragma unroll 2
        for (int p = tid; p < count; p += THREADS) {
            const Piece read = pieces[p];
#pragma unroll
            for (int v = 0; v < V; ++v) mine.sum += exponential<T, LIFT>(upcast(read.v[v]) - level);
        }
        // Of a warp, then of the block: every warp puts all of them together, in the same order.
        const auto together = [&](Level one) {
            float top = one.top;
#pragma unroll
            for (int i = 16; i > 0; i /= 2) top = max(top, __shfl_xor_sync(0xffffffffu, top, i));
            float sum = rescaled(one, top);
#pragma unroll
            for (int i = 16; i > 0; i /= 2) sum += __shfl_xor_sync(0xffffffffu, sum, i);
            return Level{top, sum};
        };
        mine = together(mine);
        if (lane == 0) of_warps[tid / 32] = mine;
        __syncthreads();
        const Level all_of_it = together(lane < WARPS ? of_warps[lane] : Level{-POSITIVE_INFINITY, 0.0f});
        // Of a run of nothing but -infinity, what elements are less the largest is NaN.
        const float top = all_of_it.top, sum = all_of_it.sum;
        float last;
        if constexpr (LOG) last = log(sum);
        else last = sizeof(T) == 2 ? reciprocal(sum) : 1.0f / sum;
        T *const y = static_cast<T *>(a.y) + (row * length - head);
#pragma unroll 2
        for (int p = tid; p < count; p += THREADS) {
            const Piece read = pieces[p];
            Piece written;
#pragma unroll
            for (int v = 0; v < V; ++v) {
                const float shifted = upcast(read.v[v]) - top;
                written.v[v] = downcast<T>(LOG ? shifted - last : exponential<T, LIFT>(shifted) * last);
            }
            if (!SKEWED || (p * V >= head && p * V + V <= end)) reinterpret_cast<Piece *>(y)[p] = written;
            else
#pragma unroll
                for (int v = 0; v < V; ++v)
                    if (p * V + v >= head && p * V + v < end) y[p * V + v] = written.v[v];
        }
        __syncthreads();
        const long long next = row + (long long)SLOTS * gridDim.x;
        if (tid == 0 && next < a.outer) load(next, slot);
    }
}
