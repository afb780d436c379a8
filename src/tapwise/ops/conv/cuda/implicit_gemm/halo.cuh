// What the roles of implicit_gemm_halo.cu share: parameters, shared memory, what they count with.
#pragma once

#include "cta_tile.cuh"

struct HaloGemm {
    // Tensor maps of x, of the packed filters and of the residual; of x and of TRANSPOSED_FILTERS in NARROW boxes.
    alignas(64) unsigned long long x[16], w[16], res[16], x_last[16], w_last[16];
    void *y;
    const void *bias, *residual, *image;
    // Images, filters and groups; tiles along the filters, and all; chunks of channels, and those that share a part of
    // x; taps.
    long long n, filters, groups, tiles_f, tiles, p, q, r, s, chunks, part_chunks;
    // The padded image, or the halo tile; pixels with their halo, which come `copy_pixels` at a time.
    long long wide, high, halo_pixels, copy_pixels, pad_h, pad_w, dilation_h, dilation_w;
    // The image itself: its size, channels, and those of a group.
    long long height, width, c, group_c;
    // HALO_TILE: outputs of a tile along both axes, and tiles of an image; `copy_pixels` are those kept behind a tile.
    long long down, across, tiles_h, tiles_w;
    // STAGED_STRIPS: those of a halo; rows of one, pixels from one to the next, and pieces of eight pixels in one; rows
    // of x of all; words of the table of places. Pixels from a residue of the strides to the next.
    long long strips, strip_rows, strip_pitch, strip_pieces, rows_x, table_words, residue_pixels;
    // The filters were packed before the launch before this one.
    long long weights_ready;
    // STRIDED: distances in y.
    long long image_stride, row_stride, column_stride;
    // TRANSPOSED_FILTERS: the tap of w that is the first, and how far the next lies from it.
    long long first_r, first_s, step_r, step_s;
};

// Threads that gather are three warps, and so are those that transpose; the fourth brings filters.
constexpr int TRANSPOSERS = 3, GATHERERS = 96, FIRST_PRODUCER = 256;

// Shared memory: halo buffers, a ring of filters or all of them, staging buffers of strips, a line for each lane of
// what nobody reads and a table of places, epilogue buffers, tables, barriers.
template <class Tile> struct HaloLayout {
    static constexpr unsigned FILTERS = Tile::FILTER_BYTES;
    static constexpr int HALOS = Tile::HALO_BUFFERS, STRIPS = Tile::STAGED_STRIPS;
    // Bytes that come, and with them those that operands shifted by the last tap read behind a halo tile, for positions
    // that are no outputs.
    unsigned copied_bytes, halo_bytes, strip_bytes;
    unsigned halos, ring, staged, spare, table, buffers, places, biases, halo_full, halo_empty, full, empty,
        staged_full;
    unsigned residual;
    DEVICE HaloLayout(unsigned memory, const HaloGemm &p)
        : copied_bytes(p.halo_pixels * Tile::CHUNK_BYTES),
          halo_bytes((p.halo_pixels + (Tile::HALO_TILE ? p.copy_pixels : 0)) * Tile::CHUNK_BYTES),
          strip_bytes(STRIPS ? p.strip_rows * p.strip_pitch * Tile::CHUNK_BYTES : 0), halos((memory + 1023) & ~1023u),
          ring((halos + HALOS * halo_bytes + 1023) & ~1023u), staged((ring + Tile::STAGES * FILTERS + 127) & ~127u),
          spare(staged + STRIPS * strip_bytes), table(spare + (STRIPS ? 512 : 0)),
          buffers((table + (STRIPS ? p.table_words * 4 : 0) + 1023) & ~1023u),
          places(buffers + Tile::BUFFERS * Tile::BUFFER_BYTES), biases(places + 2 * Tile::PLACE_WORDS * 4),
          halo_full((biases + (Tile::BIAS ? 2 * Tile::WARPGROUP_FILTERS * 4 : 0) + 7) & ~7u),
          halo_empty(halo_full + HALOS * 8), full(halo_empty + HALOS * 8), empty(full + Tile::STAGES * 8),
          staged_full(empty + Tile::STAGES * 8), residual(staged_full + STRIPS * 8) {}
};

// What all roles count with. Worked out before they part: in a loop of short steps ptxas would do it again in each of
// them.
struct HaloWork {
    int tiles, chunks, part, taps, wide, plane;
    DEVICE HaloWork(const HaloGemm &p)
        : tiles(p.tiles), chunks(p.chunks), part(p.part_chunks), taps(p.r * p.s), wide(p.wide), plane(p.wide * p.high) {
    }
};

// How far a tap's pixels lie behind a halo's first: with strides a halo has a part for each of their residues that taps
// meet.
template <class Tile> DEVICE int tap_place(const HaloGemm &p, int r, int s, int wide) {
    const unsigned row = r * (int)p.dilation_h, column = s * (int)p.dilation_w;
    const int residue =
        row % Tile::STRIDE_H / Tile::GRAIN_H * Tile::RESIDUES_W + column % Tile::STRIDE_W / Tile::GRAIN_W;
    return residue * (int)p.residue_pixels + row / Tile::STRIDE_H * wide + column / Tile::STRIDE_W;
}

// Image, row and column of a halo tile's first output.
struct Corner {
    int n, h, w;
    DEVICE Corner(const HaloGemm &p, int tile) {
        const int tiles_w = p.tiles_w, tiles = p.tiles_h * tiles_w, rest = tile % tiles;
        n = tile / tiles;
        h = rest / tiles_w * (int)p.down;
        w = rest % tiles_w * (int)p.across;
    }
};
