// What the kernels of planes in shared memory are given.
#pragma once

struct Planes {
    const void *x, *w;
    void *y;
    const void *bias, *residual;
    long long n, c;
    // Bands of a plane.
    long long pieces;
    // The filters were written before all that is still to run.
    long long weights_ready;
};
