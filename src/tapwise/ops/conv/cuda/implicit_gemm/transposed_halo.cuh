// Halo tiles of x in NCHW, 16 bits: TMA brings strips of planes as they lie to a ring of staging buffers, and three
// warps transpose them to halo buffers, channels last and swizzled.
//
// TMA begins and steps at multiples of 16 bytes, of 8 pixels. A strip is some rows of a rectangle of an image whose
// rows are such multiples, or (FLAT_PLANES) so many pixels of a tile's whole rows, one behind the other. Planes that
// are no such multiples come in PLANE_CLASSES: planes that begin with the same remainder, each class with a copy of its
// own; channels in shared memory are then sorted by class, as the packed filters are. `strip_pitch` is odd in pieces
// of 8 pixels, so that eight channels' pieces lie in eight groups of banks.
#pragma once

#include "ops/conv/cuda/implicit_gemm/halo.cuh"

// A halo's first column and row, of an image's group of planes.
struct PlaneOrigin { int x, y, planes; };
template <class Tile> DEVICE PlaneOrigin plane_origin(const HaloGemm &p, int tile) {
    const TileOrigin<Tile> at(tile, p.tiles_f, p.groups);
    const Corner corner(p, at.pixel / Tile::TILE_PIXELS);
    return {corner.w - (int)p.pad_w, corner.h - (int)p.pad_h, corner.n * (int)p.groups + at.group};
}

// The strips that a warp copies: every third one of each chunk of each tile.
template <class Tile> struct StripCopies {
    int tile, chunk, strip;
    PlaneOrigin at;
    DEVICE StripCopies(const HaloGemm &p, int warp)
        : tile(warp < (int)p.strips ? (int)blockIdx.x : (int)p.tiles), chunk(0), strip(warp),
          at(plane_origin<Tile>(p, tile)) {}
    DEVICE void advance(const HaloGemm &p, int warp) {
        if ((strip += TRANSPOSERS) < (int)p.strips) return;
        strip = warp;
        if (++chunk < (int)p.chunks) return;
        chunk = 0;
        tile += gridDim.x;
        at = plane_origin<Tile>(p, tile);
    }
    DEVICE void copy(const HaloGemm &p, unsigned to, unsigned full, unsigned bytes) const {
        constexpr int CLASSES = Tile::PLANE_CLASSES, CHANNELS = Tile::CHUNK_ELEMENTS / CLASSES;
        if (tile >= (int)p.tiles) return;
        barrier_expect(full, bytes);
        if constexpr (Tile::FLAT_PLANES) {
            const int first = at.y * (int)p.width, plane = p.height * p.width;
#pragma unroll
            for (int i = 0; i < CLASSES; ++i)
                copy_box(to + i * (bytes / CLASSES), p.x, full, ((i * plane + first) & ~7) + strip * (int)p.strip_pitch,
                         0, chunk * CHANNELS, at.planes);
        } else {
            copy_box(to, p.x, full, at.x & ~7, at.y + strip * (int)p.strip_rows, chunk * CHANNELS, at.planes);
        }
    }
};

// Where the pixels of a halo lie in its buffer, for a lane that writes those of eight channels.
template <class Tile> struct HaloPlaces {
    static constexpr int CLASSES = Tile::PLANE_CLASSES, OCTETS = Tile::CHUNK_BYTES / 16;
    PlaneOrigin at;
    // Of a strip: its first pixel, or row.
    int wide, pixels, width, height, pad, first;
    // Exact for as many pixels as shared memory holds.
    float rows_a_pixel;
    DEVICE HaloPlaces(const HaloGemm &p, const PlaneOrigin &at, int strip)
        : at(at), wide(p.wide), pixels(p.high * p.width), width(p.width), height(p.height), pad(p.pad_w),
          first(strip * (int)(Tile::FLAT_PLANES ? p.strip_pitch : p.strip_rows)), rows_a_pixel(1.0f / p.width) {}
    // Of a strip's pixel, -1 where it is none of the halo. `outside`: before or behind its plane lie others of its
    // class.
    DEVICE int place(int row, int pixel, int octet, bool &outside) const {
        outside = false;
        if constexpr (Tile::FLAT_PLANES) {
            const int plane = CLASSES > 1 ? octet * CLASSES / OCTETS * height * width : 0;
            const int number = first + pixel - (plane + at.y * width & 7), y = (number + 0.5f) * rows_a_pixel;
            if constexpr (CLASSES > 1) outside = (unsigned)(at.y + y) >= (unsigned)height;
            return (unsigned)number < (unsigned)pixels ? y * wide + number - y * width + pad : -1;
        } else {
            const int column = pixel - (at.x & 7);
            return (unsigned)column < (unsigned)wide ? (first + row) * wide + column : -1;
        }
    }
};

