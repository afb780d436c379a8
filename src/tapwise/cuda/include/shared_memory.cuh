// Addresses of shared memory, and where swizzled pieces lie there.
#pragma once

#define DEVICE __device__ __forceinline__

DEVICE unsigned shared_address(const void *pointer) { return static_cast<unsigned>(__cvta_generic_to_shared(pointer)); }

// Where byte `at` of a row lies in an array of rows of SPAN bytes, whose 16-byte pieces are swizzled so that eight
// rows' pieces lie in eight groups of banks.
template <int SPAN> DEVICE unsigned swizzled(int row, int at) {
    const int mask = SPAN == 128 ? row & 7 : SPAN == 64 ? row >> 1 & 3 : row >> 2 & 1;
    return row * SPAN + ((at / 16 ^ mask) << 4) + at % 16;
}
