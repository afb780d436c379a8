// Squeeze-and-excitation: y = x * gate(expand . activation(reduce . mean(x) + bias) + bias).
//
// x and y (image, channel, pixel), dense, channels last where CHANNELS_LAST; reduce and expand (m, c), one behind the
// other, and so the bias (m + c). BLOCKS of a cluster share an image: each has a slice of its channels and of its
// pixels. A product with part of the sums is part of the product with all, so blocks exchange m numbers, once.
//
// Source: Hu, Shen and Sun, "Squeeze-and-Excitation Networks", 2018.
#include "activation.cuh"
#include "grid.cuh"
#include "tma.cuh"

struct Gating {
    const void *x, *w, *bias;
    void *y;
    // Of an image: channels, pixels, squeezed channels. Of a block: slices along channels, channels and pixels at most.
    long long c, pixels, m, slices_c, block_c, block_p;
};

template <typename A> DEVICE A warp_sum(A value) {
#pragma unroll
    for (int step = 16; step > 0; step /= 2) value += __shfl_xor_sync(~0u, value, step);
    return value;
}

// A block's part of an image: vectors of V channels (of a plane, V pixels) from `x` on, `step` vectors from one pixel
// (plane) to the next.
template <typename T, int V> struct Slice {
    const Neighbours<T, V> *x;
    Neighbours<T, V> *y;
    int channels;
    long long pixels, step;
};

// Where threads stand, channels last: `lanes` side by side along channels, `rows` along pixels.
template <int THREADS> struct Standing {
    int lanes, rows, row, column;
    DEVICE Standing(int vectors) {
        lanes = max(1, min(vectors, THREADS)), rows = THREADS / lanes;
        row = threadIdx.x / lanes, column = threadIdx.x % lanes;
    }
};

// Threads' values of V channels lie apart by this much: so neighbours write to, and read from, other banks.
template <int THREADS> constexpr int PITCH = THREADS + 8;

// Sums of `real` channels from what each thread has in `scratch`.
template <int V, int THREADS, typename A>
DEVICE void fold_rows(A *scratch, const Standing<THREADS> &at, int real, A *sums) {
    const int width = at.lanes * V, folds = min(at.rows, max(1, THREADS / width));
    __syncthreads();
    // Rows to as few as there are threads for, then these: a thread writes only where it alone has read.
    for (int i = threadIdx.x; i < width * folds; i += THREADS) {
        const int fold = i / width, v = (i - fold * width) / at.lanes, column = i - fold * width - v * at.lanes;
        A *place = scratch + v * PITCH<THREADS> + fold * at.lanes + column;
        A sum = *place;
#pragma unroll 4
        for (int r = fold + folds; r < at.rows; r += folds) sum += place[(r - fold) * at.lanes];
        *place = sum;
    }
    __syncthreads();
    for (int i = threadIdx.x; i < width; i += THREADS) {
        const int v = i / at.lanes, column = i - v * at.lanes, channel = column * V + v;
        const A *place = scratch + v * PITCH<THREADS> + column;
        A sum = *place;
#pragma unroll 4
        for (int fold = 1; fold < folds; ++fold) sum += place[fold * at.lanes];
        if (channel < real) sums[channel] = sum;
    }
    __syncthreads();
}

// Sums of channels over the block's pixels.
template <typename T, int V, int THREADS, typename A>
DEVICE void sum_pixels(const Slice<T, V> &slice, A *sums, A *scratch) {
    const int vectors = slice.channels / V;
    const Standing<THREADS> at(vectors);
    for (int base = 0; base < vectors; base += at.lanes) {
        A total[V];
#pragma unroll
        for (int v = 0; v < V; ++v) total[v] = A(0);
        if (at.row < at.rows) {
            if (base + at.column < vectors) {
                const Neighbours<T, V> *x = slice.x + base + at.column;
#pragma unroll 8
                for (long long p = at.row; p < slice.pixels; p += at.rows) {
                    const Neighbours<T, V> read = x[p * slice.step];
#pragma unroll
                    for (int v = 0; v < V; ++v) total[v] += upcast(read.v[v]);
                }
            }
#pragma unroll
            for (int v = 0; v < V; ++v) scratch[v * PITCH<THREADS> + threadIdx.x] = total[v];
        }
        fold_rows<V>(scratch, at, slice.channels - base * V, sums + base * V);
    }
}

