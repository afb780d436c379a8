// Weight gradient of depthwise convolution on tensor cores: the diagonals of products of x and dy, a channel at a time.
//
// A row of dy is cut into groups of 8 columns. With its group, a group of x that begins where tap 0 meets it, and the
// next one, are columns of a matrix, of which a row is such a place; 16 places make a product:
//
//     D (16 x 8) += A (16 columns of x x 16 places) * B (16 places x 8 columns of dy)
//
// so D[i][j] has the terms of tap s = i - j of one row of taps. Places of a product are runs of ROWS rows, somewhere in
// the images of a chunk, which all taps' rows go down together: a row of x comes to registers once for all rows of dy
// that meet it. A block has chunks in shared memory as planes [channel][row][column], zeros around them: a thread
// brings V channels of 8 columns and turns them in registers. Strides: a plane's row has its columns class by class.
//
// Blocks' sums are added in a fixed order: by a cluster, or from the workspace by a second launch.
#include "grid.cuh"
#include "matrix.cuh"
#include "ops/conv/cuda/wgrad_by_definition.cuh"
#include "ops/conv/cuda/wgrad_places.cuh"
#include "types.cuh"

struct DepthwiseWgradMma {
    const void *x;
    // dy.
    const void *w;
    void *y;
    // Sums of parts, each (k, r, s).
    void *parts;
    long long n, c, height, width, k, r, s, p, q;
    long long stride_h, stride_w, dilation_h, dilation_w, pad_h, pad_w;
    // Parts of the sum, blocks of channels, pieces of a filter's rows.
    long long split, channel_blocks, pieces;
    // Chunks: of so many images, runs of ROWS rows of an image, bands of them, strips of columns; how many there are.
    long long images, runs, bands, strips, chunks;
    // Rows of x of an image; pieces of 16 bytes of an image in a plane of x, of planes of x and of dy.
    long long rows_x, image_x, plane_x, plane_dy;
    // Whether what comes next is placed early: grid.cuh.
    long long early;
};

// T; LAST: channels last; V channels that are loaded at once; CHANNELS of a block, EACH of a warp, SHARE warps of a
// channel; R rows of taps of a block, S; SH, SW, DH, DW: strides and dilations; ROWS of a run; GROUPS of 8 columns of
// dy in a strip, REAL_X groups of x that may have columns of the
// image; SLIDES: half of each product's columns of x stay in registers for the next group; CLUSTER: blocks that add
// their sums; SPLIT: sums go to the workspace.
template <class Traits> struct DiagonalTile : Traits {
    using B = Traits;
    static constexpr int WARPS = B::CHANNELS / B::EACH * B::SHARE, THREADS = 32 * WARPS;
    // Tiles of 16 columns that 8 columns of dy meet with one row of taps, of a class.
    static constexpr int TILES = ((B::S - 1) * B::DW / B::SW + 8 + 15) / 16;
    static constexpr int GROUPS_X = B::GROUPS + 2 * TILES - 1;
    // Pieces of a row; odd, so that rows beside each other lie in other banks, and where runs are an even number of
    // rows apart, one more every 8 rows.
    static constexpr int PITCH_X = B::SW * GROUPS_X | 1, PITCH_DY = B::GROUPS | 1;
    static constexpr bool SKEW_X = B::ROWS * B::SH % 2 == 0, SKEW_DY = B::ROWS % 2 == 0;
    // Vectors of channels; pieces behind the planes of one, so that a warp's stores go to many banks.
    static constexpr int VECTORS = B::CHANNELS / B::V, GAP = VECTORS < 8 ? 8 / VECTORS : 1;
    // Threads that bring x; the others bring dy meanwhile.
    static constexpr int SHARE_X = B::SH * B::SW * B::REAL_X, ALL = SHARE_X + B::GROUPS,
                         WARPS_X = (2 * WARPS * SHARE_X + ALL) / (2 * ALL),
                         THREADS_X = 32 * (WARPS_X < WARPS ? WARPS_X : WARPS - 1);
    // Rows of x that a run meets.
    static constexpr int REACH = (B::ROWS - 1) * B::SH + (B::R - 1) * B::DH + 1;
    static constexpr int PAIRS_X = (REACH + 1) / 2, PAIRS_DY = (B::ROWS + 1) / 2;
    // Whether a row of x meets a row of dy of its run.
    static constexpr bool meets(int h) {
        for (int r = 0; r < B::R; ++r)
            if (h >= r * B::DH && (h - r * B::DH) % B::SH == 0 && (h - r * B::DH) / B::SH < B::ROWS) return true;
        return false;
    }
    static constexpr int TAPS = B::R * B::S, OUTPUTS = B::CHANNELS * TAPS;
    static_assert(B::CHANNELS % B::V == 0 && B::CHANNELS % B::EACH == 0 && B::REAL_X <= GROUPS_X && THREADS_X > 0);
};

