"""On a GPU: patches, pooling and reductions against float64 and PyTorch."""

from __future__ import annotations

from typing import Any

import numpy as np
import pytest

import tapwise
from tapwise import registry, verify
from tapwise.cuda.jit.device import gpu
from tapwise.ops.reduce.problem import REDUCTIONS

pytestmark = pytest.mark.cuda

PATCHES = [
    "n2 c3 h13 w17 r3 s3 stride2 pad1",
    "c4 h9 w9 r2 s2",
    "n2 c5 h20 w32 r3 s3 pad1",
    "c2 h15 w40 r3 s3 stride3 pad0:1x2:0 dilation1x2",
    "c2 h11 w26 r1 s7 stride1x3 pad0x5",
    "n3 c2 w50 s5 stride2 pad3:1",
    "n3 c5 h60 w55 r3 s3 pad1",
    "n2 c3 h81 w119 r5 s3 stride2x1 pad2",
    "c2 d5 h6 w19 t2 r3 s3 stride1x2x2 pad1 dilation2x1x1",
]


@pytest.mark.parametrize("dtype", ["f32", "f64", "f16", "bf16"])
@pytest.mark.parametrize("text", PATCHES)
@pytest.mark.parametrize("operator", ["im2col", "col2im"])
def test_patches(operator: str, text: str, dtype: str) -> None:
    problem, device = registry.parse(f"{operator} {text} {dtype}"), gpu()
    for algorithm in registry.of_backend("cuda", operator):
        if algorithm.refusal(problem, device):
            continue
        for config in algorithm.configs(problem, device):
            verdict = verify.check(problem, algorithm.id, config, device=device)
            assert verdict, f"{algorithm.id} {config}: {verdict.message}"


POOLS = [
    "maxpool n2 c3 h13 w17 r3 s3 stride2 pad1",
    "maxpool c5 h9 w9 r2 s3 stride1x2 pad1:0x1:2 dilation2x1 ceil nhwc",
    "avgpool n2 c3 h13 w17 r3 s3 stride2 pad1 ceil",
    "avgpool c4 h9 w11 r3 s2 stride1 pad1:0x1:1 exclude_pad",
    "avgpool n3 c7 h8 w9 r5 s5 pad2 divisor7 nhwc",
    "avgpool c2 h40 w41 r7 s7 stride3",
    "maxpool n2 c24 h13 w17 r3 s3 stride2 pad1 nhwc",
    "maxpool n2 c12 h9 w7 r3 s2 stride1 pad1:0x1:1 nhwc indices",
    "avgpool n2 c6 h9 w8 r3 s3 pad1 exclude_pad nhwc",
    "maxpool n2 c12 h12 w14 r3 s3 stride2 pad1 indices",
    "maxpool n2 c9 h35 w35 r5 s5 stride1 pad2",
    "avgpool n3 c8 h40 w64 r2 s2",
    "avgpool c8 h9 w9 r7 s6 stride1 nhwc",
]
RUNS = [
    *(f"reduce {op} {rest}" for op in REDUCTIONS for rest in ("5x1000x7 axis1", "9x41 axis1", "41113", "300x33 axis0")),
    "reduce sum 3x4x5 axisnone",
    "reduce mean 2000x3000 axis1",
    "reduce max 70000x3 axis1",
    "reduce mean 32x3136x144 axis1",
    "reduce norm2 3x12544x32 axis1",
    "reduce min 5x49x1154 axis1",
    "reduce prod 2x37x12 axis1",
    "softmax 1024x1000",
    "softmax 100003",
    "softmax 7x3",
    "softmax 8x21x37x5 axis1",
    "softmax 3x5000x129 axis1",
    "log_softmax 3x70001",
    "softmax 700x30522",
    "log_softmax 1999x49",
    "softmax 513x90",
    "log_softmax 40x33x20 axis1",
]


GRADIENTS = [
    *(f"{text} dgrad" for text in POOLS if "indices" not in text),
    "maxpool n2 c24 h40 w33 r3 s3 stride2 pad1 dgrad",
    "maxpool n2 c16 h21 w22 r5 s5 stride1 pad2 nhwc dgrad",
    "softmax 1024x1000 dgrad",
    "softmax 3x100000 dgrad",
    "log_softmax 40x197 dgrad",
    "log_softmax 600x8200 dgrad",
    "softmax 8x21x37x5 axis1 dgrad",
    "log_softmax 3x5000x129 axis1 dgrad",
]


