// Copies from global to shared memory that run beside arithmetic (compute capability 8.0 and newer).
#pragma once

#include "pieces.cuh"

// BYTES (4, 8 or 16, both addresses multiples of it) from global memory, or zeros where `real` is false.
template <int BYTES>
__device__ __forceinline__ void copy_async(void *shared, const void *global, bool real) {
    copy_piece<BYTES>(shared_address(shared), global, real);
}

// Ends a group of copies.
__device__ __forceinline__ void commit_copies() { asm volatile("cp.async.commit_group;" ::: "memory"); }

// Waits until at most PENDING groups of this thread are under way.
template <int PENDING>
__device__ __forceinline__ void wait_copies() {
    asm volatile("cp.async.wait_group %0;" ::"n"(PENDING) : "memory");
}

// The launch before has ended, and the next may be placed (compute capability 9.0 and newer).
__device__ __forceinline__ void begin_dependent() {
#if __CUDA_ARCH__ >= 900
    asm volatile("griddepcontrol.wait;" ::: "memory");
    asm volatile("griddepcontrol.launch_dependents;" ::: "memory");
#endif
}
