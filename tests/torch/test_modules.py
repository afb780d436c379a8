"""tapwise.torch.nn in the place of torch.nn."""

from __future__ import annotations

import copy
import pickle
from typing import Any

import pytest

pytest.importorskip("torch")

import torch

from tapwise.errors import InvalidProblem
from tapwise.torch import nn

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


def test_a_gradient_is_pytorchs_own() -> None:
    theirs = torch.nn.Conv2d(6, 8, 3)
    ours = nn.Conv2d.of(theirs, "relu")
    ours(X).sum().backward()
    found = theirs.weight.grad.clone()
    theirs.zero_grad()
    theirs(X).relu().sum().backward()
    same(found, theirs.weight.grad)


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
    assert nn.MaxPool2d(2)(X.clone().requires_grad_()).requires_grad


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
