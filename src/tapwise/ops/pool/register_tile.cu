// Max and average pooling, NCHW: a thread has a strip of V neighbouring outputs of a row, and goes down some rows.
//
// x (n, c, h, w), y and places (n, c, p, q), dense. A block brings some planes, or a band of rows of one, to shared
// memory as they lie, in pieces of 16 bytes. A thread reads what a strip sees of a row at once, in vectors of ALIGN
// bytes, and works out what S neighbours give; R such rows go down its registers. Maxima of 16 bits are two in a
// register. STAGED: y goes by way of shared memory, where rows of it lie at multiples of few bytes.
#include "approximate.cuh"
#include "cp_async.cuh"
#include "types.cuh"

struct RegisterTilePooling {
    const void *x;
    void *y, *places;
    long long all_planes, height, width, p, q, pad_h, pad_w;
    // Where padding that an average counts ends, behind the image; what sums are divided by where they are not COUNTED.
    long long end_h, end_w, divisor;
    // Strips of a row, rows of y of a thread, pieces of a column of a band; planes and rows of y of a block, bands of a
    // plane; 2^32 over the first and the third, rounded up, 0 for 1.
    long long strips, rows, pieces, planes, band, bands, per_strips, per_pieces;
    // Bytes of shared memory in front of x, and of y.
    long long front, staged_at;
};

DEVICE unsigned quotient(unsigned value, unsigned per) { return per ? __umulhi(value, per) : value; }

// Elements between the line of memory (128 bytes) that an element lies in, and the element.
template <typename T> DEVICE int past_line(const T *at) {
    return (int)(reinterpret_cast<unsigned long long>(at) % 128 / sizeof(T));
}

// T; LARGEST, else the mean; PLACES; COUNTED: taps of a mean are counted, COUNT_PADDING: in the padding too; MASKED:
// strips see columns outside of the image; R, S, SH, SW: the window and its strides; V; ALIGN: what a strip's first
// bytes are a multiple of; LEAD: elements in front of its first window; OUT: bytes of y at once; STAGED; INFINITE: the
// first 16 bits of -infinity; THREADS.
template <class Traits> struct Strip : Traits {
    using B = Traits;
    using T = typename B::T;
    using A = typename Arithmetic<T>::type;
    static constexpr int SIZE = sizeof(T), KEPT = B::R > B::SH ? B::R - B::SH : 0, NEW = B::R - KEPT;
    // Outputs of a register, and registers.
    static constexpr bool PAIRED = B::LARGEST && !B::PLACES && SIZE == 2;
    static constexpr int EACH = PAIRED ? 2 : 1, COUNT = B::V / EACH;
    using Value = typename Choose<PAIRED, unsigned, A>::type;
    // Elements, words and vectors that a strip sees of a row; words of it where it begins inside a word.
    static constexpr int SPAN = B::LEAD + (B::V - 1) * B::SW + B::S, WORDS = (SPAN * SIZE + 3) / 4,
                         VECTOR = B::ALIGN > 4 ? B::ALIGN : 4, VECTORS = (WORDS * 4 + VECTOR - 1) / VECTOR,
                         SHIFTED = (SPAN + 2) / 2, LOADED = B::ALIGN < 4 ? SHIFTED : VECTORS * VECTOR / 4;
    // Words of identity elements: where a mask has no ones.
    static DEVICE unsigned identity(int word) {
        if (!B::LARGEST) return 0;
        return SIZE == 2 ? B::INFINITE * 0x10001u : SIZE == 4 || word % 2 ? (unsigned)B::INFINITE << 16 : 0;
    }
    static DEVICE Value combined(Value a, Value b) {
        if constexpr (!B::LARGEST) return a + b;
        else if constexpr (SIZE == 8) return b > a || b != b ? b : a;
        else if constexpr (PAIRED) return Element<T>::larger(a, b);
        else return Element<float>::larger(a, b);
    }
};

// A strip: rows first to end of y; `row`: the shared address of what it sees of x's row 0; the first column that its
// first window sees.
struct StripPlace { int row, left, first, end; };

template <class P> struct StripValues {
    typename P::Value v[P::COUNT];
    int place[P::PLACES ? P::V : 1];
};

