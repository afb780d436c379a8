// Depthwise convolution with large filters on tensor cores: diagonal weights as in diagonal.cu, read from shared
// memory.
//
// A block takes all rows of x that it needs for eight channels at once, and their weights. A warp has ROWS rows of
// outputs of its tiles under way: a row's operands are loaded once for all of them.
#include "ops/conv/cuda/depthwise/diagonal.cuh"

// T, R, S; SH, SW: strides in a class; a block has GROUPS groups of ROWS rows of outputs by SEGMENTS x 8 columns;
// MTILES of 16 pixels a warp; COPY bytes; ACTIVATION, BIAS, RESIDUAL.
template <class Traits> struct LargeTile : Traits {
    using B = Traits;
    static constexpr int PAIRS = (B::S + 1) / 2, QUADS = (PAIRS + 3) / 4, PITCH = 16;
    static constexpr int RUN = (B::SEGMENTS * 8 - 1) + (B::S + B::SW - 1) / B::SW, COLUMNS = RUN * B::SW;
    static constexpr int IMAGE_ROWS = (B::GROUPS * B::ROWS - 1) * B::SH + B::R, ROW_BYTES = COLUMNS * PITCH;
    static constexpr int TILES = B::GROUPS * B::SEGMENTS / 2, THREADS = 32 * (TILES / B::MTILES);
    // Weights: rows of quads, of 8 channels, of 4 words.
    static constexpr int WEIGHT_BYTES = B::R * QUADS * 128;
    static constexpr int PIECES = 16 / B::COPY;
    static_assert(TILES * 2 == B::GROUPS * B::SEGMENTS && TILES % B::MTILES == 0);
    static DEVICE int tap_bytes(int s) { return (s % B::SW * RUN + s / B::SW) * PITCH; }
};

