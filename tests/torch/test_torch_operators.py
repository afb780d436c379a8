"""torch.ops.tapwise: values, orders and the rules of PyTorch's transforms."""

from __future__ import annotations

from collections.abc import Callable
from functools import partial
from typing import Any

import pytest

pytest.importorskip("torch")

import torch
from torch.nn import functional

import tapwise.torch  # noqa: F401
from tapwise.errors import InvalidProblem

OPS = torch.ops.tapwise
ORDERS = {
    "contiguous": lambda x: x,
    "channels_last": lambda x: x.to(memory_format=torch.channels_last),
    "channels_sliced": lambda x: torch.cat((x, x), 1).to(memory_format=torch.channels_last)[:, x.shape[1] :],
    "transposed": lambda x: x.transpose(2, 3).contiguous().transpose(2, 3),
    "strided": lambda x: torch.stack((x, x), -1)[..., 0],
}
torch.manual_seed(0)
X, W, B = torch.randn(2, 6, 9, 11), torch.randn(8, 3, 3, 3), torch.randn(8)
CASES: dict[str, tuple[Any, Callable[..., Any], tuple[Any, ...]]] = {
    "max_pool2d": (OPS.max_pool2d, functional.max_pool2d, ([3, 2], [2, 1], [1, 1], [1, 1], True)),
    "max_pool2d_with_indices": (
        OPS.max_pool2d_with_indices, functional.max_pool2d_with_indices, ([3, 3], [2, 2], [1, 1]),
    ),
    "avg_pool2d": (OPS.avg_pool2d, functional.avg_pool2d, ([3, 3], [2, 2], [1, 1], True, False)),
    "global_avg_pool2d": (OPS.global_avg_pool2d, lambda x: functional.adaptive_avg_pool2d(x, 1), ()),
    "softmax": (OPS.softmax, torch.softmax, (1,)),
    "log_softmax": (OPS.log_softmax, torch.log_softmax, (-1,)),
    "im2col": (OPS.im2col, functional.unfold, ([3, 2], [1, 2], [1, 0], [2, 1])),
    "conv2d": (
        lambda x: OPS.conv2d(x, W, B, [2, 1], [1, 0, 2, 1], [1, 2], 2, activation="relu"),
        lambda x: functional.conv2d(functional.pad(x, (2, 1, 1, 0)), W, B, (2, 1), 0, (1, 2), 2).relu(), (),
    ),
    "conv_frozen": (
        lambda x: OPS.conv_frozen(x, W, B, None, "stride2x1 pad1:0x2:1 dilation1x2 groups2 relu"),
        lambda x: functional.conv2d(functional.pad(x, (2, 1, 1, 0)), W, B, (2, 1), 0, (1, 2), 2).relu(), (),
    ),
}  # fmt: skip
FROZEN = "pad1 relu"
Y, PLACES = functional.max_pool2d_with_indices(torch.randn(2, 6, 18, 22), 2)
GRADIENTS: dict[str, tuple[Any, ...]] = {
    "max_pool2d_backward": (PLACES, [2, 6, 18, 22], [2, 2]),
    "avg_pool2d_backward": ([2, 6, 18, 22], [3, 3], [2, 2], [1, 1], False, False),
    "softmax_backward": (Y.softmax(1), 1),
    "log_softmax_backward": (Y.log_softmax(-1),),
    "bias_backward": (),
    "bias_activation_backward": (Y.tanh(), "tanh"),
    "batch_norm_backward": (Y.tanh(), torch.rand(4, 6), "silu"),
}


def outputs(found: Any) -> tuple[Any, ...]:
    return found if isinstance(found, tuple) else (found,)


@pytest.mark.parametrize("order", ORDERS)
@pytest.mark.parametrize("name", CASES)
def test_values_and_orders(name: str, order: str) -> None:
    ours, theirs, words = CASES[name]
    x = ORDERS[order](X)
    for found, expected in zip(outputs(ours(x, *words)), outputs(theirs(x, *words)), strict=True):
        torch.testing.assert_close(found, expected, rtol=1e-4, atol=1e-4)
        last = order.startswith("channels") and found.ndim == 4
        assert found.is_contiguous(memory_format=torch.channels_last if last else torch.contiguous_format)


