"""Models on a CPU from recordings."""

from __future__ import annotations

import copy
import pickle
import threading
from functools import partial
from typing import Any

import pytest

pytest.importorskip("torch")

import torch
from torch import nn
from torch.nn import functional

import tapwise.torch
from tapwise.cpu.pieces import Pieces
from tapwise.torch.gated import Gated
from tapwise.torch.graphs import Graphs
from tapwise.torch.recorded import Recorded, record


class Net(nn.Module):
    """Views, writes in place, concatenation, a residual, pooling, and layers of which some are PyTorch's."""

    def __init__(self) -> None:
        super().__init__()
        torch.manual_seed(0)
        self.stem = nn.Sequential(nn.Conv2d(3, 12, 3, padding=1, bias=False), nn.BatchNorm2d(12), nn.Hardswish())
        self.deep = nn.Conv2d(12, 12, 5, padding=2, groups=12)
        self.point = nn.Conv2d(12, 12, 1)
        self.norm = nn.GroupNorm(3, 24)
        self.last = nn.Linear(24, 7)

    def forward(self, x: torch.Tensor) -> Any:
        y = self.stem(x)
        y = y + self.point(self.deep(y))
        left, right = y.chunk(2, 1)
        z = self.norm(torch.cat([right, left, y], 1).mul_(1.5))
        return self.last(functional.adaptive_avg_pool2d(z, 1).flatten(1)), z


def graph_of(made: Any) -> Graphs:
    return made.__dict__["captured"]


def called(recorded: Recorded) -> tuple[list[str], list[str]]:
    """The operators whose kernels are launched without PyTorch, and the names of what PyTorch is asked for."""
    ours = [one for step in recorded._steps for one in getattr(step, "steps", [])]
    theirs: list[Any] = [step for step in recorded._steps if isinstance(step, partial)]
    again = [step.args[0] if getattr(step.func, "__name__", "") == "_again" else step.func for step in theirs]
    operators = ["pieces" if isinstance(one, Pieces) else one.plan.problem.operator for one in ours]
    return operators, [str(getattr(one, "__name__", one)) for one in again]


def check(made: Any, theirs: Any, x: torch.Tensor) -> None:
    torch.testing.assert_close(made(x), theirs(x), rtol=1e-4, atol=1e-5)


@pytest.mark.parametrize("order", [torch.contiguous_format, torch.channels_last])
@pytest.mark.parametrize("mode", [torch.no_grad, torch.inference_mode])
def test_a_model(order: Any, mode: Any) -> None:
    theirs = Net().eval().requires_grad_(False)
    made = tapwise.torch.optimize(theirs, graphs=True)
    with mode():
        for n, size in ((1, 9), (2, 16), (1, 9), (0, 9), (1, 9)):
            for _ in range(2):
                check(made, theirs, torch.randn(n, 3, size, size + 2).contiguous(memory_format=order))
        x = torch.randn(1, 3, 9, 11).contiguous(memory_format=order)
        first = made(x)
        kept = [one.clone() for one in first]
        made(2 * x)
    assert all(map(torch.equal, first, kept)), "results are copies"
    recorded: list[Any] = [one[1] for one in graph_of(made)._graphs.values()]
    assert graph_of(made).refused == ""
    assert all(one is not None and isinstance(one.graph, Recorded) for one in recorded)
    # The convolutions' kernels are called without PyTorch: none of what is called again is one of ours.
    operators, theirs = called(recorded[0].graph)
    assert operators.count("conv") == 3
    assert theirs and not [name for name in theirs if "conv_frozen" in name]


def test_parameters_change_and_copies_work() -> None:
    theirs = Net().eval().requires_grad_(False)
    made = tapwise.torch.optimize(theirs, graphs=True)
    x = torch.randn(1, 3, 9, 9)
    check(made, theirs, x)
    for one in (made, copy.deepcopy(made), pickle.loads(pickle.dumps(made))):
        check(one, theirs, x)
    for model in (made, theirs):
        model.get_submodule("point").weight.mul_(2)
        model.get_submodule("stem.1").running_var.mul_(3)
    check(made, theirs, x)
    made.load_state_dict(Net().state_dict())
    check(made, Net().eval().requires_grad_(False), x)
    check(made.double(), Net().eval().double().requires_grad_(False), x.double())


