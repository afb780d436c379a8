// An array of up to five axes into another of its shape, both by strides in elements; zeros where x is null.
struct Copy {
    const void *x;
    void *y;
    long long total, shape[5], from[5], to[5];
};

template <typename T> __device__ __forceinline__ void copy(const Copy &a) {
    const long long step = (long long)gridDim.x * blockDim.x;
    for (long long i = blockIdx.x * (long long)blockDim.x + threadIdx.x; i < a.total; i += step) {
        long long rest = i, from = 0, to = 0;
#pragma unroll
        for (int axis = 4; axis >= 0; --axis) {
            const long long at = rest % a.shape[axis];
            rest /= a.shape[axis];
            from += at * a.from[axis];
            to += at * a.to[axis];
        }
        static_cast<T *>(a.y)[to] = a.x ? static_cast<const T *>(a.x)[from] : T(0);
    }
}
