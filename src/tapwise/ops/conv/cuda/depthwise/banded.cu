// Depthwise convolution on tensor cores: the row of a filter as a band of a matrix.
//
// A (16 positions x 16 columns of x) times B (16 columns x 8 outputs), where B[k][j] is the tap that output j of a
// position sees at column k: w[k - j] for stride 1. So all products are of one channel, whose rows must lie side by
// side: a block copies rows of x to shared memory as they are, [pixel][channel], transposes them to planes
// [channel][pixel] by ldmatrix, and brings outputs back the same way. A warp has one channel.
#include "ops/conv/cuda/depthwise/banded.cuh"

// LIVE rows of sums under way, all weights in registers: every row of x is loaded once.
template <class Traits> DEVICE void depthwise_banded(const Banded &a) {
    using P = Tile<Traits>;
    using T = typename P::T;
    extern __shared__ __align__(128) unsigned char memory[];
    constexpr int LIVE = (P::R + P::SH - 1) / P::SH, PERIOD = LIVE * P::SH;
    // A stage has whole periods, or a period some stages, of which the last may be shorter.
    constexpr int ROUNDS = P::ROWS < PERIOD ? 1 : P::ROWS / PERIOD, PARTS = (PERIOD * ROUNDS + P::ROWS - 1) / P::ROWS;
    static_assert(P::ROWS < PERIOD || P::ROWS == ROUNDS * PERIOD);
    const unsigned planes = shared_address(memory), out = planes + P::PLANE_BYTES;
    const unsigned raw = (out + P::SUMS * P::OUT_ROW + P::RAW_ALIGNMENT - 1) / P::RAW_ALIGNMENT * P::RAW_ALIGNMENT;
    Rows<P> block(a, raw, out);
    constexpr int EACH = P::EACH, WARPS = P::CHANNELS / EACH;
    const int lane = block.lane, channel = block.warp % WARPS * EACH, tile0 = block.warp / WARPS * P::MTILES;
    // Under way while the first rows are copied; before the launch before has ended, where it does not write them.
    if (!a.weights_ready) begin_dependent();
    // All are asked for at once, also where there is none.
    unsigned short taps[EACH][P::KSTEPS * 4][P::R];
#pragma unroll
    for (int c = 0; c < EACH; ++c) {
        const int own = min(block.channel0 + channel + c, (int)a.c - 1);
#pragma unroll
        for (int i = 0; i < P::KSTEPS * 4; ++i)
#pragma unroll
            for (int r = 0; r < P::R; ++r) {
                const int s = max(0, tap_of<P>(i / 2 * 8 + lane % 4 * 2 + i % 2, lane / 4));
                const int at =
                    P::FILTER_TAPS ? own * P::FILTER_TAPS + place_in_filter<P>(r, s) : (own * P::R + r) * P::S + s;
                taps[c][i][r] = static_cast<const unsigned short *>(a.w)[at];
            }
    }
    if (a.weights_ready) begin_dependent();
    // The first row of a part, counted from a period's first part, and its rows.
    const auto begin_of = [](int part) { return part / PARTS * (PERIOD * ROUNDS) + part % PARTS * P::ROWS; };
    const auto rows_of = [&](int part) { return begin_of(part + 1) - begin_of(part); };
    block.start(begin_of, rows_of);
    block.prepare(planes);
    if constexpr (P::TMA) __syncthreads();
    unsigned w[EACH][P::R][P::KSTEPS][2];
#pragma unroll
    for (int i = 0; i < P::KSTEPS * 4; i += 2) {
        const int k = i / 2 * 8 + lane % 4 * 2, output = lane / 4;
        const bool low = tap_of<P>(k, output) >= 0, high = tap_of<P>(k + 1, output) >= 0;
#pragma unroll
        for (int c = 0; c < EACH; ++c)
#pragma unroll
            for (int r = 0; r < P::R; ++r)
                w[c][r][i / 4][i / 2 % 2] = (low ? taps[c][i][r] : 0u) | (high ? taps[c][i + 1][r] : 0u) << 16;
    }
    float bias[EACH] = {};
    if constexpr (P::BIAS)
        for (int c = 0; c < EACH; ++c)
            if (block.channel0 + channel + c < (int)a.c)
                bias[c] = Element<T>::to_float(static_cast<const T *>(a.bias)[block.channel0 + channel + c]);
    unsigned begins[P::MTILES];
#pragma unroll
    for (int m = 0; m < P::MTILES; ++m) begins[m] = block.operand(planes, channel, tile0 + m);
    const unsigned kept = block.place(channel, tile0);
    // Zeros, or NaN once an output was.
    unsigned check = 0;
    float sums[LIVE][EACH][P::MTILES][4] = {};
    int stage = 0;
    for (int first = 0, output0 = 0; first < block.rows; first += PERIOD * ROUNDS, output0 += LIVE * ROUNDS)
#pragma unroll
        for (int part = 0; part < PARTS; ++part) {
            if (part > 0 && first + begin_of(part) >= block.rows) break;
            block.next(stage, PARTS > 1, [&](int further, int to) {
                block.copy(first + begin_of(part + further), rows_of(part + further), to);
            });
            // Rows of the part that complete a row of outputs: every SH-th from `done`.
            const int row0 = part * P::ROWS, end = min(PERIOD, row0 + P::ROWS);
            const int done = row0 + ((P::R - 1 - row0) % P::SH + P::SH) % P::SH;
#pragma unroll 1
            for (int round = 0; round < ROUNDS; ++round) {
#pragma unroll
                for (int t = row0; t < end; ++t) {
                    unsigned pixels[P::KSTEPS][EACH][P::MTILES][4];
#pragma unroll
                    for (int k = 0; k < P::KSTEPS; ++k)
#pragma unroll
                        for (int c = 0; c < EACH; ++c)
#pragma unroll
                            for (int m = 0; m < P::MTILES; ++m)
                                ldmatrix(pixels[k][c][m], begins[m] + (round * PERIOD + t - row0) * P::PLANE_ROW +
                                                              c * P::CHANNEL_PITCH + k * 32);
#pragma unroll
                    for (int r = t % P::SH; r < P::R; r += P::SH) {
                        // The output of `back` sees this row with tap r; the first tap begins the sums.
                        const int back = (t - r + PERIOD) / P::SH - LIVE, slot = (back + LIVE) % LIVE;
#pragma unroll
                        for (int c = 0; c < EACH; ++c)
#pragma unroll
                            for (int m = 0; m < P::MTILES; ++m) {
                                if (r == 0)
#pragma unroll
                                    for (int i = 0; i < 4; ++i) sums[slot][c][m][i] = 0.0f;
#pragma unroll
                                for (int k = 0; k < P::KSTEPS; ++k)
                                    mma<T>(sums[slot][c][m], pixels[k][c][m], w[c][r][k]);
                            }
                    }
                    if ((P::R - 1 - t) % P::SH != 0) continue;
                    const int back = (t - P::R + 1 + PERIOD) / P::SH - LIVE, slot = (back + LIVE) % LIVE;
                    // Rows of x behind the last were not copied: what lies there may be NaN.
                    if (output0 + round * LIVE + back >= (int)a.rows) continue;
#pragma unroll
                    for (int c = 0; c < EACH; ++c)
#pragma unroll
                        for (int m = 0; m < P::MTILES; ++m)
#pragma unroll
                            for (int e = 0; e < 2; ++e)
                                block.keep(kept + (round * LIVE + (t - done) / P::SH) * P::OUT_ROW + c * P::OUT_PITCH +
                                               m * 256 + e * 128,
                                           sums[slot][c][m][2 * e], sums[slot][c][m][2 * e + 1], bias[c], check);
                }
            }
            if (done >= end) continue;
            __syncthreads();
            block.write(output0 + (done - P::R + 1 + PERIOD) / P::SH - LIVE,
                        ROUNDS * ((end - done + P::SH - 1) / P::SH));
        }
    if (__syncthreads_and(check == 0) || check == 0) return;
    for (int c = 0; c < EACH; ++c)
        for (int m = 0; m < P::MTILES; ++m) block.again(channel + c, tile0 + m);
}
