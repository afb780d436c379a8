// tma.cuh's stores and barriers of parts of a block, and hopper.cuh: included by emulated.h.

// Boxes from shared memory, which are read when they are waited for: what writes there too early shows.
void store_box(const void *map, unsigned from, int filter, int group, int pixel);
void store_pixels(const void *map, unsigned from, int c, int w, int h, int n);
inline void store_box(const void *map, unsigned from, int c, int w, int h, int n) {
    store_pixels(map, from, c, w, h, n);
}
void commit_stores();
void wait_for_boxes(int pending);
template <int PENDING> inline void wait_for_stores() { wait_for_boxes(PENDING); }
inline void wait_for_all_stores() { wait_for_boxes(0); }

// This thread's copies by cp.async, then its arrival.
inline void arrive_with_copies(unsigned barrier) {
    cp_async_commit();
    cp_async_wait<0>();
    barrier_arrive(barrier);
}

// Residuals by TMA and maps of five axes are not emulated.
inline void copy_pixels_once(unsigned, const void *, unsigned, int, int, int, int) { fail("a residual by TMA"); }
inline void copy_pixels(unsigned, const void *, unsigned, int, int, int, int, int, int, int) { fail("five axes"); }
inline void copy_box(unsigned, const void *, unsigned, int, int, int, int, int) { fail("five axes"); }

// Named barriers of some of a block's threads.
void arrive_part(int id, int threads);
void sync_part(int id, int threads);

template <int COUNT> inline void release_registers() {}
template <int COUNT> inline void take_registers() {}
unsigned cluster_rank();

// Matrix instructions of warpgroups, of 16 bits. They read shared memory when they are waited for, so what writes there
// too early shows.
template <int SPAN> inline unsigned long long transposed_descriptor(unsigned address, unsigned distance) {
    if (address >> 18 || distance >> 18 || address % 16 || distance % 16) fail("no descriptor of such an operand");
    return (unsigned long long)(address >> 4) | (unsigned long long)(distance >> 4) << 16 |
           (unsigned long long)(SPAN / 2) << 32 | (SPAN == 128 ? 1ull : 2ull) << 62;
}
template <int SPAN> inline unsigned long long descriptor(unsigned address) {
    if (address >> 18 || address % 16) fail("no descriptor of such an operand");
    return (unsigned long long)(address >> 4) | 1ull << 16 | (unsigned long long)(SPAN / 2) << 32 |
           (SPAN == 128  ? 1ull
            : SPAN == 64 ? 2ull
                         : 3ull)
               << 62;
}
inline void wgmma_fence() {}
void wgmma_commit();
void multiply_later(float *d, int sums, unsigned long long a, unsigned long long b, bool add);
void wait_for_multiplies(int pending);
template <int SUMS> inline void wgmma(float (&d)[SUMS], unsigned long long a, unsigned long long b, int add) {
    multiply_later(d, SUMS, a, b, add != 0);
}
template <int PENDING> inline void wgmma_wait() { wait_for_multiplies(PENDING); }
template <int STEPS, int N> inline void keep_sums(float (&)[STEPS][N]) {}
template <int STEPS, int N> inline void wait_for_products(float (&)[STEPS][N]) { wgmma_wait<0>(); }

// Four 8 x 8 matrices of 16-bit elements from a warp's registers; each lane gives one row's address.
void store_matrices(unsigned to, const unsigned (&v)[4], bool transposed);
template <bool TRANSPOSED> inline void store_matrices(unsigned to, const unsigned (&v)[4]) {
    store_matrices(to, v, TRANSPOSED);
}
