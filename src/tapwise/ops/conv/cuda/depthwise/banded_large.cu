// Depthwise convolution with banded weights (banded.cu) for large filters: weights in shared memory.
//
// A block's rows of outputs are all under way; every row of x goes into those that see it. B of a filter's row comes
// from its taps with zeros on both sides, twice: once as pairs that begin at even places, once at odd ones.
#include "ops/conv/cuda/depthwise/banded.cuh"

DEVICE constexpr int larger(int a, int b) { return a > b ? a : b; }

template <class Traits> struct Bands : Tile<Traits> {
    using P = Tile<Traits>;
    static constexpr int LEFT = 7 * P::SW, WORDS = (LEFT + 16 * P::KSTEPS + 2) / 2;
    // From pairs at even places to those at odd ones, in words: other banks than the seven words that lanes read there.
    static constexpr int HALF = WORDS % 32 < 8 ? WORDS / 32 * 32 + 8 : WORDS % 32 > 24 ? WORDS / 32 * 32 + 40 : WORDS;
    static constexpr int PITCH = (HALF + WORDS) * 4, CHANNEL = P::R * PITCH;
    static constexpr int BYTES = (P::CHANNELS * CHANNEL + 15) / 16 * 16, TAPS = P::CHANNELS * P::R * P::S;
    // Of rows of x, and before and after them of taps and outputs.
    static constexpr int ROWS_BYTES = larger(P::PLANE_BYTES + P::RAW_ALIGNMENT + P::ALL_RAW + 8 * P::STAGES,
                                             larger(P::SUMS *P::OUT_ROW, (TAPS * 2 + 15) / 16 * 16));
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
    bool finite = true;
#pragma unroll 2
    for (int row = threadIdx.x / 32; row < P::CHANNELS * P::R; row += P::WARPS)
#pragma unroll
        for (int i = 0; i < TURNS; ++i) {
            const auto tap = [&](int at) { return at < 0 ? 0u : load_shared<2>(from + (row * P::S + at) * 2).v[0]; };
            const unsigned low = tap(taps[i][0]), high = tap(taps[i][1]);
            const int word = i * 32 + lane;
            const float a = Element<T>::to_float(T{(unsigned short)low}),
                        b = Element<T>::to_float(T{(unsigned short)high});
            finite &= (a - a) + (b - b) == 0.0f;
            if (word < 2 * P::WORDS)
                store_word(to + row * P::PITCH + (word < P::WORDS ? word : P::HALF + word - P::WORDS) * 4,
                           low | high << 16);
        }
    return finite;
}

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
