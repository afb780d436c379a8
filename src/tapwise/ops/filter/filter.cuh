// What kernels of filters share: where elements beyond the edges come from, and how a sum becomes an element.
#pragma once

#include "types.cuh"

enum Mode { REFLECT, CONSTANT, NEAREST, MIRROR, WRAP };
enum Op { SUM, LARGEST, SMALLEST };

// The element that stands for one beyond an edge, or -1 for the constant.
__device__ __forceinline__ Coordinate source_index(Coordinate index, Coordinate length, int mode) {
    if ((UnsignedCoordinate)index < (UnsignedCoordinate)length) return index;
    if (mode == CONSTANT) return -1;
    if (mode == NEAREST) return index < 0 ? 0 : length - 1;
    const Coordinate period = mode == WRAP ? length : mode == MIRROR ? max(Coordinate(1), 2 * length - 2) : 2 * length;
    const Coordinate rest = index % period, reflected = rest < 0 ? rest + period : rest;
    return reflected < length ? reflected : period - reflected - (mode == MIRROR ? 0 : 1);
}

// The low bits of an integer that a sum is truncated to, or, where it is rounded (DOWN), the next one that is not
// larger. CLIP: low is more than the least of 32 bits.
template <typename T, bool LARGE, bool CLIP, bool DOWN = CLIP, typename A>
__device__ __forceinline__ T to_integer(A value, A low, A high) {
    // By way of the signed number with the same bits: 32 of them hold what float sums may be. They end at their
    // least, and NaN becomes 0, as far as the low bits tell.
    constexpr bool LESS = DOWN && T(-1) < T(0);
    if constexpr (sizeof(A) == 4) {
        if constexpr (CLIP) value = max(value, low);
        value = min(value, high);
        return T((int)(LESS ? floor(value) : value));
    }
    value = value > low ? value : low;
    value = value < high ? value : high;
    if (LESS) value = floor(value);
    if (LARGE && value >= A(9223372036854775808.0)) value -= A(18446744073709551616.0);
    return T((long long)value);
}

// A sum in the result's type. Integers are truncated towards zero, after what makes up for the sum's roundings, and
// keep their low bits.
template <typename T, bool INTEGRAL, bool LARGE, bool CLIP, bool DOWN = CLIP, typename A>
__device__ __forceinline__ T store(A value, A low, A high, A epsilon) {
    if constexpr (!INTEGRAL) {
        return Arithmetic<T>::narrow(value);
    } else {
        return to_integer<T, LARGE, CLIP, DOWN>(value + copysign(epsilon, value), low, high);
    }
}
