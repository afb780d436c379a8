// Depthwise convolution with banded weights (banded.cu) for large filters: weights in shared memory.
//
// A block's rows of outputs are all under way; every row of x goes into those that see it. B of a filter's row comes
// from its taps with zeros on both sides, twice: once as pairs that begin at even places, once at odd ones.
#include "ops/conv/cuda/depthwise/banded_taps.cuh"

DEVICE constexpr int larger(int a, int b) { return a > b ? a : b; }

template <class Traits> struct Bands : BandedTaps<Tile<Traits>, 7 * Tile<Traits>::SW, 0> {
    using P = BandedTaps<Tile<Traits>, 7 * Tile<Traits>::SW, 0>;
    // Of rows of x, and before and after them of taps and outputs.
    static constexpr int ROWS_BYTES = larger(P::PLANE_BYTES + P::RAW_ALIGNMENT + P::ALL_RAW + 8 * P::STAGES,
                                             larger(P::SUMS *P::OUT_ROW, (P::TAPS * 2 + 15) / 16 * 16));
};

template <class Traits> DEVICE void depthwise_banded_large(const Banded &a) {
    using P = Bands<Traits>;
    using T = typename P::T;
    extern __shared__ __align__(128) unsigned char memory[];
    const unsigned bands = shared_address(memory), planes = bands + P::BYTES;
    const unsigned raw = (planes + P::PLANE_BYTES + P::RAW_ALIGNMENT - 1) / P::RAW_ALIGNMENT * P::RAW_ALIGNMENT;
    Rows<P> block(a, raw, planes);
    const int lane = block.lane, channel = block.warp % P::CHANNELS, tile0 = block.warp / P::CHANNELS * P::MTILES;
    if (!a.weights_ready) begin_dependent();
    copy_taps<P>(a, block.channel0, planes);
#if __CUDA_ARCH__ >= 900
    if constexpr (P::TMA) publish_shared();
#endif
    if (a.weights_ready) begin_dependent();
    __syncthreads();
    const bool finite = __syncthreads_and(spread_taps<P>(planes, bands));
    block.prepare(planes);
    const auto begin_of = [](int part) { return part * P::ROWS; };
    block.start(begin_of, [](int) { return P::ROWS; });
    if constexpr (P::TMA) __syncthreads();
    unsigned begins[P::MTILES];
#pragma unroll
    for (int m = 0; m < P::MTILES; ++m) begins[m] = block.operand(planes, channel, tile0 + m);
    const int even = lane % 4 * 2 + P::SW * (7 - lane / 4);
    const unsigned mine = bands + channel * P::CHANNEL + (even % 2 * P::HALF + even / 2) * 4;
    // Rows of x above the first strip's image, or below the last one's, are padding for all.
    const int last = min(block.strip0 + P::STRIPS, (int)a.strips) - 1;
    const int top = Strip<P>(a, block.strip0).p0 * (int)a.stride_h - (int)a.pad_h,
              lowest = Strip<P>(a, last).p0 * (int)a.stride_h - (int)a.pad_h;
    float sums[P::SUMS][P::MTILES][4] = {};
    for (int part = 0, stage = 0; part * P::ROWS < block.rows; ++part) {
        block.next(stage, true, [&](int further, int to) { block.copy(begin_of(part + further), P::ROWS, to); });
#pragma unroll 1
        for (int t = 0; t < P::ROWS; ++t) {
            const int row = part * P::ROWS + t;
            if (row >= block.rows) break;
            // They add nothing, unless weights are not finite.
            if (finite && (lowest + row * block.apart < 0 || top + row * block.apart >= (int)a.height)) continue;
            unsigned pixels[P::KSTEPS][P::MTILES][4];
#pragma unroll
            for (int k = 0; k < P::KSTEPS; ++k)
#pragma unroll
                for (int m = 0; m < P::MTILES; ++m) ldmatrix(pixels[k][m], begins[m] + t * P::PLANE_ROW + k * 32);
            const auto multiply = [&](int o) {
                const unsigned from = mine + (row - o * P::SH) * P::PITCH;
#pragma unroll
                for (int k = 0; k < P::KSTEPS; ++k) {
                    const unsigned weights[2] = {load_word(from + k * 32), load_word(from + k * 32 + 16)};
#pragma unroll
                    for (int m = 0; m < P::MTILES; ++m) mma<T>(sums[o][m], pixels[k][m], weights);
                }
            };
            // Where some rows of outputs see this one, weights of the next are on their way while products are made.
#pragma unroll
            for (int o = 0; o < P::SUMS; o += 4) {
                const int end = min(o + 4, P::SUMS), first = row - o * P::SH, last = row - (end - 1) * P::SH;
                if (last >= 0 && first < P::R) {
#pragma unroll
                    for (int i = o; i < end; ++i) multiply(i);
                } else {
#pragma unroll
                    for (int i = o; i < end; ++i)
                        if ((unsigned)(row - i * P::SH) < (unsigned)P::R) multiply(i);
                }
            }
        }
    }
    cp_async_wait<0>();
    __syncthreads();
    float bias = 0.0f;
    if constexpr (P::BIAS)
        if (block.channel0 + channel < (int)a.c)
            bias = Element<T>::to_float(static_cast<const T *>(a.bias)[block.channel0 + channel]);
    const unsigned kept = block.place(channel, tile0);
    // Zeros, or NaN once an output was.
    unsigned check = 0;
#pragma unroll
    for (int o = 0; o < P::SUMS; ++o)
#pragma unroll
        for (int m = 0; m < P::MTILES; ++m)
#pragma unroll
            for (int e = 0; e < 2; ++e)
                block.keep(kept + o * P::OUT_ROW + m * 256 + e * 128, sums[o][m][2 * e], sums[o][m][2 * e + 1], bias,
                           check);
    __syncthreads();
    block.write(0, P::SUMS);
    if (__syncthreads_and(check == 0) || check == 0) return;
    for (int m = 0; m < P::MTILES; ++m) block.again(channel, tile0 + m);
}
