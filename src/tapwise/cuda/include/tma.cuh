// Barriers in shared memory, and the tensor memory accelerator that signals them (compute capability 9.0 and newer).
#pragma once

#include "grid.cuh"

// Barriers: `phase` is the parity of the phase that is waited for.
DEVICE void barrier_init(unsigned barrier, int arrivals) {
    asm volatile("mbarrier.init.shared::cta.b64 [%0], %1;" ::"r"(barrier), "r"(arrivals));
}
DEVICE void barrier_expect(unsigned barrier, unsigned bytes) {
    asm volatile("mbarrier.arrive.expect_tx.shared::cta.b64 _, [%0], %1;" ::"r"(barrier), "r"(bytes) : "memory");
}
DEVICE void barrier_arrive(unsigned barrier) {
    asm volatile("mbarrier.arrive.shared::cta.b64 _, [%0];" ::"r"(barrier) : "memory");
}
// At a barrier of a CTA of the cluster, to say that this one has read, not written: a release at the cluster's scope
// would wait for the whole GPU's memory.
DEVICE void barrier_arrive_in_cluster(unsigned barrier) {
    asm volatile("mbarrier.arrive.relaxed.cluster.shared::cluster.b64 _, [%0];" ::"r"(barrier) : "memory");
}
DEVICE void barrier_wait(unsigned barrier, unsigned phase) {
    unsigned done = 0;
    do
        asm volatile("{ .reg .pred p; mbarrier.try_wait.parity.shared::cta.b64 p, [%1], %2; selp.u32 %0, 1, 0, p; }"
                     : "=r"(done)
                     : "r"(barrier), "r"(phase)
                     : "memory");
    while (!done);
}
// The same for what other CTAs of the cluster sent.
DEVICE void barrier_wait_for_cluster(unsigned barrier, unsigned phase) {
    unsigned done = 0;
    do
        asm volatile(
            "{ .reg .pred p; mbarrier.try_wait.parity.acquire.cluster.shared::cta.b64 p, [%1], %2; selp.u32 %0, 1, "
            "0, p; }"
            : "=r"(done)
            : "r"(barrier), "r"(phase)
            : "memory");
    while (!done);
}
DEVICE void publish_barriers() { asm volatile("fence.mbarrier_init.release.cluster;" ::: "memory"); }

// The place of this CTA's shared memory in that of another CTA of the cluster.
DEVICE unsigned address_of_rank(unsigned address, int rank) {
    unsigned there;
    asm volatile("mapa.shared::cluster.u32 %0, %1, %2;" : "=r"(there) : "r"(address), "r"(rank));
    return there;
}
// A number to shared memory of the cluster, whose barrier there counts its bytes.
DEVICE void send(unsigned to, unsigned barrier, float value) {
    asm volatile("st.async.shared::cluster.mbarrier::complete_tx::bytes.f32 [%0], %2, [%1];" ::"r"(to), "r"(barrier),
                 "f"(value)
                 : "memory");
}
DEVICE void send(unsigned to, unsigned barrier, double value) {
    asm volatile("st.async.shared::cluster.mbarrier::complete_tx::bytes.f64 [%0], %2, [%1];" ::"r"(to), "r"(barrier),
                 "d"(value)
                 : "memory");
}
// Four of them, 16 bytes that lie side by side.
DEVICE void send_four(unsigned to, unsigned barrier, float a, float b, float c, float d) {
    asm volatile("st.async.shared::cluster.mbarrier::complete_tx::bytes.v4.f32 [%0], {%2, %3, %4, %5}, [%1];" ::"r"(to),
                 "r"(barrier), "f"(a), "f"(b), "f"(c), "f"(d)
                 : "memory");
}

// A warpgroup's registers for each of its threads.
template <int COUNT> DEVICE void release_registers() {
    asm volatile("setmaxnreg.dec.sync.aligned.u32 %0;" ::"n"(COUNT));
}
template <int COUNT> DEVICE void take_registers() { asm volatile("setmaxnreg.inc.sync.aligned.u32 %0;" ::"n"(COUNT)); }

// Barrier `id` of a part of the CTA.
DEVICE void sync_part(int id, int threads) { asm volatile("bar.sync %0, %1;" ::"r"(id), "r"(threads) : "memory"); }
DEVICE void arrive_part(int id, int threads) { asm volatile("bar.arrive %0, %1;" ::"r"(id), "r"(threads) : "memory"); }

