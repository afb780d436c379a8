// Weight gradient of depthwise convolution: x and dy are read once for all taps of a piece of the filter.
//
// A thread has the sums of R x S taps of V channels in registers and goes down the rows of TX columns of dy. What it
// sees of a row of x is loaded once and multiplied by the LIVE rows of dy that meet it, which stay in registers: row o
// of dy meets row o * SH + r of x with tap r. Rows come through shared memory some stages ahead; a stage is as many
// rows of x as until the same registers hold another row of dy. A block goes through a run of rows of all images, one
// behind the other, so there are few parts: its threads' sums are added in a fixed order, then the parts by a second
// launch.
//
// Columns and rows are those of a residue class (columns.cu): dilation costs nothing, strides are small numbers.
#include "ops/conv/cuda/wgrad_depthwise_loads.cuh"

template <class Traits> DEVICE void wgrad_depthwise(const DepthwiseWgrad &a) {
    using P = WgradTile<Traits>;
    using T = typename P::T;
    using A = typename P::A;
    using Item = Channels<T, P::V>;
    constexpr int V = P::V, TX = P::TX, R = P::R, S = P::S, SH = P::SH, LIVE = P::LIVE, C = P::C;
    extern __shared__ __align__(1024) unsigned char memory[];
    unsigned block = blockIdx.x;
    const int s0 = block % (unsigned)a.pieces_w * S;
    block /= (unsigned)a.pieces_w;
    const int r0 = block % (unsigned)a.pieces_h * R;
    block /= (unsigned)a.pieces_h;
    const int k0 = block % (unsigned)a.channel_blocks * C, part = block / (unsigned)a.channel_blocks;
    const int tid = threadIdx.x, lane = min(P::LAST ? tid % P::LANES : tid / P::GROUPS, P::LANES - 1),
              group = min(P::LAST ? tid / P::LANES : tid % P::GROUPS, P::GROUPS - 1);
    Runs<P> runs(a, part, r0, s0);
    WgradLoads<P, P::BY> loads(a, runs, shared_address(memory), k0);
    begin_dependent(a.early);
    loads.begin();
    int lane_x = lane * V;
    if (!P::SAME) lane_x = min((k0 + lane) / (int)a.multiplier - k0 / (int)a.multiplier, P::C_X - 1);
    const unsigned char *const x = memory + lane_x * P::CHANNEL_X + group * (TX * P::SW) * P::COLUMN_X,
                               *const dy = memory + P::DY_AT + lane * V * P::CHANNEL_DY + group * TX * P::COLUMN_DY;
    A sums[R][S][V] = {}, seen[LIVE][TX][V];
    while ((P::BY != ROWS || tid < P::CONSUMERS) && runs.next()) {
        const int count = runs.count, rows = runs.rows, step = a.phases_w;
        // Columns of dy that are there.
        const int columns = ((int)a.q - runs.q0 + step - 1) / step - group * TX;
        // Of ROWS: the first column of x, and whether all of a warp's are there.
        const int column = runs.left + group * (TX * P::SW);
        const bool inside = P::BY != ROWS || __all_sync(~0u, column >= 0 && column + P::WINDOW <= (int)a.width);
        for (int base = 0, first = 0; base < rows; base += P::PERIOD, first += LIVE) {
            const int here = loads.next();
            const unsigned char *const rows_x = x + here, *const rows_dy = dy + here;
#pragma unroll
            for (int i = 0; i < P::PERIOD; ++i) {
                if (i > 0 && base + i >= rows) break;
                if (i % SH == 0) {
                    const unsigned char *const row = rows_dy + i / SH * P::ROW_DY + loads.lead_dy(runs, first + i / SH);
#pragma unroll
                    for (int j = 0; j < TX; ++j)
                        if (P::BY != ROWS || P::WHOLE || j < columns)
                            load_channels(seen[i / SH][j], reinterpret_cast<const T *>(row + j * P::COLUMN_DY));
                }
                if (i % SH >= R) continue;
                // Rows beside the image have not come.
                if (P::BY == ROWS && (unsigned)(runs.top + base + i) >= (unsigned)a.height) continue;
                A now[P::WINDOW][V];
                const unsigned char *const row = rows_x + i * P::ROW_X + loads.lead_x(runs, base + i);
                if (inside) {
#pragma unroll
                    for (int m = 0; m < P::WINDOW; ++m)
                        load_channels(now[m], reinterpret_cast<const T *>(row + m * P::COLUMN_X));
                } else {
#pragma unroll
                    for (int m = 0; m < P::WINDOW; ++m) {
                        Item there = {};
                        if ((unsigned)(column + m) < (unsigned)a.width)
                            there = *reinterpret_cast<const Item *>(row + m * P::COLUMN_X);
                        there.to(now[m]);
                    }
                }
#pragma unroll
                for (int r = i % SH; r < R; r += SH) {
                    // Row first + back of dy meets this row of x with tap r.
                    const int back = (i - r) / SH, slot = (back + LIVE) % LIVE;
                    if ((back < 0 && first == 0) || first + back >= count) continue;
#pragma unroll
                    for (int j = 0; j < TX; ++j) {
                        if (!P::WHOLE && j >= columns) break;
#pragma unroll
                        for (int s = 0; s < S; ++s)
#pragma unroll
                            for (int v = 0; v < V; ++v)
                                sums[r][s][v] = fma(seen[slot][j][v], now[j * P::SW + s][v], sums[r][s][v]);
                    }
                }
            }
            loads.done();
        }
    }
    // As many taps at a time as there is room for, of all columns.
    constexpr int TAPS = R * S, ROOM = P::STAGES * P::STAGE / (P::GROUPS * C * (int)sizeof(A)),
                  EACH = ROOM < TAPS ? ROOM : TAPS;
    static_assert(EACH > 0);
    using Sums = Channels<A, V>;
    A *const shared = reinterpret_cast<A *>(memory);
#pragma unroll
    for (int begin = 0; begin < TAPS; begin += EACH) {
        const int here = TAPS - begin < EACH ? TAPS - begin : EACH;
        __syncthreads();
        if (tid < P::USED)
#pragma unroll
            for (int tap = begin; tap < begin + here; ++tap)
                *reinterpret_cast<Sums *>(shared + ((tap - begin) * P::GROUPS + group) * C + lane * V) =
                    Sums::of(sums[tap / S][tap % S]);
        __syncthreads();
        for (int i = tid; i < here * C; i += P::THREADS) {
            const int tap = i / C, channel = i % C, r = r0 + (begin + tap) / S, s = s0 + (begin + tap) % S;
            A sum = shared[tap * P::GROUPS * C + channel];
#pragma unroll 4
            for (int g = 1; g < P::GROUPS; ++g) sum += shared[(tap * P::GROUPS + g) * C + channel];
            if (k0 + channel >= (int)a.k || r >= (int)a.r || s >= (int)a.s) continue;
            const int taps = (int)a.r * (int)a.s, at = r * (int)a.s + s;
            if constexpr (P::SPLIT)
                static_cast<A *>(a.sums)[((long long)part * taps + at) * a.k + (k0 + channel)] = sum;
            else static_cast<T *>(a.sums)[(k0 + channel) * taps + at] = downcast<T>(sum);
        }
    }
}

struct WgradParts {
    const void *parts;
    void *y;
    // Filters, taps of each, parts of their sums; whether what comes next is placed early.
    long long k, taps, count, early;
};

// dw from parts (part, tap, k), in a fixed order: a warp adds every WARPS-th of them for a lane's element, and a warp
// those sums.
template <typename T, int WARPS> DEVICE void add_wgrad_parts(const WgradParts &p) {
    using A = typename Arithmetic<T>::type;
    __shared__ A sums[WARPS][32];
    const int k = p.k, taps = p.taps, count = p.count, each = k * taps;
    const int warp = threadIdx.x / 32, lane = threadIdx.x % 32, i = blockIdx.x * 32 + lane;
    work_out(each, count);
    begin_dependent(p.early);
    A sum = 0;
    if (i < each)
#pragma unroll 8
        for (int part = warp; part < count; part += WARPS)
            sum += static_cast<const A *>(p.parts)[(long long)part * each + i];
    sums[warp][lane] = sum;
    __syncthreads();
    if (warp > 0 || i >= each) return;
#pragma unroll
    for (int other = 1; other < WARPS; ++other) sum += sums[other][lane];
    static_cast<T *>(p.y)[i % k * taps + i / k] = downcast<T>(sum);
}
