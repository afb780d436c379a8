// What the kernels that go down columns share: channels beside each other, and how sums become y.
#pragma once

#include "activation.cuh"
#include "cp_async.cuh"
#include "ops/conv/cuda/place_in_filter.cuh"
#include "shared_memory.cuh"

// V elements beside each other; of 16 bits in words, whose halves are converted without being taken apart.
template <typename T, int V, bool WORDS = sizeof(T) == 2 && V % 2 == 0> struct __align__(sizeof(T) * V) Channels {
    T item[V];
    // Of elements that lie `apart` from each other.
    DEVICE static Channels gather(const T *from, int apart) {
        Channels found;
#pragma unroll
        for (int c = 0; c < V; ++c) found.item[c] = from[c * apart];
        return found;
    }
    template <typename A> DEVICE void to(A (&v)[V]) const {
#pragma unroll
        for (int c = 0; c < V; ++c) v[c] = upcast(item[c]);
    }
    template <typename A> DEVICE static Channels of(const A (&v)[V]) {
        Channels out;
#pragma unroll
        for (int c = 0; c < V; ++c) out.item[c] = downcast<T>(v[c]);
        return out;
    }
    // Zeros where the mask's bits are zeros.
    DEVICE void mask(unsigned bits) {
#pragma unroll
        for (int c = 0; c < V; ++c)
            if (!bits) item[c] = downcast<T>(0);
    }
};
template <typename T, int V> struct __align__(sizeof(T) * V) Channels<T, V, true> {
    unsigned word[V / 2];
    DEVICE static Channels gather(const T *from, int apart) {
        const unsigned short *const halves = reinterpret_cast<const unsigned short *>(from);
        Channels found;
#pragma unroll
        for (int c = 0; c < V; c += 2) found.word[c / 2] = halves[c * apart] | (unsigned)halves[(c + 1) * apart] << 16;
        return found;
    }
    DEVICE void to(float (&v)[V]) const {
#pragma unroll
        for (int c = 0; c < V; ++c) v[c] = upcast(T{(unsigned short)(word[c / 2] >> c % 2 * 16)});
    }
    DEVICE void mask(unsigned bits) {
#pragma unroll
        for (int i = 0; i < V / 2; ++i) word[i] &= bits;
    }
    DEVICE static Channels of(const float (&v)[V]) {
        Channels out;
#pragma unroll
        for (int c = 0; c < V; c += 2) out.word[c / 2] = Element<T>::pack(v[c], v[c + 1]);
        return out;
    }
};
template <int V, typename T, typename A> DEVICE void load_channels(A (&to)[V], const T *from) {
    reinterpret_cast<const Channels<T, V> *>(from)->to(to);
}

template <int V, typename A> DEVICE void multiply_add(A (&sums)[V], const A (&x)[V], const A (&w)[V], bool begins) {
#pragma unroll
    for (int c = 0; c < V; ++c) sums[c] = begins ? x[c] * w[c] : sums[c] + x[c] * w[c];
}

// Row i of a period goes into all outputs under way that see it: into `first` + back with tap r, in slot back modulo
// LIVE of the sums; its first product begins a sum, behind its last one it is `done`. Those before the first output are
// left out, what sums of those behind the last one are matters to nobody. P: R, S; SH, SW; TX columns; LIVE.
template <class P, typename A, int V, int WINDOW, class Done>
DEVICE void multiply_row(int i, int first, A (&sums)[P::LIVE][P::TX][V], const A (&now)[WINDOW][V],
                         const A (&w)[P::R * P::S][V], Done done) {
    const auto multiply = [&](int r, int back) {
        const int slot = (back + P::LIVE) % P::LIVE;
#pragma unroll
        for (int s = 0; s < P::S; ++s)
#pragma unroll
            for (int j = 0; j < P::TX; ++j)
                multiply_add<V, A>(sums[slot][j], now[j * P::SW + s], w[r * P::S + s], r == 0 && s == 0);
        if (r == P::R - 1) done(slot, back);
    };
    // Both loops over all rows: bounds that hang on i may be met before i is known, and then they stay loops.
#pragma unroll
    for (int r = 0; r < P::R; ++r)
        if (r <= i && (i - r) % P::SH == 0) multiply(r, (i - r) / P::SH);
    if (first == 0) return;
#pragma unroll
    for (int r = 0; r < P::R; ++r)
        if (r > i && (r - i) % P::SH == 0) multiply(r, -((r - i) / P::SH));
}

// What is added to a thread's sums, and how they go to y, a row at a time. STEP: elements of y from a column to the
// next, 0 where that is not known here; WHOLE: a thread has all its columns, or none.
template <typename T, int V, int TX, int STEP, bool WHOLE, bool BIAS, bool RESIDUAL, int ACTIVATION> struct Epilogue {
    using A = typename Arithmetic<T>::type;
    A bias[V];
    T *y;
    const T *residual;
    long long row_step;
    int step, columns;

    template <class Arguments, class P> DEVICE Epilogue(const Arguments &a, const P &part) {
        if constexpr (BIAS) load_channels(bias, static_cast<const T *>(a.bias) + part.k);
        const long long row = part.residue + a.phases_h * part.first;
        const long long at = part.n * a.y_image + part.k * a.y_channel + row * a.y_row + part.q0 * a.y_column;
        y = static_cast<T *>(a.y) + at, residual = static_cast<const T *>(a.residual) + at;
        row_step = a.phases_h * a.y_row, step = STEP ? STEP : part.q_step * (int)a.y_column;
        columns = part.q0 < (int)a.q ? min(TX, ((int)a.q - part.q0 + part.q_step - 1) / part.q_step) : 0;
    }
    // The next row.
    DEVICE void store(const A (&sums)[TX][V]) {
        const int step = STEP ? STEP : this->step;
#pragma unroll
        for (int j = 0; j < TX; ++j) {
            if (WHOLE ? columns == 0 : j >= columns) break;
            A added[V];
            if constexpr (RESIDUAL) load_channels(added, residual + j * step);
            A out[V];
#pragma unroll
            for (int c = 0; c < V; ++c) {
                out[c] = sums[j][c];
                if constexpr (BIAS) out[c] += bias[c];
                if constexpr (RESIDUAL) out[c] += added[c];
                if constexpr (sizeof(A) == 4) out[c] = activated<ACTIVATION>(out[c]);
                else out[c] = activate<ACTIVATION>(out[c]);
            }
            *reinterpret_cast<Channels<T, V> *>(y + j * step) = Channels<T, V>::of(out);
        }
        y += row_step;
        if constexpr (RESIDUAL) residual += row_step;
    }
};
