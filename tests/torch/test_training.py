"""Training on tapwise: losses as PyTorch's, modules that stay torch.nn's, each direction by either library."""

from __future__ import annotations

import copy
import pickle
from typing import Any

import pytest

pytest.importorskip("torch")

import torch
from torch import nn
from torch.autograd import gradcheck, gradgradcheck
from torch.nn import functional

import tapwise.torch
from tapwise.errors import InvalidProblem
from tapwise.ops.conv.problem import DIRECTIONS
from tapwise.torch.directions import chosen, host_us
from tapwise.torch.training import TrainedConv2d, TrainedConvTranspose2d, for_training


class Net(nn.Module):
    """Every kind of convolution that a small network has."""

    def __init__(self) -> None:
        super().__init__()
        self.stem = nn.Sequential(nn.Conv2d(3, 8, 3, 2, 1, bias=False), nn.BatchNorm2d(8), nn.ReLU())
        self.depthwise, self.point = nn.Conv2d(8, 8, 3, 1, 1, groups=8), nn.Conv2d(8, 16, 1)
        self.grouped = nn.Conv2d(16, 16, 3, 2, 2, dilation=2, groups=4)
        self.odd = nn.Conv2d(16, 16, 3, padding="same")
        self.fc = nn.Linear(16, 5)

    def forward(self, x: Any) -> Any:
        x = self.point(functional.silu(self.depthwise(self.stem(x))))
        x = functional.relu(self.odd(functional.relu(self.grouped(x))))
        return self.fc(x.mean((2, 3)))


def data(dtype: torch.dtype = torch.float32) -> tuple[torch.Tensor, torch.Tensor]:
    generator = torch.Generator().manual_seed(0)
    return torch.randn(24, 3, 16, 16, generator=generator, dtype=dtype), torch.arange(24) % 5


def made(**words: Any) -> tuple[nn.Module, nn.Module]:
    torch.manual_seed(1)
    theirs = Net()
    return theirs, for_training(theirs, None, **words)[0]


def losses(model: nn.Module, steps: int, autocast: bool = False) -> list[float]:
    x, labels = data()
    optimizer = torch.optim.Adam(model.parameters(), 0.02)
    found = []
    for _ in range(steps):
        with torch.autocast("cpu", enabled=autocast):
            loss = functional.cross_entropy(model(x).float(), labels)
        optimizer.zero_grad()
        loss.backward()
        optimizer.step()
        found.append(float(loss.detach()))
    return found


def test_random_labels_are_learnt_as_by_torch() -> None:
    theirs, ours = made()
    expected, found = losses(theirs, 60), losses(ours, 60)
    assert found[-1] < 0.3 * found[0], "it does not learn"
    assert found[:8] == pytest.approx(expected[:8], rel=1e-3)
    assert found[-1] == pytest.approx(expected[-1], abs=0.3 * expected[0])


def test_under_autocast() -> None:
    theirs, ours = made()
    expected, found = losses(theirs, 12, True), losses(ours, 12, True)
    assert found == pytest.approx(expected, rel=0.1)
    assert all(one.grad is not None and one.grad.dtype is torch.float32 for one in ours.parameters())


@pytest.mark.parametrize("by_torch", [(), ("dgrad",), ("wgrad",), ("fprop", "wgrad"), DIRECTIONS])
@pytest.mark.parametrize("order", [torch.contiguous_format, torch.channels_last])
def test_directions_by_either_library(by_torch: tuple[str, ...], order: Any) -> None:
    theirs, ours = made()
    for module in ours.modules():
        if isinstance(module, TrainedConv2d):
            module.by_torch = frozenset(by_torch)
    x, labels = data()
    x = x.contiguous(memory_format=order)
    gradients = []
    for model in (theirs, ours):
        leaf = x.clone().requires_grad_()
        functional.cross_entropy(model(leaf), labels).backward()
        gradients.append([leaf.grad, *(one.grad for one in model.parameters())])
    for mine, other in zip(gradients[1], gradients[0], strict=True):
        torch.testing.assert_close(mine, other, rtol=1e-3, atol=1e-5)


def test_modules_stay_what_they_are() -> None:
    theirs, ours = made()
    assert isinstance(ours, Net)
    kinds = [type(ours.get_submodule(name)) for name in ("stem.0", "depthwise", "point", "grouped", "odd")]
    assert kinds == [TrainedConv2d] * 4 + [nn.Conv2d], "what has padding in words is left"
    assert not any(isinstance(one, TrainedConv2d) for one in theirs.modules())
    assert list(ours.state_dict()) == list(theirs.state_dict())
    ours.load_state_dict(theirs.state_dict())
    x, _ = data()
    for again in (copy.deepcopy(ours), pickle.loads(pickle.dumps(ours))):
        torch.testing.assert_close(again.eval()(x), theirs.eval()(x), rtol=1e-3, atol=1e-4)
    doubled = copy.deepcopy(ours).double().eval()
    torch.testing.assert_close(doubled(x.double()).float(), theirs.eval()(x), rtol=1e-3, atol=1e-4)
    with torch.no_grad():
        assert not ours(x).requires_grad


