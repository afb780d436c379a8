"""optimize: a model's copy computes the same, whatever happens to it."""

from __future__ import annotations

import copy
import io
import pickle
import re
from typing import Any

import pytest

import emulated

pytest.importorskip("torch")

import torch
from torch import nn
from torch._inductor import config as inductor
from torch._inductor.utils import run_and_get_code
from torch.nn import functional

import tapwise.torch
from tapwise.errors import InvalidProblem
from tapwise.torch import frozen
from tapwise.torch.fused import FusedConv
from tapwise.torch.pools import Pooled
from tapwise.torch.shuffle import Shuffle

torch.manual_seed(0)
X = torch.randn(2, 3, 32, 32)


class Bottleneck(nn.Module):
    def __init__(self, c: int, m: int, k: int, stride: int = 1) -> None:
        super().__init__()
        self.conv1, self.bn1 = nn.Conv2d(c, m, 1, bias=False), nn.BatchNorm2d(m)
        self.conv2, self.bn2 = nn.Conv2d(m, m, 3, stride, 1, bias=False), nn.BatchNorm2d(m)
        self.conv3, self.bn3 = nn.Conv2d(m, k, 1, bias=False), nn.BatchNorm2d(k)
        self.relu = nn.ReLU(inplace=True)
        self.down = nn.Sequential(nn.Conv2d(c, k, 1, stride, bias=False), nn.BatchNorm2d(k)) if c != k else None

    def forward(self, x: Any) -> Any:
        y = self.relu(self.bn1(self.conv1(x)))
        y = self.bn3(self.conv3(self.relu(self.bn2(self.conv2(y)))))
        y += x if self.down is None else self.down(x)
        return self.relu(y)


class Net(nn.Module):
    def __init__(self) -> None:
        super().__init__()
        self.stem = nn.Sequential(nn.Conv2d(3, 8, 7, 2, 3), nn.BatchNorm2d(8), nn.ReLU(), nn.MaxPool2d(3, 2, 1))
        self.layers = nn.Sequential(Bottleneck(8, 8, 16), Bottleneck(16, 16, 32, 2))
        self.fc = nn.Linear(32, 10)

    def forward(self, x: Any) -> Any:
        return self.fc(torch.flatten(nn.functional.adaptive_avg_pool2d(self.layers(self.stem(x)), 1), 1))


def net() -> Net:
    made = Net().eval()
    for one in made.modules():
        if isinstance(one, nn.BatchNorm2d):
            one.running_mean.normal_(0, 0.2)
            one.running_var.uniform_(0.5, 2)
            nn.init.uniform_(one.weight, 0.5, 1.5)
    return made


def same(found: Any, expected: Any, atol: float = 1e-5) -> None:
    torch.testing.assert_close(found.to(expected.dtype), expected, rtol=1e-4, atol=atol)


@pytest.fixture
def pair() -> Any:
    model = net()
    with torch.no_grad():
        yield model, tapwise.torch.optimize(model)


def test_all_is_fused_and_the_same(pair: Any) -> None:
    model, made = pair
    same(made(X), model(X))
    assert made.report.fused == 9
    kinds = [type(one).__name__ for one in made.__dict__["graph"].modules()]
    targets = {str(node.target) for node in made.__dict__["graph"].graph.nodes}
    assert kinds.count("FusedConv") == 9
    assert not any("bn" in name or "relu" in name or "add" in name for name in targets)
    assert list(made.state_dict()) == list(model.state_dict())
    same(made(torch.cat((X, X))), model(torch.cat((X, X))))
    same(made(X[..., :24].to(memory_format=torch.channels_last)), model(X[..., :24]))


def test_what_happens_to_a_model(pair: Any) -> None:
    model, made = pair
    other = net()
    made.load_state_dict(other.state_dict())
    same(made(X), other(X))
    for again in (copy.deepcopy(made), pickle.loads(pickle.dumps(made))):
        same(again(X), other(X))
        again.load_state_dict(model.state_dict())
        same(again(X), model(X))
        assert list(again.state_dict()) == list(model.state_dict())
    file = io.BytesIO()
    torch.save(made, file)
    file.seek(0)
    same(torch.load(file, weights_only=False)(X), other(X))
    same(copy.deepcopy(made).half()(X.half()), other(X), 0.02)
    same(copy.deepcopy(made).double()(X.double()), other(X))
    made.stem[0].weight.mul_(1.5)
    other.stem[0].weight.mul_(1.5)
    same(made(X), other(X))


