// What CUDA C++ kernels need to run on a CPU, one block after the other, a fiber a thread. Copies of cp.async arrive
// when they are waited for, and shared memory begins as NaN, so a missing wait or barrier shows in the result.
// emulated.cpp and hopper.cpp have what does not depend on a kernel: they are compiled once, each kernel by itself.
#include <cmath>
#include <cstdint>
#include <cstring>

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

using std::abs, std::copysign, std::erf, std::exp, std::floor, std::fma, std::max, std::min, std::tanh, std::trunc;

struct uint2 { unsigned x, y; };
struct uint4 { unsigned x, y, z, w; };
struct float2 { float x, y; };
struct float4 { float x, y, z, w; };
inline uint2 make_uint2(unsigned x, unsigned y) { return {x, y}; }
inline uint4 make_uint4(unsigned x, unsigned y, unsigned z, unsigned w) { return {x, y, z, w}; }
inline float2 make_float2(float x, float y) { return {x, y}; }
inline float4 make_float4(float x, float y, float z, float w) { return {x, y, z, w}; }

template <typename T> inline void __stcs(T *to, T value) { memcpy(to, &value, sizeof value); }

struct Three { unsigned x = 0, y = 0, z = 0; };
extern Three blockIdx, blockDim, gridDim;
constexpr int MOST_SHARED = 256 << 10;
extern "C" unsigned char memory[MOST_SHARED] __attribute__((aligned(1024)));

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
inline double __longlong_as_double(long long v) { return same_bits<double>(v); }
inline long long __double_as_longlong(double v) { return same_bits<long long>(v); }
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
inline unsigned __vmaxu2(unsigned a, unsigned b) {
    return std::max(a & 0xffff, b & 0xffff) | std::max(a & 0xffff0000, b & 0xffff0000);
}
inline unsigned __vminu2(unsigned a, unsigned b) {
    return std::min(a & 0xffff, b & 0xffff) | std::min(a & 0xffff0000, b & 0xffff0000);
}
inline unsigned __vimax3_u16x2(unsigned a, unsigned b, unsigned c) { return __vmaxu2(__vmaxu2(a, b), c); }
inline unsigned __vimin3_u16x2(unsigned a, unsigned b, unsigned c) { return __vminu2(__vminu2(a, b), c); }
inline unsigned __umulhi(unsigned a, unsigned b) { return (unsigned long long)a * b >> 32; }

// A thread, and what it lends to others of its warp.
struct Thread {
    Three index;
    unsigned given[32];
};
extern Thread *current;
#define threadIdx (current->index)
[[noreturn]] void fail(const char *why);
// A thread of this one's warp.
Thread *lane_of(int lane);
void __syncthreads();
void __syncwarp(unsigned = ~0u);
int __syncthreads_and(int value);

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
inline bool __all_sync(unsigned mask, bool value) {
    bool all = value;
    for (int lane = 0; lane < 32; ++lane) all &= __shfl_sync(mask, (int)value, lane) != 0;
    return all;
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
    static T larger_one(T a, T b) {
        const float first = widen(a), second = widen(b);
        return second > first || second != second ? b : a;
    }
    static unsigned larger(unsigned a, unsigned b) {
        const T low = larger_one({(unsigned short)a}, {(unsigned short)b}),
                high = larger_one({(unsigned short)(a >> 16)}, {(unsigned short)(b >> 16)});
        return low.bits | (unsigned)high.bits << 16;
    }
    static unsigned pack_relu(float low, float high) { return pack(low < 0 ? 0 : low, high < 0 ? 0 : high); }
    static unsigned pack_relu6(float low, float high) { return pack_relu(low > 6 ? 6 : low, high > 6 ? 6 : high); }
    static unsigned pack_relu1(float low, float high) { return pack_relu(low > 1 ? 1 : low, high > 1 ? 1 : high); }
};
template <> struct Element<float> {
    static float to_float(float v) { return v; }
    static float from_float(float v) { return v; }
    static float larger(float a, float b) { return b > a || b != b ? b : a; }
};
inline float to_tf32(float v) {
    const unsigned bits = __float_as_uint(v), finite = (bits & 0x7f800000) != 0x7f800000;
    return __uint_as_float((bits + (finite ? 0x1000 : 0)) & 0xffffe000);
}
inline unsigned subtract_f16x2(unsigned a, unsigned b) {
    const auto less = [](unsigned a, unsigned b) {
        return widen(f16{(unsigned short)a}) - widen(f16{(unsigned short)b});
    };
    return Element<f16>::pack(less(a, b), less(a >> 16, b >> 16));
}
inline unsigned short truncate_f16(float v) {
    const f16 nearest = Element<f16>::from_float(v);
    return nearest.bits - (std::abs(widen(nearest)) > std::abs(v));
}
inline unsigned truncate_f16x2(float low, float high) { return truncate_f16(low) | (unsigned)truncate_f16(high) << 16; }
// Towards zero; of products and sums that float64 holds.
inline float __fmaf_rz(float a, float b, float c) {
    const double exact = (double)a * b + c;
    const float nearest = (float)exact;
    return std::abs((double)nearest) > std::abs(exact) ? std::nextafter(nearest, 0.0f) : nearest;
}
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

