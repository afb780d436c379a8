// Halo tiles of x in NCHW, 16 bits: TMA brings strips of planes as they lie to a ring of staging buffers, and three
// warps transpose them to halo buffers, channels last and swizzled.
//
// TMA begins and steps at multiples of 16 bytes, of 8 pixels. A strip is some rows of a rectangle of an image whose
// rows are such multiples, or (FLAT_PLANES) so many pixels of a tile's whole rows, one behind the other. Planes that
// are no such multiples come in PLANE_CLASSES: planes that begin with the same remainder, each class with a copy of its
// own; channels in shared memory are then sorted by class, as the packed filters are. `strip_pitch` is odd in pieces
// of 8 pixels, so that eight channels' pieces lie in eight groups of banks.
//
// With strides each of their residues has a part of the halo, in which windows have a stride of one: RESIDUES rows and
// columns, multiples of GRAIN. Of other rows a rectangle has none.
#pragma once

#include "ops/conv/cuda/implicit_gemm/halo.cuh"

// A halo's first column and row, of an image's group of planes.
struct PlaneOrigin { int x, y, planes; };
template <class Tile> DEVICE PlaneOrigin plane_origin(const HaloGemm &p, int tile) {
    const TileOrigin<Tile> at(tile, p.tiles_f, p.groups);
    const Corner corner(p, at.pixel / Tile::TILE_PIXELS);
    return {corner.w * Tile::STRIDE_W - (int)p.pad_w, corner.h * Tile::STRIDE_H - (int)p.pad_h,
            corner.n * (int)p.groups + at.group};
}

// A warp's strips: every third one of all chunks of all tiles; it copies them ahead of where it transposes them.
template <class Tile> struct WarpStrips {
    int tile, chunk, strip;
    PlaneOrigin at;
    // Chunks before this one.
    int chunks_before;
    DEVICE WarpStrips(const HaloGemm &p, int warp) : tile(blockIdx.x), chunk(0), strip(warp), chunks_before(0) {
        at = plane_origin<Tile>(p, tile);
        settle(p);
    }
    DEVICE bool any(const HaloGemm &p) const { return tile < (int)p.tiles; }
    DEVICE void advance(const HaloGemm &p) {
        strip += TRANSPOSERS;
        settle(p);
    }
    DEVICE void settle(const HaloGemm &p) {
        while (strip >= (int)p.strips) {
            strip -= (int)p.strips;
            ++chunks_before;
            if (++chunk < (int)p.chunks) continue;
            chunk = 0;
            tile += gridDim.x;
            at = plane_origin<Tile>(p, tile);
        }
    }
    DEVICE void copy(const HaloGemm &p, unsigned to, unsigned full, unsigned bytes) const {
        constexpr int CLASSES = Tile::PLANE_CLASSES, CHANNELS = Tile::CHUNK_ELEMENTS / CLASSES;
        if (!any(p)) return;
        barrier_expect(full, bytes);
        if constexpr (Tile::FLAT_PLANES) {
            const int first = at.y * (int)p.width, plane = p.height * p.width;
#pragma unroll
            for (int i = 0; i < CLASSES; ++i)
                copy_box(to + i * (bytes / CLASSES), p.x, full, ((i * plane + first) & ~7) + strip * (int)p.strip_pitch,
                         0, chunk * CHANNELS, at.planes);
        } else {
            copy_box(to, p.x, full, at.x & ~7, at.y + strip * (int)p.strip_rows * Tile::GRAIN_H, chunk * CHANNELS,
                     at.planes);
        }
    }
};