def test_four_threads() -> None:
    theirs = Net().eval().requires_grad_(False)
    made = tapwise.torch.optimize(theirs, graphs=True)
    wrong: list[BaseException] = []

    def calls() -> None:
        try:
            for size in (9, 10) * 10:
                check(made, theirs, torch.randn(1, 3, size, 9))
        except BaseException as error:
            wrong.append(error)

    threads = [threading.Thread(target=calls) for _ in range(4)]
    for thread in threads:
        thread.start()
    for thread in threads:
        thread.join()
    assert not wrong, wrong


def test_operators_that_write_to_their_place() -> None:
    """Of all forms of an operator the one with the same arguments; results in PyTorch's own order; pooling of ours."""

    class Forms(nn.Module):
        def forward(self, x: torch.Tensor) -> Any:
            y = (x + 1) * 2.5 - x / 3
            z = y.sum((2, 3)) + y.mean(dim=(2, 3), keepdim=False) + y.amax((2, 3))
            many = torch.cat([z, z.relu(), functional.hardswish(z)], 1)
            pooled = torch.ops.tapwise.max_pool2d(y, [3, 3], [2, 2], [1, 1])
            many = many.double().t().contiguous()
            filled = torch.empty_like(x).copy_(x).add_(1)
            y = functional.batch_norm(y, filled.mean((0, 2, 3)), filled.var((0, 2, 3)), eps=0.5)
            means = torch.ops.tapwise.avg_pool2d(y, [2, 2]), torch.ops.tapwise.global_avg_pool2d(y)
            return many, y.transpose(1, 2) + 1, pooled, *means, x.clamp(min=0.1)

    made = tapwise.torch.optimize(Forms(), graphs=True)
    for dtype in (torch.float32, torch.float64):
        for order in (torch.contiguous_format, torch.channels_last):
            for _ in range(3):
                x = torch.randn(2, 3, 9, 8, dtype=dtype).contiguous(memory_format=order)
                expected = Forms()(x)
                for found, wanted in zip(made(x), expected, strict=True):
                    torch.testing.assert_close(found, wanted)
                    assert found.stride() == wanted.stride()
    assert graph_of(made).refused == ""
    recorded: Any = [one[1] for one in graph_of(made)._graphs.values()][-1]
    operators, names = called(recorded.graph)
    assert operators == ["pool", "pool", "reduce"]
    assert "copy_" in names and sum("out" in name for name in names) >= 6, names


def test_shapes_that_change_in_place() -> None:
    class Turned(nn.Module):
        def forward(self, x: torch.Tensor) -> torch.Tensor:
            y = x + 1
            z = y * 2
            y.transpose_(0, 1).unsqueeze_(0)
            y.add_(3)
            return y.sum(0) @ z

    made = tapwise.torch.optimize(Turned(), graphs=True)
    for _ in range(3):
        x = torch.randn(4, 3)
        torch.testing.assert_close(made(x), Turned()(x))
    assert graph_of(made).refused == "" and graph_of(made)._graphs


