// Implicit GEMM on Hopper's tensor cores, stride 1: a tile's pixels with all that its windows reach stay in shared memory while
// the taps pass. Pixels are counted along padded lines, images one below the other, so a tap is the same memory some lines on.
// Of large images a slab is a box of lines (BOX), which has less around it than as many pixels in a row.
// The copy engine brings the pixels, or (GATHER) three warps, in pieces as small as the channels ask.
#pragma once

#include "deliver.cuh"
#include "ordered.cuh"

struct Slab {
    // Tensor maps of x, of the packed filters and of the residual.
    alignas(64) unsigned long long x[16], w[16], res[16];
    void *y;
    const void *bias, *residual, *image;
    // Images, filters and groups; tiles along each; chunks of channels, and those that share a part of x; taps.
    long long n, filters, groups, tiles_f, tiles, p, q, r, s, chunks, part_chunks;
    // The padded image; lines of a slab, which come in copies of `copy_lines`.
    long long wide, high, lines, copy_lines, pad_h, pad_w, dilation_h, dilation_w;
    // The image itself: its size, channels, and those of a group.
    long long height, width, c, group_c;
    // BOX: outputs of a tile along both axes, and tiles of an image; `copy_lines` are those kept behind a box.
    long long down, across, tiles_h, tiles_w;
    // The filters were there before the launch before this one.
    long long weights_ready;
};

// Threads that gather: three warps; the fourth brings filters.
constexpr int GATHERERS = 96;

// Lines of one chunk of a slab in pieces of GATHER bytes, zeros where there is no pixel or channel.
template <class O, int GATHER>
DEVICE void gather(const Slab &p, unsigned to, int pixel, int group, int chunk) {
    using T = typename O::T;
    constexpr int PIECES = O::SPAN / GATHER, LINES = GATHERERS / PIECES, V = GATHER / (int)sizeof(T);
    const int thread = threadIdx.x - 256, at = thread % PIECES * GATHER, first = thread / PIECES;
    const int wide = p.wide, high = p.high, plane = wide * high, height = p.height, width = p.width, c = p.c, lines = p.lines;
    const int channel = chunk * O::ELEMENTS + thread % PIECES * V;
    // Bytes behind the last step's are never read.
    if (at >= (chunk + 1 == (int)p.chunks ? O::LAST * 32 : O::SPAN)) return;
    const bool real = channel < p.group_c;
    int n = (pixel + first) / plane, rest = pixel + first - n * plane, y = rest / wide - (int)p.pad_h;
    int v = rest % wide - (int)p.pad_w;
    const T *image = static_cast<const T *>(p.image);
    const T *from = image + group * p.group_c + channel + (((long long)n * height + y) * width + v) * c;
    const int end = wide - (int)p.pad_w, bottom = high - (int)p.pad_h, step = LINES * c;
    const long long next_line = (long long)(width - wide) * c, next_image = (long long)(height - high) * width * c;
    bool inside = real && n < (int)p.n && (unsigned)y < (unsigned)height;
#pragma unroll 4
    for (int line = first; line < lines; line += LINES) {
        const bool there = inside && (unsigned)v < (unsigned)width;
        copy_piece<GATHER>(to + swizzled<O::SPAN>(line, at), there ? from : image, there);
        v += LINES;
        from += step;
        while (v >= end) {
            v -= wide;
            from += next_line;
            if (++y == bottom) {
                y -= high;
                from += next_image;
                ++n;
            }
            inside = real && n < (int)p.n && (unsigned)y < (unsigned)height;
        }
    }
}

// Image, line and column of a box's first output.
struct Corner {
    int n, h, w;
    DEVICE Corner(const Slab &p, int tile) {
        const int tiles_w = p.tiles_w, tiles = p.tiles_h * tiles_w, rest = tile % tiles;
        n = tile / tiles;
        h = rest / tiles_w * (int)p.down;
        w = rest % tiles_w * (int)p.across;
    }
};

