"""On a GPU: algorithms of plain arithmetic against float64; more than 2^31 elements."""

from __future__ import annotations

from typing import Any

import pytest
from convolutions import CONVOLUTIONS

import tapwise
from tapwise import registry, verify
from tapwise.cuda.jit.device import gpu

pytestmark = pytest.mark.cuda


@pytest.mark.parametrize("dtype", ["f32", "f64", "f16"])
@pytest.mark.parametrize("text", CONVOLUTIONS)
@pytest.mark.parametrize("identifier", [name for name in registry.ALGORITHMS["conv"] if name.startswith("cuda.")])
def test_convolution(identifier: str, text: str, dtype: str) -> None:
    # Imported, its cuBLAS is among the configs.
    import torch  # noqa: F401

    problem, device = registry.parse(f"{text} {dtype}"), gpu()
    algorithm = registry.get(identifier)
    if algorithm.refusal(problem, device):
        return
    configs = list(algorithm.configs(problem, device))
    some = {configs[0], configs[-1], configs[len(configs) // 2], configs[-5]} if len(configs) > 20 else set(configs)
    for config in some:
        for integers in (False, True):
            verdict = verify.check(problem, identifier, config, device=device, integers=integers)
            assert verdict, f"{config}: {verdict.message}"


def test_of_no_element() -> None:
    """The reference is not launched with a grid of no block."""
    verdict = verify.check(registry.parse("n0 c1 h1 w1 k1 r1 s1"), "cuda.sliding_window", device=gpu())
    assert verdict, verdict.message


def test_more_than_2_31_elements() -> None:
    import torch

    x = torch.ones(40, 1, 7400, 7400, device="cuda", dtype=torch.float16)
    assert x.numel() > 1 << 31
    w = torch.ones(1, 1, 2, 2, device="cuda", dtype=torch.float16)
    for identifier in ("cuda.direct", "cuda.sliding_window"):
        y = tapwise.conv2d(x, w, algorithm=identifier)
        assert bool((y == 4).all())
    del y
    columns = tapwise.im2col(x[:, :, :, :7398], (1, 2), stride=(1, 2))
    assert columns.numel() > 1 << 31 and bool((columns == 1).all())


@pytest.mark.parametrize("layout", ["contiguous_format", "channels_last"])
def test_implicit_gemm_simt_of_more_than_2_31_elements(layout: str) -> None:
    import torch

    x = torch.ones(3, 16, 7000, 7000, device="cuda").contiguous(memory_format=getattr(torch, layout))
    assert x.numel() > 1 << 31
    x[-1] = 2
    y = tapwise.conv2d(x, torch.ones(16, 16, 1, 1, device="cuda"), algorithm="cuda.implicit_gemm_simt")
    assert bool((y[:-1] == 16).all()) and bool((y[-1] == 32).all())


@pytest.mark.parametrize("dtype", ["float32", "float16", "bfloat16"])
@pytest.mark.parametrize("layout", ["contiguous_format", "channels_last"])
def test_transposed_convolution(layout: str, dtype: str) -> None:
    """Against float64: bias and activation fused, phases that no tap meets, and more rows than the stride gives."""
    import torch
    from torch.nn import functional

    cases: list[tuple[tuple[int, ...], dict[str, Any]]] = [
        ((16, 24, 4, 4), {"stride": 2, "padding": 1}),
        ((16, 8, 1, 2), {"stride": 3, "output_padding": (2, 1), "groups": 2}),
        ((16, 8, 3, 2), {"stride": (1, 2), "dilation": (4, 3), "output_padding": (3, 2), "padding": 1}),
    ]
    for w_shape, words in cases:
        x, w = torch.randn(3, 16, 9, 7, device="cuda"), torch.randn(w_shape, device="cuda")
        bias = torch.randn(w_shape[1] * words.get("groups", 1), device="cuda")
        x, w, bias = (one.to(getattr(torch, dtype)) for one in (x, w, bias))
        expected = functional.silu(functional.conv_transpose2d(x.double(), w.double(), bias.double(), **words))
        image = x.contiguous(memory_format=getattr(torch, layout))
        # The second is made again from the first.
        for _ in range(2):
            y = tapwise.conv_transpose2d(image, w, bias, **words, activation="silu")
            tolerance = 1e-4 if dtype == "float32" else 3e-2
            torch.testing.assert_close(y.double(), expected, rtol=tolerance, atol=tolerance)
            assert y.is_contiguous(memory_format=getattr(torch, layout))
