// Sums of bytes over windows of few taps: a thread goes down rows of its own with ACROSS neighbouring elements, and has
// the sums of the rows of outputs that are under way in registers. A row of x is read once. A column and a row: the
// column's sums are under way, of all that the row's taps will see.
#include "ops/filter/down_rows.cuh"
#include "ops/filter/rows.cuh"

// What a list begins with.
enum Constant { CVAL, LOW, HIGH, START, COLUMN_EPSILON, EPSILON, CONSTANTS = 8 };

// SEPARABLE; TAPS_H; INTEGRAL: y holds integers, CLIP: within their range; TRUNCATE: so do the column's sums. As many
// rows are on their way as windows have, two at least.
template <class Traits> struct RollingTile : DownTile<Traits, (Traits::TAPS_H < 2 ? 2 : Traits::TAPS_H)> {
    static constexpr int WEIGHTS =
        Traits::SEPARABLE ? Traits::TAPS_H + Traits::TAPS_W : Traits::TAPS_H * Traits::TAPS_W;
};

// Down `rows` rows of COUNT outputs, whose taps of a row are STEP elements apart. `seen(buffer, more, values)`: a row
// of x, `more` of which come behind it; `put(sums)` takes a row's.
template <class P, int COUNT, int STEP, class Seen, class Put>
DEVICE void roll(const float *list, int rows, Seen seen, Put put) {
    constexpr int R = P::TAPS_H, S = P::TAPS_W, SEEN = COUNT + (S - 1) * STEP, SUMS = P::SEPARABLE ? SEEN : COUNT;
    float weights[P::WEIGHTS], sums[R][SUMS] = {};
#pragma unroll
    for (int i = 0; i < P::WEIGHTS; ++i) weights[i] = list[CONSTANTS + i];
    const float start = list[START], epsilon = list[COLUMN_EPSILON];
    const int all = rows + R - 1;
#pragma unroll 1
    for (int first = 0; first < all; first += P::BUFFERS)
#pragma unroll
        for (int buffer = 0; buffer < P::BUFFERS; ++buffer) {
            const int row = first + buffer;
            if (buffer > 0 && row >= all) break;
            float values[SEEN];
            seen(buffer, all - 1 - row, values);
        // Output row - r sees this row with tap r, and begins with the first.
#pragma unroll
            for (int r = 0; r < R; ++r) {
                float (&of)[SUMS] = sums[(buffer - r + R) % R];
#pragma unroll
                for (int i = 0; i < SUMS; ++i) {
                    if (r == 0) of[i] = P::SEPARABLE ? 0.0f : start;
                    if constexpr (P::SEPARABLE) of[i] += weights[r] * values[i];
                    else
#pragma unroll
                        for (int s = 0; s < S; ++s) of[i] += weights[r * S + s] * values[i + s * STEP];
                }
            }
            if (row < R - 1) continue;
            float (&done)[SUMS] = sums[(buffer + 1) % R];
            float results[COUNT];
            if constexpr (P::SEPARABLE) {
                if constexpr (P::TRUNCATE)
#pragma unroll
                    for (int i = 0; i < SUMS; ++i) done[i] = trunc(done[i] + copysign(epsilon, done[i]));
#pragma unroll
                for (int i = 0; i < COUNT; ++i) {
                    results[i] = start;
#pragma unroll
                    for (int s = 0; s < S; ++s) results[i] += weights[R + s] * done[i + s * STEP];
                }
            } else
#pragma unroll
                for (int i = 0; i < COUNT; ++i) results[i] = done[i];
            put(results);
        }
}

template <class Traits, typename Y> DEVICE void filter_rolling(const DownRows &a) {
    using P = RollingTile<Traits>;
    using T = typename P::T;
    begin_dependent();
    const float *const list = static_cast<const float *>(a.list);
    const float low = list[LOW], high = list[HIGH], epsilon = list[EPSILON];
    const auto result = [&](float sum) { return store<Y, P::INTEGRAL, false, P::CLIP>(sum, low, high, epsilon); };
    const int width = a.width;
    Y *const y = static_cast<Y *>(a.y);
    const auto within = [&](const Part &part) {
        Within<P> rows(a, part.x + (part.w - (int)a.before_w - P::SKIP), part.h - (int)a.before_h);
        Y *to = y + part.at;
        constexpr int EACH = P::ACROSS * sizeof(Y) < 16 ? P::ACROSS : 16 / sizeof(Y);
        const bool aligned =
            (reinterpret_cast<unsigned long long>(to) | width * (unsigned long long)sizeof(Y)) % (EACH * sizeof(Y)) ==
            0;
        const int all = part.rows + P::TAPS_H - 1;
#pragma unroll
        for (int i = 0; i < P::BUFFERS; ++i)
            if (i < all) rows.begin(i);
        roll<P, P::ACROSS, P::C>(
            list, part.rows,
            [&](int buffer, int more, float (&values)[P::SEEN]) {
                const unsigned (&words)[P::WORDS + 1] = rows.end(buffer);
#pragma unroll
                for (int i = 0; i < P::SEEN; ++i) values[i] = element<T>(words, P::SKIP + i);
                if (more >= P::BUFFERS) rows.begin(buffer);
            },
            [&](const float (&sums)[P::ACROSS]) {
#pragma unroll
                for (int i = 0; i < P::ACROSS; i += EACH) {
                    Neighbours<Y, EACH> some;
#pragma unroll
                    for (int j = 0; j < EACH; ++j) some.v[j] = result(sums[i + j]);
                    if (aligned) *reinterpret_cast<Neighbours<Y, EACH> *>(to + i) = some;
                    else
#pragma unroll
                        for (int j = 0; j < EACH; ++j) to[i + j] = some.v[j];
                }
                to += width;
            });
    };
    const auto at_side = [&](const Part &part) {
        AtSide<P> rows(a, part.x, part.w, part.h - (int)a.before_h);
        Y *to = y + part.at;
        const int all = part.rows + P::TAPS_H - 1;
#pragma unroll
        for (int i = 0; i < P::BUFFERS; ++i)
            if (i < all) rows.begin(i);
        roll<P, 1, 1>(
            list, part.rows,
            [&](int buffer, int more, float (&values)[P::TAPS_W]) {
#pragma unroll
                for (int s = 0; s < P::TAPS_W; ++s) values[s] = widened((T)rows.bytes[buffer][s]);
                if (more >= P::BUFFERS) rows.begin(buffer);
            },
            [&](const float (&sums)[1]) { *to = result(sums[0]), to += width; });
    };
    each_part<P::ACROSS, P::THREADS>(a, within, at_side);
}