@pytest.mark.parametrize("words", [("relu", "sigmoid"), ("silu", "sigmoid"), ("relu", "hardsigmoid")])
@pytest.mark.parametrize("order", [torch.contiguous_format, torch.channels_last])
def test_gates(words: tuple[str, str], order: Any) -> None:
    """Of which PyTorch leaves out words that are the operator's defaults; filters that change; other dtypes."""
    activation, gate = (getattr(functional, word) for word in words)

    class Gate(nn.Module):
        def __init__(self) -> None:
            super().__init__()
            torch.manual_seed(0)
            self.conv, self.reduce, self.expand = nn.Conv2d(3, 24, 3), nn.Conv2d(24, 9, 1), nn.Conv2d(9, 24, 1)

        def forward(self, x: torch.Tensor) -> torch.Tensor:
            y = self.conv(x)
            y = y * gate(self.expand(activation(self.reduce(functional.adaptive_avg_pool2d(y, 1)))))
            return self.conv(y[:, :3])

    theirs = Gate().eval().requires_grad_(False)
    for dtype in (torch.float32, torch.float64, torch.bfloat16):
        model = copy.deepcopy(theirs).to(dtype)
        made = tapwise.torch.optimize(model, graphs=True)
        for module in made.__dict__["graph"].modules():
            if isinstance(module, Gated):
                module.by_torch = False
        for size in (9, 12, 9):
            x = torch.randn(2, 3, size, size + 2).to(dtype).contiguous(memory_format=order)
            bounds = {"rtol": 2e-2, "atol": 2e-2} if dtype is torch.bfloat16 else {"rtol": 1e-4, "atol": 1e-5}
            with torch.no_grad():
                torch.testing.assert_close(made(x), model(x), **bounds)
                for one in (made, model):
                    one.get_submodule("reduce").weight.mul_(1.5)
        recorded: list[Any] = [one[1] for one in graph_of(made)._graphs.values()]
        operators, _ = called(recorded[-1].graph)
        assert operators.count("squeeze_excitation") == 1, (graph_of(made).refused, operators)


def test_results_share_memory() -> None:
    """A long chain of results takes the memory of a few; what is read later stays."""

    class Chain(nn.Module):
        def forward(self, x: torch.Tensor) -> tuple[torch.Tensor, torch.Tensor, torch.Tensor]:
            first = x * 2
            y = first
            for number in range(20):
                y = (y + number).relu()
            return y - first, first[1:], y.t()

    made = tapwise.torch.optimize(Chain(), graphs=True)
    for _ in range(3):
        x = torch.randn(64, 100)
        torch.testing.assert_close(made(x), Chain()(x))
    recorded: Any
    (recorded,) = (one[1] for one in graph_of(made)._graphs.values())
    memory = {one.untyped_storage().data_ptr(): one.untyped_storage().nbytes() for one in recorded.outputs}
    assert len(memory) == 1 and sum(memory.values()) <= 5 * 64 * 100 * 4 + 5 * 64


def test_what_depends_on_elements_is_called() -> None:
    class Positive(nn.Module):
        def forward(self, x: torch.Tensor) -> torch.Tensor:
            return x[x > 0]

    made = tapwise.torch.optimize(Positive(), graphs=True)
    for _ in range(3):
        x = torch.randn(5, 3)
        assert torch.equal(made(x), x[x > 0])
    assert "depends on elements" in graph_of(made).refused
    with pytest.raises(RuntimeError, match="depends on elements"):
        record(lambda: bool(torch.ones(1) > 0))


def test_what_is_not_traced_is_called() -> None:
    """Python's code might keep elements that the next call has not."""

    class Untraced(nn.Module):
        def forward(self, x: torch.Tensor) -> torch.Tensor:
            return x * float(x.numpy().sum())

    made = tapwise.torch.optimize(Untraced(), graphs=True)
    for _ in range(3):
        x = torch.randn(4)
        assert torch.equal(made(x), x * float(x.numpy().sum()))


def test_gradients_are_pytorchs() -> None:
    theirs = Net().eval().requires_grad_(False)
    made = tapwise.torch.optimize(theirs, graphs=True)
    x = torch.randn(1, 3, 9, 9)
    made(x)
    x.requires_grad_()
    made(x)[0].sum().backward()
    assert x.grad is not None


