// Brings x and filters into the order that tensor maps want: channels innermost, a multiple of 16 bytes, groups apart.
//
// PARTS is 2 for 3xtf32: a tf32 number and another one for what it leaves of fp32. Else tf32 is rounded to, or 16-bit
// copied.
#pragma once

#include "cp_async.cuh"
#include "float16.cuh"

struct Images {
    const void *x;
    void *y;
    // Of x in elements: distances of images, channels and pixels. `wide` channels of a group in y, `channels` in x.
    long long n, groups, channels, wide, pixels, step_n, step_c, step_pixel, tiles_pixels, tiles_channels;
    // THINNED: pixels of a row of y, and how far they and rows lie apart in x.
    long long width, step_w, step_h;
};

template <typename T, int PART> __device__ __forceinline__ T part_of(T v) {
    if constexpr (PART == 2) {
        return v;
    } else if constexpr (sizeof(T) == 4) {
        const float large = to_tf32(v);
        // Infinities and NaN leave nothing.
        return PART == 0 ? large : large - large == 0.0f ? to_tf32(v - large) : 0.0f;
    } else {
        return v;
    }
}

// One piece of 16 bytes of y, from elements of x that are all there.
template <typename T, int PARTS>
__device__ __forceinline__ void put(T *y, long long parts_apart, T (&v)[16 / sizeof(T)]) {
    constexpr int V = 16 / sizeof(T);
    alignas(16) T out[V];
#pragma unroll
    for (int e = 0; e < V; ++e) out[e] = part_of<T, 0>(v[e]);
    *reinterpret_cast<uint4 *>(y) = *reinterpret_cast<uint4 *>(out);
    if constexpr (PARTS == 2) {
#pragma unroll
        for (int e = 0; e < V; ++e) out[e] = part_of<T, 1>(v[e]);
        *reinterpret_cast<uint4 *>(y + parts_apart) = *reinterpret_cast<uint4 *>(out);
    }
}

// y[part][group][n][pixel][wide] of channels-last x; a thread takes 16 bytes of y, from pieces of PIECE bytes. I counts
// pieces of y.
template <typename T, int PARTS, int PIECE, typename I>
__device__ __forceinline__ void pack_pixels(const Images &p, unsigned block, unsigned blocks) {
    constexpr int V = 16 / sizeof(T), EACH = PIECE / sizeof(T);
    struct alignas(PIECE) Piece { T v[EACH]; };
    const I across = p.wide / V, groups = p.groups, pixels = p.n * p.pixels, count = pixels * groups * across;
    const long long plane = pixels * p.wide;
    for (I i = block * (I)256 + threadIdx.x; i < count; i += blocks * (I)256) {
        const I rest = i / across, pixel = rest / groups;
        const int channel = (int)(i - rest * across) * V, group = (int)(rest - pixel * groups);
        const T *x = static_cast<const T *>(p.x) + pixel * p.step_pixel + group * p.channels + channel;
        Piece pieces[V / EACH];
#pragma unroll
        for (int e = 0; e < V / EACH; ++e)
            pieces[e] = channel + e * EACH < p.channels ? reinterpret_cast<const Piece *>(x)[e] : Piece{};
        T v[V];
#pragma unroll
        for (int e = 0; e < V; ++e) v[e] = pieces[e / EACH].v[e % EACH];
        put<T, PARTS>(static_cast<T *>(p.y) + group * plane + pixel * p.wide + channel, groups * plane, v);
    }
}
template <typename T, int PARTS, int PIECE>
__device__ void pack_channels_last(const Images &p, unsigned block = blockIdx.x, unsigned blocks = gridDim.x) {
    begin_dependent();
    // Divisions of 64 bits would take longer than all else.
    if (p.n * p.pixels * p.groups * p.wide * sizeof(T) / 16 < 1ull << 31)
        pack_pixels<T, PARTS, PIECE, unsigned>(p, block, blocks);
    else pack_pixels<T, PARTS, PIECE, long long>(p, block, blocks);
}

