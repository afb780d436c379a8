// What the kernels of im2col and col2im take, and how a thread stores neighbours.
#pragma once

#include "grid.cuh"
#include "types.cuh"

struct Patches {
    const void *x;
    void *y;
    long long planes, size[3], kernel[3], out[3], stride[3], pad[3], dilation[3];
};

template <typename T, int VECTOR> struct __align__(sizeof(T) * VECTOR) Pack { T item[VECTOR]; };

template <int COUNT> struct Count { static constexpr int value = COUNT; };

// STREAM: what is written leaves the cache before all else.
template <bool STREAM, typename P> __device__ __forceinline__ void store(P *to, const P &values) {
    if constexpr (STREAM && sizeof(P) == 16)
        __stcs(reinterpret_cast<uint4 *>(to), reinterpret_cast<const uint4 &>(values));
    else if constexpr (STREAM && sizeof(P) == 8)
        __stcs(reinterpret_cast<uint2 *>(to), reinterpret_cast<const uint2 &>(values));
    else if constexpr (STREAM && sizeof(P) == 4)
        __stcs(reinterpret_cast<unsigned *>(to), reinterpret_cast<const unsigned &>(values));
    else *to = values;
}
