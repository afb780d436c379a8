// What CUDA C++ kernels need to run on a CPU, one block after the other, a fiber a thread. Copies of cp.async arrive
// when they are waited for, and shared memory begins as NaN, so a missing wait or barrier shows in the result.
#include <ucontext.h>

#include <cmath>
#include <cstdint>
#include <cstdio>
#include <cstdlib>
#include <cstring>
#include <vector>

#define __device__
#define __host__
#define __global__
#define __forceinline__ inline
#define __launch_bounds__(...)
#define __cluster_dims__(n)
#define __noinline__
#define __grid_constant__
#define __restrict__ __restrict
#define __shared__
#define __align__(n) __attribute__((aligned(n)))
#define DEVICE inline
#define __CUDA_ARCH__ 900

using std::abs, std::copysign, std::erf, std::exp, std::fma, std::max, std::min, std::tanh, std::trunc;

struct uint2 { unsigned x, y; };
struct uint4 { unsigned x, y, z, w; };
struct float2 { float x, y; };
struct float4 { float x, y, z, w; };
inline uint2 make_uint2(unsigned x, unsigned y) { return {x, y}; }
inline uint4 make_uint4(unsigned x, unsigned y, unsigned z, unsigned w) { return {x, y, z, w}; }
inline float2 make_float2(float x, float y) { return {x, y}; }
inline float4 make_float4(float x, float y, float z, float w) { return {x, y, z, w}; }

struct Three { unsigned x = 0, y = 0, z = 0; };
static Three blockIdx, blockDim, gridDim;
constexpr int MOST_SHARED = 256 << 10;
extern "C" {
unsigned char memory[MOST_SHARED] __attribute__((aligned(1024)));
}

template <typename To, typename From> inline To same_bits(From from) {
    static_assert(sizeof(To) == sizeof(From));
    To to;
    memcpy(&to, &from, sizeof to);
    return to;
}
inline unsigned __float_as_uint(float v) { return same_bits<unsigned>(v); }
inline int __float_as_int(float v) { return same_bits<int>(v); }
inline float __uint_as_float(unsigned v) { return same_bits<float>(v); }
inline float __int_as_float(int v) { return same_bits<float>(v); }
inline float __saturatef(float v) { return v > 1 ? 1 : v > 0 ? v : 0; }
inline unsigned __funnelshift_r(unsigned low, unsigned high, unsigned shift) {
    return (unsigned)(((unsigned long long)high << 32 | low) >> (shift & 31));
}
inline int __popcll(long long v) { return __builtin_popcountll(v); }
inline unsigned __byte_perm(unsigned a, unsigned b, unsigned selector) {
    const unsigned long long both = (unsigned long long)b << 32 | a;
    unsigned word = 0;
    for (int i = 0; i < 4; ++i) word |= (unsigned)(both >> (selector >> 4 * i & 7) * 8 & 0xff) << 8 * i;
    return word;
}
inline unsigned __umulhi(unsigned a, unsigned b) { return (unsigned long long)a * b >> 32; }

// Fibers.
struct AsyncCopy {
    void *to;
    const void *from;
    int bytes;
    bool real;
    // From where on there are zeros.
    int most = 16;
};
// A tensor map: its array's address, the bytes of an element, and sizes, strides and box of four axes, as words
// (__init__.py). Of windows the box is channels and pixels, corners (lower and upper, 16 bits each, innermost axis
// first) and steps (16 bits each).
struct Map {
    const unsigned char *address;
    long long itemsize, swizzle, sizes[4], strides[3], box[4], windows;
};
// A box on its way to global memory.
struct Store {
    unsigned from;
    Map map;
    int at[4];
};
// A matrix instruction of a warpgroup, of which each thread has its own sums.
struct Product {
    float *d;
    int sums;
    unsigned long long a, b;
    bool add;
};
struct Fiber {
    ucontext_t context;
    Three index;
    std::vector<char> stack;
    std::vector<std::vector<AsyncCopy>> groups{1};
    std::vector<std::vector<Product>> products{1};
    // Of boxes, by TMA.
    std::vector<std::vector<Store>> stores;
    enum { READY, IN_BLOCK, IN_WARP, IN_CLUSTER, ENDED } state = READY;
    unsigned given[32];
};
static std::vector<Fiber> fibers;
// Blocks of a cluster run one after the other, each until all of its threads wait for the cluster or have ended; a
// block's threads and shared memory lie here while others run.
struct Other {
    std::vector<Fiber> fibers;
    std::vector<unsigned char> memory;
    Three index;
};
static std::vector<Other> cluster;
static unsigned own_rank;
static Fiber *current;
static ucontext_t scheduler;
static void (*entry)(const void *);
static const void *parameters;
#define threadIdx (current->index)

