// Softmax and its logarithm of short runs of 16-bit elements along the last axis, which begin anywhere between the
// pieces that memory is read by. A block has one run a thread: copies bring all of them to shared memory as they lie,
// each thread holds its own run in registers, and what comes out lies in the same place before it is written by pieces.
//
// x and y (outer, length), dense. A run of an odd number of elements is no two threads' in the same bank, or few.
#include "approximate.cuh"
#include "block_reduction.cuh"
#include "tma.cuh"

// LENGTH: elements of a run.
template <typename T, bool LOG, int LENGTH, int THREADS> DEVICE void softmax_thread_per_run(const Runs &a) {
    static_assert(sizeof(T) == 2 && THREADS % 8 == 0);
    constexpr int LIFT = LOG ? 0 : 24;
    using Piece = Neighbours<T, 8>;
    // A barrier in its first piece, then the runs.
    extern __shared__ __align__(128) unsigned char memory[];
    T *const elements = reinterpret_cast<T *>(memory + 16);
    const unsigned barrier = shared_address(memory);
    const int tid = threadIdx.x;
    const long long first = (long long)blockIdx.x * THREADS;
    // Of the last block, copies bring whole pieces.
    const int runs = min((long long)THREADS, a.outer - first), count = runs * LENGTH, pieces = count / 8;
    const T *const x = static_cast<const T *>(a.x) + first * LENGTH;
    if (tid == 0) {
        barrier_init(barrier, 1);
        publish_barriers();
    }
    begin_dependent();
    __syncthreads();
    if (tid == 0) {
        barrier_expect(barrier, pieces * 16);
        if (pieces) copy_bytes(shared_address(elements), x, pieces * 16, barrier);
    }
    if (tid < count - pieces * 8) elements[pieces * 8 + tid] = x[pieces * 8 + tid];
    __syncthreads();
    barrier_wait(barrier, 0);
    if (tid < runs) {
        T *const own = elements + tid * LENGTH;
        float kept[LENGTH], top = -POSITIVE_INFINITY, sum = 0.0f;
#pragma unroll
        for (int i = 0; i < LENGTH; ++i) {
            kept[i] = upcast(own[i]);
            // A NaN is lost here, and shows in the sum.
            top = max(top, kept[i]);
        }
#pragma unroll
        for (int i = 0; i < LENGTH; ++i) {
            const float shifted = kept[i] - top, term = exponential<T, LIFT>(shifted);
            kept[i] = LOG ? shifted : term;
            sum += term;
        }
        const float last = LOG ? log(sum) : reciprocal(sum);
#pragma unroll
        for (int i = 0; i < LENGTH; ++i) own[i] = downcast<T>(LOG ? kept[i] - last : kept[i] * last);
    }
    __syncthreads();
    T *const y = static_cast<T *>(a.y) + first * LENGTH;
    for (int p = tid; p < pieces; p += THREADS)
        reinterpret_cast<Piece *>(y)[p] = reinterpret_cast<const Piece *>(elements)[p];
    if (tid < count - pieces * 8) y[pieces * 8 + tid] = elements[pieces * 8 + tid];
}