def test_training_is_the_models_own(pair: Any) -> None:
    model, made = pair
    made.train()
    model.train()
    same(made(X), model(X))
    made.eval()
    model.eval()
    same(made(X), model(X))
    with torch.enable_grad():
        made.requires_grad_(True)
        made(X).sum().backward()
        assert made.stem[0].weight.grad is not None


def test_compiled_and_exported(pair: Any) -> None:
    model, made = pair
    same(torch.compile(made, fullgraph=True, backend="aot_eager")(X), model(X))
    if emulated.available():
        same(torch.compile(made, fullgraph=True)(X), model(X))
    same(torch.export.export(made, (X,)).module()(X), model(X))
    with torch.inference_mode():
        same(made(X), model(X))


@pytest.mark.parametrize("order", [torch.contiguous_format, torch.channels_last])
def test_nothing_is_copied_between_operators_that_are_compiled(order: Any) -> None:
    """Inductor computes the mean before the last layer, and no more."""
    if not emulated.available():
        pytest.skip("no C++ compiler")
    model, x = net(), X.to(memory_format=order)
    made = tapwise.torch.optimize(model)
    with torch.no_grad():
        y, code = run_and_get_code(torch.compile(made, fullgraph=True), x)
        same(y, model(x))
    assert len(code) == 1
    assert set(re.findall(r"cpp_fused\w+", code[0])) == {"cpp_fused_mean_0"}
    assert code[0].count("= torch.ops.tapwise.") == 10 and "aten.clone" not in code[0]


def test_filters_are_packed_once_where_inductor_freezes(monkeypatch: pytest.MonkeyPatch) -> None:
    """Also those of few channels, whose biases Inductor would have in its code."""
    if not emulated.available():
        pytest.skip("no C++ compiler")
    first, calls = frozen._first, [0]

    def counted(*words: Any) -> Any:
        calls[0] += 1
        return first(*words)

    monkeypatch.setattr(frozen, "_first", counted)
    model = net()
    with torch.no_grad(), inductor.patch(freezing=True):
        made = torch.compile(tapwise.torch.optimize(model), fullgraph=True)
        for _ in range(3):
            same(made(X), model(X))
    assert calls[0] == 9


def test_one_pixel_lies_alike_in_both_orders() -> None:
    conv = nn.Conv2d(5, 6, 1).requires_grad_(False)
    fused = FusedConv(conv, activation="sigmoid")
    for x in (torch.randn(3, 5, 1, 1), torch.randn(3, 1, 1, 5).permute(0, 3, 1, 2), torch.randn(3, 10, 1, 1)[:, ::2]):
        same(fused(x), conv(x).sigmoid())
        assert fused(x).is_contiguous()
        assert fused.problem(x).layout == "nhwc"
    assert fused.problem(torch.randn(3, 5, 1, 2)).layout == "nchw"
    padded = FusedConv(nn.Conv2d(5, 6, 1, padding=1).requires_grad_(False))
    y = padded(torch.randn(3, 5, 1, 1))
    assert y.is_contiguous() and y.shape == (3, 6, 3, 3)


def test_layers_are_measured(capsys: Any) -> None:
    model = net()
    made = tapwise.torch.optimize(model, X, report=True)
    assert [layer.problem.partition(" ")[0] for layer in made.report.layers[:2]] == ["n2", "maxpool"]
    assert len(made.report.layers) == 12
    assert all(layer.time_us > 0 and layer.torch_us > 0 for layer in made.report.layers)
    assert made.report.memory_format in ("contiguous", "channels_last")
    text = capsys.readouterr().out
    assert "9 convolutions fused" in text
    assert max(map(len, text.splitlines())) < 140
    for layer in made.report.layers:
        made.__dict__["graph"].get_submodule(layer.name).by_torch = True
    with torch.no_grad():
        same(made(X), model(X))


def test_filters_first_folded_in_inference_mode_may_change() -> None:
    conv = nn.Conv2d(3, 4, 3).requires_grad_(False)
    with torch.inference_mode():
        fused = FusedConv(conv, activation="relu")
        same(fused(X), conv(X).relu())
    conv.weight.mul_(2)
    same(fused(X), conv(X).relu())


class Odd(nn.Module):
    """What may not be fused: a second user, a broadcast residual, an operand that is written in between."""

    def __init__(self) -> None:
        super().__init__()
        self.a, self.b, self.c = (nn.Conv2d(3, 3, 3, padding=1) for _ in range(3))
        self.scale = nn.Parameter(torch.randn(3, 1, 1))

    def forward(self, x: Any) -> Any:
        y = self.a(x)
        z = torch.relu(y) + y
        z = torch.relu(self.b(z) + self.scale)
        kept = self.c(z)
        z.mul_(2)
        return torch.relu(kept + z) + torch.add(self.b(x), x, alpha=2) + (self.c(x) + x.shape[1])