[[noreturn]] inline void fail(const char *why) {
    fprintf(stderr, "block %u %u %u, thread %u: %s\n", blockIdx.x, blockIdx.y, blockIdx.z, current->index.x, why);
    abort();
}
inline void wait_as(decltype(Fiber::READY) state) {
    current->state = state;
    swapcontext(&current->context, &scheduler);
}
inline void __syncthreads() { wait_as(Fiber::IN_BLOCK); }
inline void __syncwarp(unsigned = ~0u) { wait_as(Fiber::IN_WARP); }
inline Fiber *lane_of(int lane) { return &fibers[current->index.x / 32 * 32 + lane]; }

template <typename T> inline T __shfl_sync(unsigned, T value, int lane) {
    memcpy(current->given, &value, sizeof value);
    __syncwarp();
    T other;
    memcpy(&other, lane_of(lane & 31)->given, sizeof other);
    __syncwarp();
    return other;
}
template <typename T> inline T __shfl_xor_sync(unsigned mask, T value, int lanes) {
    return __shfl_sync(mask, value, (int)(current->index.x % 32) ^ lanes);
}
inline int __syncthreads_and(int value) {
    current->given[0] = value;
    __syncthreads();
    int all = 1;
    for (Fiber &fiber : fibers) all &= fiber.given[0] != 0;
    __syncthreads();
    return all;
}
inline bool __all_sync(unsigned mask, bool value) {
    bool all = value;
    for (int lane = 0; lane < 32; ++lane) all &= __shfl_sync(mask, (int)value, lane) != 0;
    return all;
}

static void fiber_main() {
    entry(parameters);
    current->state = Fiber::ENDED;
    swapcontext(&current->context, &scheduler);
}

// float16.cuh.
struct f16 { unsigned short bits; };
struct bf16 { unsigned short bits; };
typedef f16 __half;
inline float widen(f16 v) { return (float)same_bits<_Float16>(v.bits); }
inline float widen(bf16 v) { return __uint_as_float((unsigned)v.bits << 16); }
inline f16 narrow(float v, f16 *) { return {same_bits<unsigned short>((_Float16)v)}; }
inline bf16 narrow(float v, bf16 *) {
    const unsigned b = __float_as_uint(v);
    if (v != v) return {0x7fff};
    return {(unsigned short)(b + 0x7fff + (b >> 16 & 1) >> 16)};
}
template <typename T> struct Element {
    static float to_float(T v) { return widen(v); }
    static T from_float(float v) { return narrow(v, (T *)nullptr); }
    static unsigned pack(float low, float high) { return from_float(low).bits | (unsigned)from_float(high).bits << 16; }
    static unsigned pack_relu(float low, float high) { return pack(low < 0 ? 0 : low, high < 0 ? 0 : high); }
    static unsigned pack_relu6(float low, float high) { return pack_relu(low > 6 ? 6 : low, high > 6 ? 6 : high); }
    static unsigned pack_relu1(float low, float high) { return pack_relu(low > 1 ? 1 : low, high > 1 ? 1 : high); }
};
template <> struct Element<float> {
    static float to_float(float v) { return v; }
    static float from_float(float v) { return v; }
};
inline float __half2float(f16 v) { return widen(v); }
inline f16 __float2half_rn(float v) { return narrow(v, (f16 *)nullptr); }