def test_gradients_of_gradients() -> None:
    conv = TrainedConv2d.of(nn.Conv2d(4, 6, 3, 2, 1, groups=2).double())
    x = data(torch.float64)[0][:2, :1, :6, :5].repeat(1, 4, 1, 1).requires_grad_()
    assert gradcheck(conv, (x,))
    assert gradgradcheck(conv, (x,))
    conv.by_torch = frozenset(("dgrad",))
    assert gradgradcheck(conv, (x,))


def test_optimize_measures_every_direction(capsys: pytest.CaptureFixture[str]) -> None:
    torch.manual_seed(1)
    theirs, (x, _) = Net(), data()
    statistics = theirs.stem[1].running_mean.clone()  # type: ignore[operator, union-attr]
    ours = tapwise.torch.optimize(theirs, x, training=True, report=True)
    said = capsys.readouterr().out
    assert "4 convolutions replaced" in said and "of 12 directions by tapwise" in said
    for direction in DIRECTIONS[1:]:
        assert f" {direction}" in said
    assert torch.equal(ours.stem[1].running_mean, statistics)
    assert ours.training and all(one.requires_grad for one in ours.parameters())
    assert losses(ours, 3) == pytest.approx(losses(theirs, 3), rel=1e-3)
    with pytest.raises(InvalidProblem, match="training=True: goes without"):
        tapwise.torch.optimize(theirs, x, training=True, memory_format="contiguous")


def test_the_hosts_time_counts_where_nothing_is_captured() -> None:
    host = host_us(torch.device("cpu"), torch.float32)
    assert len(host) == 7 and all(0 <= taken < 10_000 for taken in host.values())
    for gains, taken, expected in (
        ({"fprop": 30, "dgrad": -5, "wgrad": 10}, {}, {"dgrad"}),
        ({"fprop": 30, "dgrad": 5, "wgrad": -float("inf")}, {frozenset(("wgrad",)): 50.0}, {"dgrad", "wgrad"}),
        ({"fprop": 30, "dgrad": 5, "wgrad": 10}, dict.fromkeys(host, 40.0), set()),
        ({"fprop": 30, "dgrad": 5, "wgrad": 10}, dict.fromkeys(host, 50.0), set(DIRECTIONS)),
        ({"fprop": -1, "dgrad": -5, "wgrad": -9}, {}, set(DIRECTIONS)),
    ):  # fmt: skip
        assert chosen(gains, taken) == expected


@pytest.mark.parametrize("by_torch", [(), ("dgrad", "wgrad"), ("fprop",), DIRECTIONS])
def test_transposed(by_torch: tuple[str, ...]) -> None:
    theirs = nn.Sequential(
        nn.ConvTranspose2d(6, 4, 3, (2, 3), (1, 0), (1, 2), groups=2), nn.ConvTranspose2d(4, 5, 2, bias=False),
        nn.ConvTranspose2d(5, 3, 3, dilation=2, output_padding=1),
    ).double()  # fmt: skip
    ours, report = for_training(theirs, (torch.randn(2, 6, 5, 7).double(),))
    assert [type(one) for one in ours.children()] == [TrainedConvTranspose2d] * 3
    assert len(report.layers) == 9 and "9 directions" in str(report)
    for module in ours.children():
        module.by_torch = frozenset(by_torch)  # type: ignore[assignment]
    found = []
    for model in (theirs, ours):
        x = data(torch.float64)[0][:6].transpose(0, 1).reshape(2, 9, -1)[:, :6, :35].reshape(2, 6, 5, 7)
        x = x.contiguous(memory_format=torch.channels_last).requires_grad_()
        middle = model[0](x, output_size=(10, 23))  # type: ignore[index, operator]
        y = model[2](model[1](middle))  # type: ignore[index, operator]
        y.square().sum().backward()
        found.append([y, x.grad, *(one.grad for one in model.parameters())])
    for mine, other in zip(*found, strict=True):
        torch.testing.assert_close(mine, other)
    with pytest.raises(ValueError, match="output size"):
        ours[0](x, output_size=(20, 20))  # type: ignore[index, operator]


def test_gradients_of_a_transposed_ones_gradients() -> None:
    conv = TrainedConvTranspose2d.of(nn.ConvTranspose2d(2, 3, 2, 2, 0, 1).double())
    x = torch.randn(1, 2, 2, 3).double().requires_grad_()
    assert gradgradcheck(conv, (x,))


def test_under_torch_func() -> None:
    theirs, ours = made()
    x, labels = data()

    def loss(model: nn.Module, parameters: dict[str, torch.Tensor]) -> torch.Tensor:
        return functional.cross_entropy(torch.func.functional_call(model, parameters, (x,)), labels)

    found, expected = (
        torch.func.grad(lambda parameters, model=model: loss(model, parameters))(dict(model.named_parameters()))
        for model in (ours.eval(), theirs.eval())
    )
    for name, one in expected.items():
        torch.testing.assert_close(found[name], one, rtol=1e-3, atol=1e-5)


def test_compiled() -> None:
    theirs, ours = made()
    x, labels = data()
    compiled = torch.compile(ours, backend="aot_eager", fullgraph=True)
    for model in (theirs, compiled):
        functional.cross_entropy(model(x), labels).backward()
    for mine, other in zip(ours.parameters(), theirs.parameters(), strict=True):
        torch.testing.assert_close(mine.grad, other.grad, rtol=1e-3, atol=1e-5)