// 2^32 over a number, rounded up (modulo 2^32).
DEVICE unsigned reciprocal(unsigned by) { return 0xffffffffu / by + 1; }

template <int PITCH, bool SKEW> DEVICE int row_at(int row) { return row * PITCH + (SKEW ? row >> 3 : 0); }

// What comes of x or dy for a chunk: rows of images from a row and a column on. In a plane: its pieces, the row of the
// first, rows and pieces from an image to the next.
struct Window {
    int images, rows, top, left, height, width, channels;
    int plane, first, image_rows, image_pieces;
};

// To planes: CLASSES of columns, GROUPS groups of 8 of each that are written, of ALL in a row.
template <class P, int THREADS, int CLASSES, int GROUPS, int ALL, int PITCH, bool SKEW>
DEVICE void bring(const typename P::T *from, const Window &in, unsigned all_channels, unsigned planes, int thread) {
    // Together they take up to 32 registers.
    constexpr int V = P::V, TOGETHER = V == 4 ? 2 : V == 2 ? 4 : 3, WORDS = V > 1 ? V / 2 : 1;
    constexpr unsigned ALONG = CLASSES * GROUPS, INNER = P::LAST ? P::VECTORS : ALONG,
                       OUTER = P::LAST ? ALONG : P::VECTORS;
    // Elements from one to the next, bytes from a column to the next of its class.
    const unsigned plane = in.height * in.width, column = P::LAST ? all_channels : 1, channel = P::LAST ? 1 : plane,
                   step = 2 * CLASSES * column;
    const unsigned count = in.images * in.rows * (ALONG * P::VECTORS), by_rows = reciprocal(in.rows);
#pragma unroll 1
    for (unsigned first = thread; first < count; first += TOGETHER * THREADS) {
        Piece<2 * V> pieces[TOGETHER][8];
        unsigned to[TOGETHER];
#pragma unroll
        for (int i = 0; i < TOGETHER; ++i) {
            const unsigned item = first + i * THREADS, inner = item % INNER, outer = item / INNER % OUTER,
                           line = item / (ALONG * P::VECTORS);
            const unsigned vector = P::LAST ? inner : outer, along = P::LAST ? outer : inner, group = along / CLASSES,
                           of_class = along % CLASSES;
            const unsigned image = divided(line, in.rows, by_rows), row = line - image * in.rows;
            const int h = in.top + (int)row, w = in.left + (int)(group * (8 * CLASSES) + of_class);
            const bool real = item < count && (unsigned)h < (unsigned)in.height && (int)vector * V < in.channels;
            const int place =
                (int)(image * all_channels * plane) + (h * in.width + w) * (int)column + (int)(vector * V * channel);
            const char *const at = reinterpret_cast<const char *>(from) + 2 * (long long)place;
            const unsigned width = real ? in.width : 0;
#pragma unroll
            for (int t = 0; t < 8; ++t) {
                pieces[i][t] = {};
                if ((unsigned)(w + t * CLASSES) < width) pieces[i][t] = load_global<2 * V>(at + t * step);
            }
            const int there = (int)image * in.image_pieces +
                              row_at<PITCH, SKEW>(image * in.image_rows + in.first + row) + of_class * ALL + group;
            to[i] = planes + (vector * (V * in.plane + P::GAP) + there) * 16;
        }
#pragma unroll
        for (int i = 0; i < TOGETHER; ++i) {
            if (first + i * THREADS >= count) break;
#pragma unroll
            for (int e = 0; e < WORDS; ++e)
#pragma unroll
                for (int high = 0; high < (V > 1 ? 2 : 1); ++high) {
                    Piece<16> columns;
#pragma unroll
                    for (int t = 0; t < 4; ++t)
                        columns.v[t] =
                            __byte_perm(pieces[i][2 * t].v[e], pieces[i][2 * t + 1].v[e], high ? 0x7632 : 0x5410);
                    store_shared<16>(to[i], columns);
                    to[i] += in.plane * 16;
                }
        }
    }
}