// shared_memory.cuh and cp_async.cuh.
inline unsigned shared_address(const void *pointer) { return (unsigned)((const unsigned char *)pointer - memory); }
template <int SPAN> inline unsigned swizzled(int row, int at) {
    const int mask = SPAN == 128 ? row & 7 : SPAN == 64 ? row >> 1 & 3 : row >> 2 & 1;
    return row * SPAN + ((at / 16 ^ mask) << 4) + at % 16;
}
template <int BYTES> struct Piece { unsigned v[BYTES > 4 ? BYTES / 4 : 1]; };
template <int BYTES> inline void aligned_or_fail(const void *at) {
    if ((uintptr_t)at % BYTES) fail("an address is not a multiple of the access");
}
template <int BYTES> inline Piece<BYTES> load_global(const void *from) {
    aligned_or_fail<BYTES>(from);
    Piece<BYTES> r{};
    memcpy(r.v, from, BYTES);
    return r;
}
template <int BYTES> inline void store_global(void *to, const Piece<BYTES> &p) {
    aligned_or_fail<BYTES>(to);
    memcpy(to, p.v, BYTES);
}
template <int BYTES> inline Piece<BYTES> load_shared(unsigned from) { return load_global<BYTES>(memory + from); }
template <int BYTES> inline void store_shared(unsigned to, const Piece<BYTES> &p) {
    store_global<BYTES>(memory + to, p);
}
inline unsigned load_word(unsigned from) { return load_shared<4>(from).v[0]; }
inline void store_word(unsigned to, unsigned v) { store_shared<4>(to, {{v}}); }

template <int BYTES> inline void cp_async(void *to, const void *from, bool real) {
    aligned_or_fail<BYTES>(to);
    aligned_or_fail<BYTES>(from);
    current->groups.back().push_back({to, from, BYTES, real});
}
template <int BYTES> inline void cp_async(unsigned to, const void *from, bool real) {
    cp_async<BYTES>(memory + to, from, real);
}
inline void cp_async_through_l1(unsigned to, const void *from, bool real) { cp_async<16>(to, from, real); }
template <int BYTES> inline void cp_async_part(unsigned to, const void *from, int bytes) {
    aligned_or_fail<BYTES>(memory + to);
    aligned_or_fail<BYTES>(from);
    const int size = min(max(bytes, 0), BYTES);
    current->groups.back().push_back({memory + to, from, BYTES, size > 0, size});
}
inline void cp_async_commit() { current->groups.emplace_back(); }
template <int PENDING> inline void cp_async_wait() {
    auto &groups = current->groups;
    while ((int)groups.size() - 1 > PENDING) {
        for (const AsyncCopy &copy : groups.front()) {
            memset(copy.to, 0, copy.bytes);
            if (copy.real) memcpy(copy.to, copy.from, min(copy.bytes, copy.most));
        }
        groups.erase(groups.begin());
    }
}

