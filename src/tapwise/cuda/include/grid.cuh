// Launches that follow each other (before compute capability 9.0 nothing is done for them), and clusters of blocks.
#pragma once

#include "shared_memory.cuh"

// Numbers that are worked out here, and no later: in front of a wait. ptxas would move them behind it, were there not
// something that depends on them: a sleep of no time, if they happen to have these bits.
template <typename... Numbers> DEVICE void work_out(Numbers... numbers) {
    unsigned bits = 0;
    ((bits ^= (unsigned)numbers), ...);
    asm volatile("{ .reg .pred p; setp.eq.u32 p, %0, 0x9e3779b9; @p nanosleep.u32 0; }" ::"r"(bits));
}

// Programmatic dependent launch: what ran before is done; what comes next may be placed.
DEVICE void wait_for_previous() {
#if __CUDA_ARCH__ >= 900
    asm volatile("griddepcontrol.wait;" ::: "memory");
#endif
}
DEVICE void let_next_begin() {
#if __CUDA_ARCH__ >= 900
    asm volatile("griddepcontrol.launch_dependents;" ::: "memory");
#endif
}
// `early`: what comes next may take what others leave while this launch still waits: where no multiprocessor has room
// for more blocks than its share, so that none gets more.
// BESIDE: the kernel is of a launch that needs nothing of the one before it (below).
DEVICE void begin_dependent(bool early = false) {
#ifdef BESIDE
    let_next_begin();
#else
    if (early) let_next_begin();
    wait_for_previous();
    if (!early) let_next_begin();
#endif
}
// A launch that needs nothing of the one before it, which began behind all that both need: it begins at once, and ends
// behind that one, so that what waits for the last of such launches waits for all.
template <bool INDEPENDENT> DEVICE void begin_beside() {
    if (!INDEPENDENT) wait_for_previous();
    let_next_begin();
}
template <bool INDEPENDENT> DEVICE void end_beside() {
    if (INDEPENDENT && blockIdx.x == 0) wait_for_previous();
}

// Clusters.
DEVICE unsigned cluster_rank() {
    unsigned rank;
    asm volatile("mov.u32 %0, %%cluster_ctarank;" : "=r"(rank));
    return rank;
}
DEVICE void cluster_arrive() { asm volatile("barrier.cluster.arrive.release.aligned;" ::: "memory"); }
// Nothing of this block's is to be seen by the others behind it: it waits for no store.
DEVICE void cluster_arrive_relaxed() { asm volatile("barrier.cluster.arrive.relaxed.aligned;" ::: "memory"); }
DEVICE void cluster_wait() { asm volatile("barrier.cluster.wait.acquire.aligned;" ::: "memory"); }
// The same place in the shared memory of another block of the cluster.
template <typename T> DEVICE const T *in_block_of_rank(const T *place, int rank) {
    const T *there;
    asm volatile("mapa.u64 %0, %1, %2;" : "=l"(there) : "l"(place), "r"(rank));
    return there;
}
