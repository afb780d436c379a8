"""Modules whose forward torch.fx would trace into something else: none of them takes an activation, or is changed."""

from __future__ import annotations

import copy
import pickle
import random
from typing import Any

import pytest

pytest.importorskip("torch")

import numpy as np
import torch
from torch import nn
from torch.utils.checkpoint import checkpoint

from tapwise.torch.norms import TrainedBatchNorm2d
from tapwise.torch.traces import graph_of
from tapwise.torch.training import for_training


@pytest.fixture(autouse=True)
def unmeasured(monkeypatch: pytest.MonkeyPatch) -> None:
    """Convolutions are not timed here."""
    monkeypatch.setattr("tapwise.torch.training.measured", lambda *_: [])


def image() -> torch.Tensor:
    return torch.randn(4, 3, 5, 5, generator=torch.Generator().manual_seed(0))


class Part(nn.Module):
    def __init__(self) -> None:
        super().__init__()
        self.conv, self.bn, self.act = nn.Conv2d(3, 3, 1), nn.BatchNorm2d(3), nn.SiLU()
        self.calls, self.log, self.seen = 0, [0], {"last": 0}
        self.register_buffer("steps", torch.zeros(()))

    def core(self, x: Any) -> Any:
        return self.act(self.bn(self.conv(x)))

    def forward(self, x: Any) -> Any:
        return self.core(x)


class Negated(torch.autograd.Function):
    @staticmethod
    def forward(ctx: Any, x: Any) -> Any:
        return x * 1

    @staticmethod
    def backward(ctx: Any, dy: Any) -> Any:
        return -dy


class Dropped(Part):
    def forward(self, x: Any) -> Any:
        y = self.core(x)
        return x if self.training and random.random() < 0.3 else y


class Drawn(Part):
    def forward(self, x: Any) -> Any:
        y = self.core(x)
        return x if float(torch.rand(1)) < 1e-6 else y


class DrawnByNumPy(Part):
    def forward(self, x: Any) -> Any:
        y = self.core(x)
        return x if np.random.random() < 1e-6 else y


class DrawnByPython(Part):
    def forward(self, x: Any) -> Any:
        y = self.core(x)
        return x if random.random() < 1e-6 else y


class Unrecorded(Part):
    def forward(self, x: Any) -> Any:
        with torch.no_grad():
            y = self.core(x)
        return y + x


class Cast(Part):
    def forward(self, x: Any) -> Any:
        with torch.autocast("cpu", enabled=False):
            return self.core(x.float())


class Reversed(Part):
    def forward(self, x: Any) -> Any:
        return Negated.apply(self.core(x))


class Checkpointed(Part):
    def forward(self, x: Any) -> Any:
        return checkpoint(self.core, x, use_reentrant=False)


class Counted(Part):
    def forward(self, x: Any) -> Any:
        self.calls += 1
        return self.core(x)


class Logged(Part):
    def forward(self, x: Any) -> Any:
        self.log.append(len(self.log))
        self.seen["last"] = self.calls
        self.seen["more"] = 1
        return self.core(x)


class Warmed(Part):
    """From its second step on it gives back x."""

    def forward(self, x: Any) -> Any:
        y = self.core(x)
        return x if self.steps > 1 else y


class Optional(Part):
    def forward(self, x: Any, more: Any = None) -> Any:
        y = self.core(x)
        return y if more is None else y + more


class Constant(Part):
    def forward(self, x: Any) -> Any:
        return self.core(x - torch.tensor([1.0, 2.0, 3.0]).view(1, 3, 1, 1))


class Recorded(Part):
    def forward(self, x: Any) -> Any:
        y = self.core(x)
        return y if torch.is_grad_enabled() else y + 1


class InItsOwnWay(Part):
    """Copied as it likes."""

    def __reduce__(self) -> Any:
        return super().__reduce__()


REFUSED = [
    Dropped, Drawn, DrawnByNumPy, DrawnByPython, Unrecorded, Cast, Reversed, Checkpointed, Counted, Logged, Warmed,
    Optional, Constant, Recorded,
]  # fmt: skip


def steps(model: Any, x: torch.Tensor) -> list[Any]:
    """Results and gradients of some steps."""
    random.seed(0)
    torch.manual_seed(0)
    found: list[Any] = []
    for _ in range(6):
        leaf = x.clone().requires_grad_()
        y = model(leaf)
        y.square().sum().backward()
        found += [
            y.detach(),
            leaf.grad,
            *(None if one.grad is None else one.grad.clone() for one in model.parameters()),
        ]
    return found


def as_before(own: Any, model: Any) -> None:
    for one, other in zip(steps(own, image()), steps(copy.deepcopy(model), image()), strict=True):
        assert (one is None) == (other is None)
        if one is not None:
            torch.testing.assert_close(one, other, rtol=1e-3, atol=1e-4)


@pytest.mark.parametrize("kind", REFUSED)
def test_forward_that_a_graph_cannot_say(kind: Any) -> None:
    torch.manual_seed(1)
    random.seed(3)
    part = kind()
    before, state, numbers = {**part.__dict__}, random.getstate(), torch.get_rng_state()
    written = copy.deepcopy((part.log, part.seen, part.steps))
    assert graph_of(part) is None
    assert part.__dict__ == before and (part.log, part.seen, part.steps) == written, "the module is as it was"
    assert random.getstate() == state and torch.equal(torch.get_rng_state(), numbers)
    assert type(part) is kind and not torch.is_autocast_enabled("cpu") and torch.is_grad_enabled()
    model = nn.Sequential(part)
    own, report = for_training(model, (image(),))
    assert report.activations == 0 and type(own[0]) is kind and own.training
    as_before(own, model)


