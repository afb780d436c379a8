// Bytes of a picture, a thread some neighbouring elements down rows of its own: how rows come, from memory to
// registers. Windows that pass the sides of the picture are other threads', of one element and few rows, which begin
// first: bytes from beyond the sides come one by one, and nobody is to wait for them.
#pragma once

#include "grid.cuh"
#include "ops/filter/filter.cuh"

struct DownRows {
    const void *x, *list;
    void *y;
    // Of the picture: rows, elements of a row; rows and elements in front of a window's own, what is beyond the edges.
    long long height, width, before_h, before_w, mode_h, mode_w, cval;
    // Rows of a window; rows of a thread, how many threads are beside each other, and the first one's element.
    long long taps_h, rows, across, first;
    // Of the sides: blocks, elements of a row, those on the left, rows of a thread.
    long long side_blocks, sides, left_side, side_rows;
};

// T: of x, a byte; C channels; TAPS_W of a window; SKIP elements in front of the first that a thread sees, which begin
// a vector of 16, or of 8 where a thread has no more; ACROSS elements of a thread; THREADS; CONSTANT: cval is beyond an
// edge. BUFFERS: rows on their way.
template <class Traits, int BUFFERS_> struct DownTile : Traits {
    using B = Traits;
    static constexpr int BUFFERS = BUFFERS_;
    // Elements that a thread sees, and in vectors and words; words with some that it sees.
    static constexpr int SEEN = B::ACROSS + (B::TAPS_W - 1) * B::C, VECTOR = B::ACROSS < 16 ? B::ACROSS : 16;
    static constexpr int VECTORS = (B::SKIP + SEEN + VECTOR - 1) / VECTOR, WORDS = VECTORS * VECTOR / 4;
    static constexpr int FIRST = B::SKIP / 4, END = (B::SKIP + SEEN + 3) / 4;
    static constexpr unsigned SIGN = typename B::T(-1) < typename B::T(0) ? 0x80808080u : 0;
    static_assert(sizeof(typename B::T) == 1 && B::ACROSS % 8 == 0);
};

// Rows one after the other: `next` is where the row would lie in the picture.
struct Down {
    const unsigned char *next;
    int h, height, width;
    long long mode;
    DEVICE Down(const DownRows &a, const unsigned char *from, int h)
        : next(from + (long long)h * (int)a.width), h(h), height(a.height), width(a.width), mode(a.mode_h) {}
    // The row, or none for the constant.
    DEVICE const unsigned char *row() {
        const unsigned char *there = next;
        if ((unsigned)h >= (unsigned)height) {
            const int source = source_index(h, height, mode);
            there = source < 0 ? nullptr : next + (long long)(source - h) * width;
        }
        ++h, next += width;
        return there;
    }
};

// A thread's rows on their way, of elements within the sides: vectors, or words of memory, from `beside` bytes in front
// of the first on.
template <class P> struct Within {
    Down down;
    const bool aligned;
    const unsigned constant;
    unsigned words[P::BUFFERS][P::WORDS + 1], beside[P::BUFFERS];

    // From row `h` on, and the elements from `from` on.
    DEVICE Within(const DownRows &a, const unsigned char *from, int h)
        : down(a, from, h),
          aligned((reinterpret_cast<unsigned long long>(from) | (unsigned long long)a.width) % P::VECTOR == 0),
          constant((unsigned char)a.cval * 0x01010101u) {}
    DEVICE void begin(int buffer) {
        unsigned (&to)[P::WORDS + 1] = words[buffer];
        const unsigned char *row = down.row();
        beside[buffer] = 0;
        if (P::CONSTANT && !row)
#pragma unroll
            for (int i = 0; i <= P::WORDS; ++i) to[i] = constant;
        else if (aligned)
#pragma unroll
            for (int i = 0; i < P::VECTORS; ++i) {
                const Piece<P::VECTOR> piece = load_global<P::VECTOR>(row + P::VECTOR * i);
#pragma unroll
                for (int j = 0; j < P::VECTOR / 4; ++j) to[i * P::VECTOR / 4 + j] = piece.v[j];
            }
        else {
            const unsigned more = reinterpret_cast<unsigned long long>(row) & 3;
            beside[buffer] = more, row -= more;
#pragma unroll
            for (int i = P::FIRST; i < P::END; ++i) to[i] = reinterpret_cast<const unsigned *>(row)[i];
            to[P::END] = reinterpret_cast<const unsigned *>(row)[P::END - (more == 0)];
        }
    }
    // The row is there, its elements from SKIP on.
    DEVICE const unsigned (&end(int buffer)) [P::WORDS + 1] {
        unsigned (&row)[P::WORDS + 1] = words[buffer];
        if (!aligned)
#pragma unroll
            for (int i = P::FIRST; i < P::END; ++i) row[i] = __funnelshift_r(row[i], row[i + 1], 8 * beside[buffer]);
        return row;
    }
};

// The same of one window that passes a side, a byte after the other.
template <class P> struct AtSide {
    Down down;
    // Elements of a row that the window sees; none for the constant.
    int there[P::TAPS_W];
    unsigned char constant;
    unsigned bytes[P::BUFFERS][P::TAPS_W];

    DEVICE AtSide(const DownRows &a, const unsigned char *x, int w, int h) : down(a, x, h), constant(a.cval) {
        const int pixels = (int)a.width / P::C;
#pragma unroll
        for (int s = 0; s < P::TAPS_W; ++s) {
            const int e = w - (int)a.before_w + s * P::C, pixel = e < 0 ? -((P::C - 1 - e) / P::C) : e / P::C;
            const int from = source_index(pixel, pixels, a.mode_w);
            there[s] = from < 0 ? -1 : from * P::C + e - pixel * P::C;
        }
    }
    DEVICE void begin(int buffer) {
        const unsigned char *const row = down.row();
#pragma unroll
        for (int s = 0; s < P::TAPS_W; ++s) {
            const bool real = !P::CONSTANT || (row && there[s] >= 0);
            bytes[buffer][s] = real ? row[there[s]] : constant;
        }
    }
};

// What a thread has of the picture: its first element and row, and how many rows.
struct Part {
    int w, h, rows;
    const unsigned char *x;
    long long at;
};

// Each thread's part: `within(part)`, or `at_side(part)`.
template <int ACROSS, int THREADS, class Inner, class Side>
DEVICE void each_part(const DownRows &a, Inner within, Side at_side) {
    const bool side = blockIdx.x < a.side_blocks;
    const long long number = (blockIdx.x - (side ? 0 : a.side_blocks)) * THREADS + threadIdx.x;
    const int beside = side ? a.sides : a.across, rows = side ? a.side_rows : a.rows;
    const long long segment = number / beside;
    if (segment * rows >= a.height) return;
    const int place = number - segment * beside, h = segment * rows;
    Part part;
    part.w = !side ? (int)a.first + place * ACROSS : place < a.left_side ? place : place + (int)a.width - (int)a.sides;
    part.h = h, part.rows = min(rows, (int)a.height - h);
    const long long picture = (long long)blockIdx.z * a.height * a.width;
    part.x = static_cast<const unsigned char *>(a.x) + picture;
    part.at = picture + (long long)h * a.width + part.w;
    if (side) at_side(part);
    else within(part);
}
