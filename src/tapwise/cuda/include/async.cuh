// Copies from global to shared memory that run beside arithmetic (compute capability 8.0 and newer).
#pragma once

// BYTES (4, 8 or 16, both addresses multiples of it) from global memory, or zeros where `real` is false.
template <int BYTES>
__device__ __forceinline__ void copy_async(void *shared, const void *global, bool real) {
    const unsigned to = static_cast<unsigned>(__cvta_generic_to_shared(shared));
    const int size = real ? BYTES : 0;
    if constexpr (BYTES == 16)
        asm volatile("cp.async.cg.shared.global [%0], [%1], 16, %2;" ::"r"(to), "l"(global), "r"(size) : "memory");
    else
        asm volatile("cp.async.ca.shared.global [%0], [%1], %2, %3;" ::"r"(to), "l"(global), "n"(BYTES), "r"(size)
                     : "memory");
}

// Ends a group of copies.
__device__ __forceinline__ void commit_copies() { asm volatile("cp.async.commit_group;" ::: "memory"); }

// Waits until at most PENDING groups of this thread are under way.
template <int PENDING>
__device__ __forceinline__ void wait_copies() {
    asm volatile("cp.async.wait_group %0;" ::"n"(PENDING) : "memory");
}