// Copies of boxes from global to shared memory; a box comes whole, zeros where it leaves the tensor.
DEVICE void prefetch_map(const void *map) { asm volatile("prefetch.tensormap [%0];" ::"l"(map) : "memory"); }
// Bytes as they lie: addresses and their number are multiples of 16.
DEVICE void copy_bytes(unsigned to, const void *from, unsigned bytes, unsigned barrier) {
    asm volatile("cp.async.bulk.shared::cluster.global.mbarrier::complete_tx::bytes [%0], [%1], %2, [%3];" ::"r"(to),
                 "l"(from), "r"(bytes), "r"(barrier)
                 : "memory");
}
DEVICE void copy_pixels(unsigned to, const void *map, unsigned barrier, int c, int w, int h, int n, int tap_w,
                        int tap_h) {
    asm volatile(
        "cp.async.bulk.tensor.4d.shared::cluster.global.im2col.mbarrier::complete_tx::bytes [%0], [%1, {%3, %4, %5, "
        "%6}], [%2], {%7, %8};" ::"r"(to),
        "l"(map), "r"(barrier), "r"(c), "r"(w), "r"(h), "r"(n), "h"((short)tap_w), "h"((short)tap_h)
        : "memory");
}
DEVICE void copy_pixels(unsigned to, const void *map, unsigned barrier, int c, int w, int h, int n, int g, int tap_w,
                        int tap_h) {
    asm volatile(
        "cp.async.bulk.tensor.5d.shared::cluster.global.im2col.mbarrier::complete_tx::bytes [%0], [%1, {%3, %4, %5, "
        "%6, %7}], [%2], {%8, %9, %10};" ::"r"(to),
        "l"(map), "r"(barrier), "r"(c), "r"(w), "r"(h), "r"(n), "r"(g), "h"((short)tap_w), "h"((short)tap_h),
        "h"((short)0)
        : "memory");
}
// Windows of 1 x 1 that are read once: they leave L2 first.
DEVICE void copy_pixels_once(unsigned to, const void *map, unsigned barrier, int c, int w, int h, int n) {
    unsigned long long policy;
    asm("createpolicy.fractional.L2::evict_first.b64 %0, 1.0;" : "=l"(policy));
    asm volatile(
        "cp.async.bulk.tensor.4d.shared::cluster.global.im2col.mbarrier::complete_tx::bytes.L2::cache_hint [%0], [%1, "
        "{%3, %4, %5, %6}], [%2], {%7, %7}, %8;" ::"r"(to),
        "l"(map), "r"(barrier), "r"(c), "r"(w), "r"(h), "r"(n), "h"((short)0), "l"(policy)
        : "memory");
}
DEVICE void copy_box(unsigned to, const void *map, unsigned barrier, int c, int w, int h, int n) {
    asm volatile(
        "cp.async.bulk.tensor.4d.shared::cluster.global.tile.mbarrier::complete_tx::bytes [%0], [%1, {%3, %4, %5, "
        "%6}], [%2];" ::"r"(to),
        "l"(map), "r"(barrier), "r"(c), "r"(w), "r"(h), "r"(n)
        : "memory");
}
DEVICE void copy_box(unsigned to, const void *map, unsigned barrier, int c, int w, int h, int n, int g) {
    asm volatile(
        "cp.async.bulk.tensor.5d.shared::cluster.global.tile.mbarrier::complete_tx::bytes [%0], [%1, {%3, %4, %5, "
        "%6, %7}], [%2];" ::"r"(to),
        "l"(map), "r"(barrier), "r"(c), "r"(w), "r"(h), "r"(n), "r"(g)
        : "memory");
}
DEVICE void copy_rows(unsigned to, const void *map, unsigned barrier, int column, int row) {
    asm volatile(
        "cp.async.bulk.tensor.2d.shared::cluster.global.tile.mbarrier::complete_tx::bytes [%0], [%1, {%3, %4}], "
        "[%2];" ::"r"(to),
        "l"(map), "r"(barrier), "r"(column), "r"(row)
        : "memory");
}
// The same to the same place of COUNT CTAs of the cluster, those of the mask, whose barriers there count the bytes.
template <int COUNT>
DEVICE void copy_shared_rows(unsigned to, const void *map, unsigned barrier, int column, int row, unsigned short mask) {
    if constexpr (COUNT == 1) return copy_rows(to, map, barrier, column, row);
    asm volatile(
        "cp.async.bulk.tensor.2d.shared::cluster.global.tile.mbarrier::complete_tx::bytes.multicast::cluster [%0], "
        "[%1, {%3, %4}], [%2], %5;" ::"r"(to),
        "l"(map), "r"(barrier), "r"(column), "r"(row), "h"(mask)
        : "memory");
}
template <int COUNT>
DEVICE void copy_shared_pixels(unsigned to, const void *map, unsigned barrier, int c, int w, int h, int n, int tap_w,
                               int tap_h, unsigned short mask) {
    if constexpr (COUNT == 1) return copy_pixels(to, map, barrier, c, w, h, n, tap_w, tap_h);
    asm volatile(
        "cp.async.bulk.tensor.4d.shared::cluster.global.im2col.mbarrier::complete_tx::bytes.multicast::cluster [%0], "
        "[%1, {%3, %4, %5, %6}], [%2], {%7, %8}, %9;" ::"r"(to),
        "l"(map), "r"(barrier), "r"(c), "r"(w), "r"(h), "r"(n), "h"((short)tap_w), "h"((short)tap_h), "h"(mask)
        : "memory");
}
DEVICE void copy_filters(unsigned to, const void *map, unsigned barrier, int c, int tap, int k) {
    asm volatile(
        "cp.async.bulk.tensor.3d.shared::cluster.global.tile.mbarrier::complete_tx::bytes [%0], [%1, {%3, %4, %5}], "
        "[%2];" ::"r"(to),
        "l"(map), "r"(barrier), "r"(c), "r"(tap), "r"(k)
        : "memory");
}
template <int COUNT>
DEVICE void copy_shared_box(unsigned to, const void *map, unsigned barrier, int c, int w, int h, int n,
                            unsigned short mask) {
    if constexpr (COUNT == 1) return copy_box(to, map, barrier, c, w, h, n);
    asm volatile(
        "cp.async.bulk.tensor.4d.shared::cluster.global.tile.mbarrier::complete_tx::bytes.multicast::cluster [%0], "
        "[%1, {%3, %4, %5, %6}], [%2], %7;" ::"r"(to),
        "l"(map), "r"(barrier), "r"(c), "r"(w), "r"(h), "r"(n), "h"(mask)
        : "memory");
}
template <int COUNT>
DEVICE void copy_shared_filters(unsigned to, const void *map, unsigned barrier, int c, int tap, int k,
                                unsigned short mask) {
    if constexpr (COUNT == 1) return copy_filters(to, map, barrier, c, tap, k);
    asm volatile(
        "cp.async.bulk.tensor.3d.shared::cluster.global.tile.mbarrier::complete_tx::bytes.multicast::cluster [%0], "
        "[%1, {%3, %4, %5}], [%2], %6;" ::"r"(to),
        "l"(map), "r"(barrier), "r"(c), "r"(tap), "r"(k), "h"(mask)
        : "memory");
}

