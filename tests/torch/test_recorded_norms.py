"""Layer norm in recordings: by a kernel of ours where its rows lie one behind the other."""

from __future__ import annotations

from typing import Any

import pytest

pytest.importorskip("torch")

import numpy as np
import torch
from torch.nn import functional

from tapwise.cpu.row_norms import RowNorms
from tapwise.torch.recorded import Joined, record


def replayed(function: Any) -> tuple[Any, list[RowNorms]]:
    """(what a recording gives when it is played back, its steps that norm rows)."""
    with torch.no_grad():
        recorded, result = record(function)
        recorded.replay()
    steps = [one for step in recorded._steps if isinstance(step, Joined) for one in step.steps]
    return result, [one for one in steps if isinstance(one, RowNorms)]


@pytest.mark.parametrize("affine", ["", "factors", "factors offsets"])
@pytest.mark.parametrize("shape", [(1, 1), (5, 3), (2, 3, 7), (3, 8), (1, 9, 11, 65), (1030, 96), (4, 4099)])
def test_against_float64(shape: tuple[int, ...], affine: str) -> None:
    torch.manual_seed(0)
    x, length = 3 * torch.randn(shape) + 100, shape[-1:]
    weight, bias = (torch.randn(length) if word in affine else None for word in ("factors", "offsets"))
    found, ours = replayed(lambda: functional.layer_norm(x, length, weight, bias, 1e-3))
    assert len(ours) == 1
    factors, offsets = (None if one is None else one.double() for one in (weight, bias))
    wanted = functional.layer_norm(x.double(), length, factors, offsets, 1e-3)
    # The mean is 30 times the deviation: its rounding shows as much.
    np.testing.assert_allclose(found, wanted, rtol=0, atol=2e-4)


def test_several_axes_and_what_is_read_again() -> None:
    x, weight, bias = torch.randn(4, 5, 6), torch.randn(5, 6), torch.randn(5, 6)
    found, ours = replayed(lambda: functional.layer_norm(x.relu(), (5, 6), weight, bias) + x)
    assert len(ours) == 1
    torch.testing.assert_close(found, functional.layer_norm(x.relu(), (5, 6), weight, bias) + x)


def test_new_images_and_factors() -> None:
    x, weight = torch.randn(6, 40), torch.randn(40)
    with torch.no_grad():
        recorded, result = record(lambda: functional.layer_norm(x, (40,), weight))
        for one in (x, weight):
            one.normal_()
        recorded.replay()
    torch.testing.assert_close(result, functional.layer_norm(x, (40,), weight))


@pytest.mark.parametrize("case", ["transposed", "float64", "the mean is wanted", "transposed factors"])
def test_the_rest_is_pytorchs(case: str) -> None:
    x = torch.randn(4, 6, 6, dtype=torch.float64 if case == "float64" else torch.float32)
    x = x.transpose(0, 1) if case == "transposed" else x
    weight = torch.randn(6, 6).to(x.dtype)
    weight = weight.t() if case == "transposed factors" else weight

    def function() -> Any:
        y, mean, _ = torch.native_layer_norm(x, (6, 6) if x.shape[0] == 4 else (4, 6), factors, None, 1e-5)
        return (y, mean) if case == "the mean is wanted" else y

    factors = None if case == "transposed" else weight
    found, ours = replayed(function)
    assert not ours
    torch.testing.assert_close(found, function())
