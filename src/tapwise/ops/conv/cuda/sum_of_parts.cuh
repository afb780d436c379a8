// Parts of a weight gradient's sums, added in a fixed order.
#pragma once

#include "grid.cuh"
#include "types.cuh"

// Of V elements of dw, the sum of every STEP-th part from `part` on; of `count` parts, which lie `pitch` elements
// apart. ONCE of them are loaded at once, of the last few too: a loop over what is left would wait for each.
template <int V, int STEP, int ONCE, typename A>
DEVICE Neighbours<A, V> sum_of_parts(const A *from, long long pitch, int part, int count) {
    Neighbours<A, V> sum{};
#pragma unroll 1
    for (; part < count; part += STEP * ONCE) {
        Neighbours<A, V> some[ONCE];
#pragma unroll
        for (int i = 0; i < ONCE; ++i)
            some[i] = part + i * STEP < count
                          ? *reinterpret_cast<const Neighbours<A, V> *>(from + (part + i * STEP) * pitch)
                          : Neighbours<A, V>{};
#pragma unroll
        for (int i = 0; i < ONCE; ++i)
#pragma unroll
            for (int e = 0; e < V; ++e) sum.v[e] += some[i].v[e];
    }
    return sum;
}