// tma.cuh: barriers, and boxes that arrive when they are waited for.
struct Barrier {
    short expected, missing;
    int bytes : 31;
    unsigned phase : 1;
};
static_assert(sizeof(Barrier) == 8);
struct Box {
    unsigned to, barrier;
    Map map;
    int at[4], tap[2];
};
static std::vector<Box> boxes;
inline Barrier &barrier_at(unsigned at) {
    aligned_or_fail<8>(memory + at);
    return *(Barrier *)(memory + at);
}
inline void barrier_settle(Barrier &b) {
    if (b.missing == 0 && b.bytes == 0) b.missing = b.expected, b.phase ^= 1;
}
inline void prefetch_map(const void *) {}
inline void publish_barriers() {}
inline void publish_shared() {}
inline void barrier_init(unsigned at, int arrivals) { barrier_at(at) = {(short)arrivals, (short)arrivals, 0, 0}; }
inline void barrier_arrive(unsigned at) {
    Barrier &b = barrier_at(at);
    if (--b.missing < 0) fail("too many arrive at a barrier");
    barrier_settle(b);
}
inline void barrier_expect(unsigned at, unsigned bytes) {
    barrier_at(at).bytes += bytes;
    barrier_arrive(at);
}
inline void copy_box(unsigned to, const void *map, unsigned barrier, int c, int w, int h, int n) {
    aligned_or_fail<128>(memory + to);
    boxes.push_back({to, barrier, *(const Map *)map, {c, w, h, n}, {}});
}
inline void copy_rows(unsigned to, const void *map, unsigned barrier, int column, int row) {
    copy_box(to, map, barrier, column, row, 0, 0);
}
inline void copy_filters(unsigned to, const void *map, unsigned barrier, int c, int tap, int k) {
    copy_box(to, map, barrier, c, tap, k, 0);
}
inline void copy_pixels(unsigned to, const void *map, unsigned barrier, int c, int w, int h, int n, int tap_w,
                        int tap_h) {
    copy_box(to, map, barrier, c, w, h, n);
    boxes.back().tap[0] = tap_w, boxes.back().tap[1] = tap_h;
}
// Pixels of windows, one behind the other; beyond a row's last window comes the next row's first. Each element's
// address in shared memory and in the array, or null.
template <class Each>
inline void for_windows(const Map &m, unsigned place, const int (&at)[4], const int (&tap)[2], Each each) {
    auto of = [](long long word, int i) { return (int)(short)(word >> 16 * i); };
    int w = at[1], h = at[2], n = at[3];
    const unsigned mask = m.swizzle / 16 - 1;
    if (place % (8 * m.swizzle) || m.swizzle != m.box[0] * m.itemsize) fail("windows come in whole rows of a pattern");
    for (int pixel = 0; pixel < m.box[1]; ++pixel) {
        const long long x = w + tap[0], y = h + tap[1];
        for (int c = 0; c < m.box[0]; ++c, place += m.itemsize) {
            const bool there =
                x >= 0 && x < m.sizes[1] && y >= 0 && y < m.sizes[2] && n < m.sizes[3] && at[0] + c < m.sizes[0];
            const unsigned char *global =
                m.address + (at[0] + c) * m.itemsize + x * m.strides[0] + y * m.strides[1] + n * m.strides[2];
            each(memory + (place ^ (place >> 7 & mask) << 4), there ? const_cast<unsigned char *>(global) : nullptr);
        }
        if ((w += of(m.box[3], 0)) <= m.sizes[1] - 1 + of(m.box[2], 2)) continue;
        w = of(m.box[2], 0);
        if ((h += of(m.box[3], 1)) <= m.sizes[2] - 1 + of(m.box[2], 3)) continue;
        h = of(m.box[2], 1), ++n;
    }
}
// A box of tiled mode, the same.
template <class Each> inline void for_box(const Map &m, unsigned place, const int (&first)[4], Each each) {
    const int size = m.itemsize;
    if ((uintptr_t)m.address % 16 || m.box[0] * size % 16) fail("TMA takes pieces of 16 bytes");
    // Pieces of 16 bytes are swizzled by the rows of 128 bytes that they lie in.
    const unsigned mask = m.swizzle ? m.swizzle / 16 - 1 : 0;
    if (place % (8 * m.swizzle + 128 * !m.swizzle)) fail("a swizzled box begins where its pattern does");
    for (int n = 0; n < m.box[3]; ++n)
        for (int h = 0; h < m.box[2]; ++h)
            for (int w = 0; w < m.box[1]; ++w)
                for (int c = 0; c < m.box[0]; ++c, place += size) {
                    const long long at[4] = {first[0] + c, first[1] + w, first[2] + h, first[3] + n};
                    bool there = true;
                    for (int axis = 0; axis < 4; ++axis) there &= at[axis] >= 0 && at[axis] < m.sizes[axis];
                    const unsigned char *global =
                        m.address + at[0] * size + at[1] * m.strides[0] + at[2] * m.strides[1] + at[3] * m.strides[2];
                    each(memory + (place ^ (place >> 7 & mask) << 4),
                         there ? const_cast<unsigned char *>(global) : nullptr);
                }
}
inline void deliver(const Box &box) {
    const Map &m = box.map;
    long long bytes = 0;
    const auto each = [&](unsigned char *to, const unsigned char *from) {
        if (from) memcpy(to, from, m.itemsize);
        else memset(to, 0, m.itemsize);
        bytes += m.itemsize;
    };
    for (long long stride : m.strides)
        if (stride % 16) fail("TMA takes strides of 16 bytes");
    if (m.windows) for_windows(m, box.to, box.at, box.tap, each);
    else for_box(m, box.to, box.at, each);
    Barrier &b = barrier_at(box.barrier);
    b.bytes -= bytes;
    barrier_settle(b);
}
inline void barrier_wait(unsigned at, unsigned phase) {
    for (long long turns = 0; barrier_at(at).phase == phase; ++turns) {
        if (turns > 100000) fail("a barrier that nobody comes to");
        for (size_t i = 0; i < boxes.size();)
            if (boxes[i].barrier == at) deliver(boxes[i]), boxes.erase(boxes.begin() + i);
            else ++i;
        if (barrier_at(at).phase == phase) wait_as(Fiber::READY);
    }
}

