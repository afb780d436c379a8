"""How layers are timed, and who computes them by their times."""

from __future__ import annotations

import contextlib
from typing import Any

import pytest

pytest.importorskip("torch")

import torch
from torch import nn

import tapwise.torch
from tapwise.torch import layers, timing
from tapwise.torch.fused import FusedConv


def net() -> Any:
    torch.manual_seed(0)
    blocks = (nn.Conv2d(8, 8, 3, padding=1), nn.ReLU(), nn.Conv2d(8, 8, 3, padding=1), nn.ReLU(), nn.Conv2d(8, 4, 1))
    return nn.Sequential(*blocks).eval().requires_grad_(False)


def test_turns_begin_with_another_each_round() -> None:
    said: list[str] = []

    def block(name: str) -> Any:
        def run() -> float:
            said.append(name)
            return float(len(said))

        return run

    rounds = timing.in_turns({name: block(name) for name in "abc"}, 3)
    assert "".join(said) == "abcbcacab"
    assert rounds == {"a": (1.0, 6.0, 8.0), "b": (2.0, 4.0, 9.0), "c": (3.0, 5.0, 7.0)}
    assert len(timing.in_turns({"a": lambda: 1.0}, 9, seconds=0)["a"]) == timing.LEAST_ROUNDS


def test_calls_fill_a_block() -> None:
    calls = [timing.calls_in(300, us) for us in (0.0, 1.0, 10.0, 100.0, 1e6)]
    assert calls == [timing.MOST_CALLS, timing.MOST_CALLS, 30, 3, 1]


def test_one_hiccup_does_not_make_a_graph_of_one_call(monkeypatch: pytest.MonkeyPatch) -> None:
    made: list[int] = []

    class Fake:
        def __init__(self, run: Any, calls: int) -> None:
            made.append(calls)
            self.times = iter([50.0, 9000.0])

        def time_us(self, before: Any = None) -> float:
            return next(self.times, 3.0)

    monkeypatch.setattr(timing, "Graph", Fake)
    timing.captured_us({"a": list}, repeats=1)
    assert made == [1, timing.MOST_CALLS]


def test_the_faster_computes_and_the_report_says_by_what_clock(monkeypatch: pytest.MonkeyPatch) -> None:
    """Layers of one problem and words are timed once: here the first two, in either order of images."""
    given = iter([({"PyTorch": 5.0, "tapwise": 4.0}, ""), ({"PyTorch": 4.0, "tapwise": 5.0}, "no capture")] * 2)
    monkeypatch.setattr(layers, "medians", lambda runs, device: next(given))
    made = tapwise.torch.optimize(net(), torch.randn(1, 8, 9, 9))
    assert [layer.by_torch for layer in made.report.layers] == [False, False, True]
    fused = [one for one in made.__dict__["graph"].modules() if isinstance(one, FusedConv)]
    assert [one.by_torch for one in fused] == [False, False, True]
    assert str(made.report).count("no CUDA graph: no capture") == 1
    assert next(given, None) is None


def test_what_cannot_be_captured_is_enqueued(monkeypatch: pytest.MonkeyPatch) -> None:
    def captured(runs: Any, **words: Any) -> Any:
        raise RuntimeError("operation not permitted\nwhen stream is capturing")

    monkeypatch.setattr(timing, "captured_us", captured)
    monkeypatch.setattr(timing, "queued_us", lambda runs, **words: dict.fromkeys(runs, (3.0, 1.0, 2.0)))
    monkeypatch.setattr(torch.cuda, "device", contextlib.nullcontext)
    times, reason = timing.medians({"a": list, "b": list}, torch.device("cuda", 0))
    assert times == {"a": 2.0, "b": 2.0}
    assert reason == "RuntimeError: operation not permitted"
    assert timing.medians({"a": list}, torch.device("cpu"))[1] == ""


@pytest.mark.cuda
def test_layers_are_timed_in_graphs_on_a_gpu(monkeypatch: pytest.MonkeyPatch) -> None:
    x = torch.randn(2, 8, 32, 32, device="cuda", dtype=torch.float16)
    model = net().cuda().half()
    made = tapwise.torch.optimize(model, x, graphs=True)
    assert len(made.report.layers) == 3
    # Less than the host takes for a call.
    assert all(0 < layer.time_us < 30 and not layer.uncaptured for layer in made.report.layers)
    torch.testing.assert_close(made(x), model(x), rtol=1e-2, atol=1e-2)
    eager = FusedConv.by_pytorch

    def waits(self: Any, *tensors: Any) -> Any:
        y = eager(self, *tensors)
        y.sum().item()
        return y

    stream = torch.cuda.current_stream()
    monkeypatch.setattr(FusedConv, "by_pytorch", waits)
    made = tapwise.torch.optimize(model, x)
    assert all(layer.uncaptured and layer.time_us > 0 and layer.torch_us > 0 for layer in made.report.layers)
    assert torch.cuda.current_stream() == stream
    monkeypatch.undo()
    torch.testing.assert_close(made(x), model(x), rtol=1e-2, atol=1e-2)
