"""Squeeze-and-excitation of a model: what is taken for one, and what it computes."""

from __future__ import annotations

import copy
import io
from typing import Any

import pytest

pytest.importorskip("torch")

import torch
from torch import nn
from torch.nn import functional

import tapwise.torch
from tapwise.torch import layers
from tapwise.torch.gated import Gated

X = torch.randn(2, 12, 9, 9, generator=torch.Generator().manual_seed(0))


class Gate(nn.Module):
    """As torchvision has it; `kind` changes it."""

    def __init__(self, kind: str = "") -> None:
        super().__init__()
        torch.manual_seed(0)
        self.kind = kind
        self.before = nn.Conv2d(12, 20, 3, padding=1)
        self.pool = nn.AdaptiveAvgPool2d(2 if kind == "four means" else 1)
        self.fc1 = nn.Conv2d(20, 5, 1, bias=kind != "no bias")
        self.fc2 = nn.Conv2d(5, 20, 3 if kind == "nine taps" else 1, padding=int(kind == "nine taps"))
        self.norm = nn.BatchNorm2d(5)

    def forward(self, x: torch.Tensor) -> Any:
        x = functional.silu(self.before(x))
        s = x.mean((2, 3), keepdim=True) if self.kind == "mean" else self.pool(x)
        s = self.fc1(s)
        s = functional.silu(self.norm(s) if self.kind == "norm" else s)
        used = s
        s = self.fc2(s)
        s = functional.hardsigmoid(s) if self.kind == "hard" else torch.relu(s) if self.kind == "relu" else s.sigmoid()
        if self.kind == "four means":
            s = functional.interpolate(s, x.shape[2:])
        if self.kind == "written":
            x.add_(1)
        y = x * s if self.kind in ("mean", "x first") else x + s if self.kind == "sum" else s * x
        if self.kind == "other":
            y = s * self.before(y[:, :12])
        return (y, used) if self.kind == "seen" else y


def gates(model: Any) -> list[Any]:
    return [one for one in model.__dict__["graph"].modules() if isinstance(one, Gated)]


def same(found: Any, wanted: Any) -> None:
    torch.testing.assert_close(found, wanted, rtol=1e-4, atol=1e-5)


@pytest.mark.many
@pytest.mark.parametrize("order", [torch.contiguous_format, torch.channels_last])
@pytest.mark.parametrize("kind", ["", "mean", "hard", "no bias", "x first"])
def test_a_gate_is_one_operator(kind: str, order: Any) -> None:
    model, x = Gate(kind).eval(), X.contiguous(memory_format=order)
    made = tapwise.torch.optimize(model, memory_format="preserve")
    (gate,) = gates(made)
    assert gate.by_torch, "until it is measured"
    with torch.no_grad():
        for by_torch in (True, False):
            gate.by_torch = by_torch
            stored = io.BytesIO()
            torch.save(made, stored)
            stored.seek(0)
            for one in (made, copy.deepcopy(made), torch.load(stored, weights_only=False)):
                same(one(x), model(x))
                same(one(x[:1, :, :3]), model(x[:1, :, :3]))
            # It counts what it compiled of one code.
            torch._dynamo.reset()
            same(torch.compile(made, fullgraph=True, backend="aot_eager")(x), model(x))
            same(torch.export.export(made, (x,)).module()(x), model(x))
        made.fc1.weight.mul_(3)
        made.fc2.weight.add_(0.2)
        model.load_state_dict(made.state_dict())
        same(made(x), model(x))
        same(copy.deepcopy(made).double()(x.double()), model.double()(x.double()))


@pytest.mark.parametrize("kind", ["norm", "relu", "nine taps", "four means", "sum", "other", "seen", "written"])
def test_what_is_none_is_left(kind: str) -> None:
    model = Gate(kind).eval()
    made = tapwise.torch.optimize(model)
    with torch.no_grad():
        assert not gates(made)
        same(made(X), model(X))


def test_parts_or_the_whole_are_measured_and_reported(monkeypatch: pytest.MonkeyPatch) -> None:
    for word, whole in (("squeeze_excitation", 1.0), ("avgpool", 1e9)):

        def times(module: Any, tensors: Any, recorded: bool, word: str = word) -> tuple[float, float, str, str]:
            ours = word in str(module.problem(*tensors))
            return (1.0, 2.0, "", "") if ours else (3.0, 2.0, "PyTorch is faster", "")

        monkeypatch.setattr(layers, "_times", times)
        made = tapwise.torch.optimize(Gate().eval(), X)
        (gate,) = gates(made)
        assert gate.by_torch == (whole > 1)
        problems = [layer.problem for layer in made.report.layers]
        assert any("squeeze_excitation" in one for one in problems) == (whole == 1)
        assert any("avgpool" in one for one in problems) == (whole > 1)
        with torch.no_grad():
            same(made(X), Gate().eval()(X))


def test_training_and_gradients_are_the_models_own() -> None:
    made = tapwise.torch.optimize(Gate().eval())
    gates(made)[0].by_torch = False
    made.requires_grad_(True)
    made(X).sum().backward()
    assert made.fc1.weight.grad is not None and made.fc2.bias.grad is not None


def test_autocast_and_vmap() -> None:
    made, model = tapwise.torch.optimize(Gate().eval()), Gate().eval()
    gates(made)[0].by_torch = False
    with torch.no_grad():
        with torch.autocast("cpu", torch.bfloat16):
            y = made(X)
        assert y.dtype is torch.bfloat16
        torch.testing.assert_close(y.float(), model(X), rtol=0.05, atol=0.05)
        weight, bias = torch.randn(2, 3, 12), torch.randn(15)
        several = torch.vmap(torch.ops.tapwise.squeeze_excitation, in_dims=(0, None, None))(X[None], weight, bias)
        same(several[0], torch.ops.tapwise.squeeze_excitation(X, weight, bias))
