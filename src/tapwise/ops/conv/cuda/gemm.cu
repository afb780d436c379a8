// y = filters times columns, for each image and group: the second half of im2col + GEMM.
//
// w (groups, m, depth), columns (batch, groups, depth, windows), y (batch, groups, m, windows), all dense; m filters of
// a group, depth = channels of a group times taps. SHARED: a block computes M x N outputs; M x DEPTH of the filters and
// DEPTH x N of the columns at a time lie in shared memory, and a thread has TM x TN sums in registers: neighbours in m,
// and N / TN apart along the windows, so that a warp reads neighbours. Else a thread has one output and reads both
// operands from global memory. WIDE: which windows make up a block's N, as ACROSS in partition.cuh, in an image of
// rows x width windows.
#include "activation.cuh"
#include "partition.cuh"

struct Gemm {
    const void *x, *w;
    void *y;
    const void *bias, *residual;
    long long batch, groups, m, windows, depth, tiles_m, tiles_n, rows, width;
};

template <typename T, bool SHARED, int M, int N, int DEPTH, int TM, int TN, int WIDE, int ACTIVATION>
__device__ __forceinline__ void gemm(const Gemm &a) {
    using A = typename Arithmetic<T>::type;
    constexpr int ACROSS = N / TN, THREADS = M / TM * ACROSS;
    const T *bias = static_cast<const T *>(a.bias), *residual = static_cast<const T *>(a.residual);
    const int tid = threadIdx.x, tx = tid % ACROSS, ty = tid / ACROSS, depth = a.depth;
    const int m0 = blockIdx.x % (unsigned)a.tiles_m * M, m_end = a.m;
    const unsigned tile = blockIdx.x / (unsigned)a.tiles_m;
    const long long n0 = (long long)tile * N;
    auto window = [&](int i) { return WIDE ? window_of<N, WIDE>(tile, i, a.rows, a.width) : n0 + i; };
#pragma unroll 1
    for (long long image = blockIdx.z; image < a.batch * a.groups; image += gridDim.z) {
        const long long group = image % a.groups;
        const T *w = static_cast<const T *>(a.w) + group * a.m * a.depth;
        const T *x = static_cast<const T *>(a.x) + image * a.depth * a.windows;
        A sum[TM][TN];
#pragma unroll
        for (int i = 0; i < TM; ++i)
#pragma unroll
            for (int j = 0; j < TN; ++j) sum[i][j] = A(0);
        if constexpr (SHARED) {
            // One column more, so that a column of filters is not written to one bank.
            __shared__ A filters[DEPTH][M + 1], columns[DEPTH][N];
#pragma unroll 1
            for (int d0 = 0; d0 < depth; d0 += DEPTH) {
                __syncthreads();
#pragma unroll 4
                for (int i = tid; i < M * DEPTH; i += THREADS) {
                    const int m = m0 + i / DEPTH, d = d0 + i % DEPTH;
                    filters[i % DEPTH][i / DEPTH] = m < m_end && d < depth ? upcast(w[(long long)m * depth + d]) : A(0);
                }
#pragma unroll 4
                for (int i = tid; i < N * DEPTH; i += THREADS) {
                    const int d = d0 + i / N;
                    const long long n = window(i % N);
                    columns[i / N][i % N] = n < a.windows && d < depth ? upcast(x[d * a.windows + n]) : A(0);
                }
                __syncthreads();
#pragma unroll 2
                for (int d = 0; d < DEPTH; ++d) {
                    A left[TM], right[TN];
#pragma unroll
                    for (int i = 0; i < TM; ++i) left[i] = filters[d][ty * TM + i];
#pragma unroll
                    for (int j = 0; j < TN; ++j) right[j] = columns[d][tx + j * ACROSS];
#pragma unroll
                    for (int i = 0; i < TM; ++i)
#pragma unroll
                        for (int j = 0; j < TN; ++j) sum[i][j] = fma(left[i], right[j], sum[i][j]);
                }
            }
        } else if (window(tx) < a.windows && m0 + ty < m_end) {
            const T *filter = w + (long long)(m0 + ty) * depth, *column = x + window(tx);
            for (int d = 0; d < depth; ++d)
                sum[0][0] = fma(upcast(filter[d]), upcast(column[d * a.windows]), sum[0][0]);
        }
#pragma unroll
        for (int i = 0; i < TM; ++i) {
            const int m = m0 + ty * TM + i;
            if (m >= m_end) break;
            const long long k = group * a.m + m;
#pragma unroll
            for (int j = 0; j < TN; ++j) {
                const long long n = window(tx + j * ACROSS);
                if (WIDE == 0 && n >= a.windows) break;
                if (WIDE > 0 && n >= a.windows) continue;
                const long long at = (image * a.m + m) * a.windows + n;
                static_cast<T *>(a.y)[at] = finish<T, ACTIVATION>(sum[i][j], bias, residual, k, at);
            }
        }
    }
}
