// Pieces of lines in shared memory: how they come there asynchronously, and where they lie.
#pragma once

#define DEVICE __device__ __forceinline__

DEVICE unsigned shared_address(const void *pointer) { return static_cast<unsigned>(__cvta_generic_to_shared(pointer)); }

// BYTES of a piece, or zeros.
template <int BYTES>
DEVICE void copy_piece(unsigned to, const void *from, bool real) {
    const int size = real ? BYTES : 0;
    if constexpr (BYTES == 16)
        asm volatile("cp.async.cg.shared.global [%0], [%1], 16, %2;" ::"r"(to), "l"(from), "r"(size) : "memory");
    else
        asm volatile("cp.async.ca.shared.global [%0], [%1], %2, %3;" ::"r"(to), "l"(from), "n"(BYTES), "r"(size) : "memory");
}

// Where byte `at` of a line lies in an array of lines of SPAN bytes, whose 16-byte pieces are swizzled so that eight lines'
// pieces lie in eight groups of banks.
template <int SPAN>
DEVICE unsigned swizzled(int line, int at) {
    const int turn = SPAN == 128 ? line & 7 : SPAN == 64 ? line >> 1 & 3 : line >> 2 & 1;
    return line * SPAN + ((at / 16 ^ turn) << 4) + at % 16;
}
