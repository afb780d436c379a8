// Outputs of halos in NCHW, whose pixels do not lie in a tile as they do in y: there are others between rows. Threads
// write RUN_VECTOR of them at once, which they pick from an epilogue buffer.
//
// The outputs of a plane are a run. Those of a tile are numbered along its runs, each of which begins at a multiple of
// RUN_VECTOR: its first one's number has the remainder of that output's place in its plane. Behind the table of places
// are the pixel of each number, for each 64 pixels the number of the first output that is not in front of them, the
// same of what is behind the tile, and the number that the first run would begin with, negated.
#pragma once

#include "epilogue_buffers.cuh"

template <class Tile> struct OutputRuns {
    static constexpr int V = Tile::RUN_VECTOR, PIXELS = Tile::WARPGROUP_PIXELS, ROUNDS = (PIXELS + 63) / 64;
    unsigned pixels, numbers;
    DEVICE OutputRuns(unsigned table) : pixels(table + PIXELS * 4), numbers(pixels + (PIXELS + Tile::RUNS * V) * 4) {}
    // From one run to the next.
    DEVICE static int pitch(int plane) { return (plane + V - 1) / V * V; }
    // What a tile's pixel `i`, or the one behind the last, says: the number of its output, or else of the next one.
    DEVICE void set(int i, int number, bool output) const {
        if (output && i < PIXELS) store_word(pixels + 4 * number, i);
        if (i % 64 == 0 || i == PIXELS) store_word(numbers + (i + 63) / 64 * 4, number);
    }
    DEVICE void set_origin(int origin) const { store_word(numbers + (ROUNDS + 1) * 4, origin); }
    DEVICE int pixel(int number) const { return load_word(pixels + number * 4); }
    DEVICE int number(int round) const { return load_word(numbers + round * 4); }
    DEVICE int origin() const { return number(ROUNDS + 1); }
};

// Outputs between a buffer of 64 pixels and y or residual (IN): numbers from `first` to `last`, of one run, or of
// several where planes are multiples of RUN_VECTOR.
template <class Tile, bool IN>
DEVICE void move_run(const OutputTile &at, typename Tile::T *global, int pixel0, int filter0, int filters, int first,
                     int last) {
    constexpr int V = Tile::RUN_VECTOR, SIZE = sizeof(typename Tile::T), ACROSS = 64 / V, STRIDE = 128 / ACROSS,
                  COUNT = 64 / STRIDE;
    static_assert(STRIDE % V == 0);
    const OutputRuns<Tile> runs(at.table);
    const int thread = threadIdx.x % 128, end = min(filters, at.filters - at.filter - filter0), step = at.step;
    // The first vector of a row: filters whose planes begin with another remainder have it elsewhere.
    const int filter = at.group * at.filters + at.filter + filter0;
    const auto begin = [&](int row) {
        const int shift = (filter + row) % V * (step % V) % V;
        return (first + shift + V - 1) / V * V - shift;
    };
    typename Tile::T *const plane = global + (at.filter + filter0) * step;
    const int row = thread / ACROSS, number = begin(row) + thread % ACROSS * V;
    int place = -1;
    unsigned from[V];
    if (number + V <= last) {
        int pixel[V];
#pragma unroll
        for (int e = 0; e < V; ++e) pixel[e] = runs.pixel(number + e);
        place = place_of(at, pixel[0]);
#pragma unroll
        for (int e = 0; e < V; ++e) from[e] = buffer_address<Tile>(at.buffer, row, pixel[e] - pixel0);
    }
    typename Tile::T *const mine = plane + row * step + place;
#pragma unroll
    for (int i = 0; i < COUNT; ++i) {
        if (STRIDE * i >= filters || place < 0 || STRIDE * i + row >= end) continue;
        Piece<V * SIZE> all;
        if constexpr (IN) all = load_global<V * SIZE>(mine + STRIDE * i * step);
#pragma unroll
        for (int e = 0; e < V; ++e) {
            const unsigned one = (from[e] ^ STRIDE * i % 8 * 16) + STRIDE * i * 128;
            const int word = e * SIZE / 4, bits = e * SIZE % 4 * 8;
            if constexpr (IN) {
                store_shared<SIZE>(one, {{all.v[word] >> bits}});
            } else {
                const unsigned v = load_shared<SIZE>(one).v[0];
                all.v[word] = bits ? all.v[word] | v << bits : v;
            }
        }
        if constexpr (!IN) store_global<V * SIZE>(mine + STRIDE * i * step, all);
    }
    // What is in front of a row's first vector, and behind its last: a thread each.
    const int own = thread % 64, head = min(begin(own), last), tail = head + (last - head) / V * V;
    if (own < end)
        for (int one = thread < 64 ? first : tail; one < (thread < 64 ? head : last); ++one) {
            const int pixel = runs.pixel(one), there = place_of(at, pixel);
            const unsigned in_buffer = buffer_address<Tile>(at.buffer, own, pixel - pixel0);
            if (there < 0) continue;
            if constexpr (IN) store_shared<SIZE>(in_buffer, load_global<SIZE>(plane + own * step + there));
            else store_global<SIZE>(plane + own * step + there, load_shared<SIZE>(in_buffer));
        }
}

// Those of a round of a tile.
template <class Tile, bool IN>
DEVICE void move_runs(const OutputTile &at, typename Tile::T *global, int pixel0, int filter0, int filters) {
    const OutputRuns<Tile> runs(at.table);
    const int first = runs.number(pixel0 / 64), last = runs.number(pixel0 / 64 + 1);
    if (at.step % Tile::RUN_VECTOR == 0) {
        move_run<Tile, IN>(at, global, pixel0, filter0, filters, first, last);
        return;
    }
    const int pitch = runs.pitch(at.step), origin = runs.origin();
    for (int begin = (first + origin) / pitch * pitch - origin; begin < last; begin += pitch)
        move_run<Tile, IN>(at, global, pixel0, filter0, filters, max(first, begin), min(last, begin + at.step));
}
