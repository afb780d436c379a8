"""tapwise.torch.nn in the place of torch.nn."""

from __future__ import annotations

import copy
import pickle
from typing import Any

import pytest

pytest.importorskip("torch")

import torch

from tapwise.errors import InvalidProblem
from tapwise.torch import calls, nn, operators

CONVOLUTIONS: list[dict[str, Any]] = [
    {"padding": 1}, {"stride": 2, "padding": (1, 2), "bias": False}, {"padding": "same", "dilation": 2},
    {"padding": 2, "padding_mode": "reflect"}, {"padding": (2, 1), "padding_mode": "circular", "groups": 2},
]  # fmt: skip
torch.manual_seed(0)
X = torch.randn(2, 6, 9, 11)


def same(found: Any, expected: Any, atol: float = 1e-4) -> None:
    torch.testing.assert_close(found.to(expected.dtype), expected, rtol=1e-4, atol=atol)


@pytest.mark.parametrize("words", CONVOLUTIONS, ids=str)
def test_conv2d(words: dict[str, Any]) -> None:
    theirs, ours = torch.nn.Conv2d(6, 8, 3, **words), nn.Conv2d(6, 8, 3, **words)
    assert list(ours.state_dict()) == list(theirs.state_dict())
    ours.load_state_dict(theirs.state_dict())
    with torch.no_grad():
        for x in (X, X.to(memory_format=torch.channels_last), X[0], torch.randn(5, 6, 12, 9)):
            expected = theirs(x)
            same(ours(x), expected)
            same(nn.Conv2d.of(theirs, "relu")(x), expected.relu())
            residual = torch.randn_like(expected)
            same(nn.Conv2d.of(theirs, "silu")(x, residual), torch.nn.functional.silu(expected + residual))
        same(copy.deepcopy(ours).double()(X.double()), theirs(X))
        same(copy.deepcopy(ours).half()(X.half()), theirs(X), 0.05)
        same(copy.deepcopy(ours).bfloat16()(X.bfloat16()), theirs(X), 0.2)
        same(pickle.loads(pickle.dumps(ours))(X), theirs(X))
        theirs.weight.mul_(2)
        ours.load_state_dict(theirs.state_dict())
        same(ours(X), theirs(X))


def gradients(module: Any, x: torch.Tensor, *more: Any) -> list[Any]:
    """(result, gradient by x, by the parameters)"""
    leaf = x.clone().requires_grad_()
    y = module(leaf, *more)
    module.zero_grad()
    (y * torch.linspace(-1, 1, y.numel()).reshape(y.shape)).float().sum().backward()
    return [y.detach(), leaf.grad, *(one.grad.clone() for one in module.parameters())]


@pytest.fixture
def by_tapwise(monkeypatch: pytest.MonkeyPatch) -> list[str]:
    """The operators that compute meanwhile."""
    seen: list[str] = []

    def noted(name: str, own: Any) -> Any:
        def operator(*words: Any, **named: Any) -> Any:
            seen.append(name)
            return own(*words, **named)

        return operator

    for name in ("conv2d", "conv2d_input", "conv2d_weight", "conv_transpose2d"):
        monkeypatch.setattr(operators, name, noted(name, getattr(operators, name)))
    calls._calls.clear()
    return seen


@pytest.mark.parametrize("words", CONVOLUTIONS, ids=str)
def test_conv2d_with_gradients(words: dict[str, Any], by_tapwise: list[str]) -> None:
    theirs = torch.nn.Conv2d(6, 8, 3, **words)
    ours = nn.Conv2d.of(theirs, "relu")
    for x in (X, X.to(memory_format=torch.channels_last), X[0]):
        residual = torch.randn_like(theirs(x)).detach()
        expected = gradients(followed(theirs, lambda y, residual=residual: (y + residual).relu()), x)
        for found, wanted in zip(gradients(ours, x, residual), expected, strict=True):
            same(found, wanted)
    assert set(by_tapwise) == {"conv2d", "conv2d_input", "conv2d_weight"}


def followed(module: torch.nn.Module, after: Any) -> torch.nn.Module:
    made = torch.nn.Sequential(module)
    made.register_forward_hook(lambda _m, _x, y: after(y))
    return made


TRANSPOSED: list[dict[str, Any]] = [
    {}, {"stride": 2, "padding": 1, "output_padding": 1}, {"stride": 3, "groups": 2, "bias": False, "dilation": 2},
]  # fmt: skip


@pytest.mark.parametrize("words", TRANSPOSED, ids=str)
def test_transposed(words: dict[str, Any], by_tapwise: list[str]) -> None:
    for kind, shapes in (("ConvTranspose2d", ((2, 6, 4, 5), (6, 3, 4))), ("ConvTranspose1d", ((2, 6, 7), (6, 5)))):
        theirs, ours = getattr(torch.nn, kind)(6, 4, 3, **words), getattr(nn, kind)(6, 4, 3, **words)
        assert list(ours.state_dict()) == list(theirs.state_dict())
        ours.load_state_dict(theirs.state_dict())
        for shape in shapes:
            x = torch.randn(shape)
            size = [one - words.get("output_padding", 0) for one in theirs(x).shape[-(theirs.weight.ndim - 2) :]]
            for more in ((), (size,)):
                for found, wanted in zip(gradients(ours, x, *more), gradients(theirs, x, *more), strict=True):
                    same(found, wanted)
            with torch.no_grad():
                same(ours(x), theirs(x))
        with pytest.raises(ValueError, match="output size"):
            ours(x, [1000] * (theirs.weight.ndim - 2))
        same(pickle.loads(pickle.dumps(ours))(x), theirs(x))
    assert "conv2d_weight" in by_tapwise