// Where pixels of a halo's first channels lie in its buffer, NOWHERE for those that are none of it: a table of words in
// shared memory, by their number along rows of strips, from the 7th before the first on.
constexpr unsigned NOWHERE = ~0u;
template <class Tile> DEVICE int table_row(const HaloGemm &p) {
    return Tile::FLAT_PLANES ? p.width : p.strip_pitch + 8;
}
template <class Tile> DEVICE unsigned halo_place(const HaloGemm &p, unsigned y, unsigned x) {
    const unsigned row = y / Tile::STRIDE_H, column = x / Tile::STRIDE_W, down = y % Tile::STRIDE_H,
                   across = x % Tile::STRIDE_W;
    const int residue = down / Tile::GRAIN_H * Tile::RESIDUES_W + across / Tile::GRAIN_W;
    const bool met = down % Tile::GRAIN_H + across % Tile::GRAIN_W == 0 && down / Tile::GRAIN_H < Tile::RESIDUES_H &&
                     across / Tile::GRAIN_W < Tile::RESIDUES_W;
    const int place = residue * (int)p.residue_pixels + row * (int)p.wide + column;
    return met && row < p.high && column < p.wide ? swizzled<Tile::CHUNK_BYTES>(place, 0) : NOWHERE;
}
template <class Tile> DEVICE void fill_halo_places(const HaloGemm &p, unsigned table) {
    constexpr bool FLAT = Tile::FLAT_PLANES;
    const unsigned width = table_row<Tile>(p);
    for (int i = threadIdx.x; i < (int)p.table_words; i += blockDim.x) {
        const unsigned number = FLAT ? i - 7 : i, y = number / width, x = number - y * width;
        store_shared<4>(table + i * 4, {FLAT ? halo_place<Tile>(p, y, x + (int)p.pad_w)
                                             : halo_place<Tile>(p, y * Tile::GRAIN_H, x - 7)});
    }
}

// A strip's pixels to their places in a halo; those that have none go to `spare`, a line for each lane.
template <class Tile>
DEVICE void transpose_strip(const HaloGemm &p, unsigned from, unsigned to, const HaloLayout<Tile> &shared,
                            const PlaneOrigin &at, int strip) {
    // Eight channels of eight pixels are a matrix, four of which an instruction moves: four times eight channels, or
    // twice eight of 16 pixels. TABLES: octets that begin with remainders of their own.
    constexpr bool FLAT = Tile::FLAT_PLANES;
    constexpr int OCTETS = Tile::CHUNK_BYTES / 16, ACROSS = OCTETS < 4 ? OCTETS : 4, BESIDE = 4 / ACROSS,
                  PARTS = OCTETS / ACROSS, BATCH = 4 / PARTS, CLASSES = Tile::PLANE_CLASSES,
                  TABLES = CLASSES > 1 ? PARTS : 1;
    const int lane = threadIdx.x % 32, octet = lane / 8 % ACROSS, beside = lane / 8 / ACROSS;
    const int pitch = p.strip_pitch, pieces = p.strip_pieces, channel = (int)p.strip_rows * pitch * 2;
    const int rows = FLAT ? 1 : min((int)p.strip_rows, (int)p.rows_x - strip * (int)p.strip_rows);
    const int width = p.width, plane = (int)p.height * width, line = table_row<Tile>(p);
    // Numbers of this lane's pixel in the first piece; those of the rows that are in the image.
    int first[TABLES];
#pragma unroll
    for (int part = 0; part < TABLES; ++part) {
        const int before = FLAT ? (octet + part * 4) * CLASSES / OCTETS * plane + at.y * width : at.x;
        first[part] = strip * (FLAT ? pitch : (int)p.strip_rows * line) + beside * 8 + lane % 8 + 7 - (before & 7);
    }
    const bool edge = CLASSES > 1 && (at.y < 0 || at.y + (int)p.rows_x > (int)p.height);
    const int inside = 7 - at.y * width;
    const unsigned spare = shared.spare + lane * 16;
    from += (octet * 8 + lane % 8) * channel + beside * 16;
    for (int row = 0, piece = 0; row < rows;) {
        unsigned v[BATCH][PARTS][4], places[BATCH][TABLES];
        bool zeros[BATCH][TABLES];
#pragma unroll
        for (int i = 0; i < BATCH; ++i) {
            const bool real = row < rows;
#pragma unroll
            for (int part = 0; part < TABLES; ++part) {
                const int number = first[part] + row * line + piece * 8;
                places[i][part] =
                    load_shared<4>(shared.table + (real && piece + beside < pieces ? number * 4 : 0)).v[0];
                zeros[i][part] = edge && places[i][part] != NOWHERE && (unsigned)(number - inside) >= (unsigned)plane;
            }
#pragma unroll
            for (int part = 0; part < PARTS; ++part)
                ldmatrix<true>(v[i][part], from + part * 32 * channel + (real ? row * pitch * 2 + piece * 16 : 0));
            if ((piece += BESIDE) >= pieces) {
                piece = 0;
                ++row;
            }
        }
#pragma unroll
        for (int i = 0; i < BATCH; ++i)
#pragma unroll
            for (int part = 0; part < PARTS; ++part) {
                const unsigned place = places[i][part % TABLES];
                const unsigned there = place == NOWHERE ? spare : to + (place ^ (octet + part * 4) * 16);
                const bool zero = zeros[i][part % TABLES];
                if (CLASSES > 1 && edge) store_shared<16>(zero ? there : spare, {});
                store_matrices<false>(zero ? spare : there, v[i][part]);
            }
    }
}