// A copy of `bytes` from global to shared memory, of which those behind `real` are zeros.
void copy_later(void *to, const void *from, int bytes, int real);
template <int BYTES> inline void cp_async(void *to, const void *from, bool real) {
    aligned_or_fail<BYTES>(to);
    aligned_or_fail<BYTES>(from);
    copy_later(to, from, BYTES, real ? BYTES : 0);
}
template <int BYTES> inline void cp_async(unsigned to, const void *from, bool real) {
    cp_async<BYTES>(memory + to, from, real);
}
inline void cp_async_through_l1(unsigned to, const void *from, bool real) { cp_async<16>(to, from, real); }
template <int BYTES> inline void cp_async_part(unsigned to, const void *from, int bytes) {
    aligned_or_fail<BYTES>(memory + to);
    aligned_or_fail<BYTES>(from);
    copy_later(memory + to, from, BYTES, min(max(bytes, 0), BYTES));
}
void cp_async_commit();
void wait_for_copies(int pending);
template <int PENDING> inline void cp_async_wait() { wait_for_copies(PENDING); }

// tma.cuh: barriers, and boxes that arrive when they are waited for.
inline void prefetch_map(const void *) {}
inline void publish_barriers() {}
inline void publish_shared() {}
void barrier_init(unsigned at, int arrivals);
void barrier_arrive(unsigned at);
void barrier_arrive_in_cluster(unsigned at);
void barrier_expect(unsigned at, unsigned bytes);
void barrier_wait(unsigned at, unsigned phase);
void copy_box(unsigned to, const void *map, unsigned barrier, int c, int w, int h, int n);
void copy_bytes(unsigned to, const void *from, unsigned bytes, unsigned barrier);
void copy_pixels(unsigned to, const void *map, unsigned barrier, int c, int w, int h, int n, int tap_w, int tap_h);
inline void copy_rows(unsigned to, const void *map, unsigned barrier, int column, int row) {
    copy_box(to, map, barrier, column, row, 0, 0);
}
// To other blocks of the cluster, too.
void multicast(unsigned short mask);
template <int COUNT>
inline void copy_shared_rows(unsigned to, const void *map, unsigned barrier, int column, int row, unsigned short mask) {
    copy_rows(to, map, barrier, column, row);
    if (COUNT > 1) multicast(mask);
}
template <int COUNT>
inline void copy_shared_pixels(unsigned to, const void *map, unsigned barrier, int c, int w, int h, int n, int tap_w,
                               int tap_h, unsigned short mask) {
    copy_pixels(to, map, barrier, c, w, h, n, tap_w, tap_h);
    if (COUNT > 1) multicast(mask);
}
template <int COUNT>
inline void copy_shared_box(unsigned to, const void *map, unsigned barrier, int c, int w, int h, int n,
                            unsigned short mask) {
    copy_box(to, map, barrier, c, w, h, n);
    if (COUNT > 1) multicast(mask);
}
inline void copy_filters(unsigned to, const void *map, unsigned barrier, int c, int tap, int k) {
    copy_box(to, map, barrier, c, tap, k, 0);
}
template <int COUNT>
inline void copy_shared_filters(unsigned to, const void *map, unsigned barrier, int c, int tap, int k,
                                unsigned short mask) {
    copy_shared_box<COUNT>(to, map, barrier, c, tap, k, 0, mask);
}