// The same of planes, a warp each.
template <typename T, int V, int THREADS, typename A> DEVICE void sum_planes(const Slice<T, V> &slice, A *sums) {
    for (int channel = threadIdx.x / 32; channel < slice.channels; channel += THREADS / 32) {
        const Neighbours<T, V> *x = slice.x + channel * slice.step;
        A total = A(0);
#pragma unroll 8
        for (long long p = threadIdx.x % 32; p < slice.pixels / V; p += 32) {
            const Neighbours<T, V> read = x[p];
#pragma unroll
            for (int v = 0; v < V; ++v) total += upcast(read.v[v]);
        }
        total = warp_sum(total);
        if (threadIdx.x % 32 == 0) sums[channel] = total;
    }
    __syncthreads();
}

template <typename T, int V, typename A> DEVICE Neighbours<T, V> scaled(const Neighbours<T, V> &x, const A *gates) {
    Neighbours<T, V> y;
#pragma unroll
    for (int v = 0; v < V; ++v) y.v[v] = downcast<T>(upcast(x.v[v]) * gates[v]);
    return y;
}

// KEPT: vectors of x that a thread holds from the sums to the scale, 0 where they are too many and are read again.
// STAGED: the block's filters are brought to shared memory while x is under way, so many elements at once; 0: they are
// read where they lie.
template <typename T, int V, int THREADS, int BLOCKS, int KEPT, int STAGED, bool CHANNELS_LAST, int ACTIVATION,
          int GATE>
