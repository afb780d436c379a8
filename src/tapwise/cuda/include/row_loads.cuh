// What algorithms share that read windows from an image's rows in shared memory.
#pragma once

#include "activation.cuh"
#include "matrix.cuh"

// value / d, where `per` is 2^32 / d rounded up, or 0 for 1; value * d is less than 2^32.
DEVICE int divide(int value, unsigned per) { return per ? __umulhi(value, per) : value; }

// Where a tile of outputs begins: its image, first row and column; tiles of an image lie in rows of tiles_w.
struct TileOrigin {
    int n, h, w;
    DEVICE TileOrigin(int tile, int tiles_h, int tiles_w, int down, int across) {
        const int plane = tiles_h * tiles_w, rest = tile % plane;
        n = tile / plane;
        h = rest / tiles_w * down;
        w = rest % tiles_w * across;
    }
};
