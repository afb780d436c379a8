"""activation.cuh by emulation: what every kernel does to a sum, in float64, float32 and, for tensor cores, in short."""

from __future__ import annotations

import ml_dtypes
import numpy as np
import pytest
import torch

import emulated
from tapwise.activation import ACTIVATIONS
from tapwise.baselines.torch_conv import activation as by_torch
from tapwise.cuda.jit.compile import Source, stub
from tapwise.cuda.jit.launch import Launch
from tapwise.ops.conv.cuda.window import activation

# What a kernel makes of sums: each by itself, or two of them in a word.
ONE, TWO = "y[i] = {}<A>(x[i]);", "if (i % 2 == 0) *(unsigned *)(y + i) = activated<{}, A>(x[i], x[i + 1]);"
WAYS = {
    "f64": ("double", ONE.format("activate")),
    "f32": ("float", ONE.format("activate")),
    "tf32": ("float", ONE.format("activated")),
    "f16": ("f16", TWO.format("f16")),
    "bf16": ("bf16", TWO.format("bf16")),
}
KINDS = {"f64": np.float64, "f16": np.float16, "bf16": ml_dtypes.bfloat16}
SPECIAL = [
    np.nan, np.inf, -np.inf, 0.0, -0.0, 3, -3, 6, -6, 2.9999998, -2.9999998, 1e-40, -1e-40, 88, -88, -100, -104, -1e3,
    1e30, -1e30, 2e38, -2e38,
]  # fmt: skip


def kernel(words: tuple[str, ...], dtype: str) -> Source:
    """One thread an element; a row of y for each activation."""
    element, line = WAYS[dtype]
    sums = "double" if dtype == "f64" else "float"
    code = (
        "struct Rows { void *x, *y; long long n; };\ntemplate <int A> DEVICE void row(const Rows &p, int number) {\n"
        f"    const {sums} *x = static_cast<const {sums} *>(p.x);\n"
        f"    {element} *y = static_cast<{element} *>(p.y) + number * p.n;\n"
        f"    for (int i = threadIdx.x; i < p.n; i += blockDim.x) {{ {line} }}\n}}\n"
        "template <int... A> DEVICE void rows(const Rows &p) { int number = 0; (row<A>(p, number++), ...); }\n"
    )
    return stub("activation.cuh", "rows", ", ".join(map(activation, words)), "Rows", 64, declarations=code)


@pytest.mark.skipif(not emulated.available(), reason="needs g++")
@pytest.mark.parametrize("dtype", WAYS)
@pytest.mark.parametrize("words", [ACTIVATIONS, ("leaky_relu-2.5",), ("leaky_relu0",)])
def test_activations_are_pytorchs(words: tuple[str, ...], dtype: str) -> None:
    """Within 16 units of roundoff of the result and of the argument, and the rounding of the output."""
    x = np.array([*SPECIAL, *np.linspace(-20, 20, 4001), *np.linspace(-3.01, 3.01, 2001)])
    x = x.astype(np.float64 if dtype == "f64" else np.float32)
    kind = KINDS.get(dtype, np.float32)
    rows = np.full((len(words), x.size), np.nan, kind)
    emulated.run(Launch(kernel(words, dtype), {"n": x.size}, (1, 1, 1), 64), {"x": x, "y": rows})
    told = ml_dtypes.finfo(kind)  # type: ignore[no-untyped-call]
    eps, least, unit = float(told.eps) / 2, float(told.smallest_subnormal), 2.0 ** (-53 if dtype == "f64" else -24)
    with np.errstate(all="ignore"):
        for word, row in zip(words, rows.astype(np.float64), strict=True):
            wanted = by_torch(word)(torch.from_numpy(x.astype(np.float64))).numpy()
            bound = 16 * unit * (np.abs(x) + np.abs(wanted)) + eps * np.abs(wanted) + least
            rounded = wanted.astype(kind).astype(np.float64)
            right = np.where(np.isfinite(rounded), np.abs(row - wanted) <= bound, row == rounded)
            right |= np.isnan(row) & np.isnan(wanted)
            assert right.all(), f"{word} of {x[~right][0]}: {row[~right][0]}, not {wanted[~right][0]}"
