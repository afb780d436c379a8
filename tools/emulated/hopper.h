// tma.cuh's stores and barriers of parts of a block, and hopper.cuh: included by emulated.h.

// Boxes from shared memory, which are read when they are waited for: what writes there too early shows.
inline void store_box(const void *map, unsigned from, int filter, int group, int pixel) {
    current->stores.back().push_back({from, *(const Map *)map, {filter, group, pixel, 0}});
}
inline void store_pixels(const void *map, unsigned from, int c, int w, int h, int n) {
    current->stores.back().push_back({from, *(const Map *)map, {c, w, h, n}});
}
inline void commit_stores() { current->stores.emplace_back(); }
template <int PENDING> inline void wait_for_stores() {
    auto &groups = current->stores;
    while ((int)groups.size() - 1 > PENDING) {
        for (const Store &store : groups.front()) {
            const Map &m = store.map;
            const auto each = [&](const unsigned char *from, unsigned char *to) {
                if (to) memcpy(to, from, m.itemsize);
            };
            for (long long stride : m.strides)
                if (stride % 16) fail("TMA takes strides of 16 bytes");
            if ((uintptr_t)m.address % 16) fail("TMA takes addresses of 16 bytes");
            if (m.windows) for_windows(m, store.from, store.at, {0, 0}, each);
            else for_box(m, store.from, store.at, each);
        }
        groups.erase(groups.begin());
    }
}
inline void wait_for_all_stores() { wait_for_stores<0>(); }

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
struct Named { int arrived = 0, turn = 0; };
constexpr int NAMED = 16;
static std::vector<Named> named(NAMED);
inline void arrive_part(int id, int threads) {
    if (++named.at(id).arrived == threads) named[id].arrived = 0, ++named[id].turn;
}
inline void sync_part(int id, int threads) {
    const int turn = named.at(id).turn;
    arrive_part(id, threads);
    for (int turns = 0; named[id].turn == turn; wait_as(Fiber::READY))
        if (++turns > 100000) fail("a part of a block that nobody completes");
}

template <int COUNT> inline void release_registers() {}
template <int COUNT> inline void take_registers() {}
inline unsigned cluster_rank() { return own_rank; }

// Matrix instructions of warpgroups, of 16 bits. They read shared memory when they are waited for, so what writes there
// too early shows.
static const char *wgmma_text = "";
static bool wgmma_bf16;
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
// Element k of row `at` of an operand, whose rows run along gemm_k, or (`transposed`) lie across it.
inline float operand_element(unsigned long long descriptor, int at, int k, bool transposed) {
    const unsigned start = (descriptor & 0x3fff) << 4, leading = (descriptor >> 16 & 0x3fff) << 4,
                   stride = (descriptor >> 32 & 0x3fff) << 4, span = 256u >> (descriptor >> 62);
    const unsigned wide = span / 2;
    const unsigned place = transposed ? start + at / wide * leading + k / 8 * stride + k % 8 * span + at % wide * 2
                                      : start + at / 8 * stride + at % 8 * span + k * 2;
    unsigned short v;
    memcpy(&v, memory + (place ^ (place >> 7 & span / 16 - 1) << 4), 2);
    return wgmma_bf16 ? widen(bf16{v}) : widen(f16{v});
}
inline void wgmma_fence() {}
inline void wgmma_commit() { current->products.emplace_back(); }
template <int SUMS> inline void wgmma(float (&d)[SUMS], unsigned long long a, unsigned long long b, int add) {
    if (!strstr(wgmma_text, "k16")) fail("operands have 16 bits here");
    current->products.back().push_back({d, SUMS, a, b, add != 0});
}
template <int PENDING> inline void wgmma_wait() {
    const int lane = current->index.x % 32, warp = current->index.x / 32 % 4;
    // "p, 1, 1, A, B": which operands are transposed.
    const char *orders = strstr(wgmma_text, "p, 1, 1, ");
    const bool transposed_a = orders && orders[9] == '1', transposed_b = orders && orders[12] == '1';
    auto &groups = current->products;
    while ((int)groups.size() - 1 > PENDING) {
        for (const Product &product : groups.front())
            for (int high = 0; high < 2; ++high) {
                float row[16];
                for (int k = 0; k < 16; ++k)
                    row[k] = operand_element(product.a, warp * 16 + high * 8 + lane / 4, k, transposed_a);
                for (int i = 0; i < product.sums / 4; ++i)
                    for (int e = 0; e < 2; ++e) {
                        float &sum = product.d[4 * i + 2 * high + e];
                        if (!product.add) sum = 0;
                        for (int k = 0; k < 16; ++k)
                            sum += row[k] * operand_element(product.b, 8 * i + lane % 4 * 2 + e, k, transposed_b);
                    }
            }
        groups.erase(groups.begin());
    }
}
template <int STEPS, int N> inline void keep_sums(float (&)[STEPS][N]) {}
template <int STEPS, int N> inline void wait_for_products(float (&)[STEPS][N]) { wgmma_wait<0>(); }

// Four 8 x 8 matrices of 16-bit elements from a warp's registers; each lane gives one row's address.
template <bool TRANSPOSED> inline void store_matrices(unsigned to, const unsigned (&v)[4]) {
    aligned_or_fail<16>(memory + to);
    current->given[0] = to;
    __syncwarp();
    const int lane = current->index.x % 32;
    for (int i = 0; i < 4; ++i)
        for (int e = 0; e < 2; ++e) {
            const int one = lane / 4, other = lane % 4 * 2 + e;
            const int row = TRANSPOSED ? other : one, column = TRANSPOSED ? one : other;
            const unsigned short element = v[i] >> e * 16;
            memcpy(memory + lane_of(i * 8 + row)->given[0] + column * 2, &element, 2);
        }
    __syncwarp();
}