// Products of row h of x with the rows of dy that it meets.
template <class P>
DEVICE void multiply_row(float (&sums)[P::R][4], int h, const unsigned (&columns)[4],
                         const unsigned (&of_rows)[P::PAIRS_DY][4]) {
#pragma unroll
    for (int r = 0; r < P::R; ++r) {
        const int distance = h - r * P::DH, row = distance / P::SH;
        if (distance < 0 || distance % P::SH != 0 || row >= P::ROWS) continue;
        const unsigned pixels[2] = {of_rows[row / 2][row % 2 * 2], of_rows[row / 2][row % 2 * 2 + 1]};
        mma<typename P::T>(sums[r], columns, pixels);
    }
}

// Products of a channel, of 16 places whose runs begin in a lane's rows: of planes from `x` and `dy` on. A lane tells
// of place lane % 16.
template <class P>
DEVICE void multiply(float (&sums)[P::SW][P::TILES][P::R][4], unsigned x, int row_x, unsigned dy, int row_dy) {
    const int below = threadIdx.x % 32 / 16;
    const auto place_x = [&](int row, int piece) {
        return x + (row_at<P::PITCH_X, P::SKEW_X>(row_x + row) + piece) * 16;
    };
    // What 8 columns further were the right half of a product is the left one of the next.
    unsigned left[P::SLIDES ? P::SW : 1][P::SLIDES ? P::PAIRS_X : 1][4];
    if constexpr (P::SLIDES)
#pragma unroll
        for (int b = 0; b < P::SW; ++b)
#pragma unroll
            for (int i = 0; i < P::PAIRS_X; ++i)
                ldmatrix_transposed(left[b][i], place_x(2 * i + below, b * P::GROUPS_X));
#pragma unroll 1
    for (int group = 0; group < P::GROUPS; ++group) {
        unsigned of_rows[P::PAIRS_DY][4];
#pragma unroll
        for (int i = 0; i < P::PAIRS_DY; ++i)
            ldmatrix_transposed(of_rows[i],
                                dy + (row_at<P::PITCH_DY, P::SKEW_DY>(row_dy + 2 * i + below) + group) * 16);
#pragma unroll
        for (int b = 0; b < P::SW; ++b)
            if constexpr (P::SLIDES)
#pragma unroll
                for (int i = 0; i < P::PAIRS_X; ++i) {
                    unsigned right[4];
                    ldmatrix_transposed(right, place_x(2 * i + below, b * P::GROUPS_X + group + 1));
#pragma unroll
                    for (int h = 0; h < 4; h += 2) {
                        const unsigned columns[4] = {left[b][i][h], right[h], left[b][i][h + 1], right[h + 1]};
                        multiply_row<P>(sums[b][0], 2 * i + h / 2, columns, of_rows);
                    }
#pragma unroll
                    for (int k = 0; k < 4; ++k) left[b][i][k] = right[k];
                }
            else
#pragma unroll
                for (int h = 0; h < P::REACH; ++h) {
                    if (!P::meets(h)) continue;
#pragma unroll
                    for (int t = 0; t < P::TILES; ++t) {
                        unsigned v[4];
                        ldmatrix_transposed(v, place_x(h, b * P::GROUPS_X + group + 2 * t + below));
                        const unsigned columns[4] = {v[0], v[2], v[1], v[3]};
                        multiply_row<P>(sums[b][t], h, columns, of_rows);
                    }
                }
    }
}

// Which images, rows and columns of dy a chunk has.
struct ChunkPlace {
    int behind, band, strip;
    DEVICE ChunkPlace(const DepthwiseWgradMma &a, int chunk) {
        const int line = chunk / (unsigned)a.strips;
        strip = chunk - line * (int)a.strips, behind = line / (unsigned)a.bands;
        band = line - behind * (int)a.bands;
    }
};

