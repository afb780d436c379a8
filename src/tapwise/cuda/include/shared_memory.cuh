// Addresses of shared memory, where swizzled pieces lie there, and pieces on their way through registers.
#pragma once

#define DEVICE __device__ __forceinline__

DEVICE unsigned shared_address(const void *pointer) { return static_cast<unsigned>(__cvta_generic_to_shared(pointer)); }

// Where byte `at` of a row lies in an array of rows of SPAN bytes, whose 16-byte pieces are swizzled so that eight
// rows' pieces lie in eight groups of banks.
template <int SPAN> DEVICE unsigned swizzled(int row, int at) {
    const int mask = SPAN == 128 ? row & 7 : SPAN == 64 ? row >> 1 & 3 : row >> 2 & 1;
    return row * SPAN + ((at / 16 ^ mask) << 4) + at % 16;
}

// BYTES between registers and shared or global memory.
template <int BYTES> struct Piece { unsigned v[BYTES > 4 ? BYTES / 4 : 1]; };
template <int BYTES> DEVICE Piece<BYTES> load_shared(unsigned from) {
    Piece<BYTES> r;
    if constexpr (BYTES == 16)
        asm volatile("ld.shared.v4.b32 {%0, %1, %2, %3}, [%4];"
                     : "=r"(r.v[0]), "=r"(r.v[1]), "=r"(r.v[2]), "=r"(r.v[3])
                     : "r"(from)
                     : "memory");
    if constexpr (BYTES == 8)
        asm volatile("ld.shared.v2.b32 {%0, %1}, [%2];" : "=r"(r.v[0]), "=r"(r.v[1]) : "r"(from) : "memory");
    if constexpr (BYTES == 4) asm volatile("ld.shared.b32 %0, [%1];" : "=r"(r.v[0]) : "r"(from) : "memory");
    if constexpr (BYTES == 2) {
        unsigned short low;
        asm volatile("ld.shared.b16 %0, [%1];" : "=h"(low) : "r"(from) : "memory");
        r.v[0] = low;
    }
    return r;
}
template <int BYTES> DEVICE void store_shared(unsigned to, const Piece<BYTES> &p) {
    if constexpr (BYTES == 16)
        asm volatile("st.shared.v4.b32 [%0], {%1, %2, %3, %4};" ::"r"(to), "r"(p.v[0]), "r"(p.v[1]), "r"(p.v[2]),
                     "r"(p.v[3])
                     : "memory");
    if constexpr (BYTES == 8)
        asm volatile("st.shared.v2.b32 [%0], {%1, %2};" ::"r"(to), "r"(p.v[0]), "r"(p.v[1]) : "memory");
    if constexpr (BYTES == 4) asm volatile("st.shared.b32 [%0], %1;" ::"r"(to), "r"(p.v[0]) : "memory");
    if constexpr (BYTES == 2) asm volatile("st.shared.b16 [%0], %1;" ::"r"(to), "h"((unsigned short)p.v[0]) : "memory");
}
template <int BYTES> DEVICE Piece<BYTES> load_global(const void *from) {
    Piece<BYTES> r;
    if constexpr (BYTES == 16) *reinterpret_cast<uint4 *>(r.v) = *static_cast<const uint4 *>(from);
    if constexpr (BYTES == 8) *reinterpret_cast<uint2 *>(r.v) = *static_cast<const uint2 *>(from);
    if constexpr (BYTES == 4) r.v[0] = *static_cast<const unsigned *>(from);
    if constexpr (BYTES == 2) r.v[0] = *static_cast<const unsigned short *>(from);
    return r;
}
template <int BYTES> DEVICE void store_global(void *to, const Piece<BYTES> &p) {
    if constexpr (BYTES == 16) *static_cast<uint4 *>(to) = make_uint4(p.v[0], p.v[1], p.v[2], p.v[3]);
    if constexpr (BYTES == 8) *static_cast<uint2 *>(to) = make_uint2(p.v[0], p.v[1]);
    if constexpr (BYTES == 4) *static_cast<unsigned *>(to) = p.v[0];
    if constexpr (BYTES == 2) *static_cast<unsigned short *>(to) = p.v[0];
}
DEVICE unsigned load_word(unsigned from) { return load_shared<4>(from).v[0]; }
DEVICE void store_word(unsigned to, unsigned v) { store_shared<4>(to, {{v}}); }