def test_what_may_not_be_fused() -> None:
    model = Odd().eval()
    for made in (tapwise.torch.optimize(model), tapwise.torch.optimize(model, X)):
        with torch.no_grad():
            same(made(X.clone()), model(X.clone()))
    assert not any(layer.reason.startswith("refused") for layer in made.report.layers)


ACTIVATIONS: dict[str, Any] = {
    "relu": nn.ReLU(), "relu6": nn.ReLU6(), "silu": nn.SiLU(inplace=True), "gelu": nn.GELU(),
    "gelu_tanh": nn.GELU("tanh"), "sigmoid": nn.Sigmoid(), "tanh": nn.Tanh(), "hardswish": nn.Hardswish(),
    "hardsigmoid": nn.Hardsigmoid(), "leaky_relu": nn.LeakyReLU(), "leaky_relu0.2": nn.LeakyReLU(0.2),
}  # fmt: skip
CALLED: dict[str, Any] = {
    "relu": torch.relu, "relu_": lambda y: y.relu_(), "relu6": functional.relu6, "gelu": functional.gelu,
    "gelu_tanh": lambda y: functional.gelu(y, approximate="tanh"), "hardswish": functional.hardswish,
    "leaky_relu0.2": lambda y: functional.leaky_relu(y, 0.2), "tanh_": lambda y: y.tanh_(),
    "leaky_relu0.3": lambda y: functional.leaky_relu(y, negative_slope=0.3, inplace=True),
}  # fmt: skip


class Called(nn.Module):
    def __init__(self, function: Any) -> None:
        super().__init__()
        self.conv, self.function = nn.Conv2d(3, 4, 3), function

    def forward(self, x: Any) -> Any:
        return self.function(self.conv(x))


@pytest.mark.parametrize(("word", "function"), [*ACTIVATIONS.items(), *CALLED.items()])
def test_activations(word: str, function: Any) -> None:
    model = Called(function).eval()
    made = tapwise.torch.optimize(model)
    (fused,) = [one for one in made.__dict__["graph"].modules() if isinstance(one, FusedConv)]
    assert fused.activation == word.rstrip("_")
    with torch.no_grad():
        same(made(X), model(X))
        fused.by_torch = True
        same(made(X), model(X))


def test_hooks_are_called() -> None:
    model, seen = net(), []
    model.layers[0].bn1.register_forward_hook(lambda module, inputs, y: seen.append(module))
    torch.nn.utils.parametrizations.weight_norm(model.layers[1].conv2)
    made = tapwise.torch.optimize(model)
    with torch.no_grad():
        same(made(X), model(X))
    assert len(seen) == 2


class Branch(nn.Module):
    def __init__(self) -> None:
        super().__init__()
        self.conv = nn.Conv2d(3, 4, 3)
        self.blocks = nn.ModuleList(nn.Sequential(nn.Conv2d(4, 4, 1), nn.BatchNorm2d(4), nn.ReLU()) for _ in range(2))

    def forward(self, x: Any) -> Any:
        y = self.conv(x if x.sum() > 0 else -x)
        for block in self.blocks:
            y = block(y)
        return y


def test_what_cannot_be_traced_is_left() -> None:
    model = Branch().eval()
    for made in (tapwise.torch.optimize(model), tapwise.torch.optimize(model, X)):
        assert list(made.report.untraced) == [""]
        assert "control flow" in str(made.report)
        assert made.report.fused == 3
        with torch.no_grad():
            for again in (made, copy.deepcopy(made), pickle.loads(pickle.dumps(made))):
                same(again(X), model(X))
                same(again(-X), model(-X))
            made.blocks[0][1].weight.mul_(2)
            model.blocks[0][1].weight.mul_(2)
            same(made(X), model(X))
            model.blocks[0][1].weight.div_(2)
    assert len(made.report.layers) == 3


def test_bad_arguments_are_named() -> None:
    with pytest.raises(InvalidProblem, match="model is a int"):
        tapwise.torch.optimize(3)  # type: ignore[arg-type]
    with pytest.raises(InvalidProblem, match="memory_format"):
        tapwise.torch.optimize(net(), memory_format="nhwc")
    with pytest.raises(InvalidProblem, match="math"):
        tapwise.torch.optimize(net(), math="fp8")


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