template <class Traits> DEVICE void depthwise_diagonal_large(const Diagonal &a) {
    using P = LargeTile<Traits>;
    using T = typename P::T;
    extern __shared__ __align__(128) unsigned char memory[];
    const int tid = threadIdx.x, lane = tid % 32, warp = tid / 32;
    int block = blockIdx.x;
    const int channel0 = block % (int)a.channel_blocks * 8;
    block /= (int)a.channel_blocks;
    const Strip strip(a, block % (int)a.strip_groups, P::SEGMENTS * 8);
    const int piece = block / (int)a.strip_groups;
    const int residue = piece % (int)a.phases_h, first = piece / (int)a.phases_h * (P::GROUPS * P::ROWS);
    const int count = ((int)a.p - residue + (int)a.phases_h - 1) / (int)a.phases_h - first;
    if (count <= 0) return;
    const int top = (residue + (int)a.phases_h * first) * (int)a.stride_h - (int)a.pad_h, apart = a.dilation_h;
    const int left = strip.q0 * (int)a.stride_w - (int)a.pad_w;

    begin_dependent();
    unsigned char *image = memory + P::WEIGHT_BYTES;
    const T *x = static_cast<const T *>(a.x) + strip.n * a.height * a.width * a.c + channel0;
    for (int i = tid; i < P::IMAGE_ROWS * P::COLUMNS * P::PIECES; i += P::THREADS) {
        const int part = i % P::PIECES * (P::COPY / 2), pixel = i / P::PIECES;
        const int row = top + pixel / P::COLUMNS * apart, rest = pixel % P::COLUMNS;
        const int column = left + (rest % P::RUN * P::SW + rest / P::RUN) * (int)a.dilation_w;
        const bool real =
            (unsigned)row < (unsigned)a.height && (unsigned)column < (unsigned)a.width && channel0 + part < (int)a.c;
        const T *element = real ? x + ((long long)row * a.width + column) * a.c + part : x;
        unsigned char *place = image + pixel * P::PITCH + part * 2;
        if constexpr (P::COPY >= 4) cp_async<P::COPY>(place, element, real);
        else *reinterpret_cast<T *>(place) = real ? *element : T{0};
    }
    cp_async_commit();
    bool finite = true;
    for (int i = tid; i < P::R * P::QUADS * 32; i += P::THREADS) {
        const int pair = i / 32 % P::QUADS * 4 + i % 4, c = channel0 + i / 4 % 8, r = i / 32 / P::QUADS;
        const unsigned short *row = static_cast<const unsigned short *>(a.w) + ((long long)c * P::R + r) * P::S;
        unsigned both = 0;
        if (c < (int)a.c && pair < P::PAIRS) {
            both = row[2 * pair];
            if (2 * pair + 1 < P::S) both |= (unsigned)row[2 * pair + 1] << 16;
        }
        finite &= finite_pair<T>(both);
        reinterpret_cast<unsigned *>(memory)[i] = both;
    }
    cp_async_wait<0>();
    finite = __syncthreads_and(finite);

    // Lanes off the diagonal have no weight: their selectors take zeros alone.
    const bool on_diagonal = lane / 8 == lane % 4, upper = lane / 4 % 2;
    const unsigned low_half = !on_diagonal ? 0x4444 : upper ? 0x1044 : 0x4410;
    const unsigned high_half = !on_diagonal ? 0x4444 : upper ? 0x3244 : 0x4432;
    const unsigned weights = shared_address(memory) + lane / 4 * 16;
    unsigned begins[P::MTILES];
    int from = (P::ROWS - 1) * P::SH + P::R, to = 0;
#pragma unroll
    for (int m = 0; m < P::MTILES; ++m) {
        const int segment = (warp * P::MTILES + m) * 2 + lane / 8 % 2, group = segment / P::SEGMENTS;
        begins[m] = shared_address(image) + group * (P::ROWS * P::SH) * P::ROW_BYTES +
                    (segment % P::SEGMENTS * 8 + lane % 8) * P::PITCH;
#pragma unroll
        for (int e = 0; e < 2; ++e) {
            // Rows of x in the image; those of padding add nothing.
            const int first_row = top + ((warp * P::MTILES + m) * 2 + e) / P::SEGMENTS * (P::ROWS * P::SH) * apart;
            from = min(from, first_row >= 0 ? 0 : (-first_row + apart - 1) / apart);
            to = max(to, first_row >= (int)a.height ? 0 : ((int)a.height - 1 - first_row) / apart + 1);
        }
    }
    if (!finite) from = 0;
    to = finite ? min(to, (P::ROWS - 1) * P::SH + P::R) : (P::ROWS - 1) * P::SH + P::R;

    float sums[P::ROWS][P::MTILES][4] = {};
    for (int t = from; t < to; ++t) {
        for (int quad = 0; quad < P::QUADS; ++quad) {
            unsigned pixels[4][P::MTILES][4];
#pragma unroll
            for (int i = 0; i < 4; ++i) {
                // What is beyond the last tap is multiplied by zero.
                const int tap = min(quad * 8 + 2 * i + (lane < 16 ? 0 : 1), P::S - 1);
#pragma unroll
                for (int m = 0; m < P::MTILES; ++m)
                    ldmatrix(pixels[i][m], begins[m] + t * P::ROW_BYTES + P::tap_bytes(tap));
            }
#pragma unroll
            for (int o = 0; o < P::ROWS; ++o) {
                const int r = t - o * P::SH;
                if (r < 0 || r >= P::R) continue;
                const Piece<16> words = load_shared<16>(weights + (r * P::QUADS + quad) * 128);
#pragma unroll
                for (int i = 0; i < 4; ++i) {
                    const unsigned both[2] = {select_bytes(words.v[i], low_half), select_bytes(words.v[i], high_half)};
#pragma unroll
                    for (int m = 0; m < P::MTILES; ++m) mma<T>(sums[o][m], pixels[i][m], both);
                }
            }
        }
    }

    const int stored = channel0 + lane % 4 * 2;
    float bias[2] = {};
    if constexpr (P::BIAS) {
        const T *from_bias = static_cast<const T *>(a.bias);
        if (stored < (int)a.c) bias[0] = Element<T>::to_float(from_bias[stored]);
        if (stored + 1 < (int)a.c) bias[1] = Element<T>::to_float(from_bias[stored + 1]);
    }
#pragma unroll
    for (int m = 0; m < P::MTILES; ++m)
#pragma unroll
        for (int e = 0; e < 2; ++e) {
            const int segment = (warp * P::MTILES + m) * 2 + e, row = segment / P::SEGMENTS * P::ROWS;
            const int q = strip.q0 + (segment % P::SEGMENTS * 8 + lane / 4) * (int)a.phases_w;
            if (q >= (int)a.q || stored >= (int)a.c) continue;
#pragma unroll
            for (int o = 0; o < P::ROWS; ++o) {
                if (row + o >= count) break;
                const int p = residue + (int)a.phases_h * (first + row + o);
                const int at = ((strip.n * (int)a.p + p) * (int)a.q + q) * (int)a.c + stored;
                const float low = sums[o][m][2 * e], high = sums[o][m][2 * e + 1];
                store_pixel<P>(a, stored, at, low, high, bias);
                // The products with the diagonal's zeros made NaN of what is not finite.
                if (low * 0.0f + high * 0.0f != 0.0f) store_again<P>(a, strip.n, stored, p, q, at, bias[0], bias[1]);
            }
        }
}
