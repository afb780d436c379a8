// Planes of x in NCHW that begin within pieces of 16 bytes, where no copy of TMA may begin, nor may its axes lie so
// apart.
//
// Planes of SHIFT_CLASSES channels, one behind the other, are whole pieces: they are a row of the tensor map, and every
// SHIFT_CLASSES-th channel is of one class. A copy brings pixels of a class from the piece on in which the first of
// them lies: each channel comes up to seven pixels early. Or (WHOLE_PLANES) one copy brings all classes, planes one
// behind the other. Warps then move each channel's row to where wgmma takes it, shifted by as many pixels.
#pragma once

#include "cta_tile.cuh"
#include "grid.cuh"

// Teams of SHIFT_WARPS warps take turns at the chunks; each has buffers of its own, so that none waits for another.
template <class Tile> struct ShiftedPlanes {
    static constexpr bool USED = Tile::PLANES && Tile::SHIFT_CLASSES > 1;
    static constexpr int CLASSES = Tile::SHIFT_CLASSES, CHANNELS = Tile::CHUNK_ELEMENTS / CLASSES;
    static constexpr int WARPS = Tile::SHIFT_WARPS, TEAMS = 4 / WARPS, BUFFERS = 2,
                         ALL_BUFFERS = USED ? TEAMS * BUFFERS : 0;
    // Pieces of 16 bytes that a tile has of a plane; bytes of a row of a class: a piece more, and an odd count of them,
    // so that eight rows lie in eight groups of banks.
    static constexpr int PIECES = Tile::TILE_PIXELS / 8, ROW = (PIECES + 1 | 1) * 16;
    // Of a class; of one where a copy may begin; of a chunk, behind whose last row a piece is read.
    static constexpr int ROWS = CHANNELS * ROW, CLASS = (ROWS + 127) / 128 * 128,
                         CHUNK =
                             Tile::WHOLE_PLANES ? Tile::CHUNK_ELEMENTS * Tile::TILE_PIXELS * 2 + 128 : CLASSES * CLASS,
                         BYTES = ALL_BUFFERS * CHUNK;
    static_assert(!USED || (8 % CLASSES == 0 && ROW <= 512));
    // A team that comes to a stage has seen what others wait for there.
    static_assert(!USED || Tile::STAGES >= TEAMS);
    // Eight threads have eight channels, one of each bank group where they go, and where they come from as far as rows
    // are ROW apart. GROUPS of them share a chunk's OCTETS of channels, or SEGMENTS of their pieces.
    static constexpr int OCTETS = Tile::CHUNK_ELEMENTS / 8, GROUPS = 4 * WARPS,
                         SEGMENTS = GROUPS > OCTETS ? GROUPS / OCTETS : 1;
    static constexpr int EACH = (PIECES + SEGMENTS - 1) / SEGMENTS, ONCE = EACH < 4 ? EACH : 4;

    int team, warp, plane, shift;
    // This team's buffers and their barriers.
    unsigned ring, arrived;
    int slot = 0;
    unsigned phase = 0;
    // The chunk that is copied next.
    int tile, stride, tiles, chunk, begin, end, n, group, pixel;

    template <class Gemm, class Work>
    DEVICE ShiftedPlanes(const Gemm &p, unsigned ring_, unsigned arrived_, const Work &work)
        : team(__shfl_sync(~0u, threadIdx.x % 128 / 32, 0) / WARPS),
          warp(__shfl_sync(~0u, threadIdx.x % 128 / 32, 0) % WARPS), plane((int)p.p * (int)p.q),
          shift(threadIdx.x % 8 * plane % 8), ring(ring_ + team * BUFFERS * CHUNK),
          arrived(arrived_ + team * BUFFERS * 8), tile(work.first), stride(work.stride), tiles(work.units),
          chunk(work.begin), begin(work.begin), end(work.end) {
        place(p);
        skip(p, team);
        for (int i = 0; i < BUFFERS; ++i) copy(p, i);
    }
    DEVICE static bool first_lane() { return threadIdx.x % 32 == 0; }
    DEVICE bool first_thread() const { return warp == 0 && first_lane(); }

    // The image, first pixel of its plane, and group of the tile.
    template <class Gemm> DEVICE void place(const Gemm &p) {
        const int rest = tile / (int)p.tiles_f, number = rest / (int)p.groups;
        group = rest - number * (int)p.groups;
        n = number / (int)p.tiles_p;
        pixel = (number - n * (int)p.tiles_p) * Tile::TILE_PIXELS;
    }
    template <class Gemm> DEVICE void skip(const Gemm &p, int chunks) {
        chunk += chunks;
        if (chunk < end) return;
        while (chunk >= end) {
            chunk -= end - begin;
            tile += stride;
        }
        place(p);
    }

    // The next chunk's copies, which the team's warps share: a thread needs some 60 cycles for each.
    template <class Gemm> DEVICE void copy(const Gemm &p, int to) {
        if (tile >= tiles) return;
        if (first_lane()) {
            const unsigned barrier = arrived + to * 8, at = ring + to * CHUNK;
            if constexpr (Tile::WHOLE_PLANES) {
                if (warp == 0) {
                    barrier_expect(barrier, Tile::CHUNK_ELEMENTS * 2 * plane);
                    copy_box(at, p.x, barrier, 0, chunk * CHANNELS, group, n);
                }
            } else {
                if (warp == 0) barrier_expect(barrier, CLASSES * ROWS);
#pragma unroll
                for (int i = 0; i < CLASSES; ++i)
                    if (i % WARPS == warp)
                        copy_box(at + i * CLASS, p.x, barrier, i * plane / 8 * 8 + pixel, chunk * CHANNELS, group, n);
            }
        }
        skip(p, TEAMS);
    }

    // A channel's pieces from the `first` on, of a row that begins early, to rows of 64 pixels.
    DEVICE void move(unsigned row, unsigned to, int channel, int first) const {
        const bool by_four = shift & 4, by_two = shift & 2;
        const int bits = shift % 2 * 16;
        unsigned w[4 * ONCE + 4];
        const auto load = [&](int i, int piece) {
            const Piece<16> read = load_shared<16>(row + piece * 16);
#pragma unroll
            for (int k = 0; k < 4; ++k) w[4 * i + k] = read.v[k];
        };
        load(ONCE, first);
#pragma unroll
        for (int start = 0; start < EACH; start += ONCE) {
#pragma unroll
            for (int k = 0; k < 4; ++k) w[k] = w[4 * ONCE + k];
#pragma unroll
            for (int i = 0; i < ONCE; ++i)
                if (start + i < EACH && first + start + i < PIECES) load(i + 1, first + start + i + 1);
#pragma unroll
            for (int i = 0; i < ONCE; ++i) {
                const int piece = first + start + i;
                if (start + i >= EACH || piece >= PIECES) continue;
                unsigned four[6], two[5];
#pragma unroll
                for (int k = 0; k < 6; ++k) four[k] = by_four ? w[4 * i + k + 2] : w[4 * i + k];
#pragma unroll
                for (int k = 0; k < 5; ++k) two[k] = by_two ? four[k + 1] : four[k];
                Piece<16> out;
#pragma unroll
                for (int k = 0; k < 4; ++k) out.v[k] = __funnelshift_r(two[k], two[k + 1], bits);
                store_shared<16>(to + piece / 8 * Tile::BLOCK_BYTES + swizzled<128>(channel, piece % 8 * 16), out);
            }
        }
    }

    // A chunk to its place, when it is there; the copy of a later one takes its buffer.
    template <class Gemm> DEVICE void bring(const Gemm &p, unsigned to, unsigned full) {
        const int eighth = threadIdx.x % 8, mine = warp * 4 + threadIdx.x % 32 / 8, segment = mine / OCTETS;
        const unsigned from = ring + slot * CHUNK;
        barrier_wait(arrived + slot * 8, phase);
#pragma unroll
        for (int octet0 = 0; octet0 < OCTETS; octet0 += GROUPS) {
            const int channel = (eighth + mine + octet0) % OCTETS * 8 + eighth;
            const unsigned row = from + (Tile::WHOLE_PLANES ? channel * plane / 8 * 16
                                                            : channel % CLASSES * CLASS + channel / CLASSES * ROW);
            move(row, to, channel, segment * EACH);
        }
        publish_shared();
        if constexpr (WARPS == 1) __syncwarp();
        else sync_part(PLANES_MOVED + team, 32 * WARPS);
        if (first_thread()) barrier_arrive(full);
        copy(p, slot);
        advance<BUFFERS>(slot, phase);
    }
};