template <class P>
DEVICE void load_strip(unsigned from, const unsigned (&masks)[P::WORDS], unsigned (&words)[P::WORDS]) {
    unsigned loaded[P::LOADED];
    constexpr int EACH = P::VECTOR / 4;
    const unsigned begin = P::ALIGN < 4 ? from & ~3u : from;
#pragma unroll
    for (int i = 0; i < P::LOADED / EACH; ++i) {
        const Piece<P::VECTOR> piece = load_shared<P::VECTOR>(begin + i * P::VECTOR);
#pragma unroll
        for (int e = 0; e < EACH; ++e) loaded[i * EACH + e] = piece.v[e];
    }
    const unsigned shift = from % 4 * 8;
#pragma unroll
    for (int i = 0; i < P::WORDS; ++i) {
        words[i] = loaded[i];
        if constexpr (P::ALIGN < 4) words[i] = __funnelshift_r(loaded[i], loaded[i + 1 < P::LOADED ? i + 1 : i], shift);
        if constexpr (P::MASKED) words[i] = words[i] & masks[i] | P::identity(i) & ~masks[i];
    }
}

// Element e; where PAIRED, it and the one that the next window has in its place.
template <class P> DEVICE typename P::Value taken(const unsigned (&words)[P::WORDS], int e) {
    if constexpr (P::PAIRED) {
        const int other = e + P::SW;
        if (e % 2 == 0 && other == e + 1) return words[e / 2];
        return __byte_perm(words[e / 2], words[other / 2], (e % 2 ? 0x32 : 0x10) | (other % 2 ? 0x7600 : 0x5400));
    } else if constexpr (P::SIZE == 2) {
        return upcast(typename P::T{(unsigned short)(words[e / 2] >> e % 2 * 16)});
    } else if constexpr (P::SIZE == 4) {
        return __uint_as_float(words[e]);
    } else {
        return __longlong_as_double((long long)words[2 * e + 1] << 32 | words[2 * e]);
    }
}

// What S neighbours give, for each output. `first`: the column of x that the first window sees.
template <class P>
DEVICE void reduce_strip(const unsigned (&words)[P::WORDS], int left, int row_place, StripValues<P> &into) {
#pragma unroll
    for (int v = 0; v < P::COUNT; ++v) {
        const int e = P::LEAD + v * P::EACH * P::SW;
        if constexpr (P::PLACES) {
            const int column = left + v * P::SW;
            typename P::Value value = -POSITIVE_INFINITY;
            int place = max(column, 0);
#pragma unroll
            for (int s = 0; s < P::S; ++s) {
                const typename P::Value one = taken<P>(words, e + s);
                const bool better = one > value || one != one;
                value = better ? one : value, place = better ? column + s : place;
            }
            into.v[v] = value, into.place[v] = row_place + place;
        } else {
            into.v[v] = taken<P>(words, e);
#pragma unroll
            for (int s = 1; s < P::S; ++s) into.v[v] = P::combined(into.v[v], taken<P>(words, e + s));
        }
    }
}