// The same of x with channels outside; blocks of 256 threads transpose 4096 elements, CHANNELS of them side by side. A
// thread loads EACH pixels of one word's channels at once: planes are multiples of them. THINNED: every second of twice
// as many, of rows that are multiples of them.
template <typename T, int PARTS, int CHANNELS, int EACH, bool THINNED>
DEVICE void transpose_tile(const Images &p, unsigned block) {
    constexpr int PIXELS = 4096 / CHANNELS, V = 16 / sizeof(T), ACROSS = CHANNELS / V, GROUPS = PIXELS / EACH;
    // Channels of a word, words of a pixel.
    constexpr int PAIR = 4 / sizeof(T), WORDS = CHANNELS / PAIR, ITEMS = WORDS * GROUPS / 256;
    // Pixel e of each group lies EACH_APART words further: neither stores nor loads meet in a bank.
    constexpr int PITCH = WORDS + 1, EACH_APART = GROUPS * PITCH + 4 / EACH % 4;
    constexpr int APART = THINNED ? 2 : 1;
    struct alignas(EACH * APART * sizeof(T)) Piece { T v[EACH * APART]; };
    __shared__ unsigned tile[EACH * EACH_APART];
    // Divisions of 64 bits would take longer than all else.
    const unsigned tiles_channels = p.tiles_channels, tiles_pixels = p.tiles_pixels, groups = p.groups;
    const unsigned tile_pixel = block / tiles_channels, image = tile_pixel / tiles_pixels;
    const int channel0 = (block - tile_pixel * tiles_channels) * CHANNELS,
              pixel0 = (tile_pixel - image * tiles_pixels) * PIXELS, group = image % groups;
    const long long n = image / groups;
    const T *x = static_cast<const T *>(p.x) + n * p.step_n + (group * p.channels + channel0) * p.step_c;
    const int pixels = min((long long)PIXELS, p.pixels - pixel0), channels = p.channels - channel0;
    Piece found[ITEMS][PAIR];
#pragma unroll
    for (int i = 0; i < ITEMS; ++i) {
        const int item = threadIdx.x + i * 256, pixel = item % GROUPS * EACH, channel = item / GROUPS * PAIR;
        int at = pixel0 + pixel;
        if constexpr (THINNED) {
            const int width = p.width, row = at / width;
            at = row * (int)p.step_h + (at - row * width) * APART;
        }
#pragma unroll
        for (int c = 0; c < PAIR; ++c) {
            found[i][c] = {};
            if (pixel < pixels && channel + c < channels)
                found[i][c] = *reinterpret_cast<const Piece *>(x + (channel + c) * p.step_c + at);
        }
    }
#pragma unroll
    for (int i = 0; i < ITEMS; ++i) {
        const int item = threadIdx.x + i * 256, at = item % GROUPS * PITCH + item / GROUPS;
#pragma unroll
        for (int e = 0; e < EACH; ++e) {
            alignas(4) T word[PAIR];
#pragma unroll
            for (int c = 0; c < PAIR; ++c) word[c] = found[i][c].v[e * APART];
            tile[e * EACH_APART + at] = *reinterpret_cast<unsigned *>(word);
        }
    }
    __syncthreads();
    const long long plane = p.n * p.pixels * p.wide;
    T *const y = static_cast<T *>(p.y) + group * plane + (n * p.pixels + pixel0) * p.wide + channel0;
    for (int i = threadIdx.x; i < PIXELS * ACROSS; i += 256) {
        const int pixel = i / ACROSS, channel = i % ACROSS * V;
        if (pixel >= pixels || channel0 + channel >= p.wide) continue;
        const unsigned *const from = tile + pixel % EACH * EACH_APART + pixel / EACH * PITCH + channel / PAIR;
        alignas(16) unsigned words[4] = {from[0], from[1], from[2], from[3]};
        put<T, PARTS>(y + (long long)pixel * p.wide + channel, p.groups * plane, *reinterpret_cast<T(*)[V]>(words));
    }
}

