// An array of up to five axes into another of its shape, both by strides in elements; zeros where x is null.
#include "grid.cuh"

struct Copy {
    const void *x;
    void *y;
    long long total, shape[5], from[5], to[5];
};

// I counts the elements.
template <typename T, typename I> DEVICE void copy(const Copy &a) {
    begin_dependent();
    const long long step = (long long)gridDim.x * blockDim.x;
    for (long long i = blockIdx.x * (long long)blockDim.x + threadIdx.x; i < a.total; i += step) {
        I rest = (I)i;
        long long from = 0, to = 0;
#pragma unroll
        for (int axis = 4; axis >= 0; --axis) {
            const I size = (I)a.shape[axis];
            if (size == 1) continue;
            const I next = rest / size, at = rest - next * size;
            rest = next;
            from += at * a.from[axis];
            to += at * a.to[axis];
        }
        static_cast<T *>(a.y)[to] = a.x ? static_cast<const T *>(a.x)[from] : T(0);
    }
}