template <class P>
DEVICE void pool_strip(const RegisterTilePooling &a, const StripPlace &at, unsigned staged, long long y, int q_left) {
    using T = typename P::T;
    using A = typename P::A;
    constexpr int R = P::R, S = P::S, V = P::V, SIZE = P::SIZE, KEPT = P::KEPT, NEW = P::NEW;
    const int height = a.height, width = a.width;
    unsigned masks[P::WORDS];
    A counted[V];
    if constexpr (P::MASKED)
#pragma unroll
        for (int i = 0; i < P::WORDS; ++i) {
            masks[i] = 0;
#pragma unroll
            for (int e = i * 4 / SIZE; e < (SIZE < 4 ? i * 2 + 2 : i * 4 / SIZE + 1); ++e)
                if ((unsigned)(at.left - P::LEAD + e) < (unsigned)width)
                    masks[i] |= SIZE < 4 ? 0xffffu << e % 2 * 16 : ~0u;
        }
    if constexpr (P::COUNTED)
#pragma unroll
        for (int v = 0; v < V; ++v) {
            const int left = at.left + v * P::SW, begin = P::COUNT_PADDING ? left : max(left, 0);
            const A count = max(min(left + S, P::COUNT_PADDING ? (int)a.end_w : width) - begin, 1);
            if constexpr (SIZE == 2) counted[v] = reciprocal(count);
            else counted[v] = count;
        }
    StripValues<P> rows[R];
    int top = at.first * P::SH - (int)a.pad_h;
    const auto load = [&](int h, StripValues<P> &into) {
        // A row twice changes no maximum; of a mean it counts nothing.
        const int inside = min(max(h, 0), height - 1);
        unsigned words[P::WORDS];
        load_strip<P>(at.row + inside * width * SIZE, masks, words);
        reduce_strip<P>(words, at.left, inside * width, into);
        if constexpr (!P::LARGEST)
#pragma unroll
            for (int v = 0; v < V; ++v) into.v[v] = inside == h ? into.v[v] : 0;
    };
#pragma unroll
    for (int r = 0; r < KEPT; ++r) load(top + r, rows[r]);
#pragma unroll 1
    for (int p = at.first; p < at.end; ++p, top += P::SH) {
#pragma unroll
        for (int r = 0; r < NEW; ++r) load(top + KEPT + r, rows[KEPT + r]);
        StripValues<P> out = rows[0];
#pragma unroll
        for (int r = 1; r < R; ++r)
#pragma unroll
            for (int v = 0; v < P::COUNT; ++v) {
                if constexpr (P::PLACES) {
                    const bool better = rows[r].v[v] > out.v[v] || rows[r].v[v] != rows[r].v[v];
                    out.v[v] = better ? rows[r].v[v] : out.v[v];
                    out.place[v] = better ? rows[r].place[v] : out.place[v];
                } else {
                    out.v[v] = P::combined(out.v[v], rows[r].v[v]);
                }
            }
        if constexpr (!P::LARGEST) {
            A count = a.divisor;
            if constexpr (P::COUNTED)
                count = max(
                    min(top + R, P::COUNT_PADDING ? (int)a.end_h : height) - (P::COUNT_PADDING ? top : max(top, 0)), 1);
            if constexpr (SIZE == 2) count = reciprocal(count);
#pragma unroll
            for (int v = 0; v < V; ++v) {
                A factor = count;
                if constexpr (P::COUNTED) factor *= counted[v];
                if constexpr (SIZE == 2) out.v[v] *= factor;
                else out.v[v] /= factor;
            }
        }
        unsigned words[V * SIZE > 4 ? V * SIZE / 4 : 1];
        if constexpr (P::PAIRED) {
#pragma unroll
            for (int i = 0; i < V / 2; ++i) words[i] = out.v[i];
        } else if constexpr (SIZE == 2) {
#pragma unroll
            for (int v = 0; v < V; ++v) {
                const unsigned bits = downcast<T>(out.v[v]).bits;
                words[v / 2] = v % 2 ? words[v / 2] | bits << 16 : bits;
            }
        } else if constexpr (SIZE == 4) {
#pragma unroll
            for (int v = 0; v < V; ++v) words[v] = __float_as_uint(out.v[v]);
        } else {
#pragma unroll
            for (int v = 0; v < V; ++v) {
                const long long bits = __double_as_longlong(out.v[v]);
                words[2 * v] = bits, words[2 * v + 1] = bits >> 32;
            }
        }
#pragma unroll
        for (int i = 0; i < V * SIZE / P::OUT; ++i) {
            if (i * P::OUT / SIZE >= q_left) continue;
            Piece<P::OUT> piece;
            if constexpr (P::OUT >= 4)
#pragma unroll
                for (int e = 0; e < P::OUT / 4; ++e) piece.v[e] = words[i * P::OUT / 4 + e];
            else piece.v[0] = words[i / 2] >> i % 2 * 16;
            if constexpr (P::STAGED) store_shared<P::OUT>(staged + i * P::OUT, piece);
            else store_global<P::OUT>(static_cast<unsigned char *>(a.y) + y * SIZE + i * P::OUT, piece);
        }
        if constexpr (P::PLACES) {
            long long *const to = static_cast<long long *>(a.places) + y;
            if constexpr (V % 2 == 0 && P::OUT % (2 * SIZE) == 0) {
#pragma unroll
                for (int v = 0; v < V; v += 2)
                    if (v < q_left)
                        *reinterpret_cast<uint4 *>(to + v) =
                            make_uint4(out.place[v], out.place[v] >> 31, out.place[v + 1], out.place[v + 1] >> 31);
            } else {
#pragma unroll
                for (int v = 0; v < V; ++v)
                    if (v < q_left) to[v] = out.place[v];
            }
        }
        y += a.q, staged += (unsigned)a.q * SIZE;
        if constexpr (KEPT > 0)
#pragma unroll
            for (int r = 0; r < KEPT; ++r) rows[r] = rows[r + NEW];
    }
}

