// dx from the results of its phases: (n, c, height, width) of slots with every stride-th row and column, dense. What
// phases have written to dx themselves stays.
#include "activation.cuh"
#include "grid.cuh"

struct Join {
    const void *parts, *bias;
    void *y;
    // `across`: phases of a row. Bit i of `empty`: no tap meets phase i; of `joined`: its result lies in a slot.
    // `slot`: elements from one of them to the next.
    long long n, c, height, width, stride_h, stride_w, across, slot, empty, joined;
};

// One thread a piece of V elements: neighbours in channels (LAST), or one in a row (V = 1).
template <typename T, bool LAST, int V, int ACTIVATION, typename I>
__device__ __forceinline__ void join_phases(const Join &a) {
    using A = typename Arithmetic<T>::type;
    using Piece = Neighbours<T, V>;
    begin_dependent();
    const I pieces = LAST ? (I)a.c / V : 1, channels = LAST ? 1 : (I)a.c;
    const I height = a.height, width = a.width, stride_h = a.stride_h, stride_w = a.stride_w;
    const I total = (I)a.n * channels * height * width * pieces;
    for (I at = blockIdx.x * (I)blockDim.x + threadIdx.x; at < total; at += gridDim.x * (I)blockDim.x) {
        const I piece = at % pieces, v = at / pieces % width, h = at / pieces / width % height;
        const I plane = at / pieces / width / height;
        const I a_h = h % stride_h, a_w = v % stride_w, phase = a_h * (I)a.across + a_w;
        Piece found;
        if (a.empty >> phase & 1) {
#pragma unroll
            for (int i = 0; i < V; ++i)
                found.v[i] =
                    finish<T, ACTIVATION>(A(0), static_cast<const T *>(a.bias), static_cast<const T *>(nullptr),
                                          LAST ? piece * V + i : plane % channels, 0);
        } else {
            if (!(a.joined >> phase & 1)) continue;
            const int slot = __popcll(a.joined & (1ull << phase) - 1);
            const I rows = (height - a_h + stride_h - 1) / stride_h, columns = (width - a_w + stride_w - 1) / stride_w;
            const I place = ((plane * rows + h / stride_h) * columns + v / stride_w) * pieces + piece;
            found = *reinterpret_cast<const Piece *>(static_cast<const T *>(a.parts) + slot * a.slot +
                                                     (long long)place * V);
        }
        *reinterpret_cast<Piece *>(static_cast<T *>(a.y) + (long long)at * V) = found;
    }
}

// Filters of all phases (c, taps of h, taps of w, k / groups), phase by phase, of w by strides.
struct Filters {
    const void *w;
    void *y;
    // `step_`: of w in elements. `first_`: the phase of tap 0; `turn_`: how much further that of the next one is.
    // `apart_`: taps of a phase are so far from each other. `down` x `across` phases; small images lack some. `base`:
    // where a phase's filters begin.
    long long groups, group_k, group_c, taps_h, taps_w, step_k, step_c, step_r, step_s, stride_h, stride_w;
    long long first_h, first_w, turn_h, turn_w, apart_h, apart_w, down, across, tiles_k, tiles_columns;
    long long base[64];
};

// Where a tap lies in its phase, whose taps are in the opposite order.
struct Tap {
    int phase, at, count;

    __device__ Tap(int tap, int taps, int stride, int first, int turn, int apart) {
        const int last = tap + (taps - 1 - tap) / apart * apart;
        phase = (first + tap * turn) % stride, at = (last - tap) / apart, count = last / apart + 1;
    }
};

// What a column (c, r, s) of w is, where columns lie side by side: channels innermost (LAST), or taps.
template <bool LAST> struct Column {
    int c, r, s;

    __device__ Column(const Filters &a, int column) {
        const int taps = a.taps_h * a.taps_w, tap = LAST ? column / (int)a.group_c : column % taps;
        c = LAST ? column % (int)a.group_c : column / taps, r = tap / (int)a.taps_w, s = tap % (int)a.taps_w;
    }

    // Of w, from a group's first filter on.
    __device__ long long from(const Filters &a) const { return c * a.step_c + r * a.step_r + s * a.step_s; }

    // Of y, from the first of a group's filters on; -1 where a small image lacks the phase.
    __device__ long long to(const Filters &a, int group) const {
        const Tap h(r, a.taps_h, a.stride_h, a.first_h, a.turn_h, a.apart_h);
        const Tap v(s, a.taps_w, a.stride_w, a.first_w, a.turn_w, a.apart_w);
        if (h.phase >= a.down || v.phase >= a.across) return -1;
        const long long row = ((group * a.group_c + c) * h.count + h.at) * v.count + v.at;
        return a.base[h.phase * (int)a.across + v.phase] + row * a.group_k;
    }
};

// A block turns a tile of filters by columns through shared memory.
template <typename T, bool LAST> __device__ __forceinline__ void turn_filters(const Filters &a) {
    __shared__ T tile[32][33];
    __shared__ long long places[32];
    begin_dependent();
    const int columns = a.group_c * a.taps_h * a.taps_w, group_k = a.group_k;
    const int tile_k = blockIdx.x % (unsigned)a.tiles_k, rest = blockIdx.x / (unsigned)a.tiles_k;
    const int column0 = rest % (int)a.tiles_columns * 32, group = rest / (int)a.tiles_columns, k0 = tile_k * 32;
    const int across = threadIdx.x % 32, down = threadIdx.x / 32;
    const T *w = static_cast<const T *>(a.w) + group * group_k * a.step_k;
    const Column<LAST> mine(a, column0 + across);
    w += mine.from(a);
    // Its divisions take longer than the copy: once a column.
    if (down == 0) places[across] = mine.to(a, group);
    for (int k = down; k < 32; k += 8)
        if (k0 + k < group_k && column0 + across < columns) tile[k][across] = w[(k0 + k) * a.step_k];
    __syncthreads();
    for (int i = down; i < 32 && column0 + i < columns; i += 8) {
        const long long to = places[i];
        if (k0 + across < group_k && to >= 0) static_cast<T *>(a.y)[to + k0 + across] = tile[across][i];
    }
}

// Of groups of a few filters: a thread an element, as they lie in w.
template <typename T, bool LAST> __device__ __forceinline__ void turn_few(const Filters &a) {
    begin_dependent();
    const unsigned columns = a.group_c * a.taps_h * a.taps_w, group_k = a.group_k;
    const unsigned count = columns * group_k * (unsigned)a.groups;
    for (unsigned i = blockIdx.x * blockDim.x + threadIdx.x; i < count; i += gridDim.x * blockDim.x) {
        const unsigned filter = i / columns, group = filter / group_k;
        const Column<LAST> column(a, i - filter * columns);
        const long long to = column.to(a, group);
        const T *w = static_cast<const T *>(a.w) + filter * a.step_k + column.from(a);
        if (to >= 0) static_cast<T *>(a.y)[to + filter - group * group_k] = *w;
    }
}
