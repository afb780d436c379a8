"""Calls of convolution and its gradients that are kept: the same results, and only for tensors of their kind."""

from __future__ import annotations

from typing import Any

import pytest

pytest.importorskip("torch")

import torch
from torch.nn import functional, grad
from torch.utils._python_dispatch import TorchDispatchMode

from tapwise.errors import InvalidProblem
from tapwise.torch import calls, operators

WINDOW = (2, 1), (1, 0), (1, 1), 2
SIZE, FILTERS = (2, 6, 7, 5), (4, 3, 3, 2)
# Rows and columns of SIZE that no window reaches.
MORE = (0, 0)
OPERATORS = ("conv2d", "conv2d_input", "conv2d_weight", "conv_transpose2d")


@pytest.fixture(autouse=True)
def _none_before() -> None:
    calls._calls.clear()


def computed(x: Any, w: Any, bias: Any, dy: Any) -> list[torch.Tensor]:
    with torch.no_grad():
        return [
            calls.fprop(x, w, bias, WINDOW, "ieee"), calls.dgrad(SIZE, w, dy, WINDOW, "ieee"),
            calls.wgrad(x, FILTERS, dy, WINDOW, "ieee"), calls.transposed(dy, w, bias_of_x(bias), WINDOW, MORE, "ieee"),
        ]  # fmt: skip


def bias_of_x(bias: torch.Tensor) -> torch.Tensor:
    return torch.cat([bias, bias[:2]])


def expected(x: Any, w: Any, bias: Any, dy: Any) -> list[torch.Tensor]:
    x, w, bias, dy = (one.detach().double() for one in (x, w, bias, dy))
    dx = grad.conv2d_input(SIZE, w, dy, *WINDOW)
    y, dw = functional.conv2d(x, w, bias, *WINDOW), grad.conv2d_weight(x, FILTERS, dy, *WINDOW)
    return [y, dx, dw, dx + bias_of_x(bias)[:, None, None]]


@pytest.mark.parametrize("order", [torch.contiguous_format, torch.channels_last])
@pytest.mark.parametrize(("dtype", "error"), [(torch.float32, 1e-4), (torch.bfloat16, 0.05)])
def test_what_is_kept_computes_the_same(
    dtype: torch.dtype, error: float, order: Any, monkeypatch: pytest.MonkeyPatch
) -> None:
    found: list[torch.Tensor] = []
    for number in range(4):
        x, dy = (torch.randn(shape).to(dtype=dtype, memory_format=order) for shape in (SIZE, (2, 4, 4, 4)))
        w, bias = torch.nn.Parameter(torch.randn(FILTERS).to(dtype)), torch.randn(4).to(dtype)
        before, found = found, computed(x, w, bias, dy)
        for one, wanted, earlier in zip(found, expected(x, w, bias, dy), before or found, strict=True):
            assert (one.dtype, one.stride(), one.requires_grad) == (dtype, earlier.stride(), False)
            torch.testing.assert_close(one.double(), wanted, rtol=error, atol=error)
        if number == 1:
            for name in OPERATORS:
                monkeypatch.setattr(operators, name, lambda *_, **__: pytest.fail("not kept"))


def test_what_is_not_of_the_kind_goes_the_whole_way(monkeypatch: pytest.MonkeyPatch) -> None:
    x, w = torch.randn(SIZE), torch.randn(FILTERS)
    for _ in range(3):
        calls.fprop(x, w, None, WINDOW, "ieee")
        with torch.no_grad():
            calls.fprop(x, w, None, WINDOW, "ieee")
    asked: list[int] = []
    own, plain = operators.conv2d, torch.randn(2, 6, 7, 6)

    def operator(*words: Any, **named: Any) -> torch.Tensor:
        asked.append(1)
        return own(*words, **named)

    monkeypatch.setattr(operators, "conv2d", operator)
    # Past the dispatcher, and by it.
    others = (x.transpose(2, 3).contiguous().transpose(2, 3), plain, x.double()), (
        torch._neg_view(x), x.as_subclass(type("Other", (torch.Tensor,), {})),
    )  # fmt: skip
    with torch.no_grad():
        calls.fprop(x, w, None, WINDOW, "ieee")
        assert not asked
        for other in others[0] + others[1]:
            y = calls.fprop(other, w.to(other.dtype), None, WINDOW, "ieee")
            wanted = functional.conv2d(other, w.to(other.dtype), None, *WINDOW)
            torch.testing.assert_close(y.as_subclass(torch.Tensor), wanted.as_subclass(torch.Tensor))
        assert len(asked) == len(others[0])
        with TorchDispatchLog() as log:
            calls.fprop(x, w, None, WINDOW, "ieee")
        assert log.seen == ["tapwise.conv2d.default"]
        for wrong in (torch.randn(4, 2, 3, 2), w.double()):
            for _ in range(3):
                with pytest.raises((InvalidProblem, RuntimeError)):
                    calls.fprop(x, wrong, None, WINDOW, "ieee")


class TorchDispatchLog(TorchDispatchMode):
    def __init__(self) -> None:
        super().__init__()
        self.seen: list[str] = []

    def __torch_dispatch__(self, function: Any, types: Any, args: Any = (), kwargs: Any = None) -> Any:
        self.seen.append(str(function))
        return function(*args, **(kwargs or {}))


def test_only_so_many_are_kept(monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setattr(calls, "KEPT", 3)
    w = torch.randn(4, 1, 1, 1)
    with torch.no_grad():
        for columns in range(1, 9):
            calls.fprop(torch.randn(1, 1, 1, columns), w, None, ((1, 1), (0, 0), (1, 1), 1), "ieee")
            assert len(calls._calls) <= 3
