"""Models that are trained under torch.compile: what its graphs have; results are those of eager steps."""

from __future__ import annotations

import copy
from typing import Any

import pytest

pytest.importorskip("torch")

import torch
from torch import nn

import tapwise.torch
from tapwise.torch import norms, training
from tapwise.torch.training import TrainedMaxPool2d


@pytest.fixture
def by_kernels(monkeypatch: pytest.MonkeyPatch) -> None:
    """Norms and pools by our kernels under torch.compile, as on a GPU."""
    for module in (norms, training):
        monkeypatch.setattr(module, "by_kernels", lambda x: torch.compiler.is_compiling())


def compiled(model: Any) -> tuple[Any, list[str]]:
    """(the model, the code of its graphs: forward, backward)."""
    from torch._dynamo.backends.common import aot_autograd
    from torch._functorch._aot_autograd.utils import make_boxed_func

    torch._dynamo.reset()
    code: list[str] = []

    def kept(graph: Any, _inputs: Any) -> Any:
        code.append(graph.code)
        return make_boxed_func(graph.forward)

    return torch.compile(model, backend=aot_autograd(fw_compiler=kept, bw_compiler=kept), fullgraph=True), code


def drawn(*shape: int, last: bool) -> Any:
    x = torch.randn(shape, generator=torch.Generator().manual_seed(0), dtype=torch.float64)
    return x.contiguous(memory_format=torch.channels_last) if last else x


def gradients(model: Any, x: Any) -> list[Any]:
    """Of one step: by x and by the parameters."""
    x = x.clone().requires_grad_()
    y = model(x)
    # In place of a scalar's own gradient, one with an order.
    (y * torch.linspace(-1, 1, y.numel(), dtype=y.dtype).reshape(y.shape)).sum().backward()
    return [x.grad, *(one.grad for one in model.parameters())]


def blocks() -> Any:
    """Convolutions, transposed too, with activations in place behind them, as behind norms and pools."""
    parts = [
        nn.Conv2d(3, 6, 3, padding=1, bias=False), nn.BatchNorm2d(6), nn.ReLU(inplace=True), nn.MaxPool2d(3, 2, 1),
        nn.Conv2d(6, 4, 1), nn.SiLU(), nn.ConvTranspose2d(4, 6, 3, stride=2), nn.ReLU(inplace=True),
        nn.Conv2d(6, 6, 3, groups=6), nn.BatchNorm2d(6), nn.Conv2d(6, 5, 1),
    ]  # fmt: skip
    return nn.Sequential(*parts).double().train()


@pytest.mark.parametrize("last", [True, False])
@pytest.mark.usefixtures("by_kernels")
def test_gradients_are_not_copied(last: bool) -> None:
    order = torch.channels_last if last else torch.contiguous_format
    model, x = blocks().to(memory_format=order), drawn(2, 3, 9, 8, last=last)
    mine, report = training.for_training(copy.deepcopy(model), None)
    assert (report.convolutions, report.norms, report.pools) == (5, 2, 1)
    run, code = compiled(mine)
    found = gradients(run, x)
    for one, other in zip(found, gradients(model, x), strict=True):
        torch.testing.assert_close(one, other)
        assert one.stride() == other.stride()
    forward, backward = code
    assert "clone" not in forward and "clone" not in backward
    assert backward.count("tapwise.conv2d_weight.default") == 5
    assert backward.count("tapwise.max_pool2d_backward.default") == 1


@pytest.mark.parametrize("words", [{}, {"ceil_mode": True}, {"dilation": 2}, {"padding": 1}, {"return_indices": True}])
@pytest.mark.usefixtures("by_kernels")
def test_max_pooling(words: dict[str, Any]) -> None:
    model = nn.Sequential(nn.MaxPool2d(3, stride=2, **words))
    mine = tapwise.torch.optimize(copy.deepcopy(model), training=True)
    assert isinstance(mine[0], nn.MaxPool2d) and type(mine[0]) is TrainedMaxPool2d
    run, code = compiled(mine)
    for last in (True, False):
        x, other = (drawn(2, 5, 9, 12, last=last).requires_grad_() for _ in range(2))
        found, expected = run(x), model(other)
        for one, two in zip(found if words.get("return_indices") else [found],
                            expected if words.get("return_indices") else [expected], strict=True):  # fmt: skip
            torch.testing.assert_close(one, two)
        if not words.get("return_indices"):
            found.square().sum().backward()
            expected.square().sum().backward()
            torch.testing.assert_close(x.grad, other.grad)
    assert "tapwise.max_pool2d_with_indices" in code[0]
    # Eager calls, and images without a batch, are PyTorch's.
    torch.testing.assert_close(mine(x.detach()[0]), model(x.detach()[0]))


def test_a_cpus_pooling_stays_pytorchs() -> None:
    mine = tapwise.torch.optimize(nn.Sequential(nn.MaxPool2d(2)), training=True)
    run, code = compiled(mine)
    run(drawn(1, 2, 4, 4, last=False).requires_grad_()).sum().backward()
    assert "tapwise" not in "".join(code)