#include "hopper.h"

// grid.cuh.
template <typename... Numbers> inline void work_out(Numbers...) {}
inline void begin_dependent(bool = false) {}
template <bool INDEPENDENT> inline void begin_beside() {}
template <bool INDEPENDENT> inline void end_beside() {}
inline void wait_for_previous() {}
inline void let_next_begin() {}
inline void cluster_arrive() {}
inline void cluster_arrive_relaxed() {}
void cluster_wait();
// The same place in the shared memory of a block of this cluster.
unsigned char *place_in_block(const void *place, unsigned rank);
template <typename T> inline const T *in_block_of_rank(const T *place, int rank) {
    return (const T *)place_in_block(place, rank);
}
// Addresses in a block's shared memory with the block's rank above them.
inline unsigned address_of_rank(unsigned address, int rank) { return (unsigned)rank << 24 | address; }
void send_bytes(unsigned to, unsigned barrier, const void *value, int bytes);
template <typename T> inline void send(unsigned to, unsigned barrier, T value) {
    send_bytes(to, barrier, &value, sizeof value);
}
inline void send_two(unsigned to, unsigned barrier, float a, float b) {
    send(to, barrier, a);
    send(to + 4, barrier, b);
}
inline void send_four(unsigned to, unsigned barrier, float a, float b, float c, float d) {
    const float v[] = {a, b, c, d};
    send_bytes(to, barrier, v, 16);
}
void barrier_wait_for_cluster(unsigned at, unsigned phase);

// matrix.cuh.
inline void keep_in_register(unsigned &) {}
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
// 8 x 8 matrices of 16 bits; each lane has a row's address.
void load_matrices(unsigned *v, int count, unsigned from, bool transposed);
template <int COUNT> inline void ldmatrix(unsigned (&v)[COUNT], unsigned from) { load_matrices(v, COUNT, from, false); }
template <int COUNT> inline void ldmatrix_transposed(unsigned (&v)[COUNT], unsigned from) {
    load_matrices(v, COUNT, from, true);
}
// hopper.cuh's: four of them, as they are or transposed.
template <bool TRANSPOSED> inline void ldmatrix(unsigned (&v)[4], unsigned from) {
    load_matrices(v, 4, from, TRANSPOSED);
}
template <typename T> inline unsigned add_zeros(unsigned v, unsigned sum) {
    for (int e = 0; e < 2; ++e)
        if (!std::isfinite(widen(T{(unsigned short)(v >> e * 16)}))) sum |= 0x7fffu << e * 16;
    return sum;
}
inline unsigned bits(float v) { return __float_as_uint(v); }
inline unsigned bits(f16 v) { return v.bits; }
inline unsigned bits(bf16 v) { return v.bits; }
// m16n8k16 and m16n8k8 of 16 bits, m16n8k8 of tf32: lanes have given words of A, and of B from the fifth on. In
// emulated.cpp for both T.
template <typename T> void multiply(float (&d)[4], int depth);
template <> void multiply<float>(float (&d)[4], int depth);
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

// m16n8k32 of 16 bits with A's zeros left out: B's words from the fifth on.
template <typename T> void multiply_two_channels(float (&d)[4]);
template <typename T> inline void mma_two_channels(float (&d)[4], const unsigned (&a)[4], const unsigned (&b)[4]) {
    memcpy(current->given, a, 16);
    memcpy(current->given + 4, b, 16);
    multiply_two_channels<T>(d);
}

// Runs a grid; `backwards`: blocks along x, and threads, in the other order. `shared`: bytes of a block. Blocks of a
// cluster lie along x. `wgmma`: the text of the kernel's matrix instruction.
void run_grid(void (*kernel)(const void *), const void *p, const unsigned *grid, unsigned threads, unsigned shared,
              bool backwards, unsigned of_cluster, const char *wgmma);
