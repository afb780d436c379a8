// Weight gradient as an implicit GEMM on Hopper's tensor cores, strides of 1: x is copied once for all taps of a tile.
// Pixels are counted along padded rows, images one below the other, of x and of dy alike; so a tap's x is that of all
// others, some pixels further on. A ring in shared memory holds as many pixels of one block of channels as the taps of
// a step reach. Columns are taps of a row, operands that lie `dilation` pixels apart. A tile has one row of taps, and
// warpgroups share its filters; or it has all rows, one for each warpgroup.
#pragma once

#include "hopper.cuh"
#include "ops/conv/cuda/implicit_gemm_wgrad/tile.cuh"
#include "ring.cuh"

struct HaloWeightGradient {
    // Tensor maps of x and dy, and of their last blocks.
    alignas(64) unsigned long long x[16], dy[16], x_last[16], dy_last[16];
    void *dw, *parts;
    // Of a set of groups: filters, channels, blocks of channels; taps; tiles along columns, along filters, and all;
    // steps of 64 pixels, parts of them; steps that a tile's last tap is ahead; rows of an image and pixels of a row,
    // with padding (rows: where a tile has several of taps).
    long long filters, channels, channel_blocks, taps, taps_w, tiles_n, tiles_m, tiles, steps, split_k, ahead, high,
        wide;
    // Filters; of a group, filters and channels; of dw, channels and taps.
    long long k, group_k, group_c, dw_c, dw_taps;
    long long pad_h, pad_w, dilation_h, dilation_w, last_x_bytes, last_dy_bytes;
};

// Shared memory: stages of dy; a ring of x, whose first pixels come once more behind its last, as operands do not turn
// over; barriers. A step's dy and the x that it is the first to read come together and leave together.
template <class Tile> struct HaloLayout {
    static constexpr int DY_BYTES = Tile::ROW_BLOCKS * BLOCK_BYTES;
    int slots;
    unsigned dy, x, full, empty, first, complete;
    DEVICE HaloLayout(unsigned memory, int ahead)
        : slots(ahead + Tile::STAGES), dy((memory + 1023) & ~1023u), x(dy + Tile::STAGES * DY_BYTES),
          full(max(x + (slots + 1) * Tile::X_BYTES, dy + Tile::SUM_BYTES)), empty(full + Tile::STAGES * 8),
          first(empty + Tile::STAGES * 8), complete(first + 8) {}
};

// A step's pixels of x to slot `slot` of the ring, as a tap sees them that lies so far down.
template <class Tile>
DEVICE void copy_x(const HaloWeightGradient &p, const HaloLayout<Tile> &shared, unsigned barrier, const void *map,
                   const PixelWalk &at, int slot, int channel, int down) {
    const int w = at.column - (int)p.pad_w, h = at.row - (int)p.pad_h;
    copy_pixels(shared.x + slot * Tile::X_BYTES, map, barrier, channel, w, h, at.n, 0, down);
    if (slot == 0) copy_pixels(shared.x + shared.slots * Tile::X_BYTES, map, barrier, channel, w, h, at.n, 0, down);
}

// One thread copies all steps, as far ahead as there are stages.
template <class Tile>
DEVICE void producer(const HaloWeightGradient &p, const HaloLayout<Tile> &shared, const TilePlace<Tile> &at, int begin,
                     int end) {
    const int ahead = p.ahead, filter = at.set * (int)p.filters + at.filter,
              channel = at.set * (int)p.channels + at.block * Tile::BLOCK_CHANNELS,
              down = at.tap / (int)p.taps_w * (int)p.dilation_h,
              rows = min(Tile::ROW_BLOCKS, ((int)p.filters - at.filter + 63) / 64);
    const LastBlocks last(p);
    const bool narrow = at.block + 1 == (int)p.channel_blocks && last.x < Tile::X_BYTES;
    const void *const map = narrow ? p.x_last : p.x;
    const unsigned x_bytes = narrow ? last.x : Tile::X_BYTES;
    unsigned dy_bytes = rows * BLOCK_BYTES;
#pragma unroll
    for (int i = 0; i < Tile::ROW_BLOCKS; ++i)
        if (i < rows && last.of_dy(at.filter + i * 64)) dy_bytes -= BLOCK_BYTES - last.dy;
    PixelWalk of_dy(begin * STEP_PIXELS, p.high, p.wide), of_x = of_dy;
    work_out(filter, channel, down, rows, of_dy.n, of_dy.row, of_dy.column);
    begin_dependent();
    barrier_expect(shared.first, (ahead + 1) * x_bytes);
    for (int i = 0; i < ahead; ++i, of_x.advance()) copy_x<Tile>(p, shared, shared.first, map, of_x, i, channel, down);
    int stage = 0, slot = ahead;
    unsigned phase = 1;
    for (int step = begin; step < end; ++step) {
        const unsigned full = shared.full + stage * 8;
        barrier_wait(shared.empty + stage * 8, phase);
        barrier_expect(full, dy_bytes + (slot == 0 ? 2 : 1) * x_bytes);
#pragma unroll
        for (int i = 0; i < Tile::ROW_BLOCKS; ++i)
            if (i < rows)
                copy_pixels(shared.dy + stage * shared.DY_BYTES + i * BLOCK_BYTES,
                            last.of_dy(at.filter + i * 64) ? p.dy_last : p.dy, full, filter + i * 64, of_dy.column,
                            of_dy.row, of_dy.n, 0, 0);
        copy_x<Tile>(p, shared, full, map, of_x, slot, channel, down);
        of_dy.advance();
        of_x.advance();
        if (++slot == shared.slots) slot = 0;
        advance<Tile::STAGES>(stage, phase);
    }
}