def test_what_a_graph_says() -> None:
    """A plain one, also where gradients are off; writes to a buffer are operations; reading `training` is not."""

    class Stepped(Part):
        def forward(self, x: Any) -> Any:
            self.steps.add_(1)
            return self.core(x)

    class Moded(Part):
        def forward(self, x: Any) -> Any:
            assert self.training in (True, False)
            return self.core(x)

    with torch.no_grad():
        assert graph_of(Part()) is not None
    assert graph_of(Moded()) is None
    part = Stepped()
    assert graph_of(part) is not None and part.steps == 0
    own, report = for_training(nn.Sequential(part), (image(),))
    start = int(own[0].steps)
    as_before(own, nn.Sequential(part))
    assert report.activations == 1 and own[0].steps == start + 6


class Taps(nn.Module):
    """Reads what lies between a Sequential's modules."""

    def __init__(self, way: str) -> None:
        super().__init__()
        self.way = way
        self.parts = nn.Sequential(nn.Conv2d(3, 3, 1), nn.BatchNorm2d(3), nn.SiLU(), nn.Conv2d(3, 3, 1))

    def forward(self, x: Any) -> Any:
        if self.way == "whole":
            return self.parts(x)
        if self.way == "both":
            return self.parts(x) + self.parts[1](x)
        if self.way == "unseen" and x.sum() > 1e9:
            return x
        found = []
        for part in self.parts:
            x = part(x)
            found.append(x)
        return found[1] + found[3]


@pytest.mark.parametrize("inputs", [True, False])
@pytest.mark.parametrize("way", ["whole", "both", "each", "unseen"])
def test_sequences_that_are_called_as_a_whole(way: str, inputs: bool) -> None:
    torch.manual_seed(1)
    model = nn.Sequential(Taps(way))
    own, report = for_training(model, (image(),) if inputs else None)
    assert report.activations == (way == "whole")
    as_before(own, model)


def test_whoever_looks_at_gradients_sees_them() -> None:
    torch.manual_seed(1)
    for place, behind in ((1, True), (2, False)):
        sequence = nn.Sequential(nn.Conv2d(3, 3, 1), nn.BatchNorm2d(3), nn.SiLU())
        part = Part()
        seen: list[Any] = []
        for one in (sequence[place], part.bn if behind else part.act):
            one.register_full_backward_hook(lambda module, dx, dy, seen=seen: seen.append(dy[0]))
        model = nn.Sequential(sequence, part)
        own, report = for_training(model, (image(),))
        assert report.activations == 0
        for each in (model, own):
            each(image()).square().sum().backward()
        assert len(seen) == 4
        for number in (0, 1):
            torch.testing.assert_close(seen[number], seen[number + 2], rtol=1e-3, atol=1e-4)


def test_forward_put_in_by_others_stays(monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setattr("tapwise.torch.activated._gives", lambda *_: True)
    for place in ("0", "1", "0.bn", "1.0", "0.act", "1.1"):
        model = nn.Sequential(Part(), nn.Sequential(nn.BatchNorm2d(3), nn.ReLU()))
        one = model.get_submodule(place)
        one.forward = type(one).forward.__get__(one)  # type: ignore[method-assign]
        _, report = for_training(model, (image(),))
        assert report.activations == 1


class Hooked(Part):
    """Its own method is a hook: it holds itself."""

    def __init__(self) -> None:
        super().__init__()
        self.register_forward_hook(self.count)

    def count(self, *_: Any) -> None:
        self.calls += 1


def test_copies() -> None:
    torch.manual_seed(1)
    own, report = for_training(nn.Sequential(Hooked(), Part(), InItsOwnWay()), (image(),))
    assert report.activations == 2 and type(own[2]) is InItsOwnWay
    wanted = own.eval()(image())
    for again in (copy.deepcopy(own), copy.copy(own[1]), pickle.loads(pickle.dumps(own))):
        other, wants = (again, wanted) if isinstance(again, nn.Sequential) else (again, own[1](image()))
        assert torch.equal(other(image()), wants)
        assert pickle.dumps(other)
    own[0].calls = 0
    again = copy.deepcopy(own)
    again(image())
    assert (own[0].calls, again[0].calls) == (0, 1) and again[0].bn is not own[0].bn
    # Once more: what has taken an activation stays so.
    twice, report = for_training(own, (image(),))
    assert report.activations == 0 and torch.equal(twice(image()), wanted)


def test_a_forward_that_has_become_another_cannot_be_loaded(monkeypatch: pytest.MonkeyPatch) -> None:
    saved = pickle.dumps(for_training(nn.Sequential(Part()), (image(),))[0])
    monkeypatch.setattr(Part, "forward", Counted.forward)
    with pytest.raises(RuntimeError, match="is not what it was"):
        pickle.loads(saved)


def test_scripted_parts_stay() -> None:
    model = nn.Sequential(torch.jit.script(nn.Sequential(nn.BatchNorm2d(3), nn.ReLU())), Part())
    own, report = for_training(model, (image(),))
    assert report.activations == 1 and type(own[1].bn) is TrainedBatchNorm2d
