// Winograd's method around a matrix product a position of its tiles: images and filters to where products are taken,
// sums of products to outputs. A tile of OH x OW outputs sees IH x IW elements of x, those of the next begin STEP_H or
// STEP_W further, and takes PH x PW products.
#pragma once

#include "activation.cuh"
#include "grid.cuh"

struct Images {
    const void *x;
    void *transformed;
    // Of x, and of the tiles that are made now, from image `image0` on; behind them the last one again, to `pitch`.
    long long height, width, pad_h, pad_w, channels, image0, tiles_h, tiles_w, tiles, pitch;
    // Distances: of x in elements; of what is written, of channels, tiles and products.
    long long step_n, step_c, step_h, step_w, apart_c, apart_tile, apart_position;
};

struct Filters {
    const void *w;
    void *y;
    // y[product][group][channel][filter]: rows and columns of a matrix, those of w, and the groups.
    long long rows, pitch, group_c, group_k, groups, step_k, step_c, step_r, step_s;
};

struct Outputs {
    const void *products;
    void *y;
    const void *bias, *residual;
    long long p, q, k, image0, tiles_h, tiles_w, tiles;
    // Distances: of y in elements; of what is read, of filters, tiles and products.
    long long step_n, step_k, step_p, step_q, apart_c, apart_tile, apart_position;
};

// to = M from, where M has ROWS x COLUMNS; what M holds is known here, so zeros cost nothing. ABSOLUTE: of |M|.
template <bool ABSOLUTE, typename A, int ROWS, int COLUMNS>
DEVICE void transform(A (&to)[ROWS], const double (&m)[ROWS][COLUMNS], const A (&from)[COLUMNS]) {
#pragma unroll
    for (int i = 0; i < ROWS; ++i) {
        bool begun = false;
#pragma unroll
        for (int j = 0; j < COLUMNS; ++j) {
            const A factor = ABSOLUTE && m[i][j] < 0 ? -m[i][j] : m[i][j];
            if (factor == A(0)) continue;
            const A term = factor * from[j];
            to[i] = begun ? to[i] + term : term;
            begun = true;
        }
    }
}

// Threads beside each other take tiles beside each other (TILES), or channels.
template <bool TILES> struct Pair {
    unsigned channel, tile;
    DEVICE Pair(unsigned at, unsigned channels, unsigned tiles) {
        const unsigned fast = TILES ? tiles : channels, slow = at / fast, rest = at - slow * fast;
        channel = TILES ? slow : rest, tile = TILES ? rest : slow;
    }
};

// The image of a tile, and where it lies there.
struct Place {
    unsigned image, row, column;
    DEVICE Place(unsigned tile, unsigned tiles_h, unsigned tiles_w) {
        const unsigned rows = tile / tiles_w;
        column = tile - rows * tiles_w, image = rows / tiles_h, row = rows - image * tiles_h;
    }
};

// M: the matrices of both axes. IN: the elements of x; T: what is computed and written.
template <class M, typename IN, typename T, bool TILES, bool ABSOLUTE> DEVICE void winograd_images(const Images &p) {
    const unsigned i = blockIdx.x * blockDim.x + threadIdx.x;
    wait_for_previous();
    if (i >= (unsigned)p.channels * (unsigned)p.pitch) return;
    const Pair<TILES> at(i, p.channels, p.pitch);
    const Place place(min(at.tile, (unsigned)p.tiles - 1), p.tiles_h, p.tiles_w);
    const int h0 = (int)(place.row * M::STEP_H) - (int)p.pad_h, w0 = (int)(place.column * M::STEP_W) - (int)p.pad_w;
    const IN *x = static_cast<const IN *>(p.x) + (p.image0 + place.image) * p.step_n + at.channel * p.step_c +
                  h0 * p.step_h + w0 * p.step_w;
    T half[M::PH][M::IW];
#pragma unroll
    for (int b = 0; b < M::IW; ++b) {
        const bool across = (unsigned)(w0 + b) < (unsigned)p.width;
        T column[M::IH], made[M::PH];
#pragma unroll
        for (int a = 0; a < M::IH; ++a) {
            const bool inside = across && (unsigned)(h0 + a) < (unsigned)p.height;
            const T v = inside ? T(x[a * p.step_h + b * p.step_w]) : T(0);
            column[a] = ABSOLUTE && v < T(0) ? -v : v;
        }
        transform<ABSOLUTE>(made, M::B_HIGH, column);
#pragma unroll
        for (int a = 0; a < M::PH; ++a) half[a][b] = made[a];
    }
    T *to = static_cast<T *>(p.transformed) + at.channel * p.apart_c + at.tile * p.apart_tile;
#pragma unroll
    for (int a = 0; a < M::PH; ++a) {
        T made[M::PW];
        transform<ABSOLUTE>(made, M::B_WIDE, half[a]);
#pragma unroll
        for (int b = 0; b < M::PW; ++b) to[(a * M::PW + b) * p.apart_position] = made[b];
    }
    // Placed before, the product's blocks would fill the multiprocessors that end first.
    let_next_begin();
}