// The same of planes that are no multiples of two, or (THINNED) of pixels a stride apart: a thread loads TIMES pixels
// of each channel of a piece of y, and stores the pieces. Pixels of all images are counted together. A warp has pieces
// of CHANNELS side by side, as few as leave it 16 pixels or so of each channel.
template <typename T, int PARTS, int CHANNELS, bool THINNED> DEVICE void turn_pixels(const Images &p, unsigned block) {
    constexpr int V = 16 / sizeof(T), ACROSS = CHANNELS / V, STEP = 32 / ACROSS, TIMES = 4;
    const unsigned tiles_channels = p.tiles_channels, groups = p.groups, plane = p.pixels, lane = threadIdx.x % 32;
    const unsigned outer = block / tiles_channels, tile = outer / groups, group = outer - tile * groups;
    const int channel = (block - outer * tiles_channels) * CHANNELS + lane % ACROSS * V,
              channels = min((int)p.channels - channel, V);
    if (channel >= (int)p.wide) return;
    const long long all = p.n * p.pixels, pixel0 = (tile * 8ll + threadIdx.x / 32) * (STEP * TIMES) + lane / ACROSS;
    const T *const x = static_cast<const T *>(p.x) + (group * p.channels + channel) * p.step_c;
    T found[TIMES][V];
#pragma unroll
    for (int i = 0; i < TIMES; ++i) {
        const unsigned pixel = pixel0 + i * STEP, n = pixel / plane;
        int at = pixel - n * plane;
        if constexpr (THINNED) {
            const int width = p.width, row = at / width;
            at = row * (int)p.step_h + (at - row * width) * (int)p.step_w;
        }
        const T *const from = x + n * p.step_n + at;
#pragma unroll
        for (int c = 0; c < V; ++c) found[i][c] = pixel0 + i * STEP < all && c < channels ? from[c * p.step_c] : T{};
    }
    T *const y = static_cast<T *>(p.y) + (group * all + pixel0) * p.wide + channel;
#pragma unroll
    for (int i = 0; i < TIMES; ++i)
        if (pixel0 + i * STEP < all) put<T, PARTS>(y + i * STEP * p.wide, groups * all * p.wide, found[i]);
}

template <typename T, int PARTS, int CHANNELS, int EACH, bool THINNED = false>
__device__ void pack_channels_first(const Images &p, unsigned block = blockIdx.x) {
    begin_dependent();
    if constexpr (EACH == 1) turn_pixels<T, PARTS, CHANNELS, THINNED>(p, block);
    else transpose_tile<T, PARTS, CHANNELS, EACH, THINNED>(p, block);
}

// Two arrays, the first by `blocks` blocks; words as those of Images.
struct ImagePair {
    const void *x[2];
    void *y[2];
    long long blocks, n[2], groups[2], channels[2], wide[2], pixels[2], step_n[2], step_c[2], step_pixel[2],
        tiles_pixels[2], tiles_channels[2];
};
__device__ __forceinline__ Images images_of(const ImagePair &p, int i) {
    return {p.x[i],      p.y[i],      p.n[i],      p.groups[i],     p.channels[i],     p.wide[i],
            p.pixels[i], p.step_n[i], p.step_c[i], p.step_pixel[i], p.tiles_pixels[i], p.tiles_channels[i]};
}

template <typename T, int PIECE, int OTHER_PIECE> __device__ void pack_pair_channels_last(const ImagePair &p) {
    const unsigned blocks = p.blocks;
    if (blockIdx.x < blocks) pack_channels_last<T, 1, PIECE>(images_of(p, 0), blockIdx.x, blocks);
    else pack_channels_last<T, 1, OTHER_PIECE>(images_of(p, 1), blockIdx.x - blocks, gridDim.x - blocks);
}
template <typename T, int CHANNELS, int EACH, int OTHER_CHANNELS, int OTHER_EACH>
__device__ void pack_pair_channels_first(const ImagePair &p) {
    const unsigned blocks = p.blocks;
    if (blockIdx.x < blocks) pack_channels_first<T, 1, CHANNELS, EACH>(images_of(p, 0), blockIdx.x);
    else pack_channels_first<T, 1, OTHER_CHANNELS, OTHER_EACH>(images_of(p, 1), blockIdx.x - blocks);
}

