// How the windows of an image (or of a volume, whose planes' rows follow one another) are shared out to blocks of
// threads.
#pragma once

// ACROSS 0: tiles are N windows as they come. Else they are ACROSS windows wide and N / ACROSS high: a square, a piece
// of a row (ACROSS = N) or of a column (ACROSS = 1).
template <int N, int ACROSS> __device__ __forceinline__ long long tiles_of(int rows, int width) {
    if constexpr (ACROSS == 0) {
        return ((long long)rows * width + N - 1) / N;
    } else {
        constexpr int HIGH = N / ACROSS;
        return (long long)((width + ACROSS - 1) / ACROSS) * ((rows + HIGH - 1) / HIGH);
    }
}

// The window that is number i of a tile; beyond an edge, a number of rows * width or more.
template <int N, int ACROSS>
__device__ __forceinline__ long long window_of(long long tile, int i, int rows, int width) {
    if constexpr (ACROSS == 0) {
        return tile * N + i;
    } else {
        constexpr int HIGH = N / ACROSS;
        const unsigned tiles = (width + ACROSS - 1) / ACROSS, at = tile;
        const int row = at / tiles * HIGH + i / ACROSS, column = at % tiles * ACROSS + i % ACROSS;
        return row < rows && column < width ? (long long)row * width + column : (long long)rows * width;
    }
}