class Dense(nn.Module):
    """Normalisation of what lies side by side, as in DenseNet, and next to it what is not to be fused."""

    def __init__(self) -> None:
        super().__init__()
        torch.manual_seed(0)
        self.norms = nn.ModuleList(nn.BatchNorm2d(channels) for channels in (13, 13, 18, 5, 13, 5))
        for norm in self.norms:
            for one in (norm.weight, norm.bias, norm.running_mean):
                nn.init.normal_(one)
            nn.init.uniform_(norm.running_var, 0.5, 2)

    def forward(self, x: torch.Tensor) -> Any:
        y = x * 2 + 1
        fused = functional.relu(self.norms[0](torch.cat([x, y, x[:, :3]], 1)), inplace=True)
        read_twice = torch.cat([y, x, y[:, 1:4]], 1)
        normed = self.norms[1](read_twice)
        both = normed.relu() + normed + read_twice
        plain = self.norms[2](torch.cat([fused, y], 1)).relu()
        changed = torch.cat([x, y, x[:, 2:]], 1)
        changed.add_(1)
        signed = functional.relu(self.norms[4](changed))
        # What a call works out, no parameter.
        own = functional.batch_norm(y, y.mean((0, 2, 3)), y.var((0, 2, 3)))
        return fused, both, plain, signed, own, self.norms[5](y).sigmoid()


@pytest.mark.parametrize("order", [torch.contiguous_format, torch.channels_last])
def test_normalisation_of_what_lies_side_by_side(order: Any) -> None:
    theirs = Dense().eval().requires_grad_(False)
    made = tapwise.torch.optimize(theirs, graphs=True)
    for dtype in (torch.float32, torch.float64, torch.float32):
        x = torch.randn(2, 5, 9, 11, dtype=dtype).contiguous(memory_format=order)
        x[1, 2, 3, 4] = torch.nan
        made, theirs = made.to(dtype), theirs.to(dtype)
        for found, wanted in zip(made(x), theirs(x), strict=True):
            torch.testing.assert_close(found, wanted, rtol=1e-4, atol=1e-5, equal_nan=True)
            assert found.stride() == wanted.stride()
    theirs.norms[0].bias.add_(3)
    made.get_submodule("norms.0").bias.add_(3)
    torch.testing.assert_close(made(x)[0], theirs(x)[0], rtol=1e-4, atol=1e-5, equal_nan=True)
    assert graph_of(made).refused == ""
    recorded: Any = [one[1] for one in graph_of(made)._graphs.values()][-1]
    operators, names = called(recorded.graph)
    # Five channels are too short a row where they lie side by side, and no row of pieces of one.
    planes = order is torch.contiguous_format
    assert sum("native_batch_norm" in name for name in names) == (1 if planes else 2), names
    assert sum("cat" in name for name in names) == (0 if planes else 4), names
    # Concatenation is by itself where somebody else reads or writes it.
    assert operators.count("pieces") == (7 if planes else 4), operators


@pytest.mark.parametrize("order", [torch.contiguous_format, torch.channels_last])
@pytest.mark.parametrize("sizes", [(8, 8), (6, 10), (16,)])
def test_shuffles_of_parts(order: Any, sizes: tuple[int, ...]) -> None:
    class Parts(nn.Module):
        def forward(self, x: torch.Tensor) -> torch.Tensor:
            y = torch.cat([x[:, : sizes[0]] * 2, *([x[:, sizes[0] :] * 2] * (len(sizes) > 1))], dim=1)
            n, c, h, w = y.size()
            return y.view(n, 2, c // 2, h, w).transpose(1, 2).contiguous().view(n, c, h, w) + 1

    made = tapwise.torch.optimize(Parts(), graphs=True)
    for n in (1, 3, 1):
        x = torch.randn(n, 16, 5, 7)
        assert torch.equal(made(x.contiguous(memory_format=order)), Parts()(x))
    if len(sizes) == 2 and order is torch.contiguous_format:
        recorded: Any = [one[1] for one in graph_of(made)._graphs.values()][-1]
        operators, _ = called(recorded.graph)
        assert operators.count("pieces") == (1 if sizes[0] == sizes[1] else 2), operators