DEVICE void squeeze_excitation(const Gating &a) {
    using A = typename Arithmetic<T>::type;
    constexpr int WARPS = THREADS / 32, TOGETHER = 4;
    static_assert(KEPT == 0 || CHANNELS_LAST, "planes are read again");
    extern __shared__ __align__(16) unsigned char memory[];
    const int tid = threadIdx.x, warp = tid / 32, lane = tid % 32, m = a.m, block_c = a.block_c;
    const int rank = blockIdx.x % BLOCKS, first_c = rank % (int)a.slices_c * block_c;
    const long long image = blockIdx.x / BLOCKS, first_p = rank / (int)a.slices_c * a.block_p;
    const int channels = max(0, min(block_c, (int)a.c - first_c));
    // First the barrier that counts what comes from the cluster. `partial`: what each of its blocks has summed up.
    const unsigned all_sent = shared_address(memory);
    T *staged = reinterpret_cast<T *>(memory + 16);
    const int staged_bytes = STAGED ? (2 * m * block_c + m + block_c) * (int)sizeof(T) : 0;
    A *sums = reinterpret_cast<A *>(memory + 16 + (staged_bytes + 15) / 16 * 16), *gates = sums + block_c,
      *partial = gates + block_c, *squeezed = partial + BLOCKS * m, *scratch = squeezed + m;
    Slice<T, V> slice;
    slice.channels = channels;
    slice.pixels = max(0ll, min(a.block_p, a.pixels - first_p));
    slice.step = (CHANNELS_LAST ? a.c : a.pixels) / V;
    const long long from =
        image * a.c * a.pixels + (CHANNELS_LAST ? first_p * a.c + first_c : first_c * a.pixels + first_p);
    slice.x = reinterpret_cast<const Neighbours<T, V> *>(static_cast<const T *>(a.x) + from);
    slice.y = reinterpret_cast<Neighbours<T, V> *>(static_cast<T *>(a.y) + from);
    const T *reduce = static_cast<const T *>(a.w) + first_c, *expand = reduce + a.m * a.c;
    const T *bias = static_cast<const T *>(a.bias), *offsets = bias + a.m + first_c;
    long long pitch = a.c;
    // All blocks of the cluster have begun before any sends.
    if constexpr (BLOCKS > 1) {
        if (tid == 0) {
            barrier_init(all_sent, 1);
            publish_barriers();
        }
        cluster_arrive_relaxed();
    }
    begin_dependent();

    const Standing<THREADS> at(channels / V);
    Neighbours<T, V> kept[KEPT ? KEPT : 1];
    if constexpr (KEPT > 0) {
        const Neighbours<T, V> *x = slice.x + at.row * slice.step + at.column;
#pragma unroll
        for (int i = 0; i < KEPT; ++i, x += at.rows * slice.step) {
            kept[i] = {};
            if (channels > 0 && at.row < at.rows && at.row + i * at.rows < slice.pixels) kept[i] = *x;
        }
    }
    if constexpr (STAGED > 0) {
        // Rows of both: m of `reduce`, m of `expand`, one behind the other.
        using Piece = Neighbours<T, STAGED>;
        Piece *pieces = reinterpret_cast<Piece *>(staged);
        const Piece *w = reinterpret_cast<const Piece *>(reduce);
        const int across = channels / STAGED, step = (int)(a.c / STAGED);
#pragma unroll 4
        for (int i = tid; i < 2 * m * across; i += THREADS) pieces[i] = w[(long long)(i / across) * step + i % across];
        reduce = staged, expand = staged + m * channels, pitch = channels;
        T *staged_bias = staged + 2 * m * block_c;
#pragma unroll 2
        for (int i = tid; i < m + channels; i += THREADS) staged_bias[i] = i < m ? bias[i] : offsets[i - m];
        bias = staged_bias, offsets = staged_bias + m;
    }
    if (channels > 0) {
        if constexpr (KEPT > 0) {
            if (at.row < at.rows)
#pragma unroll
                for (int v = 0; v < V; ++v) {
                    A total = A(0);
#pragma unroll
                    for (int i = 0; i < KEPT; ++i) total += upcast(kept[i].v[v]);
                    scratch[v * PITCH<THREADS> + tid] = total;
                }
            // What x was widened to is not to be kept as well: registers have no room for both.
            if constexpr (sizeof(T) == 2 && V % 2 == 0)
#pragma unroll
                for (int i = 0; i < KEPT * V / 2; ++i) asm volatile("" : "+r"(reinterpret_cast<unsigned *>(kept)[i]));
            fold_rows<V>(scratch, at, channels, sums);
        } else if constexpr (CHANNELS_LAST) {
            sum_pixels<T, V, THREADS>(slice, sums, scratch);
        } else {
            sum_planes<T, V, THREADS>(slice, sums);
        }
    } else {
        __syncthreads();
    }
    if constexpr (BLOCKS > 1) {
        // Behind a barrier of the block's: racecheck takes the barrier's beginning for a write of all its threads.
        if (tid == 0) barrier_expect(all_sent, BLOCKS * m * (int)sizeof(A));
        cluster_wait();
    }
    for (int first = warp; first < m; first += WARPS * TOGETHER) {
        A total[TOGETHER];
#pragma unroll
        for (int i = 0; i < TOGETHER; ++i) total[i] = A(0);
        for (int channel = lane; channel < channels; channel += 32) {
            const A sum = sums[channel];
#pragma unroll
            for (int i = 0; i < TOGETHER; ++i)
                if (first + i * WARPS < m) total[i] += sum * upcast(reduce[(first + i * WARPS) * pitch + channel]);
        }
#pragma unroll
        for (int i = 0; i < TOGETHER; ++i) {
            total[i] = warp_sum(total[i]);
            if (lane < BLOCKS && first + i * WARPS < m) {
                A *place = partial + rank * m + first + i * WARPS;
                if constexpr (BLOCKS == 1) *place = total[i];
                else send(address_of_rank(shared_address(place), lane), address_of_rank(all_sent, lane), total[i]);
            }
        }
    }
    if constexpr (BLOCKS > 1) barrier_wait_for_cluster(all_sent, 0);
    else __syncthreads();
    const A share = A(1) / A((double)a.pixels);
    for (int i = tid; i < m; i += THREADS) {
        A total = A(0);
#pragma unroll
        for (int block = 0; block < BLOCKS; ++block) total += partial[block * m + i];
        squeezed[i] = activate<ACTIVATION>(upcast(bias[i]) + total * share);
    }
    __syncthreads();
    if (channels == 0) return;

    const int folds = max(1, min(THREADS / channels, m));
    for (int i = tid; i < channels * folds; i += THREADS) {
        const int channel = i % channels;
        A total = A(0);
#pragma unroll 4
        for (int j = i / channels; j < m; j += folds) total += squeezed[j] * upcast(expand[j * pitch + channel]);
        scratch[i] = total;
    }
    __syncthreads();
    for (int channel = tid; channel < channels; channel += THREADS) {
        A total = upcast(offsets[channel]);
        for (int fold = 0; fold < folds; ++fold) total += scratch[fold * channels + channel];
        gates[channel] = activate<GATE>(total);
    }
    __syncthreads();
    if constexpr (KEPT > 0) {
        if (at.row >= at.rows) return;
        A gate[V];
#pragma unroll
        for (int v = 0; v < V; ++v) gate[v] = gates[at.column * V + v];
        Neighbours<T, V> *y = slice.y + at.row * slice.step + at.column;
#pragma unroll
        for (int i = 0; i < KEPT; ++i, y += at.rows * slice.step)
            if (at.row + i * at.rows < slice.pixels) *y = scaled(kept[i], gate);
    } else if constexpr (CHANNELS_LAST) {
        for (int column = at.column; column < channels / V && at.row < at.rows; column += at.lanes)
#pragma unroll 8
            for (long long p = at.row; p < slice.pixels; p += at.rows)
                slice.y[p * slice.step + column] = scaled(slice.x[p * slice.step + column], gates + column * V);
    } else {
        for (int channel = warp; channel < channels; channel += WARPS) {
            A gate[V];
#pragma unroll
            for (int v = 0; v < V; ++v) gate[v] = gates[channel];
#pragma unroll 8
            for (long long p = lane; p < slice.pixels / V; p += 32)
                slice.y[channel * slice.step + p] = scaled(slice.x[channel * slice.step + p], gate);
        }
    }
}