template <class Traits> DEVICE void wgrad_depthwise_mma(const DepthwiseWgradMma &a) {
    using P = DiagonalTile<Traits>;
    using T = typename P::T;
    constexpr int R = P::R, SH = P::SH, SW = P::SW, TILES = P::TILES, ROWS = P::ROWS, EACH = P::EACH;
    extern __shared__ __align__(128) unsigned char memory[];
    const int tid = threadIdx.x, lane = tid % 32, warp = tid / 32;
    const int of_block = blockIdx.x / (unsigned)a.split, part = blockIdx.x - of_block * (unsigned)a.split;
    const int piece = of_block / (unsigned)a.channel_blocks,
              channel0 = (of_block - piece * (int)a.channel_blocks) * P::CHANNELS, r0 = piece * R;
    const int plane_x = a.plane_x, plane_dy = a.plane_dy;
    const unsigned planes_x = shared_address(memory),
                   planes_dy = planes_x + (P::CHANNELS * plane_x + P::VECTORS * P::GAP) * 16;
    const int pieces = P::CHANNELS * (plane_x + plane_dy) + 2 * P::VECTORS * P::GAP;
    for (int i = tid; i < pieces; i += P::THREADS) store_shared<16>(planes_x + i * 16, {});
    const int place = lane % 16;
    const int share = warp % P::SHARE, own = warp / P::SHARE * EACH;
    const int rows_x = a.rows_x, rows_dy = (int)a.runs * ROWS;
    const unsigned by_runs = reciprocal(a.runs);
    float sums[EACH][SW][TILES][R][4] = {};
    const int end = (int)(a.chunks * (part + 1) / a.split);
    int chunk = (int)(a.chunks * part / a.split);
    ChunkPlace place_of(a, chunk);
    work_out(end, chunk, place_of.behind, place_of.band, place_of.strip);
    begin_dependent(a.early);
#pragma unroll 1
    for (; chunk < end; place_of = ChunkPlace(a, ++chunk)) {
        const int n0 = place_of.behind * (int)a.images, images = min((int)a.images, (int)a.n - n0);
        const int p0 = place_of.band * rows_dy, q0 = place_of.strip * (8 * P::GROUPS);
        Window in, of_dy;
        in.images = of_dy.images = images, in.channels = of_dy.channels = (int)a.c - channel0;
        in.rows = rows_x, in.top = p0 * SH - (int)a.pad_h + r0 * P::DH, in.left = q0 * SW - (int)a.pad_w;
        in.height = a.height, in.width = a.width, in.plane = plane_x;
        in.first = in.image_rows = 0, in.image_pieces = a.image_x;
        of_dy.rows = of_dy.image_rows = rows_dy, of_dy.top = p0, of_dy.left = q0;
        of_dy.height = a.p, of_dy.width = a.q, of_dy.plane = plane_dy, of_dy.first = of_dy.image_pieces = 0;
        if (a.bands == 1) {
            // Rows beside the image are zeros from the beginning on.
            in.first = min(max(0, -in.top), rows_x - 1), in.top += in.first;
            in.rows = max(1, min(rows_x - in.first, in.height - in.top));
            of_dy.rows = (int)a.p;
        }
        __syncthreads();
        const long long image_x = (long long)n0 * a.c * in.height * in.width,
                        image_dy = (long long)n0 * a.c * of_dy.height * of_dy.width;
        const T *const x = static_cast<const T *>(a.x) + image_x +
                           (P::LAST ? channel0 : (long long)channel0 * in.height * in.width),
                       *const dy = static_cast<const T *>(a.w) + image_dy +
                                   (P::LAST ? channel0 : (long long)channel0 * of_dy.height * of_dy.width);
        if (tid < P::THREADS_X)
            bring<P, P::THREADS_X, SW, P::REAL_X, P::GROUPS_X, P::PITCH_X, P::SKEW_X>(x, in, a.c, planes_x, tid);
        else
            bring<P, P::THREADS - P::THREADS_X, 1, P::GROUPS, P::GROUPS, P::PITCH_DY, P::SKEW_DY>(
                dy, of_dy, a.c, planes_dy, tid - P::THREADS_X);
        __syncthreads();
        const int runs = images * (int)a.runs;
#pragma unroll 1
        for (int run0 = share * 16; run0 < runs; run0 += P::SHARE * 16) {
            const int run = run0 + place, image = divided(min(run, runs - 1), (int)a.runs, by_runs),
                      of_image = min(run, runs - 1) - image * (int)a.runs;
            // Places that are none have the zeros behind all images.
            const int row_x = of_image * (ROWS * SH), image_x = image * (int)a.image_x,
                      row_dy = run < runs ? image * rows_dy + of_image * ROWS : (int)a.images * rows_dy;
#pragma unroll
            for (int e = 0; e < EACH; ++e) {
                const int vector = (own + e) / P::V * P::GAP;
                multiply<P>(sums[e], planes_x + ((own + e) * plane_x + vector + image_x) * 16, row_x,
                            planes_dy + ((own + e) * plane_dy + vector) * 16, row_dy);
            }
        }
    }
    __syncthreads();
    // Terms of a tap: eight columns of dy, of each warp that shares the channel.
    constexpr int TERMS = 8 * P::SHARE;
    float *const terms = reinterpret_cast<float *>(memory);
    float *const totals = terms + P::OUTPUTS * TERMS;
#pragma unroll
    for (int e = 0; e < EACH; ++e)
#pragma unroll
        for (int b = 0; b < SW; ++b)
#pragma unroll
            for (int t = 0; t < TILES; ++t)
#pragma unroll
                for (int k = 0; k < 4; ++k) {
                    const int column = lane % 4 * 2 + k % 2, distance = 16 * t + lane / 4 + k / 2 * 8 - column;
                    const int s = (distance * SW + b) / P::DW;
                    if (distance < 0 || s * P::DW != distance * SW + b || s >= P::S) continue;
#pragma unroll
                    for (int r = 0; r < R; ++r)
                        terms[((own + e) * P::TAPS + r * P::S + s) * TERMS + share * 8 + column] = sums[e][b][t][r][k];
                }
    __syncthreads();
    const int taps = (int)a.r * P::S;
    // Whether there is an output, and where in dw.
    const auto real = [&](int i) { return channel0 + i / P::TAPS < (int)a.c && r0 + i % P::TAPS / P::S < (int)a.r; };
    const auto at = [&](int i) { return (channel0 + i / P::TAPS) * taps + r0 * P::S + i % P::TAPS; };
#pragma unroll 1
    for (int begin = 0; begin < P::OUTPUTS; begin += P::THREADS) {
        const int i = begin + tid;
        const bool mine = i < P::OUTPUTS && real(i);
        float sum = 0.0f;
        if (mine)
#pragma unroll
            for (int j = 0; j < TERMS; j += 4) {
                const Neighbours<float, 4> some =
                    *reinterpret_cast<const Neighbours<float, 4> *>(terms + i * TERMS + j);
                sum += (some.v[0] + some.v[1]) + (some.v[2] + some.v[3]);
            }
        if constexpr (P::CLUSTER > 1) {
            if (i < P::OUTPUTS) totals[i] = sum;
        } else if constexpr (P::SPLIT) {
            if (mine) static_cast<float *>(a.parts)[(long long)part * a.c * taps + at(i)] = sum;
        } else store_sum<T, P::LAST, 1>(a, mine, at(i), sum);
    }
    if constexpr (P::CLUSTER > 1) {
        cluster_arrive(), cluster_wait();
        constexpr int SHARED = (P::OUTPUTS + P::CLUSTER - 1) / P::CLUSTER;
        const int first = part * SHARED, last = min(P::OUTPUTS, first + SHARED);
#pragma unroll 1
        for (int begin = first; begin < last; begin += P::THREADS) {
            const int i = begin + tid;
            const bool mine = i < last && real(i);
            float sum = 0.0f;
            if (mine)
#pragma unroll
                for (int rank = 0; rank < P::CLUSTER; ++rank) sum += *in_block_of_rank(totals + i, rank);
            store_sum<T, P::LAST, 1>(a, mine, at(i), sum);
        }
        // No block ends while others read its sums.
        cluster_arrive(), cluster_wait();
    }
}

template <typename T, bool LAST, int WARPS> DEVICE void add_depthwise_parts(const DepthwiseWgradMma &a) {
    add_parts_of_sums<T, LAST, 1, WARPS, WARPS>(a, a.early);
}
