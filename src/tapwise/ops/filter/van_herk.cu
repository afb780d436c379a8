// The largest or smallest byte of a window, by van Herk and Gil and Werman: no barriers, each thread goes down rows of
// its own with ACROSS neighbouring elements.
//
// Two elements are in a word, each byte twice, so that numbers of 16 bits have the order of bytes: element i and the one
// half a thread's width on, and a tap of a row is another register. The row's window is joined of three, of nine, and so
// on, the last ones overlap. Down the column rows come in runs of as many as a window has. A window is the end of one run
// and the beginning of the next: what all ends of a run hold is made when it is full, and lies in shared memory, each
// thread's own; the beginning grows in registers.
//
// Windows that pass the sides of the picture are other threads', of one element and few rows, which begin first.
#include "grid.cuh"
#include "ops/filter/filter.cuh"

struct VanHerk {
    const void *x;
    void *y;
    // Of the picture: rows, elements of a row; rows and elements in front of a window's own, what is beyond the edges.
    long long height, width, before_h, before_w, mode_h, mode_w, cval;
    // Rows of a window; rows of a thread, how many threads are beside each other, and the first one's element.
    long long taps_h, rows, across, first;
    // Of the sides: blocks, elements of a row, those on the left, rows of a thread.
    long long side_blocks, sides, left_side, side_rows;
};

// T: of x, a byte; C channels; OP; TAPS_W of a window; SKIP elements in front of the first that a thread sees, which
// begin a vector of 16, or of 8 where a thread has no more; ACROSS elements of a thread; THREADS; CONSTANT: cval is
// beyond an edge.
template <class Traits> struct VanHerkTile : Traits {
    using B = Traits;
    static constexpr int HALF = B::ACROSS / 2, PAIRS = HALF + (B::TAPS_W - 1) * B::C;
    // Elements that a thread loads, in vectors and words; words with some that it sees.
    static constexpr int SEEN = B::SKIP + PAIRS + HALF, VECTOR = B::ACROSS < 16 ? B::ACROSS : 16;
    static constexpr int VECTORS = (SEEN + VECTOR - 1) / VECTOR, WORDS = VECTORS * VECTOR / 4;
    static constexpr int FIRST = B::SKIP / 4, END = (SEEN + 3) / 4;
    static constexpr unsigned SIGN = typename B::T(-1) < typename B::T(0) ? 0x80808080u : 0;
    static_assert(sizeof(typename B::T) == 1 && B::ACROSS % 8 == 0);
};

// The larger or smaller of numbers of 16 bits, two in a word.
template <class P> DEVICE unsigned chosen(unsigned a, unsigned b) {
    return P::OP == LARGEST ? __vmaxu2(a, b) : __vminu2(a, b);
}
template <class P> DEVICE unsigned chosen(unsigned a, unsigned b, unsigned c) {
    return P::OP == LARGEST ? __vimax3_u16x2(a, b, c) : __vimin3_u16x2(a, b, c);
}

// What is chosen of it and of any number is the other one.
template <class P> DEVICE unsigned nothing() { return P::OP == LARGEST ? 0 : ~0u; }

// COUNT words of this thread's in shared memory, in pieces of all threads beside each other.
template <class P, int COUNT> struct Slots {
    static constexpr int BYTES = COUNT < 4 ? 4 * COUNT : 16, PARTS = 4 * COUNT / BYTES, APART = 4 * COUNT * P::THREADS;
    static DEVICE void load(unsigned slot, unsigned (&words)[COUNT]) {
#pragma unroll
        for (int part = 0; part < PARTS; ++part) {
            const Piece<BYTES> piece = load_shared<BYTES>(slot + part * BYTES * P::THREADS);
#pragma unroll
            for (int i = 0; i < BYTES / 4; ++i) words[part * BYTES / 4 + i] = piece.v[i];
        }
    }
    static DEVICE void store(unsigned slot, const unsigned (&words)[COUNT]) {
#pragma unroll
        for (int part = 0; part < PARTS; ++part) {
            Piece<BYTES> piece;
#pragma unroll
            for (int i = 0; i < BYTES / 4; ++i) piece.v[i] = words[part * BYTES / 4 + i];
            store_shared<BYTES>(slot + part * BYTES * P::THREADS, piece);
        }
    }
};