// A warpgroup's products of all steps.
template <class Tile>
DEVICE void multiply_steps(const HaloWeightGradient &p, float (&d)[1][Tile::SUMS], const HaloLayout<Tile> &shared,
                           int warpgroup, int begin, int end) {
    constexpr int IN_FLIGHT = Tile::WARPGROUPS == 1 && Tile::STAGES > 2 ? 2 : 1;
    static_assert(Tile::STAGES > IN_FLIGHT && Tile::M_STEPS == 1);
    const unsigned filters = shared.dy + (Tile::ACROSS == 1 ? warpgroup * BLOCK_BYTES : 0);
    const unsigned apart = (int)p.dilation_w * Tile::SPAN;
    const int around = shared.slots * STEP_PIXELS;
    // Where the row of taps begins in the ring.
    int first = Tile::ACROSS == 1 ? 0 : warpgroup * (int)p.dilation_h * (int)p.wide, stage = 0;
    unsigned phase = 0;
    barrier_wait(shared.first, 0);
    for (int step = begin; step < end; ++step) {
        barrier_wait(shared.full + stage * 8, phase);
        const unsigned long long a = transposed_descriptor<128>(filters + stage * shared.DY_BYTES, BLOCK_BYTES);
        wgmma_fence();
#pragma unroll
        for (int k = 0; k < STEP_PIXELS / 16; ++k) {
            const int pixel = first + k * 16;
            const unsigned long long b = transposed_descriptor<Tile::SPAN>(
                shared.x + (pixel < around ? pixel : pixel - around) * Tile::SPAN, apart);
            wgmma(d[0], a + k * 128, b, step > begin || k > 0);
        }
        wgmma_commit();
        wgmma_wait<IN_FLIGHT>();
        if (step >= begin + IN_FLIGHT && threadIdx.x % 32 == 0)
            barrier_arrive(shared.empty + before<Tile::STAGES>(stage, IN_FLIGHT) * 8);
        first += STEP_PIXELS;
        if (first >= around) first -= around;
        advance<Tile::STAGES>(stage, phase);
    }
    wait_for_products(d);
}

template <class Traits> DEVICE void weight_gradient_halo(const HaloWeightGradient &p) {
    using Tile = WgradTile<Traits>;
    static_assert(Tile::N == WGMMA_N && Tile::HALO);
    extern __shared__ unsigned char memory[];
    const HaloLayout<Tile> shared(shared_address(memory), p.ahead);
    const WgradWork<Tile> work(p, blockIdx.x / Tile::CLUSTER_K);
    const TilePlace<Tile> at(p, work.tile);
    const int warpgroup = __shfl_sync(~0u, threadIdx.x / 128, 0);
    if (threadIdx.x == Tile::CONSUMER_THREADS) {
        prefetch_map(p.x);
        prefetch_map(p.dy);
        barrier_init(shared.first, 1);
        for (int stage = 0; stage < Tile::STAGES; ++stage) {
            barrier_init(shared.full + stage * 8, 1);
            barrier_init(shared.empty + stage * 8, 4 * Tile::WARPGROUPS);
        }
        prepare_exchange<Tile>(shared.complete);
        publish_barriers();
    }
    __syncthreads();
    if (warpgroup == Tile::WARPGROUPS) {
        if (threadIdx.x == Tile::CONSUMER_THREADS) producer<Tile>(p, shared, at, work.begin, work.end);
        return;
    }
    begin_dependent();
    float d[1][Tile::SUMS];
    multiply_steps<Tile>(p, d, shared, warpgroup, work.begin, work.end);
    store_sums<Tile>(p, at, memory + (shared.dy - shared_address(memory)), shared.complete, work.place, warpgroup, d);
}