@pytest.mark.parametrize("dtype", ["f32", "f64", "f16", "bf16"])
@pytest.mark.parametrize("text", [*POOLS, *RUNS, *GRADIENTS])
def test_plain_operators(text: str, dtype: str) -> None:
    problem, device = registry.parse(f"{text} {dtype}"), gpu()
    for algorithm in registry.of_backend("cuda", problem.operator):
        if algorithm.refusal(problem, device):
            continue
        for config in algorithm.configs(problem, device):
            verdict = verify.check(problem, algorithm.id, config, device=device)
            assert verdict, f"{algorithm.id} {config}: {verdict.message}"


@pytest.mark.parametrize("layout", ["nchw", "nhwc"])
def test_positions_of_pooling(layout: str) -> None:
    import torch

    order = torch.channels_last if layout == "nhwc" else torch.contiguous_format
    x = torch.randint(-3, 4, (2, 3, 21, 23), device="cuda").float()
    x[0, 0, 3, 4], x[1, 2, 9:12] = float("nan"), float("-inf")
    x = x.contiguous(memory_format=order)
    windows: tuple[tuple[int, ...], ...] = ((3, 2, 1), (2, 2, 0), (3, 1, 1, 2))
    for window in windows:
        pool: Any = tapwise.max_pool2d
        y, places = pool(x, *window, return_indices=True)
        wanted, positions = torch.nn.functional.max_pool2d(x, *window, return_indices=True)
        torch.testing.assert_close(y, wanted, equal_nan=True)
        assert torch.equal(places, positions) or layout == "nhwc"
        flat = x.flatten(2).gather(2, places.flatten(2)).view_as(y)
        torch.testing.assert_close(flat, wanted, equal_nan=True)
    y = tapwise.avg_pool1d(x[0], 3, 2, 1)
    torch.testing.assert_close(y, torch.nn.functional.avg_pool1d(x[0], 3, 2, 1), equal_nan=True)


def test_reductions_of_special_values() -> None:
    import torch

    inf, nan = float("inf"), float("nan")
    rows = [
        [1.0, nan, 3.0, -inf],
        [inf, 1.0, 2.0, 3.0],
        [-inf, -inf, -inf, -inf],
        [inf, -inf, 0.0, 0.0],
        [nan, nan, inf, 1.0],
        [2.0, 5.0, 5.0, 1.0],
        [inf, inf, 1.0, 1.0],
    ]
    x = torch.tensor(rows, device="cuda").repeat_interleave(50, 1)
    for function in (tapwise.softmax, tapwise.log_softmax):
        wanted = getattr(torch, function.__name__)(x, -1)
        torch.testing.assert_close(function(x), wanted, equal_nan=True)
        torch.testing.assert_close(function(x.T.contiguous(), 0).T, wanted, equal_nan=True)
    for op, wanted in (
        ("max", x.amax(1)),
        ("min", x.amin(1)),
        ("logsumexp", x.logsumexp(1)),
        ("sum", x.sum(1)),
        ("prod", x.prod(1)),
    ):
        torch.testing.assert_close(tapwise.reduce(x, op, 1), wanted, equal_nan=True)
    for op in ("argmax", "argmin"):
        assert tapwise.reduce(x, op, 1).tolist() == getattr(np, op)(x.cpu().numpy(), axis=1).tolist()


def test_reductions_of_any_strides_and_places() -> None:
    import torch

    x = torch.randn(4, 6, 10, device="cuda")
    seen = x[:, ::2].transpose(0, 2)
    torch.testing.assert_close(tapwise.reduce(seen, "sum", (0, 2), keepdims=True), seen.sum((0, 2), keepdim=True))
    torch.testing.assert_close(tapwise.reduce(x, "sum", ()), x)
    torch.testing.assert_close(tapwise.softmax(seen, 1), torch.softmax(seen, 1))
    out = torch.empty(10, 3, 4, device="cuda").transpose(1, 2).contiguous().transpose(1, 2)
    assert tapwise.softmax(seen, 0, out=out) is out
    torch.testing.assert_close(out, torch.softmax(seen, 0))
    assert tapwise.reduce(torch.empty(3, 0, device="cuda"), "sum", 1).tolist() == [0.0] * 3
    array = x.cpu().numpy()
    np.testing.assert_allclose(tapwise.reduce(array, "mean", 1, device="cuda"), array.mean(1), rtol=1e-5, atol=1e-6)
    y = tapwise.max_pool2d(array, 2, device="cuda")
    assert isinstance(y, np.ndarray)
    np.testing.assert_array_equal(y, tapwise.max_pool2d(array, 2))
    scalar = torch.tensor(3.0, device="cuda")
    assert tapwise.softmax(scalar).item() == 1.0 and tapwise.reduce(scalar, "sum").item() == 3.0