#include "hopper.h"

// grid.cuh.
inline void begin_dependent() {}
template <bool INDEPENDENT> inline void begin_beside() {}
template <bool INDEPENDENT> inline void end_beside() {}
inline void wait_for_previous() {}
inline void let_next_begin() {}
inline void cluster_arrive() {}
inline void cluster_arrive_relaxed() {}
inline void cluster_wait() { wait_as(Fiber::IN_CLUSTER); }
template <typename T> inline const T *in_block_of_rank(const T *place, int rank) {
    if ((unsigned)rank == own_rank) return place;
    if ((unsigned)rank >= cluster.size()) fail("a block outside its cluster");
    return (const T *)(cluster[rank].memory.data() + ((const unsigned char *)place - memory));
}

// matrix.cuh.
inline void store_pair(unsigned to, float a, float b) {
    store_shared<8>(to, {{__float_as_uint(a), __float_as_uint(b)}});
}
inline void load_words(unsigned from, long long &a, long long &b) {
    aligned_or_fail<16>(memory + from);
    memcpy(&a, memory + from, 8), memcpy(&b, memory + from + 8, 8);
}
inline void store_words(unsigned to, long long a, long long b) {
    aligned_or_fail<16>(memory + to);
    memcpy(memory + to, &a, 8), memcpy(memory + to + 8, &b, 8);
}
inline float load_float(unsigned from) { return __uint_as_float(load_word(from)); }
template <bool TRANSPOSED, int COUNT> inline void load_matrices(unsigned (&v)[COUNT], unsigned from) {
    aligned_or_fail<16>(memory + from);
    current->given[0] = from;
    __syncwarp();
    const int lane = current->index.x % 32;
    for (int i = 0; i < COUNT; ++i) {
        unsigned short pair[2];
        for (int e = 0; e < 2; ++e) {
            const int one = lane / 4, other = lane % 4 * 2 + e;
            const int row = TRANSPOSED ? other : one, column = TRANSPOSED ? one : other;
            memcpy(&pair[e], memory + lane_of(i * 8 + row)->given[0] + column * 2, 2);
        }
        v[i] = pair[0] | (unsigned)pair[1] << 16;
    }
    __syncwarp();
}
template <int COUNT> inline void ldmatrix(unsigned (&v)[COUNT], unsigned from) { load_matrices<false>(v, from); }
inline void ldmatrix_transposed(unsigned (&v)[4], unsigned from) { load_matrices<true>(v, from); }
template <typename T> inline unsigned add_zeros(unsigned v, unsigned sum) {
    for (int e = 0; e < 2; ++e)
        if (!std::isfinite(widen(T{(unsigned short)(v >> e * 16)}))) sum |= 0x7fffu << e * 16;
    return sum;
}
inline unsigned bits(f16 v) { return v.bits; }
inline unsigned bits(bf16 v) { return v.bits; }
// m16n8k16 and m16n8k8 of 16 bits: lanes have given words of A, and of B from the fifth on.
template <typename T> inline void multiply(float (&d)[4], int depth) {
    __syncwarp();
    const int lane = current->index.x % 32;
    auto element = [](unsigned word, int e) { return widen(T{(unsigned short)(word >> e * 16)}); };
    for (int i = 0; i < 4; ++i) {
        const int row = lane / 4 + i / 2 * 8, column = lane % 4 * 2 + i % 2;
        float sum = d[i];
        for (int k = 0; k < depth; ++k) {
            const unsigned of_a = lane_of(row % 8 * 4 + k % 8 / 2)->given[row / 8 + k / 8 * 2];
            const unsigned of_b = lane_of(column * 4 + k % 8 / 2)->given[4 + k / 8];
            sum += element(of_a, k % 2) * element(of_b, k % 2);
        }
        d[i] = sum;
    }
    __syncwarp();
}
template <typename T> inline void mma(float (&d)[4], const unsigned (&a)[4], const unsigned (&b)[2]) {
    memcpy(current->given, a, 16);
    memcpy(current->given + 4, b, 8);
    multiply<T>(d, 16);
}
template <typename T> inline void mma_half(float (&d)[4], const unsigned (&a)[2], unsigned b) {
    memcpy(current->given, a, 8);
    current->given[4] = b;
    multiply<T>(d, 8);
}

