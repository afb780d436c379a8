// float64 from the definition, one thread an output: y = conv(x, w), magnitude = conv(|x|, |w|).
//
// x by strides in elements, so both memory orders; w (k, c / groups, r, s) dense; y and magnitude (n, k, p, q) dense.
#include "types.cuh"

struct Reference {
    const void *x, *w;
    double *y, *magnitude;
    long long n, c, height, width, k, r, s, p, q;
    long long stride_h, stride_w, pad_h, pad_w, dilation_h, dilation_w, groups;
    long long step_n, step_c, step_h, step_w;
};

template <typename T> __device__ __forceinline__ void reference(const Reference &a) {
    const long long total = a.n * a.k * a.p * a.q;
    const long long group_c = a.c / a.groups, group_k = a.k / a.groups;
    for (long long i = blockIdx.x * (long long)blockDim.x + threadIdx.x; i < total;
         i += (long long)gridDim.x * blockDim.x) {
        const long long q = i % a.q, p = i / a.q % a.p, k = i / a.q / a.p % a.k, n = i / a.q / a.p / a.k;
        const T *x = static_cast<const T *>(a.x) + n * a.step_n + k / group_k * group_c * a.step_c;
        const T *w = static_cast<const T *>(a.w) + k * group_c * a.r * a.s;
        double sum = 0, size = 0;
        for (long long r = 0; r < a.r; ++r) {
            const long long h = p * a.stride_h - a.pad_h + r * a.dilation_h;
            if (h < 0 || h >= a.height) continue;
            for (long long s = 0; s < a.s; ++s) {
                const long long v = q * a.stride_w - a.pad_w + s * a.dilation_w;
                if (v < 0 || v >= a.width) continue;
                for (long long c = 0; c < group_c; ++c) {
                    const double left = upcast(x[c * a.step_c + h * a.step_h + v * a.step_w]);
                    const double right = upcast(w[(c * a.r + r) * a.s + s]);
                    sum += left * right;
                    size += fabs(left * right);
                }
            }
        }
        a.y[i] = sum;
        a.magnitude[i] = size;
    }
}
