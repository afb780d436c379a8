// Depthwise convolution on tensor cores: eight channels' weights of two taps as diagonal matrices, one over the other.
//
// x (n, h, w, c), y (n, p, q, c), of 16 bits. The matrix instruction's A is 16 pixels x (2 taps x 8 channels): a tap of
// a pixel's eight channels is a row of 16 bytes that ldmatrix takes from anywhere in shared memory. Its B has the
// weights of the two taps on the diagonals of 8 x 8 matrices. Seven eighths of the products are with zeros, and still
// more of those that count come out than from multiply-adds of float32, without widening x.
//
// Rows of x pass through a ring of stages in shared memory. A row's operands are loaded once and go into all LIVE rows
// of outputs under way that see it. Residue classes of dilation are as in columns.cu: along a class, columns that lie
// SW apart come one behind the other in shared memory, so that ldmatrix reads it without conflicts.
#include "ops/conv/cuda/depthwise/diagonal.cuh"

// T, R, S; SH, SW: strides in a class; OCTETS of channels, STRIPS of SEGMENTS x 8 columns a block; MTILES of 16 pixels
// a warp; STAGES; COPY bytes; ACTIVATION, BIAS, RESIDUAL.
template <class Traits> struct Tile : Traits {
    using B = Traits;
    static constexpr int PAIRS = (B::S + 1) / 2, LIVE = (B::R + B::SH - 1) / B::SH, PERIOD = LIVE * B::SH;
    static constexpr int PITCH = (B::OCTETS | 1) * 16;
    // Columns of a class that a strip reads, in SW runs.
    static constexpr int RUN = (B::SEGMENTS * 8 - 1) + (B::S + B::SW - 1) / B::SW, COLUMNS = RUN * B::SW;
    static constexpr int ROW_BYTES = B::STRIPS * COLUMNS * PITCH, STAGE_BYTES = PERIOD * ROW_BYTES;
    static constexpr int TILES = B::STRIPS * B::SEGMENTS / 2, WARPS = B::OCTETS * (TILES / B::MTILES);
    static constexpr int THREADS = 32 * WARPS;
    // Pieces of a pixel, and pixels of a row that a thread copies.
    static constexpr int PIECES = B::OCTETS * 16 / B::COPY, APART = THREADS / PIECES,
                         ITEMS = (B::STRIPS * COLUMNS + APART - 1) / APART;
    static_assert(TILES * 2 == B::STRIPS * B::SEGMENTS && TILES % B::MTILES == 0 && THREADS % PIECES == 0);
    // Bytes from tap to tap.
    static DEVICE constexpr int tap_bytes(int s) { return (s % B::SW * RUN + s / B::SW) * PITCH; }
};

template <int COUNT> DEVICE void clear(float (&sums)[COUNT][4]) {
#pragma unroll
    for (int i = 0; i < COUNT * 4; ++i) sums[i / 4][i % 4] = 0.0f;
}

