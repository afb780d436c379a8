// dx from the results of its phases: (n, c, height, width) of slots with every stride-th row and column, dense.
#include "activation.cuh"
#include "grid.cuh"

struct Join {
    const void *parts, *bias;
    void *y;
    // `across`: phases of a row. Bit i of `empty`: no tap meets phase i. `slot`: elements from one's result to the
    // next's.
    long long n, c, height, width, stride_h, stride_w, across, slot, empty;
};

// One thread a piece of V elements: neighbours in channels (LAST), or one in a row (V = 1).
template <typename T, bool LAST, int V, int ACTIVATION, typename I>
__device__ __forceinline__ void join_phases(const Join &a) {
    using A = typename Arithmetic<T>::type;
    using Piece = Neighbours<T, V>;
    begin_dependent();
    const I pieces = LAST ? (I)a.c / V : 1, channels = LAST ? 1 : (I)a.c;
    const I height = a.height, width = a.width, stride_h = a.stride_h, stride_w = a.stride_w;
    const I total = (I)a.n * channels * height * width * pieces;
    for (I at = blockIdx.x * (I)blockDim.x + threadIdx.x; at < total; at += gridDim.x * (I)blockDim.x) {
        const I piece = at % pieces, v = at / pieces % width, h = at / pieces / width % height;
        const I plane = at / pieces / width / height;
        const I a_h = h % stride_h, a_w = v % stride_w, phase = a_h * (I)a.across + a_w;
        Piece found;
        if (a.empty >> phase & 1) {
#pragma unroll
            for (int i = 0; i < V; ++i)
                found.v[i] =
                    finish<T, ACTIVATION>(A(0), static_cast<const T *>(a.bias), static_cast<const T *>(nullptr),
                                          LAST ? piece * V + i : plane % channels, 0);
        } else {
            const I rows = (height - a_h + stride_h - 1) / stride_h, columns = (width - a_w + stride_w - 1) / stride_w;
            const I place = ((plane * rows + h / stride_h) * columns + v / stride_w) * pieces + piece;
            found = *reinterpret_cast<const Piece *>(static_cast<const T *>(a.parts) + phase * a.slot +
                                                     (long long)place * V);
        }
        *reinterpret_cast<Piece *>(static_cast<T *>(a.y) + (long long)at * V) = found;
    }
}