template <class Traits> DEVICE void pool_register_tile(const RegisterTilePooling &a) {
    using P = Strip<Traits>;
    using T = typename P::T;
    extern __shared__ __align__(16) unsigned char memory[];
    constexpr int EACH = 16 / P::SIZE;
    const int height = a.height, width = a.width, p = a.p, q = a.q, plane = height * width;
    const int plane0 = blockIdx.x / (unsigned)a.bands * (int)a.planes,
              p0 = blockIdx.x % (unsigned)a.bands * (int)a.band, p1 = min(p, p0 + (int)a.band);
    const int here = min((int)a.planes, (int)a.all_planes - plane0);
    // Elements of x that the block reads, in whole pieces of 16 bytes: others of x lie around them. A warp's pieces are
    // whole lines of memory.
    const int h0 = max(0, p0 * P::SH - (int)a.pad_h), h1 = min(height, (p1 - 1) * P::SH - (int)a.pad_h + P::R);
    const long long first = (long long)plane0 * plane + (long long)h0 * width;
    const int ahead = past_line<T>(static_cast<const T *>(a.x) + first),
              count = (here - 1) * plane + (h1 - h0) * width + ahead;
    const long long behind = (long long)(int)a.all_planes * plane - (first - ahead);
    const T *const from = static_cast<const T *>(a.x) + first - ahead;
    T *const elements = reinterpret_cast<T *>(memory + a.front);
    begin_dependent();
    for (int i = threadIdx.x * EACH; i < count; i += P::THREADS * EACH)
        if (i + EACH > ahead)
            cp_async_part<16>(shared_address(elements + i), from + i, (int)min(behind - i, (long long)EACH) * P::SIZE);
    cp_async_commit();
    cp_async_wait<0>();
    __syncthreads();
    const long long y0 = ((long long)plane0 * p + p0) * q;
    const int ahead_y = past_line<T>(static_cast<T *>(a.y) + y0), items = here * (int)a.pieces * (int)a.strips;
    for (unsigned item = threadIdx.x; item < (unsigned)items; item += P::THREADS) {
        const unsigned rest = quotient(item, a.per_strips), number = quotient(rest, a.per_pieces);
        const int column = (item - rest * (unsigned)a.strips) * P::V, piece = rest - number * (unsigned)a.pieces;
        StripPlace at;
        at.first = p0 + piece * (int)a.rows, at.end = min(p1, at.first + (int)a.rows);
        if (at.first >= at.end) continue;
        at.left = column * P::SW - (int)a.pad_w;
        at.row =
            (int)shared_address(elements) + (ahead + (int)number * plane - h0 * width + at.left - P::LEAD) * P::SIZE;
        const int place = ((int)number * p + at.first - p0) * q + column;
        pool_strip<P>(a, at, shared_address(memory) + (unsigned)a.staged_at + (ahead_y + place) * P::SIZE, y0 + place,
                      q - column);
    }
    if constexpr (P::STAGED) {
        __syncthreads();
        const int all = ((here - 1) * p + p1 - p0) * q + ahead_y;
        T *const y = static_cast<T *>(a.y) + y0 - ahead_y;
        const T *const staged = reinterpret_cast<const T *>(memory + a.staged_at);
        const int begin = (ahead_y + EACH - 1) / EACH * EACH, end = all / EACH * EACH;
        for (int i = threadIdx.x * EACH; i < end; i += P::THREADS * EACH)
            if (i >= begin) store_global<16>(y + i, load_shared<16>(shared_address(staged + i)));
        // A thread for each element in front of the pieces of 16 bytes, and behind them.
        if (threadIdx.x < 2 * EACH) {
            const bool front = threadIdx.x < EACH;
            const int edge = front ? ahead_y + threadIdx.x : max(begin, end) + threadIdx.x - EACH;
            if (edge < all && (!front || edge < begin)) y[edge] = staged[edge];
        }
    }
}
