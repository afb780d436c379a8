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
from torch._inductor import graph, lowering
from torch._inductor.utils import run_and_get_code
from torch.nn import functional

import tapwise.torch
from tapwise import dispatch
from tapwise.errors import InvalidProblem
from tapwise.torch import frozen
from tapwise.torch.fused import FusedConv
from tapwise.torch.operators import OPERATORS

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


def test_inductor_knows_operators_before_it_meets_them(monkeypatch: pytest.MonkeyPatch) -> None:
    """What it does not know it first puts into words, with all that comes before."""
    if not emulated.available():
        pytest.skip("no C++ compiler")
    for name in OPERATORS:
        monkeypatch.delitem(lowering.lowerings, getattr(torch.ops.tapwise, name).default, raising=False)

    def met(target: Any, **_words: Any) -> None:
        raise AssertionError(f"{target} is not known")

    monkeypatch.setattr(graph, "make_fallback", met)
    torch._dynamo.reset()
    model = net()
    same(torch.compile(tapwise.torch.optimize(model), fullgraph=True)(X), model(X))


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


def test_blas_computes_no_filters_that_stay(monkeypatch: pytest.MonkeyPatch) -> None:
    """Its threads would spin beside the layers behind them: the next best computes what it would."""
    w, x, choices = torch.randn(90, 70, 1, 1), torch.randn(1, 70, 1, 1), []

    def choose(problem: Any, device: Any, algorithm: str = "auto", **words: Any) -> Any:
        choices.append(real(problem, device, "cpu.im2col_gemm" if algorithm == "auto" else algorithm, **words))
        return choices[-1]

    real = dispatch.choose
    monkeypatch.setattr(dispatch, "choose", choose)
    y = torch.ops.tapwise.conv_frozen(x, w, None, None, "relu")
    assert [one.algorithm for one in choices] == ["cpu.im2col_gemm", "cpu.pointwise"]
    torch.testing.assert_close(y, torch.conv2d(x, w).relu())


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