// SLABS in shared memory. RESIDENT: all filters of a block's tiles, which are the same, stay there. GATHER: bytes of a piece, or
// 0 for the copy engine.
template <class O, int SLABS, bool RESIDENT, int GATHER, bool BOX>
DEVICE void implicit_gemm_slab(const Slab &p) {
    extern __shared__ unsigned char memory[];
    constexpr unsigned FILTERS = O::BF * O::FILTER_SPAN;
    // Operands shifted by the last tap read a few lines behind a box, for positions that are no outputs.
    const unsigned box_bytes = p.lines * O::SPAN, slab_bytes = (p.lines + (BOX ? p.copy_lines : 0)) * O::SPAN;
    const unsigned slabs = (shared_address(memory) + 1023) & ~1023u, ring = (slabs + SLABS * slab_bytes + 1023) & ~1023u;
    const unsigned staging = (ring + O::STAGES * FILTERS + 1023) & ~1023u, tables = staging + O::PARTS * O::STAGING;
    const unsigned biases = tables + 2 * O::PIXELS * 4;
    const unsigned slab_full = (biases + (O::BIAS ? 2 * O::FILTERS * 4 : 0) + 7) & ~7u, slab_empty = slab_full + SLABS * 8;
    const unsigned full = slab_empty + SLABS * 8, empty = full + O::STAGES * 8;
    const unsigned deliveries = empty + O::STAGES * 8;
    const int group = __shfl_sync(~0u, threadIdx.x / 128, 0);
    const int tiles = p.tiles, chunks = p.chunks, part = p.part_chunks, taps = p.r * p.s, width = p.wide,
              plane = p.wide * p.high;
    if (threadIdx.x == 256) {
        prefetch_map(p.x);
        prefetch_map(p.w);
        for (int slot = 0; slot < SLABS; ++slot) {
            barrier_init(slab_full + slot * 8, GATHER ? GATHERERS : 1);
            barrier_init(slab_empty + slot * 8, 4);
        }
        for (int slot = 0; slot < O::STAGES; ++slot) {
            barrier_init(full + slot * 8, 1);
            barrier_init(empty + slot * 8, 4);
        }
        init_deliveries<O>(deliveries);
        publish_barriers();
    }
    __syncthreads();
    if (group == 2) {
        release_registers<(GATHER ? 72 : 40)>();
        if (threadIdx.x != (GATHER ? 256 + GATHERERS : 288) || !p.weights_ready) wait_for_previous();
        if (GATHER ? threadIdx.x >= 256 && threadIdx.x < 256 + GATHERERS : threadIdx.x == 256) {
            int slot = 0;
            unsigned phase = 1;
            for (int tile = blockIdx.x; tile < tiles; tile += gridDim.x) {
                const At<O> at(tile, p.tiles_f, p.groups);
                for (int chunk = 0; chunk < chunks; ++chunk) {
                    barrier_wait(slab_empty + slot * 8, phase);
                    const unsigned to = slabs + slot * slab_bytes, arrived = slab_full + slot * 8;
                    if constexpr (GATHER > 0) {
                        gather<O, GATHER>(p, to, at.pixel, at.group, chunk);
                        arrive_with_copies(arrived);
                    } else if constexpr (BOX) {
                        const Corner corner(p, at.pixel / O::BP);
                        const int w = corner.w - (int)p.pad_w, h = corner.h - (int)p.pad_h;
                        barrier_expect(arrived, box_bytes);
                        if constexpr (O::FIVE)
                            copy_box(to, p.x, arrived, chunk_of_part(chunk, part) * O::ELEMENTS, w, h, corner.n,
                                     at.group + second_part(chunk, part) * (int)p.groups);
                        else
                            copy_box(to, p.x, arrived, chunk * O::ELEMENTS, w, h, corner.n);
                    } else {
                        barrier_expect(arrived, slab_bytes);
                        for (int line = 0; line < (int)p.lines; line += (int)p.copy_lines) {
                            const int pixel = at.pixel + line, n = pixel / plane, rest = pixel - n * plane, h = rest / width;
                            // Behind the last image comes the next group, of whose padding only zeros are used. With five axes
                            // a copy may not begin behind the last image.
                            const int images = O::FIVE ? n % (int)p.n : n, behind = at.group + (O::FIVE ? n / (int)p.n : 0);
                            copy_chunk<O>(to + line * O::SPAN, p.x, arrived, chunk, part, p.groups,
                                          rest - h * width - (int)p.pad_w, h - (int)p.pad_h, images, behind, 0, 0);
                        }
                    }
                    advance<SLABS>(slot, phase);
                }
            }
        }
        if (threadIdx.x == (GATHER ? 256 + GATHERERS : 288)) {
            int slot = 0;
            unsigned phase = 1;
            for (int tile = blockIdx.x; tile < tiles; tile += gridDim.x) {
                if (RESIDENT && tile != blockIdx.x) break;
                const At<O> at(tile, p.tiles_f, p.groups);
                for (int chunk = 0; chunk < chunks; ++chunk)
                    for (int tap = 0; tap < taps; ++tap) {
                        barrier_wait(empty + slot * 8, phase);
                        barrier_expect(full + slot * 8, FILTERS);
                        copy_filters(ring + slot * FILTERS, p.w, full + slot * 8, chunk * O::ELEMENTS, tap,
                                     at.group * (int)p.filters + at.filter);
                        advance<O::STAGES>(slot, phase);
                    }
            }
        }
        if constexpr (O::DELIVERED)
            if (threadIdx.x / 32 == 10)
                deliver<O>(p.res, staging, deliveries, p.filters, p.groups, p.tiles_f, blockIdx.x, tiles, gridDim.x, plane,
                           width);
        // A block's shared memory stays until its copies are there.
        if constexpr (GATHER > 0) asm volatile("cp.async.wait_all;" ::: "memory");
        return;
    }
    take_registers<(GATHER ? 216 : 232)>();
    wait_for_previous();
    let_next_begin();
    const int lane = threadIdx.x % 32, thread = threadIdx.x % 128;
    const unsigned table = tables + group * O::PIXELS * 4;
    int slab = 0, slot = 0;
    unsigned slab_phase = 0, phase = 0;
    // The next residual's part, and its parity.
    int next = 0;
    unsigned next_phase = 0;
    float d[O::STEPS][O::COLUMNS / 2];
    if (group == 1) {
        arrive_part(6, 256);
        if (O::DELIVERED) arrive_part(3, 256);
    }
    for (int tile = blockIdx.x, turn = 0; tile < tiles; tile += gridDim.x, ++turn) {
        const int delivery = next;
        const unsigned delivery_phase = next_phase;
        if constexpr (O::DELIVERED) advance<O::STAGINGS>(next, next_phase, Round<O>::COUNT);
        if (turn % 2 != group) {
            advance<SLABS>(slab, slab_phase, chunks);
            if (!RESIDENT) advance<O::STAGES>(slot, phase, chunks * taps);
            continue;
        }
        const At<O> at(tile, p.tiles_f, p.groups);
        const int filters = p.filters, all = (int)p.groups * filters, outputs = p.p * p.q;
        for (int i = thread; i < O::PIXELS; i += 128) {
            int n, h, w;
            bool output;
            if constexpr (BOX) {
                const Corner corner(p, at.pixel / O::BP);
                const int row = i / width, column = i - row * width;
                n = corner.n;
                h = corner.h + row;
                w = corner.w + column;
                output = row < p.down && column < p.across && h < p.p && w < p.q;
            } else {
                const int pixel = at.pixel + i, rest = pixel % plane;
                n = pixel / plane;
                h = rest / width;
                w = rest - h * width;
                output = n < p.n && h < p.p && w < p.q;
            }
            const int there = h * (int)p.q + w;
            const int place =
                O::NCHW ? (n * all + at.group * filters) * outputs + there : (n * outputs + there) * all + at.group * filters;
            set_place(table, i, output ? place : -1);
        }
        const unsigned mine = staging + (O::RINGS == 1 ? 0 : group * O::STAGINGS) * O::STAGING;
        const Place out{at.filter, at.group,  at.pixel, filters,    outputs,  table,         biases + group * O::FILTERS * 4,
                        mine,      1 + group, nullptr,  deliveries, delivery, delivery_phase};
        begin_tile<O>(out, p.residual);
        Biases<O> bias;
        bias.load(out, p.bias);
        // The first tile of all does not wait for its residual, and the second fetches it when the first copies are through.
        const bool begun = O::BEGUN && turn > 0;
        if constexpr (O::BEGUN) {
            if (turn == 1) sync_part(5, 256);
            add_residual<O, false>(d, out, p.residual, begun);
        }
        sync_part(6 + group, 256);
        int within = 0;
        for (int chunk = 0; chunk < chunks; ++chunk) {
            barrier_wait(slab_full + slab * 8, slab_phase);
            if constexpr (GATHER > 0) publish_shared();
            const unsigned pixels = slabs + slab * slab_bytes;
            if (++within == part) within = 0;
            int r = 0, s = 0;
            for (int tap = 0; tap < taps; ++tap) {
                barrier_wait(full + slot * 8, phase);
                if ((O::BEGUN || O::DELIVERED) && turn == 0 && chunk + tap == 0) arrive_part(5, O::BEGUN ? 256 : 160);
                const unsigned shifted = pixels + (r * (int)p.dilation_h * width + s * (int)p.dilation_w) * O::SPAN;
                const unsigned filters = ring + slot * FILTERS;
                if (++s == (int)p.s) {
                    s = 0;
                    ++r;
                }
                const bool add = O::BEGUN || chunk + tap > 0;
                wgmma_fence();
                if (O::LAST == O::WHOLE || within != 0)
                    multiply<O, O::WHOLE>(d, O::SWAP ? filters : shifted, O::SWAP ? shifted : filters, add);
                else
                    multiply<O, O::LAST>(d, O::SWAP ? filters : shifted, O::SWAP ? shifted : filters, add);
                wgmma_commit();
                wgmma_wait<O::FLIGHT>();
                if (lane == 0) {
                    if (!RESIDENT && chunk * taps + tap >= O::FLIGHT)
                        barrier_arrive(empty + before<O::STAGES>(slot, O::FLIGHT) * 8);
                    if (chunk > 0 && tap == O::FLIGHT - 1) barrier_arrive(slab_empty + before<SLABS>(slab, 1) * 8);
                }
                if (RESIDENT) {
                    if (++slot == O::STAGES) slot = 0;
                } else {
                    advance<O::STAGES>(slot, phase);
                }
            }
            advance<SLABS>(slab, slab_phase);
        }
        arrive_part(6 + (group ^ 1), 256);
        sums_are_there(d);
        if (lane == 0) {
            if (!RESIDENT)
                for (int back = O::FLIGHT; back > 0; --back) barrier_arrive(empty + before<O::STAGES>(slot, back) * 8);
            barrier_arrive(slab_empty + before<SLABS>(slab, 1) * 8);
        }
        if constexpr (O::ORDER > 0) {
            if (O::BEGUN && !begun) add_residual<O, true>(d, out, p.residual, true);
            finish_ordered<O>(d, out, p.y, bias);
        } else {
            finish_tile<O>(d, out, p.y, bias, p.residual);
        }
    }
}