@pytest.mark.many
@pytest.mark.parametrize("order", ["contiguous", "channels_last", "channels_sliced", "transposed"])
@pytest.mark.parametrize(
    ("name", "words"),
    [
        ("conv2d", (W, B, [1, 1], [1, 1], [1, 1], 2)),
        ("conv_frozen", (W, B, None, "groups2 pad1 silu")),
        ("conv_transpose2d", (torch.randn(6, 3, 3, 3), torch.randn(6), [2, 1], [1, 0], [1, 0], 2)),
        ("conv2d_weight", ([8, 3, 3, 3], torch.randn(2, 8, 9, 11), [1, 1], [1, 1], [1, 1], 2)),
        *((name, CASES[name][2]) for name in CASES if "conv" not in name),
        *GRADIENTS.items(),
    ],
)
def test_opcheck(name: str, words: tuple[Any, ...], order: str) -> None:
    """Schema, fake and dispatch, as PyTorch wants them."""
    # What PyTorch compiles depends on whether x is dense, not on why it is not.
    checks = ["test_schema", "test_faketensor", "test_autograd_registration", "test_aot_dispatch_dynamic"]
    given = ORDERS[order](X), *words
    torch.library.opcheck(getattr(OPS, name).default, given, test_utils=checks[: 2 if order == "transposed" else 4])


def test_col2im_is_fold() -> None:
    columns = torch.randn(2, 54, 63)
    torch.testing.assert_close(OPS.col2im(columns, [9, 11], [3, 3]), functional.fold(columns, (9, 11), 3))
    torch.library.opcheck(OPS.col2im.default, (columns, [9, 11], [3, 3]))


def test_residual_and_bfloat16_on_a_cpu() -> None:
    residual = torch.randn(2, 8, 9, 11)
    expected = torch.relu(functional.conv2d(X, W, B, padding=1, groups=2) + residual)
    found = OPS.conv2d(X, W, B, [1, 1], [1, 1], [1, 1], 2, residual, activation="relu")
    torch.testing.assert_close(found, expected, rtol=1e-4, atol=1e-4)
    half = [tensor.bfloat16() for tensor in (X, W, B, residual)]
    found = OPS.conv2d(half[0], half[1], half[2], [1, 1], [1, 1], [1, 1], 2, half[3], activation="relu")
    assert found.dtype is torch.bfloat16
    torch.testing.assert_close(found.float(), expected, rtol=0.05, atol=0.2)
    assert OPS.max_pool2d(half[0], [2, 2]).dtype is torch.bfloat16


def test_autocast() -> None:
    weight = torch.randn(8, 6, 3, 3)
    with torch.autocast("cpu"):
        found, frozen = OPS.conv2d(X, weight, B), OPS.conv_frozen(X, weight, B, None, "")
        expected = functional.conv2d(X, weight, B)
        assert found.dtype is frozen.dtype is expected.dtype is torch.bfloat16
        torch.testing.assert_close(found, expected)
        torch.testing.assert_close(frozen, expected, rtol=0.02, atol=0.2)
        assert OPS.softmax(X.bfloat16()).dtype is torch.float32
        assert OPS.max_pool2d(X, [2, 2]).dtype is torch.float32
        assert OPS.softmax_backward(X.bfloat16(), X).dtype is torch.float32


def test_vmap() -> None:
    x, weight, residual = torch.randn(3, 2, 6, 9, 11), torch.randn(3, 8, 6, 3, 3), torch.randn(3, 2, 8, 7, 9)
    vmap, same = torch.vmap, partial(torch.testing.assert_close, rtol=1e-4, atol=1e-4)
    for operator in (lambda x, w: OPS.conv2d(x, w, B), lambda x, w: OPS.conv_frozen(x, w, B, None, "")):
        one: Any = partial(operator, w=weight[0])
        same(vmap(one)(x), vmap(lambda x: functional.conv2d(x, weight[0], B))(x))
        same(vmap(operator)(x, weight), vmap(lambda x, w: functional.conv2d(x, w, B))(x, weight))
    added = vmap(lambda x, r: OPS.conv_frozen(x, weight[0], B, r, ""))(x, residual)
    same(added, vmap(lambda x: functional.conv2d(x, weight[0], B))(x) + residual)
    same(vmap(lambda x: OPS.softmax(x, 0), in_dims=1)(x), vmap(lambda x: x.softmax(0), in_dims=1)(x))
    same(vmap(lambda x: OPS.max_pool2d(x, [3, 3]))(x), functional.max_pool2d(x.flatten(0, 1), 3).unflatten(0, (3, 2)))


@pytest.mark.parametrize("name", GRADIENTS)
def test_vmap_of_gradients(name: str) -> None:
    """Of one tensor and of both, without a batch within too."""
    operator, words = getattr(OPS, name), GRADIENTS[name]
    dy = torch.randn(3, 2, 6, 9, 11)
    found = [outputs(operator(one, *words)) for one in dy]
    expected: Any = tuple(map(torch.stack, zip(*found, strict=True)))
    expected = expected if len(expected) > 1 else expected[0]
    torch.testing.assert_close(torch.vmap(lambda one: operator(one, *words), in_dims=2)(dy.movedim(0, 2)), expected)
    if words and isinstance(words[0], torch.Tensor):
        second = torch.stack([words[0]] * 3, 1)
        both = torch.vmap(lambda one, other: operator(one, other, *words[1:]), in_dims=(0, 1))
        torch.testing.assert_close(both(dy, second), expected)
    if "softmax" in name:
        flat = torch.vmap(lambda one: operator(one, one, 0))(dy[0, 0])
        torch.testing.assert_close(flat, operator(dy[0, 0], dy[0, 0], 1))


