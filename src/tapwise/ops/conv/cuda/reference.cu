// float64 from the definition, one thread an element of the result, and the same sum of absolute values.
//
// Images by strides in elements, so both memory orders; w (k, c / groups, r, s), the results dense.
#include "types.cuh"

struct Reference {
    const void *x, *w;
    double *y, *magnitude;
    long long n, c, height, width, k, r, s, p, q;
    long long stride_h, stride_w, pad_h, pad_w, dilation_h, dilation_w, groups;
    // Of x, and of dy.
    long long step_n, step_c, step_h, step_w, dy_n, dy_k, dy_p, dy_q;
};

struct Sum {
    double sum = 0, size = 0;

    template <typename T> __device__ void add(T left, T right) {
        const double product = upcast(left) * upcast(right);
        sum += product;
        size += fabs(product);
    }
};

// One element of y (n, k, p, q) of x and w.
template <typename T> __device__ Sum fprop(const Reference &a, long long i) {
    const long long group_c = a.c / a.groups, group_k = a.k / a.groups;
    const long long q = i % a.q, p = i / a.q % a.p, k = i / a.q / a.p % a.k, n = i / a.q / a.p / a.k;
    const T *x = static_cast<const T *>(a.x) + n * a.step_n + k / group_k * group_c * a.step_c;
    const T *w = static_cast<const T *>(a.w) + k * group_c * a.r * a.s;
    Sum found;
    for (long long r = 0; r < a.r; ++r) {
        const long long h = p * a.stride_h - a.pad_h + r * a.dilation_h;
        if (h < 0 || h >= a.height) continue;
        for (long long s = 0; s < a.s; ++s) {
            const long long v = q * a.stride_w - a.pad_w + s * a.dilation_w;
            if (v < 0 || v >= a.width) continue;
            for (long long c = 0; c < group_c; ++c)
                found.add(x[c * a.step_c + h * a.step_h + v * a.step_w], w[(c * a.r + r) * a.s + s]);
        }
    }
    return found;
}

// One element of dx (n, c, h, w) of dy, which is a.x, and w.
template <typename T> __device__ Sum dgrad(const Reference &a, long long i) {
    const long long group_c = a.c / a.groups, group_k = a.k / a.groups;
    const long long v = i % a.width, h = i / a.width % a.height, c = i / a.width / a.height % a.c;
    const long long n = i / a.width / a.height / a.c, k0 = c / group_c * group_k;
    const T *dy = static_cast<const T *>(a.x) + n * a.dy_n + k0 * a.dy_k;
    const T *w = static_cast<const T *>(a.w) + (k0 * group_c + c % group_c) * a.r * a.s;
    Sum found;
    for (long long r = 0; r < a.r; ++r) {
        const long long top = h + a.pad_h - r * a.dilation_h, p = top / a.stride_h;
        if (top < 0 || top % a.stride_h || p >= a.p) continue;
        for (long long s = 0; s < a.s; ++s) {
            const long long left = v + a.pad_w - s * a.dilation_w, q = left / a.stride_w;
            if (left < 0 || left % a.stride_w || q >= a.q) continue;
            for (long long k = 0; k < group_k; ++k)
                found.add(dy[k * a.dy_k + p * a.dy_p + q * a.dy_q], w[(k * group_c * a.r + r) * a.s + s]);
        }
    }
    return found;
}

// One element of dw (k, c / groups, r, s) of x, and of dy, which is a.w.
template <typename T> __device__ Sum wgrad(const Reference &a, long long i) {
    const long long group_c = a.c / a.groups, group_k = a.k / a.groups;
    const long long s = i % a.s, r = i / a.s % a.r, c = i / a.s / a.r % group_c, k = i / a.s / a.r / group_c;
    const T *x = static_cast<const T *>(a.x) + (k / group_k * group_c + c) * a.step_c;
    const T *dy = static_cast<const T *>(a.w) + k * a.dy_k;
    Sum found;
    for (long long n = 0; n < a.n; ++n)
        for (long long p = 0; p < a.p; ++p) {
            const long long h = p * a.stride_h - a.pad_h + r * a.dilation_h;
            if (h < 0 || h >= a.height) continue;
            for (long long q = 0; q < a.q; ++q) {
                const long long v = q * a.stride_w - a.pad_w + s * a.dilation_w;
                if (v < 0 || v >= a.width) continue;
                found.add(x[n * a.step_n + h * a.step_h + v * a.step_w], dy[n * a.dy_n + p * a.dy_p + q * a.dy_q]);
            }
        }
    return found;
}

enum Direction { FPROP, DGRAD, WGRAD };

template <typename T, Direction DIRECTION> __device__ __forceinline__ void reference(const Reference &a) {
    const long long total = DIRECTION == FPROP   ? a.n * a.k * a.p * a.q
                            : DIRECTION == DGRAD ? a.n * a.c * a.height * a.width
                                                 : a.k * (a.c / a.groups) * a.r * a.s;
    for (long long i = blockIdx.x * (long long)blockDim.x + threadIdx.x; i < total;
         i += (long long)gridDim.x * blockDim.x) {
        const Sum found = DIRECTION == FPROP ? fprop<T>(a, i) : DIRECTION == DGRAD ? dgrad<T>(a, i) : wgrad<T>(a, i);
        a.y[i] = found.sum;
        a.magnitude[i] = found.size;
    }
}