struct Windows {
    const void *x;
    void *y;
    // Of x in elements: distances of images, channels, rows and pixels, and its sizes.
    long long step_n, step_c, step_h, step_w, channels, height, width;
    // Of y: images, rows, pixels in a row, and channels: `taps` of a window and zeros.
    long long n, rows, across, wide, taps, taps_w;
    // From a row and a pixel of y to the first tap in x, and from tap to tap.
    long long up_h, up_w, pad_h, pad_w, dilation_h, dilation_w;
};

// 16 bytes from elements side by side that begin anywhere: `count` of them, zeros behind. Those around them may be
// read.
template <typename T> __device__ __forceinline__ void load_unaligned(T (&v)[16 / sizeof(T)], const T *from, int count) {
    constexpr int V = 16 / sizeof(T);
    if constexpr (sizeof(T) == 4) {
#pragma unroll
        for (int e = 0; e < V; ++e) v[e] = e < count ? from[e] : T{};
    } else {
        const auto address = reinterpret_cast<unsigned long long>(from);
        const unsigned *words = reinterpret_cast<const unsigned *>(address & ~3ull), shift = (address & 2) * 8;
        unsigned read[5], *out = reinterpret_cast<unsigned *>(v);
#pragma unroll
        for (int i = 0; i < 5; ++i) read[i] = words[i];
#pragma unroll
        for (int i = 0; i < 4; ++i) {
            const unsigned both = __funnelshift_r(read[i], read[i + 1], shift);
            out[i] = 2 * i + 1 < count ? both : 2 * i < count ? both & 0xffff : 0;
        }
    }
}

// y[part][n][row][pixel][tap][channel]: a few channels of taps side by side, zeros outside x. A thread takes 16 bytes
// of y in every so many rows.
template <typename T, int PARTS> __device__ void pack_windows(const Windows &p) {
    constexpr int V = 16 / sizeof(T);
    begin_dependent();
    const int pieces = p.wide / V, at = blockIdx.x * 256 + threadIdx.x, pixel = at / pieces,
              first = (at - pixel * pieces) * V;
    if (pixel >= p.across) return;
    const int channels = p.channels, taps_w = p.taps_w, width = p.width, height = p.height, rows = p.rows;
    const int step_c = p.step_c, step_w = p.step_w, step_h = p.step_h, up_h = p.up_h, pad_h = p.pad_h;
    const int next_w = p.dilation_w, next_h = p.dilation_h, row = taps_w * channels,
              count = min(V, (int)p.taps * channels - first);
    const int r0 = first / row, within = first - r0 * row, s0 = within / channels, channel0 = within - s0 * channels;
    const int corner = pixel * (int)p.up_w - (int)p.pad_w, w0 = corner + s0 * next_w;
    // Of a row of x, elements side by side; one before and one behind are there.
    const int begin = corner * channels + within;
    const bool beside =
        step_c == 1 && next_w == 1 && within + count <= row && begin > 0 && begin + V + 2 <= width * channels;
    const unsigned all = (unsigned)p.n * rows;
    const long long parts_apart = (long long)all * p.across * p.wide;
#pragma unroll 2
    for (unsigned above = blockIdx.y; above < all; above += gridDim.y) {
        const int n = above / (unsigned)rows, h0 = ((int)above - n * rows) * up_h - pad_h + r0 * next_h;
        const T *image = static_cast<const T *>(p.x) + n * p.step_n;
        alignas(16) T v[V] = {};
        if (beside) {
            if (count > 0 && (unsigned)h0 < (unsigned)height) load_unaligned(v, image + (h0 * step_h + begin), count);
        } else {
            int h = h0, w = w0, s = s0, channel = channel0, place = h * step_h + w * step_w + channel * step_c;
#pragma unroll
            for (int e = 0; e < V; ++e) {
                if (e < count && (unsigned)h < (unsigned)height && (unsigned)w < (unsigned)width) v[e] = image[place];
                place += step_c;
                if (++channel == channels) {
                    channel = 0;
                    w += next_w;
                    place += next_w * step_w - channels * step_c;
                    if (++s == taps_w) {
                        s = 0;
                        w -= taps_w * next_w;
                        h += next_h;
                        place += next_h * step_h - taps_w * next_w * step_w;
                    }
                }
            }
        }
        put<T, PARTS>(static_cast<T *>(p.y) + (above * p.across + pixel) * p.wide + first, parts_apart, v);
    }
}

