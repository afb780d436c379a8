// Filters of cuda.joined_pixels: of `pixels` outputs beside each other, over as many pixels of x whose channels lie
// side by side.
#include "activation.cuh"
#include "grid.cuh"

struct JoinedFilters {
    const void *w;
    void *y;
    // w's sizes, and strides in elements. `taps_w`: of the joined filters along a row, whose first one reads `ahead`
    // groups of pixels before the one of the same number.
    long long k, c, r, s, step_k, step_c, step_r, step_s, pixels, taps_w, ahead, stride_w, pad_w, dilation_w;
};

// (pixel of y, k; r; group of pixels; pixel of x, c) in y, a thread an element; zeros where a pixel has no tap.
template <typename T> DEVICE void join_filters(const JoinedFilters &a) {
    begin_dependent();
    const unsigned k = a.k, c = a.c, r = a.r, taps_w = a.taps_w, pixels = a.pixels, row = pixels * c;
    const unsigned count = pixels * k * r * taps_w * row;
    for (unsigned i = blockIdx.x * blockDim.x + threadIdx.x; i < count; i += gridDim.x * blockDim.x) {
        const unsigned tap = i / row, rest = i - tap * row, of_x = rest / c, channel = rest - of_x * c;
        const unsigned line = tap / taps_w, group = tap - line * taps_w, filter = line / r, h = line - filter * r;
        const unsigned of_y = filter / k;
        const int distance =
                      ((int)group - (int)a.ahead) * (int)pixels + (int)of_x - (int)(of_y * a.stride_w) + (int)a.pad_w,
                  v = distance / (int)a.dilation_w;
        const bool real = distance >= 0 && distance % (int)a.dilation_w == 0 && v < (int)a.s;
        const T *const from = static_cast<const T *>(a.w) + (filter - of_y * k) * a.step_k + channel * a.step_c +
                              h * a.step_r + v * a.step_s;
        static_cast<T *>(a.y)[i] = real ? *from : downcast<T>(typename Arithmetic<T>::type(0));
    }
}
