// Filters on pictures: one thread an element of the result, which goes through a list of taps.
//
// x, y (depth, height, width * channels), dense. A tap is its place in the window, 20 bits an axis, and its weight.
// Where the whole window lies inside, places are distances in memory; else each tap finds its element by the picture's
// modes.
#include "ops/filter/filter.cuh"

struct Filter {
    const void *x, *list;
    void *y;
    long long depth, height, width, channels, size[3], before[3], mode[3], taps;
};

template <typename A, typename X> __device__ __forceinline__ A widened(X value) { return A(value); }
#ifdef WITH_HALF
template <typename A> __device__ __forceinline__ A widened(__half value) { return A(upcast(value)); }
#endif

// X, Y: element types; A: the sums'; INTEGRAL: Y holds integers, LARGE of 64 bits without a sign; TRUNCATE: Y is A, and
// what it gets is truncated to integers; CLIP: it is rounded. I counts elements.
template <typename X, typename Y, typename A, int OP, bool INTEGRAL, bool LARGE, bool TRUNCATE, bool CLIP, typename I>
__device__ __forceinline__ void filter(const Filter &a) {
    const Coordinate depth = a.depth, height = a.height, width = a.width, channels = a.channels;
    const X *x = static_cast<const X *>(a.x);
    Y *y = static_cast<Y *>(a.y);
    // cval, low, high, start, epsilon, how many taps there are; then places and weights, each with room for all of the
    // window.
    const double *constants = static_cast<const double *>(a.list);
    const int taps = constants[5];
    const A cval = constants[0], low = constants[1], high = constants[2], start = constants[3], epsilon = constants[4];
    const long long *places = static_cast<const long long *>(a.list) + 6;
    const double *weights = constants + 6 + a.taps;
    const I row = (I)width * channels, total = (I)depth * height * row, step = (I)gridDim.x * blockDim.x;
    for (I i = blockIdx.x * (I)blockDim.x + threadIdx.x; i < total; i += step) {
        const Coordinate c = i % channels, v = i / channels % width, h = i / row % height, d = i / row / height;
        const Coordinate d0 = d - (Coordinate)a.before[0], h0 = h - (Coordinate)a.before[1],
                         v0 = v - (Coordinate)a.before[2];
        const bool inside = d0 >= 0 && d0 + (Coordinate)a.size[0] <= depth && h0 >= 0 &&
                            h0 + (Coordinate)a.size[1] <= height && v0 >= 0 && v0 + (Coordinate)a.size[2] <= width;
        A sum = OP == SUM ? start : A(0);
        auto add = [&](int tap, A value) {
            if constexpr (OP == SUM) sum += A(weights[tap]) * value;
            else if (tap == 0 || (OP == LARGEST ? value > sum : value < sum)) sum = value;
        };
        for (int tap = 0; tap < taps; ++tap) {
            const long long place = places[tap];
            Coordinate dd = d0 + (Coordinate)(place >> 40), hh = h0 + (Coordinate)(place >> 20 & 0xfffff),
                       vv = v0 + (Coordinate)(place & 0xfffff);
            if (!inside) {
                dd = source_index(dd, depth, a.mode[0]);
                hh = source_index(hh, height, a.mode[1]);
                vv = source_index(vv, width, a.mode[2]);
                if (dd < 0 || hh < 0 || vv < 0) {
                    add(tap, cval);
                    continue;
                }
            }
            add(tap, widened<A>(x[((I)dd * height + hh) * row + (I)vv * channels + c]));
        }
        if constexpr (TRUNCATE) {
            y[i] = trunc(sum + copysign(epsilon, sum));
        } else {
            y[i] = store<Y, INTEGRAL, LARGE, true, CLIP>(sum, low, high, epsilon);
        }
    }
}