// Blocks.
// Runs a block until all of its threads wait for the cluster or have ended; returns whether all have ended.
static bool run_block(unsigned threads, bool backwards) {
    for (Fiber &fiber : fibers)
        if (fiber.state == Fiber::IN_CLUSTER) fiber.state = Fiber::READY;
    for (;;) {
        bool ran = false;
        for (unsigned i = 0; i < threads; ++i) {
            current = &fibers[backwards ? threads - 1 - i : i];
            if (current->state != Fiber::READY) continue;
            swapcontext(&scheduler, &current->context), ran = true;
        }
        // Who waits for a warp goes on when all of the warp's threads wait for it, and so with a block.
        for (unsigned first = 0; first < threads; first += 32) {
            unsigned waiting = 0, done = 0, of = threads - first < 32 ? threads - first : 32;
            for (unsigned t = first; t < first + of; ++t)
                waiting += fibers[t].state == Fiber::IN_WARP, done += fibers[t].state == Fiber::ENDED;
            if (waiting && waiting + done == of)
                for (unsigned t = first; t < first + of; ++t)
                    if (fibers[t].state == Fiber::IN_WARP) fibers[t].state = Fiber::READY, ran = true;
        }
        unsigned waiting = 0, ended = 0, in_cluster = 0;
        for (const Fiber &fiber : fibers)
            waiting += fiber.state == Fiber::IN_BLOCK, ended += fiber.state == Fiber::ENDED,
                in_cluster += fiber.state == Fiber::IN_CLUSTER;
        if (ended + in_cluster == threads) return !in_cluster;
        if (waiting && waiting + ended == threads) {
            for (Fiber &fiber : fibers)
                if (fiber.state == Fiber::IN_BLOCK) fiber.state = Fiber::READY;
        } else if (!ran) fail("threads wait for each other at different places");
    }
}
// Addresses in a block's shared memory with the block's rank above them.
inline unsigned address_of_rank(unsigned address, int rank) { return (unsigned)rank << 24 | address; }
template <typename T> inline void send(unsigned to, unsigned barrier, T value) {
    const unsigned rank = to >> 24, mask = (1 << 24) - 1;
    if (rank >= cluster.size() || rank != barrier >> 24) fail("a block outside its cluster");
    unsigned char *there = rank == own_rank ? memory : cluster[rank].memory.data();
    memcpy(there + (to & mask), &value, sizeof value);
    Barrier &b = *(Barrier *)(there + (barrier & mask));
    b.bytes -= sizeof value;
    barrier_settle(b);
}
inline void send_two(unsigned to, unsigned barrier, float a, float b) {
    send(to, barrier, a);
    send(to + 4, barrier, b);
}
inline void barrier_wait_for_cluster(unsigned at, unsigned phase) {
    wait_as(Fiber::IN_CLUSTER);
    if (barrier_at(at).phase == phase) fail("less was sent than a barrier waits for");
}