// A strip's pixels to their places in a halo; those that have none go to `spare`, a line for each lane.
template <class Tile>
DEVICE void transpose_strip(const HaloGemm &p, unsigned from, unsigned to, unsigned spare, const PlaneOrigin &at,
                            int strip) {
    // Eight channels of eight pixels are a matrix, four of which an instruction moves: four times eight channels, or
    // twice eight of 16 pixels.
    constexpr int OCTETS = Tile::CHUNK_BYTES / 16, ACROSS = OCTETS < 4 ? OCTETS : 4, BESIDE = 4 / ACROSS,
                  PARTS = OCTETS / ACROSS, BATCH = 4 / PARTS;
    const int lane = threadIdx.x % 32, octet = lane / 8 % ACROSS, beside = lane / 8 / ACROSS;
    const int pitch = p.strip_pitch, pieces = p.strip_pieces, channel = (int)p.strip_rows * pitch * 2;
    const int rows = Tile::FLAT_PLANES ? 1 : min((int)p.strip_rows, (int)p.high - strip * (int)p.strip_rows);
    const HaloPlaces<Tile> halo(p, at, strip);
    const bool edge = at.y < 0 || at.y + (int)p.high > (int)p.height;
    from += (octet * 8 + lane % 8) * channel + beside * 16;
    spare += lane * 16;
    for (int row = 0, piece = 0; row < rows;) {
        unsigned v[BATCH][PARTS][4], places[BATCH][PARTS];
        bool zeros[BATCH][PARTS];
#pragma unroll
        for (int i = 0; i < BATCH; ++i) {
            const unsigned offset = row < rows ? row * pitch * 2 + piece * 16 : 0;
            const bool real = row < rows && piece + beside < pieces;
#pragma unroll
            for (int part = 0; part < PARTS; ++part) {
                ldmatrix<true>(v[i][part], from + part * 32 * channel + offset);
                const int mine = octet + part * 4;
                const int place = halo.place(row, (piece + beside) * 8 + lane % 8, mine, zeros[i][part]);
                places[i][part] = real && place >= 0 ? to + swizzled<Tile::CHUNK_BYTES>(place, mine * 16) : spare;
            }
            if ((piece += BESIDE) >= pieces) {
                piece = 0;
                ++row;
            }
        }
#pragma unroll
        for (int i = 0; i < BATCH; ++i)
#pragma unroll
            for (int part = 0; part < PARTS; ++part) {
                if (Tile::PLANE_CLASSES > 1 && edge) {
                    store_shared<16>(zeros[i][part] ? places[i][part] : spare, {});
                    if (zeros[i][part]) places[i][part] = spare;
                }
                store_matrices<false>(places[i][part], v[i][part]);
            }
    }
}

// Columns of padding beside whole rows, which no strip has.
template <class Tile> DEVICE void zero_columns(const HaloGemm &p, const HaloLayout<Tile> &shared) {
    constexpr int OCTETS = Tile::CHUNK_BYTES / 16;
    const int width = p.width, wide = p.wide, pad = p.pad_w, columns = wide - width;
    const int each = (int)p.high * columns * OCTETS, all = Tile::HALO_BUFFERS * each;
    for (int i = threadIdx.x - FIRST_PRODUCER; i < all; i += TRANSPOSERS * 32) {
        const int number = i / OCTETS, row = number / columns, column = number - row * columns, high = p.high;
        const int place = row % high * wide + column + (column < pad ? 0 : width);
        store_shared<16>(
            shared.halos + row / high * shared.halo_bytes + swizzled<Tile::CHUNK_BYTES>(place, i % OCTETS * 16), {});
    }
}

// The pixels of all chunks of all tiles, by three warps with each its own part of the ring.
template <class Tile> DEVICE void transposing_producer(const HaloGemm &p, const HaloLayout<Tile> &shared) {
    constexpr int RING = Tile::STAGED_STRIPS / TRANSPOSERS;
    const int warp = (threadIdx.x - FIRST_PRODUCER) / 32, lane = threadIdx.x % 32;
    const int tiles = p.tiles, chunks = p.chunks, strips = p.strips;
    const unsigned bytes = shared.strip_bytes, staged = shared.staged + warp * RING * bytes,
                   staged_full = shared.staged_full + warp * RING * 8;
    StripCopies<Tile> copies(p, warp);
    for (int slot = 0; slot < RING; ++slot) {
        if (lane == 0) copies.copy(p, staged + slot * bytes, staged_full + slot * 8, bytes);
        copies.advance(p, warp);
    }
    if constexpr (Tile::FLAT_PLANES) zero_columns<Tile>(p, shared);
    int halo = 0, slot = 0;
    unsigned halo_phase = 1, phase = 0;
    for (int tile = blockIdx.x; tile < tiles; tile += gridDim.x) {
        const PlaneOrigin at = plane_origin<Tile>(p, tile);
        for (int chunk = 0; chunk < chunks; ++chunk) {
            barrier_wait(shared.halo_empty + halo * 8, halo_phase);
            for (int strip = warp; strip < strips; strip += TRANSPOSERS) {
                const unsigned from = staged + slot * bytes, full = staged_full + slot * 8;
                barrier_wait(full, phase);
                transpose_strip<Tile>(p, from, shared.halos + halo * shared.halo_bytes, shared.spare, at, strip);
                __syncwarp();
                if (lane == 0) copies.copy(p, from, full, bytes);
                copies.advance(p, warp);
                advance<RING>(slot, phase);
            }
            publish_shared();
            __syncwarp();
            if (lane == 0) barrier_arrive(shared.halo_full + halo * 8);
            advance<Tile::HALO_BUFFERS>(halo, halo_phase);
        }
    }
}