// The plain method, of any size: one thread a value. STAGE by STAGE, between which values lie in `workspace`: means
// (image, c), squeezed (image, m), gates (image, c).
enum Stage { MEANS, SQUEEZED, GATES, SCALED };

struct PlainGating {
    const void *x, *w, *bias;
    void *y, *workspace;
    long long n, c, pixels, m;
};

template <typename T, bool CHANNELS_LAST, int ACTIVATION, int GATE, int STAGE>
DEVICE void squeeze_excitation_plain(const PlainGating &a) {
    using A = typename Arithmetic<T>::type;
    A *means = static_cast<A *>(a.workspace), *squeezed = means + a.n * a.c, *gates = squeezed + a.n * a.m;
    const T *x = static_cast<const T *>(a.x), *w = static_cast<const T *>(a.w), *bias = static_cast<const T *>(a.bias);
    const long long step_c = CHANNELS_LAST ? 1 : a.pixels, step_p = CHANNELS_LAST ? a.c : 1, plane = a.c * a.pixels;
    const long long count = a.n * (STAGE == SQUEEZED ? a.m : STAGE == SCALED ? plane : a.c);
    begin_dependent();
    for (long long i = blockIdx.x * (long long)blockDim.x + threadIdx.x; i < count;
         i += gridDim.x * (long long)blockDim.x) {
        A total = A(0);
        if constexpr (STAGE == MEANS) {
            const T *from = x + i / a.c * plane + i % a.c * step_c;
            for (long long p = 0; p < a.pixels; ++p) total += upcast(from[p * step_p]);
            means[i] = total / A(a.pixels);
        } else if constexpr (STAGE == SQUEEZED) {
            const long long image = i / a.m, j = i % a.m;
            for (long long c = 0; c < a.c; ++c) total += means[image * a.c + c] * upcast(w[j * a.c + c]);
            squeezed[i] = activate<ACTIVATION>(total + upcast(bias[j]));
        } else if constexpr (STAGE == GATES) {
            const long long image = i / a.c, c = i % a.c;
            for (long long j = 0; j < a.m; ++j) total += squeezed[image * a.m + j] * upcast(w[(a.m + j) * a.c + c]);
            gates[i] = activate<GATE>(total + upcast(bias[a.m + c]));
        } else {
            const long long image = i / plane, c = CHANNELS_LAST ? i % a.c : i % plane / a.pixels;
            static_cast<T *>(a.y)[i] = downcast<T>(upcast(x[i]) * gates[image * a.c + c]);
        }
    }
}