// Columns of padding beside whole rows, which no strip has: by all threads.
template <class Tile> DEVICE void zero_columns(const HaloGemm &p, const HaloLayout<Tile> &shared) {
    constexpr int OCTETS = Tile::CHUNK_BYTES / 16, RESIDUES = Tile::RESIDUES_H * Tile::RESIDUES_W;
    const int wide = p.wide, high = p.high, all = Tile::HALO_BUFFERS * RESIDUES * high * wide;
    for (int i = threadIdx.x; i < all; i += blockDim.x) {
        const int line = i / wide, column = i - line * wide, part = line / high, residue = part % RESIDUES;
        const int x = column * Tile::STRIDE_W + residue % Tile::RESIDUES_W * Tile::GRAIN_W - (int)p.pad_w;
        if ((unsigned)x < (unsigned)p.width) continue;
        const int place = residue * (int)p.residue_pixels + (line - part * high) * wide + column;
#pragma unroll
        for (int octet = 0; octet < OCTETS; ++octet)
            store_shared<16>(shared.halos + part / RESIDUES * shared.halo_bytes +
                                 swizzled<Tile::CHUNK_BYTES>(place, octet * 16),
                             {});
    }
}

// The pixels of all chunks of all tiles, by three warps with each its own part of the ring.
template <class Tile> DEVICE void transposing_producer(const HaloGemm &p, const HaloLayout<Tile> &shared) {
    constexpr int RING = Tile::STAGED_STRIPS / TRANSPOSERS;
    const int warp = (threadIdx.x - FIRST_PRODUCER) / 32, lane = threadIdx.x % 32;
    const unsigned bytes = shared.strip_bytes, staged = shared.staged + warp * RING * bytes,
                   staged_full = shared.staged_full + warp * RING * 8;
    WarpStrips<Tile> copies(p, warp), strips(p, warp);
    for (int slot = 0; slot < RING; ++slot) {
        if (lane == 0) copies.copy(p, staged + slot * bytes, staged_full + slot * 8, bytes);
        copies.advance(p);
    }
    const int all = ((int)p.tiles - (int)blockIdx.x + (int)gridDim.x - 1) / (int)gridDim.x * (int)p.chunks;
    int halo = 0, slot = 0, chunk = 0;
    unsigned halo_phase = 1, phase = 0;
    barrier_wait(shared.halo_empty, halo_phase);
    while (true) {
        // A warp says of each chunk that its strips are there, also of one of which it has none: so none falls a phase
        // behind.
        for (; chunk < min(strips.chunks_before, all); ++chunk) {
            publish_shared();
            __syncwarp();
            if (lane == 0) barrier_arrive(shared.halo_full + halo * 8);
            advance<Tile::HALO_BUFFERS>(halo, halo_phase);
            if (chunk + 1 < all) barrier_wait(shared.halo_empty + halo * 8, halo_phase);
        }
        if (!strips.any(p)) return;
        const unsigned from = staged + slot * bytes, full = staged_full + slot * 8;
        barrier_wait(full, phase);
        transpose_strip<Tile>(p, from, shared.halos + halo * shared.halo_bytes, shared, strips.at, strips.strip);
        strips.advance(p);
        __syncwarp();
        if (lane == 0) copies.copy(p, from, full, bytes);
        copies.advance(p);
        advance<RING>(slot, phase);
    }
}