template <class Traits> DEVICE void depthwise_diagonal(const Diagonal &a) {
    using P = Tile<Traits>;
    using T = typename P::T;
    extern __shared__ __align__(128) unsigned char memory[];
    const int tid = threadIdx.x, lane = tid % 32, warp = tid / 32;
    int block = blockIdx.x;
    const int channel0 = block % (int)a.channel_blocks * (P::OCTETS * 8);
    block /= (int)a.channel_blocks;
    const int strip0 = block % (int)a.strip_groups * P::STRIPS, piece = block / (int)a.strip_groups;
    const int residue = piece % (int)a.phases_h, first = piece / (int)a.phases_h * (int)a.rows;
    const int count = min((int)a.rows, ((int)a.p - residue + (int)a.phases_h - 1) / (int)a.phases_h - first);
    if (count <= 0) return;
    const int rows = (count - 1) * P::SH + P::R, apart = a.dilation_h, row_step = (int)a.width * (int)a.c;
    const int top = (residue + (int)a.phases_h * first) * (int)a.stride_h - (int)a.pad_h;

    // What this thread copies of a row: where in x's row, less than 0 for padding, and where the first of it goes.
    int from[P::ITEMS];
    const int channel = tid % P::PIECES * (P::COPY / 2), slot0 = tid / P::PIECES;
    unsigned char *to = memory + slot0 * P::PITCH + channel * 2;
#pragma unroll
    for (int i = 0; i < P::ITEMS; ++i) {
        const int slot = slot0 + i * P::APART, rest = slot % P::COLUMNS;
        const Strip at(a, strip0 + slot / P::COLUMNS, P::SEGMENTS * 8);
        const int along = rest % P::RUN * P::SW + rest / P::RUN;
        const int column = at.q0 * (int)a.stride_w - (int)a.pad_w + along * (int)a.dilation_w;
        const bool real = at.exists && (unsigned)column < (unsigned)a.width && channel0 + channel < (int)a.c;
        from[i] = real ? (at.n * (int)a.height * (int)a.width + column) * (int)a.c + channel0 + channel : -1;
    }
    const T *x = static_cast<const T *>(a.x);
    auto copy_stage = [&](int stage) {
        unsigned char *there = to + stage % P::STAGES * P::STAGE_BYTES;
#pragma unroll
        for (int t = 0; t < P::PERIOD; ++t) {
            const int row = top + (stage * P::PERIOD + t) * apart;
            const bool real = (unsigned)row < (unsigned)a.height && stage * P::PERIOD + t < rows;
            const int row_start = row * row_step;
#pragma unroll
            for (int i = 0; i < P::ITEMS; ++i) {
                if (i * P::APART + P::APART > P::STRIPS * P::COLUMNS && slot0 + i * P::APART >= P::STRIPS * P::COLUMNS)
                    break;
                const bool both = real && from[i] >= 0;
                const T *element = x + (both ? from[i] + row_start : 0);
                unsigned char *place = there + t * P::ROW_BYTES + i * P::APART * P::PITCH;
                if constexpr (P::COPY >= 4) cp_async<P::COPY>(place, element, both);
                else *reinterpret_cast<T *>(place) = both ? *element : T{0};
            }
        }
    };

    // Weights as operands: only a lane in four has one that is not zero, in one half of its words.
    const int octet = warp % P::OCTETS, mine = channel0 + octet * 8 + lane / 4;
    const bool on_diagonal = lane / 8 == lane % 4 && mine < (int)a.c, upper = lane / 4 % 2;
    unsigned low_half = upper ? 0x1044 : 0x4410, high_half = upper ? 0x3244 : 0x4432;
    // Kept, not worked out again.
    asm volatile("" : "+r"(low_half), "+r"(high_half));
    // Under way while the first rows are copied; before the launch before has ended, where it does not write them.
    if (!a.weights_ready) begin_dependent();
    const unsigned short *taps = static_cast<const unsigned short *>(a.w) + (on_diagonal ? mine : 0) * P::R * P::S;
    unsigned short weights[P::R * P::S];
#pragma unroll
    for (int tap = 0; tap < P::R * P::S; ++tap) weights[tap] = on_diagonal ? taps[tap] : 0;
    if (a.weights_ready) begin_dependent();
#pragma unroll
    for (int stage = 0; stage < P::STAGES - 1; ++stage) {
        copy_stage(stage);
        cp_async_commit();
    }
    unsigned w[P::R][P::PAIRS];
    bool finite = true;
#pragma unroll
    for (int r = 0; r < P::R; ++r)
#pragma unroll
        for (int i = 0; i < P::PAIRS; ++i) {
            const unsigned next = 2 * i + 1 < P::S ? weights[r * P::S + (2 * i + 1 < P::S ? 2 * i + 1 : 0)] : 0;
            w[r][i] = weights[r * P::S + 2 * i] | next << 16;
            finite &= finite_pair<T>(w[r][i]);
        }
    finite = __all_sync(0xffffffffu, finite);

    // This lane's pixels: as rows of ldmatrix, and as those that it stores.
    unsigned begins[P::MTILES];
    const int stored = channel0 + octet * 8 + lane % 4 * 2, y_row = (int)a.phases_h * (int)a.q * (int)a.c;
    // Of the first row, less than 0 where there is none.
    int at[P::MTILES][2];
#pragma unroll
    for (int m = 0; m < P::MTILES; ++m) {
        const int segment0 = (warp / P::OCTETS * P::MTILES + m) * 2, segment = segment0 + lane / 8 % 2;
        begins[m] = shared_address(memory) + octet * 16 +
                    (segment / P::SEGMENTS * P::COLUMNS + segment % P::SEGMENTS * 8 + lane % 8) * P::PITCH;
#pragma unroll
        for (int e = 0; e < 2; ++e) {
            const Strip strip(a, strip0 + (segment0 + e) / P::SEGMENTS, P::SEGMENTS * 8);
            const int q = strip.q0 + ((segment0 + e) % P::SEGMENTS * 8 + lane / 4) * (int)a.phases_w;
            const int p = residue + (int)a.phases_h * first;
            at[m][e] = ((strip.n * (int)a.p + p) * (int)a.q + q) * (int)a.c + stored;
            if (!strip.exists || q >= (int)a.q || stored >= (int)a.c) at[m][e] = -1;
        }
    }
    // 0, or NaN once a sum was not finite: then the products with the diagonal's zeros made NaN.
    float check = 0.0f;
    float bias[2] = {};
    if constexpr (P::BIAS) {
        const T *from_bias = static_cast<const T *>(a.bias);
        if (stored < (int)a.c) bias[0] = Element<T>::to_float(from_bias[stored]);
        if (stored + 1 < (int)a.c) bias[1] = Element<T>::to_float(from_bias[stored + 1]);
    }
    float sums[P::LIVE][P::MTILES][4];
    for (int stage = 0; stage * P::PERIOD < rows; ++stage) {
        cp_async_wait<P::STAGES - 2>();
        __syncthreads();
        copy_stage(stage + P::STAGES - 1);
        cp_async_commit();
        const unsigned here = stage % P::STAGES * P::STAGE_BYTES;
#pragma unroll
        for (int t = 0; t < P::PERIOD; ++t) {
            unsigned pixels[P::PAIRS][P::MTILES][4];
            // A row of padding adds nothing, unless weights are not finite.
            const bool counts = !finite || (unsigned)(top + (stage * P::PERIOD + t) * apart) < (unsigned)a.height;
#pragma unroll
            for (int i = 0; i < P::PAIRS; ++i) {
                // Lanes of the second tap; what is beyond the last is multiplied by zero.
                const int next = 2 * i + 1 < P::S ? 2 * i + 1 : 2 * i;
                const unsigned place = here + t * P::ROW_BYTES + (lane < 16 ? P::tap_bytes(2 * i) : P::tap_bytes(next));
#pragma unroll
                for (int m = 0; m < P::MTILES; ++m)
                    if (counts) ldmatrix(pixels[i][m], begins[m] + place);
            }
#pragma unroll
            for (int r = t % P::SH; r < P::R; r += P::SH) {
                const int back = (t - r + P::PERIOD) / P::SH - P::LIVE, slot = (back + P::LIVE) % P::LIVE;
                const int o = stage * P::LIVE + back;
                if (o < 0 || o >= count) continue;
                // The first tap begins the sums.
                if (r == 0) clear(sums[slot]);
                if (!counts) continue;
#pragma unroll
                for (int i = 0; i < P::PAIRS; ++i) {
                    const unsigned weights[2] = {select_bytes(w[r][i], low_half), select_bytes(w[r][i], high_half)};
#pragma unroll
                    for (int m = 0; m < P::MTILES; ++m) mma<T>(sums[slot][m], pixels[i][m], weights);
                }
            }
            // The row of outputs that has seen all of its rows of x.
            if ((P::R - 1 - t) % P::SH != 0) continue;
            const int back = (t - P::R + 1 + P::PERIOD) / P::SH - P::LIVE, slot = (back + P::LIVE) % P::LIVE;
            const int o = stage * P::LIVE + back;
            if (o < 0 || o >= count) continue;
#pragma unroll
            for (int m = 0; m < P::MTILES; ++m)
#pragma unroll
                for (int e = 0; e < 2; ++e) {
                    const float low = sums[slot][m][2 * e], high = sums[slot][m][2 * e + 1];
                    check += low * 0.0f;
                    check += high * 0.0f;
                    if (at[m][e] >= 0) store_pixel<P>(a, stored, at[m][e] + o * y_row, low, high, bias);
                }
        }
    }
    if (check == 0.0f) return;
    for (int i = 0; i < count * P::MTILES * 2; ++i) {
        const int o = i / (P::MTILES * 2), m = i / 2 % P::MTILES, e = i % 2;
        const int segment = (warp / P::OCTETS * P::MTILES + m) * 2 + e;
        const Strip strip(a, strip0 + segment / P::SEGMENTS, P::SEGMENTS * 8);
        const int q = strip.q0 + (segment % P::SEGMENTS * 8 + lane / 4) * (int)a.phases_w;
        const int p = residue + (int)a.phases_h * (first + o);
        const int place = ((strip.n * (int)a.p + p) * (int)a.q + q) * (int)a.c + stored;
        if (strip.exists && q < (int)a.q && stored < (int)a.c)
            store_again<P>(a, strip.n, stored, p, q, place, bias[0], bias[1]);
    }
}
