// im2col of 16-bit elements over one or two axes, where lines of windows are no multiple of what a thread stores. A
// block lays the lines of a channel that its windows see into shared memory, once for each tap of a line: what that tap
// sees of a line, zeros where it leaves the image, and the next line right behind it. What a tap sees of all of the
// block's windows is then one piece of it, which goes to its row of columns by whole lines of the cache, wherever it
// begins.
#include "ops/patches/patches.cuh"

// A block of THREADS has LINES lines of WIDE windows of a channel. KERNEL1, KERNEL2: taps down and along a line, and so
// on. Lines of the image that are STRIDE1 apart lie together, as a tap sees them.
template <typename T, int THREADS, int LINES, int WIDE, int KERNEL1, int KERNEL2, int STRIDE1, int STRIDE2,
          int DILATION1, int DILATION2, bool STREAM>
DEVICE void im2col_shared_lines(const Patches &a) {
    static_assert(sizeof(T) == 2, "elements go in pairs");
    constexpr int WARPS = THREADS / 32, TAPS = KERNEL1 * KERNEL2;
    constexpr int ROWS = (LINES - 1) * STRIDE1 + (KERNEL1 - 1) * DILATION1 + 1, EACH = (ROWS + STRIDE1 - 1) / STRIDE1;
    // Elements of a line that its windows see, and that a tap sees of all lines, an even number.
    constexpr int PITCH = (WIDE - 1) * STRIDE2 + (KERNEL2 - 1) * DILATION2 + 1;
    constexpr int COPY = (EACH * STRIDE1 * WIDE + 1) / 2 * 2;
    extern __shared__ __align__(16) unsigned char memory[];
    T *const shared = reinterpret_cast<T *>(memory);
    const int high = a.size[1], wide = a.size[2], out1 = a.out[1], pad2 = a.pad[2], tid = threadIdx.x;
    const int groups = (out1 + LINES - 1) / LINES, line = blockIdx.x % groups * LINES;
    const long long plane = blockIdx.x / groups;
    const int top = line * STRIDE1 - (int)a.pad[1];
    begin_dependent();
    // As many elements of a line as the stride, each to the copies of those taps that see it.
    constexpr int STEPS = (PITCH + STRIDE2 - 1) / STRIDE2;
#pragma unroll 4
    for (int i = tid; i < ROWS * STEPS; i += THREADS) {
        const int row = i / STEPS, u = i % STEPS, y = top + row;
        const bool real = (unsigned)y < (unsigned)high;
        const T *const from = static_cast<const T *>(a.x) + (plane * high + y) * wide;
        T *const to = shared + (row % STRIDE1 * EACH + row / STRIDE1) * WIDE;
#pragma unroll
        for (int r = 0; r < STRIDE2; ++r) {
            const int x = u * STRIDE2 + r - pad2;
            const T value = real && (unsigned)x < (unsigned)wide ? from[x] : downcast<T>(0);
#pragma unroll
            for (int k = 0; k < KERNEL2; ++k) {
                const int q = u + (r - k * DILATION2) / STRIDE2;
                if ((r - k * DILATION2) % STRIDE2 == 0 && (unsigned)q < (unsigned)WIDE) to[k * COPY + q] = value;
            }
        }
    }
    __syncthreads();
    const int lane = tid % 32, count = min(LINES, out1 - line) * WIDE;
    for (int tap = tid / 32; tap < TAPS; tap += WARPS) {
        const int down = tap / KERNEL2 * DILATION1;
        const int first = tap % KERNEL2 * COPY + (down % STRIDE1 * EACH + down / STRIDE1) * WIDE;
        const long long to = ((plane * TAPS + tap) * out1 + line) * WIDE;
        // By words, which begin at an even place of y, and single elements at the ends.
        T *const y = static_cast<T *>(a.y) + to;
        const T *const from = shared + first;
        const int odd = (int)(to & 1), words = (count - odd) / 2, behind = (int)(to + odd >> 1 & 31);
        if (lane == 0 && odd) y[0] = from[0];
        if (lane == 1 && odd + 2 * words < count) y[count - 1] = from[count - 1];
        const auto copy_words = [&](auto shifted) {
            constexpr int SHIFTED = decltype(shifted)::value;
            const unsigned *const pairs = reinterpret_cast<const unsigned *>(from + odd - SHIFTED);
#pragma unroll 4
            for (int n = lane - behind; n < words; n += 32)
                if (n >= 0) {
                    const unsigned pair = SHIFTED ? __funnelshift_r(pairs[n], pairs[n + 1], 16) : pairs[n];
                    store<STREAM>(reinterpret_cast<unsigned *>(y + odd) + n, pair);
                }
        };
        if ((first + odd) & 1) copy_words(Count<1>{});
        else copy_words(Count<0>{});
    }
}