def both(x: Any) -> Any:
    return OPS.max_pool2d(OPS.conv_frozen(x, W, B, None, "groups2 pad1 relu"), [2, 2]) + 1


def compiled(function: Any, **words: Any) -> Any:
    """By AOTAutograd without Inductor, which takes long and a compiler."""
    return torch.compile(function, fullgraph=True, backend="aot_eager", **words)


def test_compile_export_and_inference_mode() -> None:
    expected = both(X)
    with torch.no_grad():
        assert torch.equal(compiled(both)(X), expected)
    for order in ("channels_last", "transposed"):
        x = ORDERS[order](X)
        torch.testing.assert_close(compiled(both, dynamic=True)(x), both(x))

    class Both(torch.nn.Module):
        def forward(self, x: Any) -> Any:
            return both(x)

    exported = torch.export.export(Both(), (X,), dynamic_shapes={"x": {0: torch.export.Dim("n")}})
    assert torch.equal(exported.module()(torch.cat((X, X)))[2:], expected)
    with torch.inference_mode():
        assert torch.equal(both(X.clone()), expected)
    assert torch.equal(torch.func.functionalize(both)(X), expected)


def test_gradients_are_refused_by_name() -> None:
    weight = W.clone().requires_grad_()
    with pytest.raises(InvalidProblem, match=r"tapwise\.conv_frozen: a tensor requires a gradient"):
        OPS.conv_frozen(X, weight, B, None, "groups2")
    with torch.no_grad():
        OPS.conv_frozen(X, weight, B, None, "groups2")
    with pytest.raises(InvalidProblem, match="squeeze_excitation"):
        torch.func.grad(lambda x: OPS.squeeze_excitation(x, torch.ones(2, 6, 4), torch.ones(10)).sum())(X)
    with pytest.raises(InvalidProblem, match="has a tangent"):
        torch.func.jvp(lambda x: OPS.softmax(x), (X,), (X,))


@pytest.mark.parametrize("order", [torch.contiguous_format, torch.channels_last])
def test_frozen_calls_that_come_again(order: Any) -> None:
    """Whatever a tensor is besides its shape: what NumPy has no view of goes another way."""
    weight, bias, x = torch.randn(8, 6, 3, 3), torch.randn(8), X.contiguous(memory_format=order)
    residual = torch.randn(X.shape[0], 8, *X.shape[2:]).contiguous(memory_format=order)
    plain = functional.conv2d(x, weight, bias, padding=1)
    for added in (None, residual):
        expected = (plain if added is None else plain + added).relu()
        tensors = (x, x.clone().requires_grad_(), (-x)._neg_view())
        with torch.no_grad():
            for again in (*tensors, *tensors):
                for other in (added, None if added is None else (-added)._neg_view()):
                    y = OPS.conv_frozen(again, weight, bias, other, FROZEN)
                    torch.testing.assert_close(y, expected, rtol=1e-4, atol=1e-4)
                    assert y.is_contiguous(memory_format=order)
    with pytest.raises(InvalidProblem, match="residual"):
        OPS.conv_frozen(x, weight, bias, residual[:, :, :2], FROZEN)


def test_frozen_filters_follow_counted_writes() -> None:
    from tapwise.torch.frozen import _kept

    weight, bias = torch.randn(8, 6, 3, 3), torch.randn(8)

    def check(weight: Any) -> None:
        expected = functional.conv2d(X, weight, bias, padding=1).relu()
        torch.testing.assert_close(OPS.conv_frozen(X, weight, bias, None, FROZEN), expected, rtol=1e-4, atol=1e-4)

    check(weight)
    check(weight)
    weight.mul_(2)
    check(weight)
    bias.add_(1)
    check(weight)
    weight.data = torch.randn(8, 6, 3, 3)
    check(weight)
    kept = len(_kept)
    del weight
    assert len(_kept) == kept - 1


def test_bad_arguments_are_named() -> None:
    with pytest.raises(InvalidProblem, match="padding"):
        OPS.conv2d(X, W, B, [1, 1], [1, 1, 1], [1, 1], 2)
    with pytest.raises(InvalidProblem, match="4 axes"):
        OPS.conv2d(X[0], W, B)
    with pytest.raises(InvalidProblem, match="w has shape"):
        OPS.conv2d(X, W, B)
    with pytest.raises(InvalidProblem, match="wobble"):
        OPS.conv_frozen(X, W, B, None, "wobble")
