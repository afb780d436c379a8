// A convolution's sizes, as every kernel of ours that computes one gets them: 8-byte words, in this order.
#pragma once

struct Window {
    const void *x, *w;
    void *y;
    const void *bias, *residual;
    long long n, c, height, width, k, r, s, p, q;
    long long stride_h, stride_w, pad_h, pad_w, dilation_h, dilation_w, groups;
    // Blocks along q, p and the output channels.
    long long tiles_q, tiles_p, tiles_k;
};