// A box from shared memory to global memory; what leaves the tensor is not written. Stores of a thread go in groups.
DEVICE void store_box(const void *map, unsigned from, int filter, int group, int pixel) {
    asm volatile("cp.async.bulk.tensor.3d.global.shared::cta.tile.bulk_group [%0, {%2, %3, %4}], [%1];" ::"l"(map),
                 "r"(from), "r"(filter), "r"(group), "r"(pixel)
                 : "memory");
}
DEVICE void store_box(const void *map, unsigned from, int c, int w, int h, int n) {
    asm volatile("cp.async.bulk.tensor.4d.global.shared::cta.tile.bulk_group [%0, {%2, %3, %4, %5}], [%1];" ::"l"(map),
                 "r"(from), "r"(c), "r"(w), "r"(h), "r"(n)
                 : "memory");
}
// The same of pixels one behind the other, which go on in the next row and in the next image: windows of 1 x 1.
DEVICE void store_pixels(const void *map, unsigned from, int c, int w, int h, int n) {
    asm volatile(
        "cp.async.bulk.tensor.4d.global.shared::cta.im2col_no_offs.bulk_group [%0, {%2, %3, %4, %5}], [%1];" ::"l"(map),
        "r"(from), "r"(c), "r"(w), "r"(h), "r"(n)
        : "memory");
}
DEVICE void commit_stores() { asm volatile("cp.async.bulk.commit_group;" ::: "memory"); }
// Shared memory of all groups but the PENDING last may be written again.
template <int PENDING> DEVICE void wait_for_stores() {
    asm volatile("cp.async.bulk.wait_group.read %0;" ::"n"(PENDING) : "memory");
}
// All has been written.
DEVICE void wait_for_all_stores() { asm volatile("cp.async.bulk.wait_group 0;" ::: "memory"); }

// What threads wrote to shared memory is there for TMA and the tensor cores.
DEVICE void publish_shared() { asm volatile("fence.proxy.async.shared::cta;" ::: "memory"); }
// The barrier gets this thread's arrival when its copies (cp.async) are there.
DEVICE void arrive_with_copies(unsigned barrier) {
    asm volatile("cp.async.mbarrier.arrive.noinc.shared::cta.b64 [%0];" ::"r"(barrier) : "memory");
}