// Zeros behind a group's channels and filters.
template <class M, typename IN, typename T, bool ABSOLUTE> DEVICE void winograd_filters(const Filters &p) {
    const long long count = p.groups * p.rows * p.pitch;
    begin_dependent();
    for (long long i = blockIdx.x * (long long)blockDim.x + threadIdx.x; i < count; i += gridDim.x * blockDim.x) {
        const long long row = i / p.pitch, filter = i - row * p.pitch, group = row / p.rows,
                        channel = row - group * p.rows;
        const bool real = filter < p.group_k && channel < p.group_c;
        const IN *w = static_cast<const IN *>(p.w) + (group * p.group_k + filter) * p.step_k + channel * p.step_c;
        T half[M::PH][M::S];
#pragma unroll
        for (int s = 0; s < M::S; ++s) {
            T column[M::R], made[M::PH];
#pragma unroll
            for (int r = 0; r < M::R; ++r) {
                const T v = real ? T(w[r * p.step_r + s * p.step_s]) : T(0);
                column[r] = ABSOLUTE && v < T(0) ? -v : v;
            }
            transform<ABSOLUTE>(made, M::G_HIGH, column);
#pragma unroll
            for (int a = 0; a < M::PH; ++a) half[a][s] = made[a];
        }
        T *y = static_cast<T *>(p.y) + i;
#pragma unroll
        for (int a = 0; a < M::PH; ++a) {
            T made[M::PW];
            transform<ABSOLUTE>(made, M::G_WIDE, half[a]);
#pragma unroll
            for (int b = 0; b < M::PW; ++b) y[(a * M::PW + b) * count] = made[b];
        }
    }
}

// WRITE outputs of a row at once; where that is more than one, a tile's rows are all there.
template <class M, typename T, bool TILES, int WRITE, bool ABSOLUTE, int ACTIVATION>
DEVICE void winograd_outputs(const Outputs &p) {
    struct alignas(WRITE * sizeof(T)) Written { T v[WRITE]; };
    const unsigned i = blockIdx.x * blockDim.x + threadIdx.x;
    begin_dependent();
    if (i >= (unsigned)p.k * (unsigned)p.tiles) return;
    const Pair<TILES> at(i, p.k, p.tiles);
    const Place place(at.tile, p.tiles_h, p.tiles_w);
    const T *from = static_cast<const T *>(p.products) + at.channel * p.apart_c + at.tile * p.apart_tile;
    T half[M::OH][M::PW];
#pragma unroll
    for (int b = 0; b < M::PW; ++b) {
        T column[M::PH], made[M::OH];
#pragma unroll
        for (int a = 0; a < M::PH; ++a) column[a] = from[(a * M::PW + b) * p.apart_position];
        transform<ABSOLUTE>(made, M::A_HIGH, column);
#pragma unroll
        for (int a = 0; a < M::OH; ++a) half[a][b] = made[a];
    }
    const T *bias = static_cast<const T *>(p.bias), *residual = static_cast<const T *>(p.residual);
    const T added = bias ? bias[at.channel] : T(0);
    const int row0 = place.row * M::OH, column0 = place.column * M::OW;
    const long long begin =
        (p.image0 + place.image) * p.step_n + at.channel * p.step_k + row0 * p.step_p + column0 * p.step_q;
    T *y = static_cast<T *>(p.y) + begin;
    const T *more = residual ? residual + begin : nullptr;
#pragma unroll
    for (int a = 0; a < M::OH; ++a) {
        if (row0 + a >= (int)p.p) break;
        T made[M::OW];
        transform<ABSOLUTE>(made, M::A_WIDE, half[a]);
#pragma unroll
        for (int b = 0; b < M::OW; b += WRITE) {
            if (column0 + b >= (int)p.q) break;
            const long long to = a * p.step_p + b * p.step_q;
            Written out, term{};
            if (more) term = *reinterpret_cast<const Written *>(more + to);
#pragma unroll
            for (int e = 0; e < WRITE; ++e) out.v[e] = activate<ACTIVATION>(made[b + e] + added + term.v[e]);
            *reinterpret_cast<Written *>(y + to) = out;
        }
    }
}
