// Copies from global to shared memory that run beside arithmetic (compute capability 8.0 and newer).
#pragma once

#include "grid.cuh"

// BYTES (4, 8 or 16, both addresses multiples of it) from global memory, or zeros where `real` is false.
template <int BYTES> DEVICE void cp_async(unsigned to, const void *from, bool real) {
    const int size = real ? BYTES : 0;
    if constexpr (BYTES == 16)
        asm volatile("cp.async.cg.shared.global [%0], [%1], 16, %2;" ::"r"(to), "l"(from), "r"(size) : "memory");
    else
        asm volatile("cp.async.ca.shared.global [%0], [%1], %2, %3;" ::"r"(to), "l"(from), "n"(BYTES), "r"(size)
                     : "memory");
}
// 16 bytes by way of L1, for what other threads of the multiprocessor read, too.
DEVICE void cp_async_through_l1(unsigned to, const void *from, bool real) {
    const int size = real ? 16 : 0;
    asm volatile("cp.async.ca.shared.global [%0], [%1], 16, %2;" ::"r"(to), "l"(from), "r"(size) : "memory");
}
// Of 16 bytes the first `bytes`, zeros behind them.
template <int BYTES> DEVICE void cp_async_part(unsigned to, const void *from, int bytes) {
    static_assert(BYTES == 16);
    const int size = min(max(bytes, 0), BYTES);
    asm volatile("cp.async.cg.shared.global [%0], [%1], 16, %2;" ::"r"(to), "l"(from), "r"(size) : "memory");
}
template <int BYTES> DEVICE void cp_async(void *to, const void *from, bool real) {
    cp_async<BYTES>(shared_address(to), from, real);
}

// Ends a group of copies.
DEVICE void cp_async_commit() { asm volatile("cp.async.commit_group;" ::: "memory"); }

// Waits until at most PENDING groups of this thread are under way.
template <int PENDING> DEVICE void cp_async_wait() {
    asm volatile("cp.async.wait_group %0;" ::"n"(PENDING) : "memory");
}
