"""What `optimize` does with padding, pooling, dropout and channel shuffles."""

from __future__ import annotations

import pickle
from typing import Any

import pytest

pytest.importorskip("torch")

import torch
from torch import nn
from torch.nn import functional
from torch.utils._python_dispatch import TorchDispatchMode

import tapwise.torch
from tapwise.torch.fused import FusedConv
from tapwise.torch.pools import Pooled
from tapwise.torch.shuffle import Shuffle

torch.manual_seed(0)
X = torch.randn(2, 3, 32, 32)


def same(found: Any, expected: Any, atol: float = 1e-5) -> None:
    torch.testing.assert_close(found.to(expected.dtype), expected, rtol=1e-4, atol=atol)


class Padded(nn.Module):
    """What may be folded into a convolution's padding, and what may not."""

    def __init__(self) -> None:
        super().__init__()
        self.a, self.b = nn.Conv2d(3, 3, 3, 2), nn.Conv2d(3, 4, 3, padding=(0, 1))
        self.norm, self.same = nn.BatchNorm2d(3), nn.Conv2d(3, 3, 4, padding="same")
        self.zeros, self.ones = nn.ZeroPad2d((0, 1, 0, 2)), nn.ConstantPad2d(1, 1.0)

    def forward(self, x: Any) -> Any:
        # Folded: a module before batch norm, functions of four and of two sides, and zeros that make all sides alike.
        z = self.norm(self.a(self.zeros(x))).relu()
        y: tuple[Any, ...] = self.b(functional.pad(z, [1, 0], value=0.0)), self.same(functional.pad(z, (2, 1, 0, 0)))
        y = *y, self.a(functional.pad(x, (1, 1, 1, 1))) + y[1][:, :, :16, :16]
        # Not: other values, other modes, negative sizes, sizes that depend on x, a second user.
        y = *y, self.a(self.ones(x)), self.a(functional.pad(x, (1, 1, 1, 1), "reflect"))
        y = *y, self.a(functional.pad(x, (-1, 0, 0, 0))), self.a(functional.pad(x, (0, x.shape[3] % 2 + 1)))
        z = self.zeros(x)
        return *y, self.a(z), z


@pytest.mark.parametrize("dtype", [torch.float32, torch.float16])
def test_padding_is_folded(dtype: Any) -> None:
    model = Padded().eval()
    nn.init.uniform_(model.norm.bias)
    made = tapwise.torch.optimize(model)
    graph = made.__dict__["graph"]
    fused = [one for one in graph.modules() if isinstance(one, FusedConv)]
    pads = [(0, 1, 0, 2), (1, 0, 0, 0), (2, 1, 0, 0), (1, 1, 1, 1)]
    assert [one.pad for one in fused] == [*pads, *[()] * 5]
    wanted = model(X)

    def check() -> None:
        for y, expected in zip(made.to(dtype)(X.to(dtype)), wanted, strict=True):
            same(y, expected, 1e-5 if dtype is torch.float32 else 0.02)

    with torch.no_grad():
        check()
        for one in fused:
            one.by_torch = True
        check()
    # The parts themselves.
    made.requires_grad_(True)
    check()
    made = tapwise.torch.optimize(model, X)
    assert not any(layer.reason.startswith("refused") for layer in made.report.layers)
    with torch.no_grad():
        check()


def _raised(module: Any, inputs: Any, y: Any) -> Any:
    return y + 1


