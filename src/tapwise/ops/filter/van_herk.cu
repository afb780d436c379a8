// The largest or smallest byte of a window, by van Herk and Gil and Werman: no barriers, each thread goes down rows of
// its own with ACROSS neighbouring elements.
//
// Two elements are in a word, each byte twice, so that numbers of 16 bits have the order of bytes: element i and the
// one half a thread's width on, and a tap of a row is another register. The row's window is joined of three, of nine,
// and so on, the last ones overlap. Down the column rows come in runs of as many as a window has. A window is the end
// of one run and the beginning of the next: what all ends of a run hold is made when it is full, and lies in shared
// memory, each thread's own; the beginning grows in registers.
#include "ops/filter/down_rows.cuh"

// OP; of a row's pairs HALF are outputs.
template <class Traits> struct VanHerkTile : DownTile<Traits, 2> {
    static constexpr int HALF = Traits::ACROSS / 2, PAIRS = HALF + (Traits::TAPS_W - 1) * Traits::C;
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

// Down `rows` rows of COUNT words. `seen(buffer, more, words)`: those that a row's windows end with; behind it `more`
// rows come, and the one after the next takes its place in one of two buffers. `put(words)` takes a row's.
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

template <class Traits> DEVICE void van_herk(const DownRows &a) {
    using P = VanHerkTile<Traits>;
    extern __shared__ __align__(16) unsigned char memory[];
    begin_dependent();
    const int taps = a.taps_h, width = a.width;
    unsigned char *const y = static_cast<unsigned char *>(a.y);
    const auto within = [&](const Part &part) {
        const int ahead = (int)a.before_w + P::SKIP;
        Within<P> rows(a, part.x + (part.w - ahead), part.h - (int)a.before_h);
        unsigned char *to = y + part.at;
        const unsigned aligned = (unsigned)(reinterpret_cast<unsigned long long>(to) | width);
        rows.begin(0);
        if (part.rows + taps > 2) rows.begin(1);
        go_down<P, P::HALF>(
            memory, taps, part.rows,
            [&](int buffer, int more, unsigned (&ends)[P::HALF]) {
                unsigned pairs[P::PAIRS];
                join_row<P>(rows.end(buffer), pairs);
                if (more > 1) rows.begin(buffer);
#pragma unroll
                for (int i = 0; i < P::HALF; ++i) ends[i] = pairs[i];
            },
            [&](const unsigned (&pairs)[P::HALF]) { store_row<P>(to, aligned, pairs), to += width; });
    };
    const auto at_side = [&](const Part &part) {
        AtSide<P> rows(a, part.x, part.w, part.h - (int)a.before_h);
        unsigned char *to = y + part.at;
        rows.begin(0);
        if (part.rows + taps > 2) rows.begin(1);
        go_down<P, 1>(
            memory, taps, part.rows,
            [&](int buffer, int more, unsigned (&end)[1]) {
                end[0] = nothing<P>();
#pragma unroll
                for (int s = 0; s < P::TAPS_W; ++s) end[0] = chosen<P>(end[0], rows.bytes[buffer][s] ^ P::SIGN & 0xff);
                if (more > 1) rows.begin(buffer);
            },
            [&](const unsigned (&one)[1]) { *to = one[0] ^ P::SIGN, to += width; });
    };
    each_part<P::ACROSS, P::THREADS>(a, within, at_side);
}
