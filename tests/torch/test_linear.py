"""Linear layers in optimize: what is fused with them, by either library."""

from __future__ import annotations

import copy
import pickle
from typing import Any

import pytest

pytest.importorskip("torch")

import torch
from torch import nn
from torch.nn import functional

import tapwise.torch
from tapwise.torch.linear import FusedLinear

torch.manual_seed(0)
X = torch.randn(2, 6, 7, 5)


class Block(nn.Module):
    """As ConvNeXt's: channels last in between, a factor a channel, a residual."""

    def __init__(self, c: int = 6) -> None:
        super().__init__()
        self.conv, self.norm = nn.Conv2d(c, c, 7, padding=3, groups=c), nn.LayerNorm(c)
        self.one, self.two, self.drop = nn.Linear(c, 4 * c), nn.Linear(4 * c, c, bias=c > 6), nn.Dropout(0.1)
        self.scale = nn.Parameter(torch.randn(c, 1, 1))

    def forward(self, x: Any) -> Any:
        y = self.norm(self.conv(x).permute(0, 2, 3, 1))
        y = self.two(functional.gelu(self.one(y)))
        y = self.drop(self.scale * torch.permute(y, [0, 3, 1, 2]))
        y += x
        return y


class Rows(nn.Module):
    """Rows of 1 to 4 axes; what may not be fused: other permutations, factors and residuals of other shapes."""

    def __init__(self) -> None:
        super().__init__()
        self.a, self.b, self.c = nn.Linear(5, 5), nn.Linear(5, 5), nn.Linear(5, 3)
        self.gain, self.gains = nn.Parameter(torch.randn(5)), nn.Parameter(torch.randn(1, 1, 1, 1, 5))

    def forward(self, x: Any) -> Any:
        y = torch.relu(self.a(x) * self.gain + x)
        y = y, self.b(x) * self.gains, self.b(x).permute(0, 2, 1, 3), self.a(x) + x[:, :1], self.b(x) + 1
        y = (
            *y,
            functional.hardswish(self.c(x[0, 0])),
            self.c(x[0, 0, 0]),
            self.a(x).permute(0, 3, 1, 2) + x[:1, :1, :1, :1],
        )
        z = self.a(x)
        z.add_(1)
        return *y, z, torch.tanh(self.c(x[:, 0]))


def fused(made: Any) -> list[FusedLinear]:
    return [one for one in made.__dict__["graph"].modules() if isinstance(one, FusedLinear)]


def same(found: Any, expected: Any, atol: float = 1e-5) -> None:
    found, expected = ((one,) if isinstance(one, torch.Tensor) else one for one in (found, expected))
    for y, wanted in zip(found, expected, strict=True):
        torch.testing.assert_close(y.to(wanted.dtype), wanted, rtol=max(1e-4, atol / 10), atol=atol)


@pytest.mark.parametrize("c", [6, 24])
@pytest.mark.parametrize("by_torch", [False, True])
def test_a_block_is_three_operators(c: int, by_torch: bool) -> None:
    model, x = Block(c).eval(), torch.randn(2, c, 7, 5)
    made = tapwise.torch.optimize(model)
    one, two = fused(made)
    targets = [str(node.target) for node in made.__dict__["graph"].graph.nodes if node.op.startswith("call")]
    assert targets == ["fused_conv", "permute", "norm", "fused_one", "fused_two"]
    assert one.by_torch, "until it is measured"
    one.by_torch = two.by_torch = by_torch
    with torch.no_grad():
        for again in (made, copy.deepcopy(made), pickle.loads(pickle.dumps(made))):
            for images in (x, x.to(memory_format=torch.channels_last), x[:1, :, :3]):
                same(again(images), model(images))
            assert again(x.to(memory_format=torch.channels_last)).is_contiguous(memory_format=torch.channels_last)
        same(torch.compile(made, fullgraph=True, backend="aot_eager")(x), model(x))
        same(torch.export.export(made, (x,)).module()(x), model(x))
        same(copy.deepcopy(made).half()(x.half()), model(x), 0.02)
        made.scale.mul_(2)
        made.one.weight.add_(0.1)
        model.load_state_dict(made.state_dict())
        same(made(x), model(x))
    made.requires_grad_(True)
    made(x).sum().backward()
    model(x).sum().backward()
    same(made.scale.grad, model.scale.grad, 1e-3)


@pytest.mark.parametrize("by_torch", [False, True])
def test_rows_of_any_axes(by_torch: bool) -> None:
    model = Rows().eval()
    made = tapwise.torch.optimize(model)
    for one in fused(made):
        one.by_torch = by_torch
    assert len(fused(made)) == 10
    with torch.no_grad():
        for images in (X, X[:1], X[..., :3, :], X.transpose(1, 2)):
            same(made(images), model(images))


def test_linear_layers_are_measured() -> None:
    model = nn.Sequential(Block(), nn.AdaptiveAvgPool2d(1), nn.Flatten(), nn.Linear(6, 10), nn.ReLU()).eval()
    made = tapwise.torch.optimize(model, X)
    problems = [layer.problem for layer in made.report.layers]
    assert any("w70 k24 r1 s1" in problem and "gelu" in problem for problem in problems)
    assert len(problems) == 5
    assert not any(layer.reason.startswith("refused") for layer in made.report.layers)
    with torch.no_grad():
        same(made(X), model(X))


@pytest.mark.cuda
@pytest.mark.parametrize("dtype", [torch.float32, torch.float16, torch.bfloat16])
def test_on_a_gpu(dtype: Any) -> None:
    model, x = Block(24).eval().requires_grad_(False).cuda(), torch.randn(3, 24, 9, 7, device="cuda")
    wanted, atol = model(x), {torch.float32: 1e-4, torch.float16: 0.02, torch.bfloat16: 0.15}[dtype]
    theirs, x = copy.deepcopy(model).to(dtype), x.to(dtype)
    made = tapwise.torch.optimize(theirs)
    for one in fused(made):
        one.by_torch = False
    for images in (x, x.to(memory_format=torch.channels_last)):
        same(made(images), wanted, atol)
    measured = tapwise.torch.optimize(theirs, x, graphs=True)
    assert not any(layer.reason.startswith("refused") for layer in measured.report.layers)
    for _ in range(2):
        same(measured(x), wanted, atol)