class Pools(nn.Module):
    def __init__(self) -> None:
        super().__init__()
        self.max, self.whole, self.four = nn.MaxPool2d(3, 2, 1), nn.AdaptiveAvgPool2d((1, 1)), nn.AdaptiveAvgPool2d(4)
        self.mean = nn.AvgPool2d(2, ceil_mode=True)
        self.hooked = nn.AvgPool2d(2)
        self.hooked.register_forward_hook(_raised)

    def forward(self, x: Any) -> Any:
        y: tuple[Any, ...] = (self.max(x), self.whole(x), self.mean(x))
        y = *y, functional.max_pool2d(x, 3, 2, padding=1, ceil_mode=True), functional.max_pool2d(x, kernel_size=(2, 1))
        y = *y, torch.max_pool2d(x, 2, padding=[1, 0]), functional.avg_pool2d(x, 3, [], 1, count_include_pad=False)
        y = *y, functional.adaptive_avg_pool2d(x, 1), x.mean((2, 3)), torch.mean(x, [-1, -2], keepdim=True)
        y = *y, x.mean(dim=(-2, 3))
        # As they are: other axes and dtypes, other sizes, sizes that depend on x.
        z: tuple[Any, ...] = (self.hooked(x), self.four(x), x.mean((1, 2)), x.mean(), x.mean(2))
        z = *z, x.mean((2, 3), dtype=torch.float64)
        z = *z, functional.adaptive_avg_pool2d(x, 2), functional.max_pool2d(x, x.shape[2] // 2)
        return *y, *z, functional.max_pool2d(x, 2, return_indices=True)[1], functional.adaptive_max_pool2d(x, 1)


def test_pooling_is_by_either() -> None:
    model = Pools().eval()
    made = tapwise.torch.optimize(model)
    pools = [one for one in made.__dict__["graph"].modules() if isinstance(one, Pooled)]
    assert len(pools) == 11
    # Averages of whole images only where they were measured.
    assert [one.by_torch for one in pools] == [False, True, *[False] * 5, *[True] * 4]
    wanted = model(X)
    images = X, X.to(memory_format=torch.channels_last)

    def check() -> None:
        for x in images:
            for found, expected in zip(made(x), wanted, strict=True):
                assert found.shape == expected.shape
                same(found, expected)

    check()
    for by_torch in (True, False):
        for one in pools:
            one.by_torch = by_torch
        check()
        compiled = torch.compile(made, fullgraph=True, backend="aot_eager")
        for found, expected in zip(compiled(X), wanted, strict=True):
            same(found, expected)
    with torch.enable_grad():
        made(X.clone().requires_grad_())[8].sum().backward()
    made = pickle.loads(pickle.dumps(tapwise.torch.optimize(model, X, report=True)))
    assert len(made.report.layers) == 11
    assert not any(layer.reason.startswith("refused") for layer in made.report.layers)
    check()
    y = tapwise.torch.optimize(nn.Sequential(nn.MaxPool2d(2)))(X[0])
    same(y, functional.max_pool2d(X[0], 2))


class Dropped(nn.Module):
    """Dropout between a convolution and its residual."""

    def __init__(self) -> None:
        super().__init__()
        self.a, self.b, self.c = (nn.Sequential(nn.Conv2d(3, 3, 1), nn.BatchNorm2d(3)) for _ in range(3))
        self.drop, self.same = nn.Dropout2d(0.3), nn.Identity()

    def forward(self, x: Any) -> Any:
        y = self.drop(self.a(x)) + x
        y = functional.dropout(self.b(self.same(y)), 0.3, self.training) + y
        # This one drops always.
        return torch.relu(self.c(y) + y), functional.dropout(y, 1.0)


def test_dropout_is_taken_out() -> None:
    model = Dropped().eval()
    made = tapwise.torch.optimize(model)
    targets = [str(node.target).partition(" ")[0] for node in made.__dict__["graph"].graph.nodes]
    assert targets == ["x", "fused_a_0", "fused_b_0", "fused_c_0", "<function", "output"]
    with torch.no_grad():
        for found, expected in zip(made(X), model(X), strict=True):
            same(found, expected)
    made.train()
    assert bool((made(X)[0] != model(X)[0]).any())


class Shuffled(nn.Module):
    def __init__(self, how: str) -> None:
        super().__init__()
        self.a, self.b, self.how = nn.Conv2d(3, 12, 1), nn.Conv2d(6, 6, 1), how

    def forward(self, x: Any) -> Any:
        y = self.a(x)
        n, c, h, w = y.size() if self.how != "shape" else y.shape
        z = y.view(n, 3, -1 if self.how == "rest" else c // 3, h, w)
        if self.how == "other":
            return self.b(torch.transpose(z, 1, 3).reshape(n, c, h, w).chunk(2, 1)[1])
        if self.how == "viewed":
            return z.transpose(1, 2).contiguous().view(n, c, h, w).view(n, -1)
        z = z.transpose(1, 2)
        z = z.reshape(n, -1, h, w) if self.how == "rest" else z.contiguous().view(n, c, h, w)
        return self.b(z.chunk(2, 1)[1])


@pytest.mark.parametrize(("how", "shuffles"), [("rest", 1), ("shape", 1), ("other", 0), ("viewed", 0)])
def test_channel_shuffles_keep_the_order(how: str, shuffles: int) -> None:
    model = Shuffled(how).eval()
    made = tapwise.torch.optimize(model, memory_format="channels_last")
    made = pickle.loads(pickle.dumps(made))
    assert sum(isinstance(one, Shuffle) for one in made.__dict__["graph"].modules()) == shuffles
    with torch.no_grad():
        for x in (X, X[:1], X[:, :, :5]):
            same(made(x), model(x))
        torch._dynamo.reset()
        same(torch.compile(made, fullgraph=True, backend="aot_eager")(X), model(X))
        if shuffles:
            assert made(X).is_contiguous(memory_format=torch.channels_last)
        made.report.memory_format = "contiguous"
        same(made(X), model(X))


@pytest.mark.cuda
@pytest.mark.parametrize("order", ["contiguous", "channels_last"])
def test_pooling_padding_and_shuffles_on_a_gpu(order: str) -> None:
    for model in (Padded(), Pools(), Shuffled("rest")):
        # Of the same values: positions of the largest are compared.
        wanted = model.eval()(X.half().float())
        made = tapwise.torch.optimize(model, memory_format=order).half().cuda()
        for one in made.__dict__["graph"].modules():
            if isinstance(one, Pooled):
                one.by_torch = False
        found = made(X.half().cuda())
        pairs = zip(found, wanted, strict=True) if isinstance(found, tuple) else ((found, wanted),)
        for y, expected in pairs:
            same(y.cpu(), expected, 0.02)
        again = tapwise.torch.optimize(made.__dict__["model"], X.half().cuda(), memory_format=order)
        assert not any(layer.reason.startswith("refused") or layer.uncaptured for layer in again.report.layers)


def test_who_looks_on_sees_the_operator() -> None:
    """Without onlookers a layer on a CPU calls its kernel past PyTorch's dispatcher: the same numbers."""
    seen = []

    class Watch(TorchDispatchMode):
        def __torch_dispatch__(self, function: Any, _types: Any, args: Any = (), kwargs: Any = None) -> Any:
            seen.append(str(function))
            return function(*args, **(kwargs or {}))

    conv = FusedConv(nn.Conv2d(3, 5, 3), nn.BatchNorm2d(5).eval(), "relu")
    x = torch.randn(2, 3, 9, 7)
    with torch.no_grad():
        expected = conv(x)
        with Watch():
            watched = conv(x)
    assert "tapwise.conv_frozen.default" in seen
    assert torch.equal(watched, expected)
    assert torch.allclose(expected, conv.by_pytorch(x.detach()), atol=1e-5)
