// Epilogue buffers: 64 x 64 outputs in shared memory on their way to y, in rows of 128 bytes, and residuals on theirs
// from there. What threads move between them and global memory.
#pragma once

#include "cp_async.cuh"
#include "cta_tile.cuh"

// Where a warpgroup's outputs go: its tile's first filter, group and pixel, filters in a group, the distance of two
// filters in y (NCHW), a table of its pixels' places in y, -1 where there is none (output_runs.cuh has more behind it),
// one of its filters' bias, its epilogue buffers, its named barrier, the tensor maps of y, and of the last columns
// (LAST_STORED). TMA_RESIDUAL: barriers of the
// ring of buffers that say that a residual is there, and behind them those that say that one may come; the slot of the
// ring that is next, and its barriers' parity. STRIDED: pixels of a row, and all. NCHW, TMA_STORE: its first pixel's
// image.
struct OutputTile {
    int filter, group, pixel, filters, step;
    unsigned table, bias, buffer;
    int barrier;
    const void *map, *last_map;
    unsigned residual_full;
    int residual_slot;
    unsigned residual_phase;
    int width, pixels, image;
};

DEVICE int place_of(const OutputTile &at, int pixel) { return load_word(at.table + 4 * pixel); }
// Of a pixel where y has strides.
template <class Gemm> DEVICE int strided_place(const Gemm &p, int n, int row, int column) {
    return n * (int)p.image_stride + row * (int)p.row_stride + column * (int)p.column_stride;
}
DEVICE void set_place(unsigned table, int pixel, int place) { store_word(table + 4 * pixel, place); }

// Address of element `at` of a buffer's row: rows of 128 bytes, swizzled by pieces of 16 as TMA wants them; what is
// longer goes on 64 rows further.
template <class Tile> DEVICE unsigned buffer_address(unsigned buffer, unsigned row, unsigned at) {
    constexpr unsigned SIZE = sizeof(typename Tile::T), PIECE = 16 / SIZE;
    const unsigned within = at % Tile::BUFFER_ROW;
    return buffer + (at / Tile::BUFFER_ROW * 64 + row) * 128 + ((within / PIECE ^ row % 8) << 4) +
           within % PIECE * SIZE;
}

// What a thread moves of a buffer's 64 rows: VECTOR elements of each STRIDE-th of them. Buffers begin on multiples of
// 1024 bytes, so that only the bits of a row's swizzle change besides a constant.
template <class Tile> struct BufferRows {
    static constexpr int ACROSS = 64 / Tile::VECTOR, STRIDE = 128 / ACROSS, COUNT = 64 / STRIDE;
    int row, first;
    unsigned base;
    DEVICE BufferRows(const OutputTile &at)
        : row(threadIdx.x % 128 / ACROSS), first(threadIdx.x % ACROSS * Tile::VECTOR),
          base(buffer_address<Tile>(at.buffer, row, first)) {}
    DEVICE unsigned address(int i) const { return (base ^ STRIDE * i % 8 * 16) + STRIDE * i * 128; }
    DEVICE int pixel(int i) const { return Tile::NCHW ? first : STRIDE * i + row; }
    DEVICE int filter(int i) const { return Tile::NCHW ? STRIDE * i + row : first; }
    // Where a thread's first filter is, and how much further its others. ptxas would add up what leads there for each
    // of them; what it cannot see through is added up once.
    template <class T> DEVICE T *mine(const OutputTile &at, T *global, int filter0) const {
        T *to = global + (at.filter + filter0 + filter(0)) * (Tile::NCHW ? at.step : 1);
        asm("" : "+l"(to));
        return to;
    }
    DEVICE int further(const OutputTile &at, int i) const { return Tile::NCHW ? STRIDE * i * at.step : 0; }
};

// Rows between a buffer and y or residual (IN), VECTOR elements a thread.
template <class Tile, bool IN>
DEVICE void move_rows(const OutputTile &at, typename Tile::T *global, int pixel0, int pixels, int filter0,
                      int filters) {
    constexpr int BYTES = Tile::VECTOR * (int)sizeof(typename Tile::T);
    const BufferRows<Tile> rows(at);
    const int end = min(filters, at.filters - at.filter - filter0);
    typename Tile::T *const mine = rows.mine(at, global, filter0);
    // All places first, then all loads, then all stores: each step waits once.
    constexpr int AT_ONCE = rows.COUNT < 4 ? rows.COUNT : 4;
#pragma unroll
    for (int start = 0; start < rows.COUNT; start += AT_ONCE) {
        int there[AT_ONCE];
        Piece<BYTES> piece[AT_ONCE];
#pragma unroll
        for (int i = 0; i < AT_ONCE; ++i) {
            const int pixel = rows.pixel(start + i);
            there[i] = pixel < pixels && rows.filter(start + i) < end ? place_of(at, pixel0 + pixel) : -1;
        }
#pragma unroll
        for (int i = 0; i < AT_ONCE; ++i) {
            if (there[i] < 0) continue;
            if constexpr (IN) piece[i] = load_global<BYTES>(mine + there[i] + rows.further(at, start + i));
            else piece[i] = load_shared<BYTES>(rows.address(start + i));
        }
#pragma unroll
        for (int i = 0; i < AT_ONCE; ++i) {
            if (there[i] < 0) continue;
            if constexpr (IN) store_shared<BYTES>(rows.address(start + i), piece[i]);
            else store_global<BYTES>(mine + there[i] + rows.further(at, start + i), piece[i]);
        }
    }
}

// The residual of a round on its way to a buffer.
template <class Tile>
DEVICE void fetch_rows(const OutputTile &at, const typename Tile::T *residual, int pixel0, int pixels, int filter0,
                       int filters) {
    constexpr int BYTES = Tile::VECTOR * (int)sizeof(typename Tile::T);
    const BufferRows<Tile> rows(at);
    const int end = min(filters, at.filters - at.filter - filter0);
    const typename Tile::T *const mine = rows.mine(at, residual, filter0);
#pragma unroll
    for (int i = 0; i < rows.COUNT; ++i) {
        const int pixel = rows.pixel(i);
        const int place = pixel < pixels && rows.filter(i) < end ? place_of(at, pixel0 + pixel) : -1;
        if (place >= 0) cp_async<BYTES>(rows.address(i), mine + place + rows.further(at, i), true);
    }
}
