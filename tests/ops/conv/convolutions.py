"""Small convolutions of every kind, for tests on a GPU."""

from __future__ import annotations

CONVOLUTIONS = [
    "c5 h11 w13 k7 r3 s3 pad1",
    "n2 c3 h17 w19 k9 r5 s5 stride2 pad2",
    "c6 h12 w9 k8 r3 s3 pad2 dilation2 bias relu",
    "c8 h9 w9 k6 r3 s3 pad1 groups2 residual tanh",
    "c17 h7 w9 k19 r1 s1 bias gelu",
    "c4 h10 w12 k5 r1 s7 pad0x3",
    "c9 h13 w15 k9 r3 s3 pad1 groups9 sigmoid",
    "c3 h40 w64 k4 r3 s3 pad2:1x3:0 stride2x1",
    "n3 c2 h33 w40 k13 r3 s3 pad1 bias silu",
    "c1 h70 w131 k1 r8 s8",
    "c2 h4 w5 k3 r3 s3 pad4 relu6",
    "n8 c128 h13 w13 k256 r3 s3 pad1 groups2",
]
