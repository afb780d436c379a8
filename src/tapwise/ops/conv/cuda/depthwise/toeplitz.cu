// Depthwise convolution of small images on tensor cores, channels last: rows of a filter as Toeplitz matrices.
//
// A block has eight channels of some images, whole, in shared memory: [channel][image][row][column], a row of zeros
// behind each image, zeros to 16 columns behind each row. A product takes 16 rows of outputs (or 8 of two images), the
// rows of x that they see with one row of taps, and all columns of x:
//
//     A: 16 rows of x x 16 columns      B: 16 columns x 8 outputs, B[k][j] = w[r][k - j + pad]
//
// so that padding takes no products but those within 16 columns. Where a window is wider than that, bands (banded.cu)
// take more of them.
#include "ops/conv/cuda/depthwise/banded_taps.cuh"

// T, R, S, PAD_H, PAD_W; H, W, P, Q of an image; TILES of 16 rows of A, of one image or two, a channel a warp; BIAS,
// RESIDUAL, ACTIVATION.
template <class Traits> struct WholeImages : Traits {
    using B = Traits;
    static constexpr bool TAPS_FIRST = false;
    static constexpr int GROUP_C = 1;
    static constexpr int SW = 1, DW = 1, CHANNELS = 8, WARPS = 8, THREADS = 32 * WARPS;
    // Columns of x in 16s and of outputs in 8s; rows of outputs in 16s, or two images' in 8s.
    static constexpr int KSTEPS = (B::W + 15) / 16, NTILES = (B::Q + 7) / 8, MTILES = (B::P + 15) / 16;
    static constexpr int IMAGES_TILE = B::P <= 8 ? 2 : 1, IMAGES = B::TILES * IMAGES_TILE;
    // Bytes of a row, of an image, of a channel's images.
    static constexpr int ROW = KSTEPS * 32, IMAGE = (B::H + 1) * ROW, PLANE = IMAGES * IMAGE;
    // Pairs of columns that are brought at once, and outputs.
    static constexpr int PAIRS = (B::W + 1) / 2, ITEMS = IMAGES * B::H * PAIRS, OUTPUTS = IMAGES * B::P * B::Q;
    static_assert(KSTEPS <= 2);
};

// Images from n0 on to `planes`; pairs of columns of eight channels at a time, some of them on their way.
template <class P> DEVICE void bring_images(const Banded &a, unsigned planes, int n0, int channel0) {
    constexpr int BATCH = 4;
    const typename P::T *const x = static_cast<const typename P::T *>(a.x) + channel0;
    const int c = a.c, n = a.n;
    for (int first = threadIdx.x; first < P::ITEMS; first += BATCH * P::THREADS) {
        Piece<16> left[BATCH], right[BATCH];
#pragma unroll
        for (int i = 0; i < BATCH; ++i) {
            const int at = first + i * P::THREADS, pair = at % P::PAIRS, row = at / P::PAIRS, image = n0 + row / P::H,
                      from = ((n0 * P::H + row) * P::W + 2 * pair) * c;
            const bool real = at < P::ITEMS && image < n;
            left[i] = right[i] = {};
            if (real) left[i] = load_global<16>(x + from);
            if (real && 2 * pair + 1 < P::W) right[i] = load_global<16>(x + from + c);
        }
#pragma unroll
        for (int i = 0; i < BATCH; ++i) {
            const int at = first + i * P::THREADS, pair = at % P::PAIRS, row = at / P::PAIRS;
            if (at >= P::ITEMS) break;
            const unsigned to = planes + row / P::H * P::IMAGE + swizzled<P::ROW>(row % P::H, pair * 4);
#pragma unroll
            for (int e = 0; e < 4; ++e) {
                const unsigned a = left[i].v[e], b = right[i].v[e];
                store_word(to + 2 * e * P::PLANE, (a & 0xffff) | b << 16);
                store_word(to + (2 * e + 1) * P::PLANE, a >> 16 | (b & 0xffff0000u));
            }
        }
    }
}

// Sums in shared memory to y, eight channels of a pixel at a time.
template <class P> DEVICE void write_outputs(const Banded &a, unsigned sums, int n0, int channel0, bool finite) {
    using T = typename P::T;
    T *const y = static_cast<T *>(a.y) + channel0;
    const T *const residual = static_cast<const T *>(a.residual) + channel0;
    Piece<16> bias{};
    if constexpr (P::BIAS) bias = load_global<16>(static_cast<const T *>(a.bias) + channel0);
    const auto half = [](const Piece<16> &p, int e) {
        return Element<T>::to_float(T{(unsigned short)(p.v[e / 2] >> e % 2 * 16)});
    };
    for (int i = threadIdx.x; i < P::OUTPUTS; i += P::THREADS) {
        const int image = n0 + i / (P::P * P::Q), at = (n0 * (P::P * P::Q) + i) * (int)a.c;
        if (image >= (int)a.n) break;
        float v[8];
        bool real = finite;
#pragma unroll
        for (int e = 0; e < 8; ++e) {
            v[e] = __uint_as_float(load_word(sums + (e * P::OUTPUTS + i) * 4));
            real &= v[e] - v[e] == 0.0f;
            if constexpr (P::BIAS) v[e] += half(bias, e);
        }
        if constexpr (P::RESIDUAL) {
            const Piece<16> more = load_global<16>(residual + at);
#pragma unroll
            for (int e = 0; e < 8; ++e) v[e] += half(more, e);
        }
        Piece<16> out;
#pragma unroll
        for (int e = 0; e < 8; e += 2) out.v[e / 2] = activated<T, P::ACTIVATION>(v[e], v[e + 1]);
        store_global<16>(y + at, out);
        // Products with the zeros beside the taps may have made NaN.
        if (!real)
            for (int e = 0; e < 8; ++e) by_definition<P>(a, image, channel0 + e, i / P::Q % P::P, i % P::Q);
    }
}