// Runs a grid; `backwards`: threads in the other order. `shared`: bytes of a block. Blocks of a cluster lie along x.
static void run_grid(void (*kernel)(const void *), const void *p, const unsigned *grid, unsigned threads,
                     unsigned shared, bool backwards, unsigned of_cluster) {
    entry = kernel, parameters = p, boxes.clear();
    gridDim = {grid[0], grid[1], grid[2]}, blockDim = {threads, 1, 1};
    const unsigned char beyond = 0xa5;
    if (grid[0] % of_cluster) fail("a grid of no whole clusters");
    cluster.resize(of_cluster);
    for (unsigned z = 0; z < grid[2]; ++z)
        for (unsigned y = 0; y < grid[1]; ++y)
            for (unsigned x = 0; x < grid[0]; x += of_cluster) {
                for (unsigned rank = 0; rank < of_cluster; ++rank) {
                    Other &block = cluster[rank];
                    block.index = {x + rank, y, z};
                    block.memory.assign(shared + 1024, 0xff);
                    memset(block.memory.data() + shared, beyond, 1024);
                    block.fibers.resize(threads);
                    for (unsigned t = 0; t < threads; ++t) {
                        Fiber &fiber = block.fibers[t];
                        fiber.index = {t, 0, 0}, fiber.state = Fiber::READY, fiber.groups.assign(1, {});
                        fiber.products.assign(1, {}), fiber.stores.assign(1, {});
                        fiber.stack.resize(128 << 10);
                        getcontext(&fiber.context);
                        fiber.context.uc_stack = {fiber.stack.data(), 0, fiber.stack.size()};
                        makecontext(&fiber.context, fiber_main, 0);
                    }
                }
                // All of a cluster come to each of its barriers, or all end.
                named.assign(NAMED, {});
                for (unsigned ended = 0; ended < of_cluster;) {
                    ended = 0;
                    for (unsigned i = 0; i < of_cluster; ++i) {
                        own_rank = backwards ? of_cluster - 1 - i : i;
                        Other &block = cluster[own_rank];
                        std::swap(fibers, block.fibers), blockIdx = block.index;
                        memcpy(memory, block.memory.data(), shared + 1024);
                        const bool all = run_block(threads, backwards);
                        ended += all;
                        if (!boxes.empty()) fail("a box that nobody waits for");
                        for (int at = 0; at < 1024; ++at)
                            if (memory[shared + at] != beyond) fail("wrote beyond its shared memory");
                        memcpy(block.memory.data(), memory, shared + 1024);
                        // Shared memory of a block that has ended is another's.
                        if (all) memset(block.memory.data(), 0xff, shared);
                        std::swap(fibers, block.fibers);
                    }
                    if (ended % of_cluster) fail("some blocks of a cluster end, others wait for it");
                }
            }
}