// A warpgroup brings the pixels and filters of all steps of all tiles: each team those of every TEAMS-th step.
template <class Tile, class Gemm, class Layout, class Work>
DEVICE void shifting_producer(const Gemm &p, const Layout &shared, const Work &work) {
    using Planes = ShiftedPlanes<Tile>;
    const auto copy_filters_of = [&](int tile, int stage, int chunk) {
        const TileOrigin<Tile> at(tile, p.tiles_f, p.groups);
        copy_tile_filters<Tile>(p, shared.filters(stage, chunk), shared.full + stage * 8, chunk, 0, 0, 1, at.group,
                                at.filter);
    };
    // Filters do not wait for what ran before, as far as there is room.
    const int ahead = p.weights_ready ? min(Tile::STAGES, work.end - work.begin) : 0;
    for (int stage = 0; stage < ahead && threadIdx.x % 128 == 0; ++stage) {
        barrier_expect(shared.full + stage * 8, Layout::FILTERS);
        copy_filters_of(work.first, stage, work.begin + stage);
    }
    begin_beside<Tile::INDEPENDENT>();
    Planes planes(p, shared.planes, shared.arrived, work);
    int stage = 0, turn = 0;
    unsigned phase = 1;
    for (int tile = work.first; tile < work.units; tile += work.stride)
        for (int chunk = work.begin; chunk < work.end; ++chunk) {
            if (turn == planes.team) {
                const unsigned full = shared.full + stage * 8;
                if (tile != work.first || chunk >= work.begin + ahead) {
                    barrier_wait(shared.empty + stage * 8, phase);
                    const bool filters = !Layout::STATIONARY || tile == work.first;
                    if (planes.first_thread()) {
                        barrier_expect(full, filters ? Layout::FILTERS : 0);
                        if (filters) copy_filters_of(tile, stage, chunk);
                    }
                }
                planes.bring(p, shared.pixels(stage), full);
            }
            if (++turn == Planes::TEAMS) turn = 0;
            advance<Tile::STAGES>(stage, phase);
        }
}