// Down `rows` rows of COUNT words. `seen(buffer, more, words)`: those that a row's windows end with; behind it `more` rows
// come, and the one after the next takes its place in one of two buffers. `put(words)` takes a row's.
template <class P, int COUNT, class Seen, class Put>
DEVICE void go_down(const void *memory, int taps, int rows, Seen seen, Put put) {
    using S = Slots<P, COUNT>;
    const unsigned begin = shared_address(memory) + threadIdx.x * S::BYTES, end = begin + taps * S::APART;
    unsigned beginning[COUNT];
#pragma unroll
    for (int i = 0; i < COUNT; ++i) beginning[i] = nothing<P>();
    // Behind the last of a run there is nothing of the one before.
    S::store(end, beginning);
    // The row's place in its run.
    unsigned slot = begin;
#pragma unroll 1
    for (int first = 1 - taps; first < rows; first += 2)
#pragma unroll
        for (int buffer = 0; buffer < 2; ++buffer) {
            const int row = first + buffer;
            if (buffer > 0 && row >= rows) break;
            unsigned words[COUNT];
            seen(buffer, rows - 1 - row, words);
#pragma unroll
            for (int i = 0; i < COUNT; ++i) beginning[i] = chosen<P>(beginning[i], words[i]);
            if (row >= 0) {
                unsigned whole[COUNT];
                S::load(slot + S::APART, whole);
#pragma unroll
                for (int i = 0; i < COUNT; ++i) whole[i] = chosen<P>(whole[i], beginning[i]);
                put(whole);
            }
            S::store(slot, words);
            slot += S::APART;
            if (slot < end) continue;
            // The run is full: what ends with this row, from each of its run on.
#pragma unroll 2
            for (slot -= 2 * S::APART; (int)slot > (int)begin; slot -= S::APART) {
                unsigned other[COUNT];
                S::load(slot, other);
#pragma unroll
                for (int j = 0; j < COUNT; ++j) words[j] = chosen<P>(words[j], other[j]);
                S::store(slot, words);
            }
            slot = begin;
#pragma unroll
            for (int i = 0; i < COUNT; ++i) beginning[i] = nothing<P>();
        }
}

