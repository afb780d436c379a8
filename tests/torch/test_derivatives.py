"""Gradients of torch.ops.tapwise: gradcheck in float64, transforms of torch.func, torch.compile, autocast, training."""

from __future__ import annotations

from collections.abc import Callable
from typing import Any

import pytest

pytest.importorskip("torch")

import torch
from torch.autograd import gradcheck, gradgradcheck
from torch.nn import functional

import tapwise.torch
from tapwise.activation import ACTIVATIONS

OPS = torch.ops.tapwise
WORDS: tuple[Any, ...] = ([2, 1], [1, 1], [1, 1], 2)


def made(*shape: int) -> torch.Tensor:
    generator = torch.Generator().manual_seed(sum(shape))
    return torch.randn(*shape, dtype=torch.float64, generator=generator).requires_grad_()


X, W, B, R = made(2, 4, 4, 3), made(6, 2, 3, 3), made(6), made(2, 6, 2, 3)
# Operators on x alone.
OF_X: dict[str, Callable[[torch.Tensor], torch.Tensor]] = {
    "max_pool2d": lambda x: OPS.max_pool2d(x, [2, 3], [1, 2], [1, 1]),
    "max_pool2d_with_indices": lambda x: OPS.max_pool2d_with_indices(x, [2, 2])[0],
    "avg_pool2d": lambda x: OPS.avg_pool2d(x, [2, 2], [1, 1], [1, 1], False, False),
    "global_avg_pool2d": OPS.global_avg_pool2d,
    "softmax": lambda x: OPS.softmax(x, 1),
    "log_softmax": OPS.log_softmax,
    "im2col": lambda x: OPS.im2col(x, [3, 2], [1, 1], [1, 0], [2, 1]),
    "col2im": lambda x: OPS.col2im(x.flatten(2)[..., :12], [3, 7], [2, 2]),
}


@pytest.mark.parametrize("activation", [None, *ACTIVATIONS, "leaky_relu0.2", "leaky_relu-0.5"])
def test_convolution(activation: str | None) -> None:
    assert gradcheck(lambda x, w, b, r: OPS.conv2d(x, w, b, *WORDS, r, activation=activation), (X, W, B, R))


@pytest.mark.parametrize("activation", [None, "silu", "tanh", "gelu"])
def test_second_derivatives(activation: str | None) -> None:
    assert gradgradcheck(lambda x, w, b: OPS.conv2d(x, w, b, *WORDS, activation=activation), (X, W, B))


def test_gradients_have_gradients() -> None:
    assert gradcheck(lambda w, dy: OPS.conv2d_input(X.shape, w, dy, *WORDS), (W, R))
    assert gradcheck(lambda x, dy: OPS.conv2d_weight(x, W.shape, dy, *WORDS), (X, R))


@pytest.mark.parametrize("activation", [None, "relu", "silu"])
def test_transposed_convolution(activation: str | None) -> None:
    words: tuple[Any, ...] = ([2, 2], [1, 1], [1, 0], 2)
    w, b = made(4, 3, 3, 3), made(6)
    assert gradcheck(lambda x, w, b: OPS.conv_transpose2d(x, w, b, *words, activation=activation), (X, w, b))
    found = OPS.conv_transpose2d(X, w, b, *words)
    torch.testing.assert_close(found, functional.conv_transpose2d(X, w, b, 2, 1, (1, 0), 2))


@pytest.mark.parametrize("name", OF_X)
def test_operators_of_one_tensor(name: str) -> None:
    assert gradcheck(OF_X[name], (X,))


@pytest.mark.parametrize("name", ["max_pool2d", "max_pool2d_with_indices", "avg_pool2d", "softmax", "log_softmax"])
def test_second_derivatives_of_one_tensor(name: str) -> None:
    assert gradgradcheck(OF_X[name], (X[:1, :2, :3, :4].detach().clone().requires_grad_(),))


def test_windows_of_nothing_have_no_second_derivative() -> None:
    """A dilated window that sees nothing but padding has the position -1."""
    dy = made(1, 2, 2, 2)
    places = torch.tensor([-1, 3, 0, 2]).reshape(1, 1, 2, 2).expand(1, 2, 2, 2)
    assert gradcheck(lambda dy: OPS.max_pool2d_backward(dy, places, [1, 2, 3, 3], [2, 2], [1, 1]), (dy,))