template <class Traits> DEVICE void depthwise_toeplitz(const Banded &a) {
    using Images = WholeImages<Traits>;
    using P = BandedTaps<Images, 8 * Images::NTILES - 1, Images::PAD_W>;
    using T = typename P::T;
    extern __shared__ __align__(128) unsigned char memory[];
    const unsigned bands = shared_address(memory), planes = bands + P::BYTES;
    const int lane = threadIdx.x % 32, channel = threadIdx.x / 32;
    const int channel0 = blockIdx.x % (unsigned)a.channel_blocks * 8,
              n0 = blockIdx.x / (unsigned)a.channel_blocks * P::IMAGES;
    if (!a.weights_ready) begin_dependent();
    copy_taps<P>(a, channel0, planes);
    __syncthreads();
    const bool finite = __syncthreads_and(spread_taps<P>(planes, bands));
    for (int i = threadIdx.x * 16; i < 8 * P::PLANE; i += P::THREADS * 16) store_shared<16>(planes + i, {});
    if (a.weights_ready) begin_dependent();
    __syncthreads();
    bring_images<P>(a, planes, n0, channel0);
    __syncthreads();
    // Of a lane: the row of A that it tells of, and where its pairs of taps begin.
    const int own_row = lane % (16 / P::IMAGES_TILE), own_image = P::IMAGES_TILE == 2 ? lane / 8 % 2 : 0;
    const unsigned mine = planes + channel * P::PLANE + own_image * P::IMAGE;
    const int place = lane % 4 * 2 - lane / 4 + 8 * P::NTILES - 1;
    const unsigned taps = bands + channel * P::CHANNEL + (place % 2 * P::HALF + place / 2) * 4;
    float sums[P::TILES][P::MTILES][P::NTILES][4] = {};
#pragma unroll 1
    for (int r = 0; r < P::R; ++r) {
        // Eight places further along k is where eight outputs further came from.
        unsigned weights[2 * P::KSTEPS + P::NTILES - 1];
#pragma unroll
        for (int i = 0; i < 2 * P::KSTEPS + P::NTILES - 1; ++i)
            weights[i] = load_word(taps + r * P::PITCH + (i - P::NTILES + 1) * 16);
#pragma unroll
        for (int m = 0; m < P::MTILES; ++m) {
            const int first = r - P::PAD_H + m * 16, row = first + own_row;
            if (first >= P::H || first + 16 / P::IMAGES_TILE <= 0) continue;
            const int real = (unsigned)row < (unsigned)P::H ? row : P::H;
#pragma unroll
            for (int k = 0; k < P::KSTEPS; ++k) {
                const unsigned from = mine + swizzled<P::ROW>(real, k * 32 + lane / 16 * 16);
#pragma unroll
                for (int i = 0; i < P::TILES; ++i) {
                    unsigned rows[4];
                    ldmatrix(rows, from + i * P::IMAGES_TILE * P::IMAGE);
#pragma unroll
                    for (int t = 0; t < P::NTILES; ++t) {
                        const int at = 2 * k - t + P::NTILES - 1;
                        const unsigned pair[2] = {weights[at], weights[at + 1]};
                        mma<T>(sums[i][m][t], rows, pair);
                    }
                }
            }
        }
    }
    __syncthreads();
    // Floats, [channel][image][row][column], from the beginning on.
    const unsigned out = bands + channel * (P::OUTPUTS * 4);
#pragma unroll
    for (int i = 0; i < P::TILES; ++i)
#pragma unroll
        for (int m = 0; m < P::MTILES; ++m)
#pragma unroll
            for (int t = 0; t < P::NTILES; ++t)
#pragma unroll
                for (int e = 0; e < 4; ++e) {
                    const int image = i * P::IMAGES_TILE + (P::IMAGES_TILE == 2 ? e / 2 : 0);
                    const int row = m * 16 + lane / 4 + (P::IMAGES_TILE == 1 ? e / 2 * 8 : 0),
                              column = t * 8 + lane % 4 * 2 + e % 2;
                    if (row < P::P && column < P::Q)
                        store_word(out + ((image * P::P + row) * P::Q + column) * 4, __float_as_uint(sums[i][m][t][e]));
                }
    __syncthreads();
    write_outputs<P>(a, bands, n0, channel0, finite);
}