struct Filters {
    const void *w;
    void *y;
    // y[k][tap][part][wide], filters `pitch` elements apart; a tap of y is `inner` taps of w side by side. Of w in
    // elements: distances of filters, channels and taps. Of each `order` filters of y, the (8 j + 2 t + e)-th is the
    // (order / 4 t + 2 j + e)-th of w; as they are with 8. Behind the `real` ones come zeros. Of each `chunk` channels
    // every `classes`-th come together, a whole number of pieces.
    long long k, taps, inner, channels, wide, pitch, step_k, step_c, step_r, step_s, taps_w, order, real, classes,
        chunk;
};

// Parts of filters for 3xtf32: large, small, large. PARTS 0: as they are. A thread takes V neighbours of a tap, all of
// them channels or all zeros; I counts elements of y.
template <typename T, int PARTS, int V, typename I> __device__ void pack_pieces(const Filters &p) {
    struct alignas(sizeof(T) * V) Piece { T v[V]; };
    const I pitch = p.pitch, wide = p.wide, row = PARTS == 2 ? 3 * wide : wide, channels = p.channels;
    const I order = p.order, taps = p.taps, inner = p.inner, taps_w = p.taps_w, count = (I)p.k * pitch;
    const I classes = p.classes;
    const long long step = p.step_c * p.classes;
    const T *w = static_cast<const T *>(p.w);
    for (I i = (blockIdx.x * (I)256 + threadIdx.x) * V; i < count; i += gridDim.x * (I)256 * V) {
        const I k = i / pitch, rest = i - k * pitch, tap = rest / row, at = rest - tap * row, part = at / wide;
        const I within = (at - part * wide) / channels;
        I channel = at - part * wide - within * channels;
        if (classes > 1) {
            const I each = p.chunk / classes, number = channel / each;
            channel = number / classes * p.chunk + (channel - number * each) * classes + number % classes;
        }
        const I real_tap = tap * inner + within, permuted = k % order;
        const I filter = k - permuted + permuted % 8 / 2 * (order / 4) + permuted / 8 * 2 + permuted % 2;
        Piece piece{};
        if (within < inner && tap < taps && filter < p.real) {
            const T *from = w + (long long)filter * p.step_k + (long long)channel * p.step_c +
                            (long long)(real_tap / taps_w) * p.step_r + (long long)(real_tap % taps_w) * p.step_s;
            if (V > 1 && step == 1 && reinterpret_cast<unsigned long long>(from) % sizeof(Piece) == 0) {
                piece = *reinterpret_cast<const Piece *>(from);
            } else {
#pragma unroll
                for (int e = 0; e < V; ++e) piece.v[e] = from[e * step];
            }
        }
#pragma unroll
        for (int e = 0; e < V; ++e)
            piece.v[e] = part == 1 ? part_of<T, 1>(piece.v[e]) : part_of<T, PARTS == 0 ? 2 : 0>(piece.v[e]);
        *reinterpret_cast<Piece *>(static_cast<T *>(p.y) + i) = piece;
    }
}

template <typename T, int PARTS> __device__ void pack_filters(const Filters &p) {
    constexpr int V = 16 / sizeof(T);
    begin_dependent();
    // Divisions of 64 bits would take longer than all else.
    if (p.k * p.pitch >= 1ll << 31) pack_pieces<T, PARTS, 1, long long>(p);
    else if (p.channels % V || p.wide % V || p.pitch % V) pack_pieces<T, PARTS, 1, unsigned>(p);
    else pack_pieces<T, PARTS, V, unsigned>(p);
}