@pytest.mark.parametrize("order", [torch.contiguous_format, torch.channels_last])
def test_gradients_of_pooling_and_softmax_are_ours(order: Any, monkeypatch: pytest.MonkeyPatch) -> None:
    asked: list[str] = []
    for name in ("max_pool2d_backward", "avg_pool2d_backward", "softmax_backward", "log_softmax_backward"):
        plain = getattr(tapwise, name)

        def told(*words: Any, plain: Any = plain, name: str = name, **named: Any) -> Any:
            asked.append(name)
            return plain(*words, **named)

        monkeypatch.setattr(tapwise, name, told)
    x = X.detach().float().contiguous(memory_format=order).requires_grad_()
    theirs: dict[str, Callable[..., Any]] = {
        "max_pool2d": lambda x: functional.max_pool2d(x, (2, 3), (1, 2), (1, 1)),
        "avg_pool2d": lambda x: functional.avg_pool2d(x, 2, 1, 1, False, False),
        "softmax": lambda x: torch.softmax(x, 1), "log_softmax": lambda x: torch.log_softmax(x, -1),
    }  # fmt: skip
    for name, function in theirs.items():
        y = OF_X[name](x)
        g = torch.randn(y.shape)
        (found,), (expected,) = torch.autograd.grad(y, x, g), torch.autograd.grad(function(x), x, g)
        torch.testing.assert_close(found, expected)
        assert found.is_contiguous(memory_format=order)
    assert asked == [f"{name}_backward" for name in theirs]


def loss(x: torch.Tensor, w: torch.Tensor, b: torch.Tensor | None = None) -> torch.Tensor:
    return OPS.max_pool2d(OPS.conv2d(x, w, b, [1, 1], [1, 1], [1, 1], 2, activation="silu"), [2, 2]).square().sum()


def theirs(x: torch.Tensor, w: torch.Tensor, b: torch.Tensor | None = None) -> torch.Tensor:
    return functional.max_pool2d(functional.silu(functional.conv2d(x, w, b, 1, 1, 1, 2)), 2).square().sum()


def test_transforms_of_torch_func() -> None:
    x, w = X.detach(), W.detach()
    grad, same = torch.func.grad, torch.testing.assert_close
    same(grad(loss, 1)(x, w), grad(theirs, 1)(x, w))

    def twice(function: Any) -> Any:
        return grad(lambda w: grad(function, 1)(x, w).square().sum())(w)

    def plain(convolve: Any) -> Any:
        return lambda x, w: convolve(x, w).pow(3).sum()

    found = twice(plain(lambda x, w: OPS.conv2d(x, w, None, *WORDS)))
    same(found, twice(plain(lambda x, w: functional.conv2d(x, w, None, (2, 1), 1, 1, 2))))
    each = torch.vmap(grad(lambda w, x: loss(x[None], w)), in_dims=(None, 0))
    same(each(w, x), torch.vmap(grad(lambda w, x: theirs(x[None], w)), in_dims=(None, 0))(w, x))


@pytest.mark.parametrize("order", [torch.contiguous_format, torch.channels_last])
def test_compiled(order: Any) -> None:
    def leaves() -> list[torch.Tensor]:
        return [one.detach().clone().requires_grad_() for one in (X.contiguous(memory_format=order), W, B)]

    eager, compiled, expected = leaves(), leaves(), leaves()
    loss(*eager).backward()
    torch.compile(loss, fullgraph=True, backend="aot_eager")(*compiled).backward()
    theirs(*expected).backward()
    for one, other, third in zip(eager, compiled, expected, strict=True):
        torch.testing.assert_close(one.grad, third.grad)
        torch.testing.assert_close(other.grad, third.grad)
    assert eager[0].grad is not None and eager[0].grad.is_contiguous(memory_format=order)


def test_autocast() -> None:
    x, w, b = (one.detach().float().requires_grad_() for one in (X, W, B))
    with torch.autocast("cpu"):
        y = OPS.conv2d(x, w, b, *WORDS, activation="relu")
    assert y.dtype is torch.bfloat16
    y.float().square().sum().backward()
    for mine, exact in zip((x, w, b), (X, W, B), strict=True):
        assert mine.grad is not None and mine.grad.dtype is torch.float32
        leaf = [one.detach().clone().requires_grad_() for one in (X, W, B)]
        functional.conv2d(leaf[0], leaf[1], leaf[2], (2, 1), 1, 1, 2).relu().square().sum().backward()
        full = next(one.grad for one in leaf if one.shape == exact.shape)
        assert full is not None
        assert (mine.grad - full).norm() < 0.03 * full.norm()


def test_unneeded_gradients_are_not_computed(monkeypatch: pytest.MonkeyPatch) -> None:
    asked: list[str] = []
    for name in ("conv2d_input", "conv2d_weight"):
        plain = getattr(tapwise, name)

        def told(*words: Any, plain: Any = plain, name: str = name, **named: Any) -> Any:
            asked.append(name)
            return plain(*words, **named)

        monkeypatch.setattr(tapwise, name, told)
    OPS.conv2d(X.detach(), W, B, *WORDS).sum().backward()
    assert asked == ["conv2d_weight"]
    OPS.conv2d(X, W.detach(), None, *WORDS).sum().backward()
    assert asked == ["conv2d_weight", "conv2d_input"]
