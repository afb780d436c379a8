// im2col where lines of windows are no multiple of what a thread stores: a thread has RUN windows as they come, past
// the end of a line, and in each row of columns those that begin at a multiple of RUN elements of memory. So all stores
// are of a whole run, and the last one of a row brings the first windows of the next row. Lines are at least RUN long.
#include "ops/patches/patches.cuh"

// Windows of a line are neighbours. K0, K1, K2: the kernel's sizes, 0 where they are known at run time only.
template <typename T, int RUN, int K0, int K1, int K2, bool STREAM, typename I>
__device__ __forceinline__ void im2col_past(const Patches &a) {
    begin_dependent();
    const Coordinate kernel0 = K0 ? K0 : a.kernel[0], kernel1 = K1 ? K1 : a.kernel[1], kernel2 = K2 ? K2 : a.kernel[2];
    const Coordinate size0 = a.size[0], size1 = a.size[1], size2 = a.size[2], out1 = a.out[1], out2 = a.out[2];
    const Coordinate pad0 = a.pad[0], pad1 = a.pad[1], pad2 = a.pad[2];
    const Coordinate windows = a.out[0] * out1 * out2, image = size0 * size1 * size2;
    const long long taps = (long long)kernel0 * kernel1 * kernel2;
    const I runs = ((I)windows + RUN - 1) / RUN, total = a.planes * runs, step = gridDim.x * blockDim.x;
    // Where an element lies in its line that is not there, since its line is not.
    const Coordinate nowhere = (Coordinate)(UnsignedCoordinate(1) << 8 * sizeof(Coordinate) - 1);
    const auto real = [&](Coordinate i0, Coordinate i1) {
        return (UnsignedCoordinate)i0 < (UnsignedCoordinate)size0 && (UnsignedCoordinate)i1 < (UnsignedCoordinate)size1;
    };
    for (I i = blockIdx.x * (I)blockDim.x + threadIdx.x; i < total; i += step) {
        const long long plane = i / runs;
        const UnsignedCoordinate first = i % runs * RUN, line = first / (UnsignedCoordinate)out2;
        const Coordinate column = first - line * out2;
        const T *const x = static_cast<const T *>(a.x) + plane * image;
        long long to = plane * taps * windows;
        // Where the lines begin that a run may have windows of.
        Coordinate at0[3], at1[3];
#pragma unroll
        for (int n = 0; n < 3; ++n) {
            const UnsignedCoordinate depth = (line + n) / (UnsignedCoordinate)out1;
            at0[n] = (Coordinate)depth * (Coordinate)a.stride[0] - pad0;
            at1[n] = (Coordinate)(line + n - depth * out1) * (Coordinate)a.stride[1] - pad1;
        }
#pragma unroll(K0 ? K0 : 1)
        for (Coordinate k0 = 0; k0 < kernel0; ++k0)
#pragma unroll(K1 ? K1 : 1)
            for (Coordinate k1 = 0; k1 < kernel1; ++k1) {
                Coordinate start[3];
                bool there[3];
#pragma unroll
                for (int n = 0; n < 3; ++n) {
                    const Coordinate i0 = at0[n] + k0 * (Coordinate)a.dilation[0];
                    const Coordinate i1 = at1[n] + k1 * (Coordinate)a.dilation[1];
                    there[n] = real(i0, i1), start[n] = (i0 * size1 + i1) * size2;
                }
#pragma unroll(K2 ? K2 : 1)
                for (Coordinate k2 = 0; k2 < kernel2; ++k2, to += windows) {
                    // A run begins so many elements further in this row of columns.
                    const int off = (int)-to & (RUN - 1);
                    const Coordinate past = windows - (Coordinate)first - off;
                    if (past <= 0) continue;
                    const bool second = column + off >= out2;
                    const Coordinate from = column + off - (second ? out2 : 0), left = out2 - from;
                    const Coordinate along = from + k2 * (Coordinate)a.dilation[2] - pad2;
                    // Of the line of the first window, and of the next one: its element 0 behind x, and which element
                    // the first window sees, as that line counts.
                    const Coordinate here = second ? start[1] : start[0];
                    const Coordinate here_at = (second ? there[1] : there[0]) ? along : nowhere;
                    Coordinate next = second ? start[2] : start[1], next_along = along - out2;
                    bool next_there = second ? there[2] : there[1];
                    if (past < RUN) {
                        // The row of columns ends, and the next tap's begins, or the next channel's.
                        Coordinate n0 = k0, n1 = k1, n2 = k2 + 1;
                        if (n2 == kernel2) n2 = 0, ++n1;
                        if (n1 == kernel1) n1 = 0, ++n0;
                        const Coordinate other = n0 == kernel0;
                        if (other) n0 = 0;
                        const Coordinate i0 = n0 * (Coordinate)a.dilation[0] - pad0;
                        const Coordinate i1 = n1 * (Coordinate)a.dilation[1] - pad1;
                        next = (i0 * size1 + i1) * size2 + other * image;
                        next_along = n2 * (Coordinate)a.dilation[2] - pad2 - past;
                        next_there = real(i0, i1) && !(other && plane + 1 == a.planes);
                    }
                    const Coordinate next_at = next_there ? next_along : nowhere;
                    const T *const from_here = x + (here + along), *const from_next = x + (next + next_along);
                    const auto element = [&](int v) {
                        const T *const place = (v < left ? from_here : from_next) + v;
                        const Coordinate at = (v < left ? here_at : next_at) + v;
                        return (UnsignedCoordinate)at < (UnsignedCoordinate)size2 ? *place : downcast<T>(0);
                    };
                    T *const y = static_cast<T *>(a.y) + (to + first + off);
                    if (k0 == kernel0 - 1 && k1 == kernel1 - 1 && k2 == kernel2 - 1 && past < RUN &&
                        plane + 1 == a.planes) {
                    // Nothing comes behind the last row.
#pragma unroll 1
                        for (int v = 0; v < past; ++v) y[v] = element(v);
                    } else {
                        Pack<T, RUN> values;
#pragma unroll
                        for (int v = 0; v < RUN; ++v) values.item[v] = element(v);
                        store<STREAM>(reinterpret_cast<Pack<T, RUN> *>(y), values);
                    }
                }
            }
    }
}