def test_what_a_transposed_one_leaves_to_torch() -> None:
    theirs = torch.nn.ConvTranspose2d(6, 4, 3, dilation=2, output_padding=1)
    ours = nn.ConvTranspose2d(6, 4, 3, dilation=2, output_padding=1, math="tf32")
    ours.load_state_dict(theirs.state_dict())
    same(ours(X), theirs(X))
    assert "math=tf32" in repr(ours)
    with pytest.raises(InvalidProblem, match="math"):
        nn.ConvTranspose1d(6, 8, 3, math="fp8")


def test_others_with_gradients() -> None:
    lines = torch.nn.Conv1d(6, 8, 3, padding=2, stride=2), torch.nn.Conv1d(6, 8, 4, padding="same")
    for theirs in lines:
        for found, wanted in zip(
            gradients(nn.Conv1d.of(theirs), X[:, :, 0]), gradients(theirs, X[:, :, 0]), strict=True
        ):
            same(found, wanted)
    more: list[tuple[Any, Any]] = [
        (nn.MaxPool2d(3, 2, 1), torch.nn.MaxPool2d(3, 2, 1)), (nn.AvgPool2d(2), torch.nn.AvgPool2d(2)),
        (nn.Softmax(1), torch.nn.Softmax(1)), (nn.LogSoftmax(-1), torch.nn.LogSoftmax(-1)),
        (nn.Unfold(3, padding=1), torch.nn.Unfold(3, padding=1)),
    ]  # fmt: skip
    for ours, their in more:
        for found, wanted in zip(gradients(ours, X), gradients(their, X), strict=True):
            same(found, wanted)
    columns = torch.nn.Unfold(3)(X)
    for found, wanted in zip(
        gradients(nn.Fold((9, 11), 3), columns), gradients(torch.nn.Fold((9, 11), 3), columns), strict=True
    ):
        same(found, wanted)


def test_autocast_with_gradients() -> None:
    theirs = torch.nn.Sequential(torch.nn.Conv2d(6, 8, 3, bias=False), torch.nn.ConvTranspose2d(8, 4, 2, 2))
    ours = copy.deepcopy(theirs)
    ours[0], ours[1] = nn.Conv2d.of(ours[0]), nn.ConvTranspose2d(8, 4, 2, 2)
    ours.load_state_dict(theirs.state_dict())
    found = []
    for model in (ours, theirs):
        with torch.autocast("cpu", torch.bfloat16):
            y = model(X)
        assert y.dtype is torch.bfloat16
        y.float().square().mean().backward()
        found.append([y, *(one.grad for one in model.parameters())])
    for mine, other in zip(*found, strict=True):
        assert mine.dtype is other.dtype
        torch.testing.assert_close(mine.float(), other.float(), rtol=0.1, atol=0.02)


def test_others() -> None:
    theirs = torch.nn.Conv1d(6, 8, 3, padding=1, stride=2)
    pairs: list[tuple[Any, Any]] = [
        (nn.MaxPool2d(3, 2, 1), torch.nn.MaxPool2d(3, 2, 1)),
        (nn.AvgPool2d(3, 2, 1, ceil_mode=True), torch.nn.AvgPool2d(3, 2, 1, ceil_mode=True)),
        (nn.Softmax(1), torch.nn.Softmax(1)), (nn.LogSoftmax(-1), torch.nn.LogSoftmax(-1)),
        (nn.Unfold(3, padding=1), torch.nn.Unfold(3, padding=1)),
    ]  # fmt: skip
    with torch.no_grad():
        for ours, their in pairs:
            same(ours(X), their(X))
            same(ours(X.double()), their(X.double()))
        x = torch.randn(2, 6, 17)
        same(nn.Conv1d.of(theirs)(x), theirs(x))
        same(nn.Conv1d.of(theirs)(x[0]), theirs(x[0]))
        columns = torch.nn.Unfold(3)(X)
        same(nn.Fold((9, 11), 3)(columns), torch.nn.Fold((9, 11), 3)(columns))
        values, places = nn.MaxPool2d(2, return_indices=True)(X)
        expected = torch.nn.MaxPool2d(2, return_indices=True)(X)
        assert torch.equal(values, expected[0])
        assert torch.equal(places, expected[1])


def test_compile_and_export() -> None:
    model = torch.nn.Sequential(nn.Conv2d(6, 8, 3, padding=1, activation="relu"), nn.MaxPool2d(2), nn.Conv2d(8, 4, 1))
    with torch.no_grad():
        expected = model(X)
        same(torch.compile(model, fullgraph=True, backend="aot_eager")(X), expected)
        same(torch.export.export(model, (X,)).module()(X), expected)


def test_bad_words_are_named() -> None:
    with pytest.raises(InvalidProblem, match="activation"):
        nn.Conv2d(6, 8, 3, activation="swish")
    with pytest.raises(InvalidProblem, match="math"):
        nn.Conv2d(6, 8, 3, math="fp8")
    assert "activation=relu" in repr(nn.Conv2d(6, 8, 3, activation="relu"))