// Rows one after the other: `next` is where the row would lie in the picture.
struct Down {
    const unsigned char *next;
    int h, height, width;
    long long mode;
    DEVICE Down(const VanHerk &a, const unsigned char *from, int h)
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

// The row's windows, of pairs.
template <class P> DEVICE void join_row(const unsigned (&words)[P::WORDS + 1], unsigned (&pairs)[P::PAIRS]) {
#pragma unroll
    for (int i = 0; i < P::PAIRS; ++i) {
        const int low = P::SKIP + i, high = low + P::HALF, a = low % 4, b = 4 + high % 4;
        pairs[i] = __byte_perm(words[low / 4] ^ P::SIGN, words[high / 4] ^ P::SIGN, b << 12 | b << 8 | a << 4 | a);
    }
    // Of `taps` each, then three of these, which overlap at last.
    int seen = P::PAIRS;
#pragma unroll
    for (int taps = 1; taps < P::TAPS_W;) {
        const int more = min(2 * taps, P::TAPS_W - taps), half = more > taps ? more / 2 : 0;
        seen -= more * P::C;
#pragma unroll
        for (int i = 0; i < P::PAIRS; ++i)
            if (i < seen)
                pairs[i] = half ? chosen<P>(pairs[i], pairs[i + half * P::C], pairs[i + more * P::C])
                                : chosen<P>(pairs[i], pairs[i + more * P::C]);
        taps += more;
    }
}

// A thread's elements of a row. `aligned`: bits that the addresses of its rows have.
template <class P> DEVICE void store_row(unsigned char *to, unsigned aligned, const unsigned (&pairs)[P::HALF]) {
    unsigned words[P::ACROSS / 4];
#pragma unroll
    for (int i = 0; i < P::HALF / 4; ++i) {
        const unsigned first = __byte_perm(pairs[4 * i], pairs[4 * i + 1], 0x6240);
        const unsigned second = __byte_perm(pairs[4 * i + 2], pairs[4 * i + 3], 0x6240);
        words[i] = __byte_perm(first, second, 0x5410) ^ P::SIGN;
        words[P::HALF / 4 + i] = __byte_perm(first, second, 0x7632) ^ P::SIGN;
    }
    if (aligned % P::VECTOR == 0)
#pragma unroll
        for (int i = 0; i < P::ACROSS / P::VECTOR; ++i) {
            Piece<P::VECTOR> piece;
#pragma unroll
            for (int j = 0; j < P::VECTOR / 4; ++j) piece.v[j] = words[i * P::VECTOR / 4 + j];
            store_global<P::VECTOR>(to + i * P::VECTOR, piece);
        }
    else {
        // Whole words of memory, and single elements at both ends.
        const unsigned before = -(unsigned)reinterpret_cast<unsigned long long>(to) & 3;
        constexpr int LAST = P::ACROSS / 4 - 1;
#pragma unroll
        for (int i = 0; i < 3; ++i)
            if (i < before) to[i] = words[0] >> 8 * i;
        unsigned *const whole = reinterpret_cast<unsigned *>(to + before);
#pragma unroll
        for (int i = 0; i < LAST; ++i) whole[i] = __funnelshift_r(words[i], words[i + 1], 8 * before);
        if (before == 0) whole[LAST] = words[LAST];
        else
#pragma unroll
            for (int i = 1; i < 4; ++i)
                if (i >= before) to[4 * LAST + i] = words[LAST] >> 8 * i;
    }
}

// Windows within the sides of the picture.
template <class P>
DEVICE void within(const VanHerk &a, const unsigned char *x, unsigned char *y, long long number, const void *memory) {
    const int height = a.height, width = a.width, segment = number / a.across, h0 = segment * (int)a.rows;
    const int w0 = a.first + (number - segment * a.across) * P::ACROSS, rows = min((int)a.rows, height - h0);
    const unsigned char *const from = x + (w0 - (int)a.before_w - P::SKIP);
    const bool aligned = (reinterpret_cast<unsigned long long>(from) | width) % P::VECTOR == 0;
    const unsigned constant = (unsigned char)a.cval * 0x01010101u;
    // Two rows on their way: vectors, or words of memory, from `beside` bytes in front of the first on.
    unsigned words[2][P::WORDS + 1], beside[2];
    Down down(a, from, h0 - (int)a.before_h);
    const auto begin = [&](int buffer) {
        unsigned(&to)[P::WORDS + 1] = words[buffer];
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
    };
    unsigned char *to = y + (long long)h0 * width + w0;
    const unsigned y_aligned = (unsigned)(reinterpret_cast<unsigned long long>(to) | width);
    begin(0);
    if (rows + a.taps_h > 2) begin(1);
    go_down<P, P::HALF>(
        memory, (int)a.taps_h, rows,
        [&](int buffer, int more, unsigned (&ends)[P::HALF]) {
            unsigned pairs[P::PAIRS];
            if (!aligned)
#pragma unroll
                for (int i = P::FIRST; i < P::END; ++i)
                    words[buffer][i] = __funnelshift_r(words[buffer][i], words[buffer][i + 1], 8 * beside[buffer]);
            join_row<P>(words[buffer], pairs);
            if (more > 1) begin(buffer);
#pragma unroll
            for (int i = 0; i < P::HALF; ++i) ends[i] = pairs[i];
        },
        [&](const unsigned (&pairs)[P::HALF]) { store_row<P>(to, y_aligned, pairs), to += width; });
}

// Windows that pass a side: a thread has one column of elements.
template <class P>
DEVICE void at_sides(const VanHerk &a, const unsigned char *x, unsigned char *y, long long number, const void *memory) {
    const int height = a.height, width = a.width, segment = number / a.sides, h0 = segment * (int)a.side_rows;
    const int place = number - segment * a.sides, rows = min((int)a.side_rows, height - h0);
    const int w = place < a.left_side ? place : place + width - (int)a.sides;
    // Elements of a row that the window sees; none for the constant.
    int there[P::TAPS_W];
#pragma unroll
    for (int s = 0; s < P::TAPS_W; ++s) {
        const int e = w - (int)a.before_w + s * P::C, pixel = e < 0 ? -((P::C - 1 - e) / P::C) : e / P::C;
        const int from = source_index(pixel, width / P::C, a.mode_w);
        there[s] = from < 0 ? -1 : from * P::C + e - pixel * P::C;
    }
    unsigned bytes[2][P::TAPS_W];
    Down down(a, x, h0 - (int)a.before_h);
    const auto begin = [&](int buffer) {
        const unsigned char *const row = down.row();
#pragma unroll
        for (int s = 0; s < P::TAPS_W; ++s) {
            const bool real = !P::CONSTANT || (row && there[s] >= 0);
            bytes[buffer][s] = real ? row[there[s]] : (unsigned char)a.cval;
        }
    };
    unsigned char *to = y + (long long)h0 * width + w;
    begin(0);
    if (rows + a.taps_h > 2) begin(1);
    go_down<P, 1>(
        memory, (int)a.taps_h, rows,
        [&](int buffer, int more, unsigned (&end)[1]) {
            end[0] = bytes[buffer][0] ^ P::SIGN & 0xff;
#pragma unroll
            for (int s = 1; s < P::TAPS_W; ++s) end[0] = chosen<P>(end[0], bytes[buffer][s] ^ P::SIGN & 0xff);
            if (more > 1) begin(buffer);
        },
        [&](const unsigned (&one)[1]) { *to = one[0] ^ P::SIGN, to += width; });
}

template <class Traits> DEVICE void van_herk(const VanHerk &a) {
    using P = VanHerkTile<Traits>;
    extern __shared__ __align__(16) unsigned char memory[];
    begin_dependent();
    const long long picture = (long long)blockIdx.z * a.height * a.width;
    const unsigned char *const x = static_cast<const unsigned char *>(a.x) + picture;
    unsigned char *const y = static_cast<unsigned char *>(a.y) + picture;
    const bool side = blockIdx.x < a.side_blocks;
    const long long number = (blockIdx.x - (side ? 0 : a.side_blocks)) * P::THREADS + threadIdx.x;
    if (side) {
        if (number / a.sides * a.side_rows < a.height) at_sides<P>(a, x, y, number, memory);
    } else if (number / a.across * a.rows < a.height) within<P>(a, x, y, number, memory);
}
