// A block's taps in shared memory: rows with zeros on both sides, twice: as pairs that begin at even places, and at odd
// ones.
#pragma once

#include "ops/conv/cuda/depthwise/banded.cuh"

// BEFORE: places before the first tap that outputs of a product reach, SKIPPED of them and of the taps; then 16 *
// KSTEPS. WORDS pairs of a kind, PITCH bytes from row to row.
template <class P, int BEFORE, int SKIPPED> struct BandedTaps : P {
    static constexpr int LEFT = BEFORE - SKIPPED, WORDS = (BEFORE + 16 * P::KSTEPS + 2) / 2;
    // From pairs at even places to those at odd ones, in words: other banks than the seven words that lanes read there.
    static constexpr int HALF = WORDS % 32 < 8 ? WORDS / 32 * 32 + 8 : WORDS % 32 > 24 ? WORDS / 32 * 32 + 40 : WORDS;
    static constexpr int PITCH = (HALF + WORDS) * 4, CHANNEL = P::R * PITCH;
    static constexpr int BYTES = (P::CHANNELS * CHANNEL + 15) / 16 * 16, TAPS = P::CHANNELS * P::R * P::S;
};

// This block's taps to `to`, zeros beyond the last channel.
template <class P> DEVICE void copy_taps(const Banded &a, int channel0, unsigned to) {
    const unsigned short *taps = static_cast<const unsigned short *>(a.w) + channel0 * P::R * P::S;
    const int real = min(P::CHANNELS, (int)a.c - channel0) * P::R * P::S;
    const bool aligned = (unsigned long long)taps % 16 == 0;
#pragma unroll 4
    for (int i = threadIdx.x * 8; i < P::TAPS; i += P::THREADS * 8) {
        if (aligned && i + 8 <= real) {
            store_shared<16>(to + i * 2, load_global<16>(taps + i));
        } else {
            for (int e = 0; e < 8; ++e) store_shared<2>(to + (i + e) * 2, {{i + e < real ? taps[i + e] : 0u}});
        }
    }
}

// Rows of taps with zeros beside them; whether they are all numbers. A warp takes a row, lanes its words.
template <class P> DEVICE bool spread_taps(unsigned from, unsigned to) {
    using T = typename P::T;
    constexpr int TURNS = (2 * P::WORDS + 31) / 32;
    const int lane = threadIdx.x % 32;
    int taps[TURNS][2];
#pragma unroll
    for (int i = 0; i < TURNS; ++i)
#pragma unroll
        for (int e = 0; e < 2; ++e) {
            const int word = i * 32 + lane, odd = word >= P::WORDS;
            taps[i][e] = tap_of<P>((odd ? word - P::WORDS : word) * 2 + odd + e - P::LEFT, 0);
        }
    // Zeros, or NaN once a tap was.
    unsigned check = 0;
#pragma unroll 2
    for (int row = threadIdx.x / 32; row < P::CHANNELS * P::R; row += P::WARPS)
#pragma unroll
        for (int i = 0; i < TURNS; ++i) {
            const auto tap = [&](int at) { return at < 0 ? 0u : load_shared<2>(from + (row * P::S + at) * 2).v[0]; };
            const unsigned low = tap(taps[i][0]), high = tap(taps[i][1]);
            const int word = i * 32 + lane;
            check = add_zeros<T>(low | high << 16, check);
            if (word < 2 * P::WORDS)
                store_word(to + row * P::PITCH + (word < P::WORDS ? word : P::HALF + word - P::WORDS) * 4,
                           low | high << 16);
        }
    return check == 0;
}
