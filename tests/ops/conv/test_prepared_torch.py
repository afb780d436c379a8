"""Prepared calls on tensors that need no conversion."""

from __future__ import annotations

from collections.abc import Mapping
from types import SimpleNamespace

import numpy as np
import pytest
import torch.autograd.forward_ad as forward_ad

from tapwise.cuda import plan
from tapwise.ops.conv.prepared import TorchCall
from tapwise.ops.conv.problem import ConvProblem


def test_a_quick_call_brings_the_workspace_along() -> None:
    import torch

    problem = ConvProblem.parse("c4 h5 w5 k4 r3 s3")
    seen: list[tuple[Mapping[str, int], int]] = []

    class Fake(plan.CudaPlan):
        def __init__(self, size: int) -> None:
            self.workspace_bytes = size

        def enqueue(self, addresses: Mapping[str, int], stream: int) -> None:
            seen.append((addresses, stream))

    filters, packed = SimpleNamespace(index=0, owner=torch.zeros(1)), SimpleNamespace(ptr=7, synchronized=True)
    x = torch.zeros(problem.x_shape)
    for size in (0, 16):
        call = TorchCall(problem, Fake(size), packed, None, filters)
        call._stream = lambda index: 5
        y = call(x)
        addresses, stream = seen[-1]
        assert (addresses["x"], addresses["y"], addresses["w"], stream) == (x.data_ptr(), y.data_ptr(), 7, 5)
        assert addresses["weights_ready"] == 1
        assert ("workspace" in addresses) == (size > 0)
        assert y.shape == problem.y_shape


@pytest.mark.parametrize("layout", ["nchw", "nhwc"])
def test_a_quick_call_takes_a_residual_that_needs_no_conversion(layout: str) -> None:
    import torch

    problem = ConvProblem.parse(f"n2 c4 h5 w6 k3 r3 s3 residual {layout}")

    class Fake(plan.CudaPlan):
        workspace_bytes = 0

        def __init__(self) -> None:
            self.seen: dict[str, int] = {}

        def enqueue(self, addresses: Mapping[str, int], stream: int) -> None:
            self.seen = addresses  # type: ignore[assignment]

    made = Fake()
    # Tensors of the host are numbered -1.
    filters, packed = SimpleNamespace(index=-1, owner=torch.zeros(1)), SimpleNamespace(ptr=7, synchronized=False)
    call = TorchCall(problem, made, packed, None, filters)
    call._stream = lambda index: 5
    order, other = torch.channels_last, torch.contiguous_format
    if layout == "nchw":
        order, other = other, order
    x = torch.zeros(problem.x_shape).contiguous(memory_format=order)
    residual = torch.zeros(problem.y_shape).contiguous(memory_format=order)
    assert call.takes(x, residual)
    y = call(x, residual)
    assert made.seen["residual"] == residual.data_ptr() and made.seen["x"] == x.data_ptr()
    assert made.seen["y"] == y.data_ptr() and y.is_contiguous(memory_format=order)
    for wrong in (
        None,
        residual.contiguous(memory_format=other),
        residual[:1],
        residual.double(),
        np.zeros(problem.y_shape),
        torch.zeros(residual.numel() + 1)[1:].reshape(residual.shape),
        residual.clone().requires_grad_(),
    ):
        assert not call.takes(x, wrong)
    assert not call.takes(x.contiguous(memory_format=other), residual)
    assert not call.takes(torch._neg_view(x), residual)
    with forward_ad.dual_level():
        assert not call.takes(x, residual)
    quick = TorchCall(problem.replace(residual=False), made, packed, None, filters)
    assert quick.takes(x) and not quick.takes(x, residual)
