// Pixels that begin within 16 bytes, as those of channels that are no multiple of 8 do, to shared memory by a warp.
#pragma once

#include "cp_async.cuh"
#include "shared_memory.cuh"

// Images of elements of 2 bytes, channels last.
struct Pixels {
    const void *from;
    int n, height, width, channels;
};

// COLUMNS pixels of a row, of OCTETS times eight channels, to swizzled pixels from `to` on, by copies of BYTES, which
// pixels begin at multiples of. Threads beside each other copy what lies beside each other: a request takes L1 a cycle
// for each line that it meets. Zeros where there is no pixel, and no channel.
template <int BYTES, int COLUMNS, int OCTETS>
DEVICE void bring_row(const Pixels &x, int n, int h, int left, int channel0, unsigned to) {
    constexpr int OF_PIXEL = OCTETS * 16 / BYTES, STEP = 32 / OF_PIXEL, SPAN = OCTETS * 16;
    constexpr int STEPS = (COLUMNS + STEP - 1) / STEP, TOGETHER = STEPS < 8 ? STEPS : 8;
    // Turns of the loop are whole patterns of swizzled pixels.
    static_assert(COLUMNS % 8 == 0 && (STEPS <= 8 || TOGETHER * STEP % 8 == 0));
    const int lane = threadIdx.x % 32, piece = lane % OF_PIXEL, own = lane / OF_PIXEL;
    const int channel = channel0 + piece * (BYTES / 2);
    const bool real = n < x.n && (unsigned)h < (unsigned)x.height && channel < x.channels;
    const long long at = (((long long)n * x.height + h) * x.width + left + own) * x.channels + channel;
    const char *from = static_cast<const char *>(x.from) + 2 * at;
    const long long step = 2 * STEP * x.channels;
#pragma unroll 1
    for (int first = 0; first < COLUMNS; first += TOGETHER * STEP, from += TOGETHER * step)
#pragma unroll
        for (int i = 0; i < TOGETHER; ++i) {
            const int column = first + i * STEP + own;
            if (COLUMNS % (TOGETHER * STEP) && column >= COLUMNS) continue;
            const bool here = real && (unsigned)(left + column) < (unsigned)x.width;
            const unsigned place = to + first * SPAN + swizzled<SPAN>(i * STEP + own, piece * BYTES);
            cp_async<BYTES>(place, here ? from + i * step : x.from, here);
        }
}
