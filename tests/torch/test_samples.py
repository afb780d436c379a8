"""The shapes and arguments with which PyTorch tests its own convolutions (OpInfo): the same results and gradients."""

from __future__ import annotations

from functools import partial
from typing import Any

import pytest

pytest.importorskip("torch")

import torch
from torch.autograd import gradcheck, gradgradcheck
from torch.nn import functional

import tapwise.torch

# One of the samples has a filter of even size.
pytestmark = pytest.mark.filterwarnings("ignore:Using padding='same':UserWarning")

# x, w, whether there is a bias, and the other arguments.
SAMPLES: dict[str, list[tuple[tuple[int, ...], tuple[int, ...], bool, dict[str, Any]]]] = {
    "conv1d": [
        ((1, 3, 4), (3, 3, 3), True, {"stride": (2,), "padding": 2}),
        ((2, 4, 8), (2, 2, 3), True, {"stride": 3, "padding": 1, "groups": 2, "dilation": 2}),
        ((1, 4, 5), (1, 4, 3), False, {"stride": (2,), "padding": "valid"}),
        ((2, 2, 4), (2, 1, 4), True, {"stride": (1,), "padding": "same", "groups": 2, "dilation": (2,)}),
    ],
    "conv_transpose1d": [
        ((1, 3, 4), (3, 3, 3), True, {"stride": (2,), "padding": 2, "output_padding": (1,)}),
        (
            *((2, 2, 4), (2, 2, 4), True),
            {"stride": (3,), "padding": (1,), "output_padding": (2,), "groups": 2, "dilation": (4,)},
        ),
        ((1, 1, 4), (1, 1, 4), True, {"stride": 2, "padding": 1, "output_padding": 1, "dilation": (2,)}),
        ((1, 1, 4), (1, 2, 3), False, {"stride": 2, "padding": 1, "output_padding": 1}),
        ((1, 4, 5), (4, 8, 3), False, {}),
    ],
    "conv2d": [
        ((1, 3, 4, 4), (3, 3, 3, 3), True, {"stride": (2, 2), "padding": 2}),
        ((2, 4, 8, 8), (2, 2, 3, 3), True, {"stride": (3, 2), "padding": (2, 1), "groups": 2, "dilation": (4, 4)}),
        ((1, 4, 5, 5), (1, 4, 2, 3), True, {"stride": 2, "padding": 1, "dilation": (2, 3)}),
        ((1, 2, 4, 3), (4, 2, 3, 4), False, {"stride": 2, "padding": 1}),
        ((1, 4, 5, 5), (1, 4, 2, 3), True, {"stride": 1, "padding": "same", "dilation": 3}),
        ((2, 4, 6, 6), (8, 1, 3, 3), True, {"groups": 4}),
        ((2, 4, 6, 6), (4, 1, 3, 3), True, {"groups": 4, "stride": (3, 2)}),
        ((2, 4, 6, 5), (6, 2, 3, 2), True, {"groups": 2}),
    ],
    "conv_transpose2d": [
        ((1, 3, 4, 4), (3, 3, 3, 3), True, {"stride": (2, 2), "padding": 2, "output_padding": (1, 1)}),
        (
            *((2, 2, 4, 4), (2, 2, 4, 5), True),
            {"stride": (3, 2), "padding": (1, 2), "output_padding": (2, 3), "groups": 2, "dilation": (4, 4)},
        ),
        ((1, 1, 4, 5), (1, 1, 4, 3), True, {"stride": 2, "padding": 1, "output_padding": 1, "dilation": (2, 3)}),
        ((1, 1, 4, 3), (1, 2, 3, 4), False, {"stride": 2, "padding": 1, "output_padding": 1}),
        ((2, 4, 4, 4), (4, 1, 3, 3), False, {"groups": 4}),
    ],
}


def made(sample: tuple[Any, ...], dtype: torch.dtype, transposed: bool) -> list[torch.Tensor]:
    """x, w and a bias where there is one."""
    x, w, bias, words = sample
    channels = w[1] * words.get("groups", 1) if transposed else w[0]
    shapes = [x, w, *([(channels,)] if bias else [])]
    generator = torch.Generator().manual_seed(3)
    return [torch.randn(shape, dtype=dtype, generator=generator) for shape in shapes]


@pytest.mark.parametrize("name", SAMPLES)
def test_results_are_those_of_torch(name: str) -> None:
    for sample in SAMPLES[name]:
        x, *rest = made(sample, torch.float32, "transpose" in name)
        expected = getattr(functional, name)(x, *rest, **sample[3])
        found = getattr(tapwise, name)(x, *rest, **sample[3])
        torch.testing.assert_close(found, expected, rtol=1e-4, atol=1e-4)
        unbatched = getattr(tapwise, name)(x[0], *rest, **sample[3])
        torch.testing.assert_close(unbatched, expected[0], rtol=1e-4, atol=1e-4)


# Derivatives of the other convolutions are tested on their own.
@pytest.mark.parametrize(("name", "some"), [("conv2d", slice(2, 5, 2)), ("conv_transpose2d", slice(None))])
def test_derivatives(name: str, some: slice) -> None:
    """Of the first and second order, in one direction chosen at random."""
    operator = getattr(torch.ops.tapwise, name)
    for sample in SAMPLES[name][some]:
        words = {
            key: [value] * 2 if isinstance(value, int) and key != "groups" else value
            for key, value in sample[3].items()
        }
        if words.get("padding") == "same":
            # (2 - 1) * 3 rows and (3 - 1) * 3 columns.
            words["padding"] = [1, 2, 3, 3]
        values = [value.requires_grad_() for value in made(sample, torch.float64, "transpose" in name)]
        expected = getattr(functional, name)(*values, **sample[3])
        call = partial(operator, **words)
        torch.testing.assert_close(call(*values), expected, rtol=1e-9, atol=1e-9)
        assert gradcheck(call, values, fast_mode=True), sample
        assert gradgradcheck(call, values, fast_mode=True), sample


@pytest.mark.parametrize(
    ("name", "words"),
    [
        ("conv_transpose1d", {"padding": "same", "stride": 2}),
        ("conv_transpose2d", {"padding": "full"}),
        ("conv_transpose2d", {"padding": ((1, 1), (0, -1))}),
        ("conv_transpose2d", {"output_padding": 3, "stride": 2, "dilation": 3}),
        ("conv_transpose2d", {"output_padding": (1, 2), "stride": (1, 2), "dilation": (2, 1)}),
        ("conv_transpose1d", {"output_padding": -1}),
        ("conv2d", {"padding": "same", "stride": 2}),
        ("conv1d", {"dilation": -1}),
        ("conv2d", {"groups": 0}),
    ],
)
def test_what_is_refused_is_named(name: str, words: dict[str, Any]) -> None:
    x, w, _bias, _words = SAMPLES[name][0]
    argument = next(iter(words))
    with pytest.raises(tapwise.InvalidProblem, match=f"{argument}="):
        getattr(tapwise, name)(torch.ones(x), torch.ones(w), **words)
