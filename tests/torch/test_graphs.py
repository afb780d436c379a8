"""Models from CUDA graphs."""

from __future__ import annotations

import copy
import pickle
import threading
from types import SimpleNamespace
from typing import Any

import numpy as np
import pytest

pytest.importorskip("torch")

import torch
from torch import nn

import tapwise.torch
from tapwise.errors import InvalidProblem
from tapwise.torch.graphs import Graphs, _Captured


def model() -> Any:
    torch.manual_seed(0)
    block = nn.Sequential(nn.Conv2d(3, 8, 3, padding=1), nn.BatchNorm2d(8), nn.ReLU(), nn.Conv2d(8, 4, 1))
    return block.eval().requires_grad_(False)


class Replayed(Graphs):
    """Graphs on a CPU: a capture's replay computes from its own inputs to its own outputs."""

    captures = 0

    @staticmethod
    def _suited(tensors: Any) -> bool:
        return True

    def _capture(self, leaves: Any, form: Any) -> Any:
        self.captures += 1
        static = [leaf.clone() for leaf in leaves]
        output = torch.empty(0)

        def replay() -> None:
            found = self._function(*static)
            output.resize_(found.shape).copy_(found)

        return _Captured(SimpleNamespace(replay=replay), static, output)


def test_what_a_graph_is_for() -> None:
    weight, kept = torch.ones(3), 2
    graphs = Replayed(lambda x: x * weight, lambda: weight._version, kept)
    a, b = torch.randn(2, 3), torch.randn(4, 3)
    first = graphs(a)
    assert torch.equal(first, a)
    assert torch.equal(graphs(2 * a), 2 * a)
    assert torch.equal(first, a), "results are copies"
    assert graphs.captures == 1
    assert torch.equal(graphs(b), b)
    assert graphs.captures == 2
    assert torch.equal(graphs(a.double()), a.double())
    assert graphs.captures == 3
    graphs(b)
    assert graphs.captures == 3, "used last, kept"
    graphs(a)
    assert graphs.captures == 4, "bounded"
    weight.mul_(3)
    assert torch.equal(graphs(a), 3 * a)
    assert graphs.captures == 5, "of another version"


def test_what_cannot_be_told_apart_is_called() -> None:
    """The repr of a large array leaves most of it out."""
    graphs = Replayed(lambda x, scale: x * float(scale[5000]), lambda: 0, 2)
    one, two = np.ones(10000), np.ones(10000)
    two[5000] = 2
    x = torch.randn(3)
    assert torch.equal(graphs(x, one), x)
    assert torch.equal(graphs(x, two), 2 * x)
    assert graphs.captures == 0


def test_what_a_models_graphs_depend_on() -> None:
    made = tapwise.torch.optimize(model(), graphs=True)
    for one in (made, copy.deepcopy(made), pickle.loads(pickle.dumps(made))):
        conv, norm = one.get_submodule("0"), one.get_submodule("1")
        seen = [one._version()]
        assert one._version() == seen[0]
        with torch.no_grad():
            conv.weight[0, 0, 0, 0] += 1
            seen.append(one._version())
            norm.running_mean.mul_(2)
            seen.append(one._version())
        conv.weight.data = torch.zeros(8, 3, 3, 3)
        seen.append(one._version())
        conv.bias = nn.Parameter(torch.zeros(8))
        seen.append(one._version())
        one.double()
        seen.append(one._version())
        with torch.inference_mode():
            conv.bias = nn.Parameter(torch.ones(8), requires_grad=False)
        seen.append(one._version())
        assert all(seen[i] != seen[j] for i in range(len(seen)) for j in range(i)), seen


def test_what_lies_on_a_cpu_is_called() -> None:
    made = tapwise.torch.optimize(model(), graphs=True)
    x = torch.randn(2, 3, 9, 9)
    for again in (made, copy.deepcopy(made), pickle.loads(pickle.dumps(made))):
        torch.testing.assert_close(again(x), model()(x), rtol=1e-4, atol=1e-5)
    with pytest.raises(InvalidProblem, match="graphs"):
        tapwise.torch.optimize(model(), graphs=-1)
    with pytest.raises(InvalidProblem, match="graphs"):
        tapwise.torch.optimize(model(), graphs="many")  # type: ignore[arg-type]


@pytest.mark.cuda
@pytest.mark.parametrize("dtype", [torch.float32, torch.float16])
def test_on_a_gpu(dtype: Any) -> None:
    theirs = model().cuda().to(dtype)
    made = tapwise.torch.optimize(theirs, graphs=True)

    def check(x: Any) -> None:
        torch.testing.assert_close(made(x), theirs(x), rtol=1e-2, atol=1e-2)

    for size in (9, 16, 9):
        for _ in range(3):
            check(torch.randn(2, 3, size, size, device="cuda", dtype=dtype))
    made.get_submodule("0").weight.mul_(2)
    theirs[0].weight.mul_(2)
    check(torch.randn(2, 3, 9, 9, device="cuda", dtype=dtype))
    wrong: list[BaseException] = []

    def calls() -> None:
        try:
            with torch.cuda.stream(torch.cuda.Stream()):
                for _ in range(20):
                    x = torch.randn(2, 3, 9, 9, device="cuda", dtype=dtype)
                    check(x)
        except BaseException as error:
            wrong.append(error)

    threads = [threading.Thread(target=calls) for _ in range(2)]
    for thread in threads:
        thread.start()
    for thread in threads:
        thread.join()
    assert not wrong
    assert made.__dict__["captured"].refused == ""
