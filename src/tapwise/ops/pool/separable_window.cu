// Max and average pooling, channels last, rows of a window first: what S elements beside each other give is worked out
// once for all outputs of a column, whose R rows then go down a thread's registers.
//
// x (n, h, w, c), y (n, p, q, c), dense. A thread has V neighbouring channels of a column, and the next rows of x are
// on their way while it combines. Maxima of 16 bits are two in a register.
#include "grid.cuh"
#include "types.cuh"

struct SeparablePooling {
    const void *x;
    void *y;
    long long n, c, height, width, p, q, stride_w, pad_h, pad_w;
    // Where padding that an average counts ends, behind the image; what sums are divided by, 0 for the count.
    long long end_h, end_w, divisor;
    // Rows of y of a thread, and pieces of a column.
    long long rows, pieces;
};

// T; V; LARGEST, else the mean; COUNT_PADDING; R, S; SH: stride down; THREADS.
template <class Traits> struct Columns : Traits {
    using B = Traits;
    using T = typename B::T;
    using A = typename Arithmetic<T>::type;
    static constexpr bool PAIRED = B::LARGEST && sizeof(T) == 2 && B::V % 2 == 0;
    // Channels of a register, and registers.
    static constexpr int EACH = PAIRED ? 2 : 1, COUNT = B::V / EACH;
    using Item = Neighbours<typename Choose<PAIRED, unsigned, T>::type, COUNT>;
    using Value = typename Choose<PAIRED, unsigned, A>::type;
    // Rows of a window that the one before it has, and those that come.
    static constexpr int KEPT = B::R > B::SH ? B::R - B::SH : 0, NEW = B::R - KEPT;
    // The larger one, NaN above all; or the sum.
    static DEVICE Value combined(Value a, Value b) {
        if constexpr (!B::LARGEST) return a + b;
        else if constexpr (sizeof(T) == 8) return b > a || b != b ? b : a;
        else if constexpr (PAIRED) return Element<T>::larger(a, b);
        else return Element<float>::larger(a, b);
    }
    static DEVICE Item identity() {
        const T one = downcast<T>(B::LARGEST ? A(-POSITIVE_INFINITY) : A(0));
        Item item;
#pragma unroll
        for (int i = 0; i < COUNT; ++i)
            if constexpr (PAIRED) item.v[i] = one.bits * 0x10001u;
            else item.v[i] = one;
        return item;
    }
    static DEVICE Value value_of(const Item &item, int i) {
        if constexpr (PAIRED) return item.v[i];
        else return upcast(item.v[i]);
    }
};

// A column of outputs: rows first to end of y, at `y` and `y_step` from each other; x from its image's element (0, 0)
// on.
template <class P> struct Column {
    const typename P::T *x;
    typename P::T *y;
    int left, first, end, row_step, column_step, y_step;
};

template <class P> DEVICE void pool_column(const SeparablePooling &a, const Column<P> &at) {
    using A = typename P::A;
    using Item = typename P::Item;
    using Value = typename P::Value;
    constexpr int R = P::R, S = P::S, COUNT = P::COUNT, KEPT = P::KEPT, NEW = P::NEW;
    const int height = a.height, width = a.width;
    unsigned inside = 0;
    int counted = 0;
#pragma unroll
    for (int s = 0; s < S; ++s) {
        const int w = at.left + s;
        inside |= (unsigned)((unsigned)w < (unsigned)width) << s;
        counted += P::COUNT_PADDING ? w < (int)a.end_w : (unsigned)w < (unsigned)width;
    }
    const Item nothing = P::identity();
    const auto load = [&](int h, Item(&row)[S]) {
        const typename P::T *const from = at.x + (long long)h * at.row_step + at.left * at.column_step;
        const unsigned here = (unsigned)h < (unsigned)height ? inside : 0;
#pragma unroll
        for (int s = 0; s < S; ++s)
            row[s] = here >> s & 1 ? *reinterpret_cast<const Item *>(from + s * at.column_step) : nothing;
    };
    const auto reduce = [&](const Item(&row)[S], Value(&sums)[COUNT]) {
#pragma unroll
        for (int v = 0; v < COUNT; ++v) {
            sums[v] = P::value_of(row[0], v);
#pragma unroll
            for (int s = 1; s < S; ++s) sums[v] = P::combined(sums[v], P::value_of(row[s], v));
        }
    };
    Value rows[R][COUNT];
    int top = at.first * P::SH - (int)a.pad_h;
    if constexpr (KEPT > 0) {
#pragma unroll
        for (int r = 0; r < KEPT; ++r) {
            Item row[S];
            load(top + r, row);
            reduce(row, rows[r]);
        }
    }
    Item next[NEW][S];
#pragma unroll
    for (int r = 0; r < NEW; ++r) load(top + KEPT + r, next[r]);
    typename P::T *y = at.y;
#pragma unroll 1
    for (int p = at.first; p < at.end; ++p, top += P::SH, y += at.y_step) {
#pragma unroll
        for (int r = 0; r < NEW; ++r) reduce(next[r], rows[KEPT + r]);
        if (p + 1 < at.end)
#pragma unroll
            for (int r = 0; r < NEW; ++r) load(top + P::SH + KEPT + r, next[r]);
        A divisor = 1;
        if constexpr (!P::LARGEST) {
            const int end = P::COUNT_PADDING ? (int)a.end_h : height, begin = P::COUNT_PADDING ? top : max(top, 0);
            divisor = a.divisor ? (A)a.divisor : (A)((long long)max(min(top + R, end) - begin, 0) * counted);
        }
        Item out;
#pragma unroll
        for (int v = 0; v < COUNT; ++v) {
            Value value = rows[0][v];
#pragma unroll
            for (int r = 1; r < R; ++r) value = P::combined(value, rows[r][v]);
            if constexpr (P::PAIRED) out.v[v] = value;
            else out.v[v] = downcast<typename P::T>(P::LARGEST ? value : value / divisor);
        }
        *reinterpret_cast<Item *>(y) = out;
        if constexpr (KEPT > 0) {
#pragma unroll
            for (int r = 0; r < KEPT; ++r)
#pragma unroll
                for (int v = 0; v < COUNT; ++v) rows[r][v] = rows[r + NEW][v];
        }
    }
}

template <class Traits> DEVICE void pool_separable(const SeparablePooling &a) {
    using P = Columns<Traits>;
    using T = typename P::T;
    const int height = a.height, width = a.width, p = a.p, q = a.q, c = a.c;
    Column<P> at;
    const unsigned vectors = c / P::V;
    unsigned rest = blockIdx.x * P::THREADS + threadIdx.x;
    const int channel = rest % vectors * P::V;
    rest /= vectors;
    const int column = rest % (unsigned)q;
    rest /= (unsigned)q;
    const int piece = rest % (unsigned)a.pieces, image = rest / (unsigned)a.pieces;
    begin_dependent();
    if (image >= (int)a.n) return;
    at.x = static_cast<const T *>(a.x) + (long long)image * height * width * c + channel;
    at.first = piece * (int)a.rows, at.end = min(p, at.first + (int)a.rows);
    at.y = static_cast<T *>(a.y) + (((long long)image * p + at.first) * q + column) * c + channel;
    at.left = column * (int)a.stride_w - (int)a.pad_w;
    at.row_step = width * c, at.column_step = c, at.y_step = q * c;
    pool_column(a, at);
}
