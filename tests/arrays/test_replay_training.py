"""Convolutions in training on a GPU, without one: nothing but launches is left of them."""

from __future__ import annotations

import pytest

pytest.importorskip("torch")

import torch
from host_launches import Launched
from torch.nn import functional, grad

import emulated
from tapwise.arrays import device, replay
from tapwise.torch import calls as training


@pytest.mark.skipif(not emulated.available(), reason="kernels run by emulation")
def test_calls_of_training(launched: Launched, monkeypatch: pytest.MonkeyPatch) -> None:
    """Of the third call on nothing but launches is left, of a bias and of both gradients."""
    allocate, launched.computed = replay.allocator(torch, 0), True
    monkeypatch.setattr(replay, "allocator", lambda *_: lambda *given: allocate(*given).fill_(77))
    window, size, filters = ((2, 1), (1, 0), (1, 1), 1), (1, 6, 5, 4), (8, 6, 3, 2)
    training._calls.clear()
    for number in range(3):
        x, dy = (torch.randn(shape).contiguous(memory_format=torch.channels_last) for shape in (size, (1, 8, 3, 3)))
        w, bias = torch.randn(filters), torch.randn(8)
        with torch.no_grad():
            found = [
                training.fprop(x, w, bias, window, "ieee"), training.dgrad(size, w, dy, window, "ieee"),
                training.wgrad(x, filters, dy, window, "ieee"),
            ]  # fmt: skip
        wanted = [
            functional.conv2d(x, w, bias, *window), grad.conv2d_input(size, w, dy, *window),
            grad.conv2d_weight(x, filters, dy, *window),
        ]  # fmt: skip
        torch.testing.assert_close(found, wanted, rtol=1e-4, atol=1e-4)
        if number == 1:
            monkeypatch.setattr(device, "view", lambda *_: pytest.fail("not made again"))
    monkeypatch.undo()
    training._calls.clear()
