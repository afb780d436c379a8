"""A model's layers one by one: what each takes, here and in PyTorch, and which of them computes it."""

from __future__ import annotations

import math
import os
import sys
from collections import Counter
from collections.abc import Callable, Sequence
from concurrent.futures import ThreadPoolExecutor
from contextlib import suppress
from dataclasses import dataclass, replace
from functools import partial
from typing import Any, NamedTuple

import torch
from rich.console import Console
from rich.progress import track

from tapwise.torch.fused import FusedConv
from tapwise.torch.gated import Gated
from tapwise.torch.linear import FusedLinear
from tapwise.torch.pools import Pooled
from tapwise.torch.recorded import record
from tapwise.torch.timing import medians


@dataclass(frozen=True)
class Layer:
    """Times of a call, in microseconds: in a CUDA graph, by the GPU's clock; on a CPU wall times.

    `reason` where it is not tapwise's, else empty; `uncaptured`: why a GPU's times are those of eager calls.
    """

    name: str
    problem: str
    uses: int
    time_us: float
    torch_us: float
    reason: str = ""
    uncaptured: str = ""

    @property
    def by_torch(self) -> bool:
        return bool(self.reason)


class Kind(NamedTuple):
    """A tensor without its values: a meta tensor, and where it lies."""

    meta: torch.Tensor
    device: torch.device

    def random(self) -> torch.Tensor:
        one = self.meta
        return torch.empty_strided(one.shape, one.stride(), dtype=one.dtype, device=self.device).normal_()


# Of what a layer is called with: x, and a residual, which may be a number.
Arguments = tuple[Any, ...]
# What either library computes.
Either = FusedConv | FusedLinear | Pooled | Gated


def measured(model: torch.nn.Module, inputs: tuple[Any, ...], recorded: bool = False) -> list[Layer]:
    """A model's convolutions, linear layers and pooling on its inputs, each set to compute by whichever was faster.

    `recorded`: on a CPU calls are played back, of layers as they will be of the model.

    Kernels are compiled by many threads first. Layers of one problem are timed once.
    """
    modules = {name: one for name, one in model.named_modules() if isinstance(one, Either)}
    kinds: dict[str, Arguments] = {}
    uses: Counter[str] = Counter()

    def record(name: str, module: torch.nn.Module, arguments: Arguments) -> None:
        uses[name] += 1
        kinds.setdefault(name, tuple(map(_kind, arguments)))

    hooks = [one.register_forward_pre_hook(partial(record, name)) for name, one in modules.items()]
    for module in modules.values():
        module.by_torch = True
    try:
        with torch.no_grad():
            model(*inputs)
    finally:
        for hook in hooks:
            hook.remove()
    problems = {name: str(modules[name].problem(*_metas(kind))) for name, kind in kinds.items()}
    with torch.no_grad():
        firsts = {problem: partial(_by_tapwise, modules[name], kinds[name]) for name, problem in problems.items()}
        by_threads(list(firsts.values()))
        times: dict[str, tuple[float, float, str, str]] = {}
        # The parts of a layer before it.
        for name, problem in sorted(problems.items(), key=lambda one: -one[0].count(".")):
            if problem not in times:
                times[problem] = _times(modules[name], _tensors(kinds[name]), recorded)
            modules[name].by_torch = bool(times[problem][2])
    return [Layer(name, problem, uses[name], *times[problem]) for name, problem in problems.items()]


def called(model: torch.nn.Module, layers: list[Layer]) -> list[Layer]:
    """Those that compute: of a gate either itself or its parts."""
    gates = {layer.name: layer.by_torch for layer in layers if isinstance(model.get_submodule(layer.name), Gated)}

    def computes(layer: Layer) -> bool:
        owner = layer.name.rpartition(".")[0]
        return not gates[layer.name] if layer.name in gates else gates.get(owner, True)

    return [layer for layer in layers if computes(layer)]


def _kind(value: Any) -> Any:
    if not isinstance(value, torch.Tensor):
        return value
    return Kind(torch.empty_strided(value.shape, value.stride(), dtype=value.dtype, device="meta"), value.device)


def _metas(arguments: Arguments) -> Arguments:
    return tuple(one.meta if isinstance(one, Kind) else one for one in arguments)


def _tensors(arguments: Arguments) -> Arguments:
    return tuple(one.random() if isinstance(one, Kind) else one for one in arguments)


def by_threads(calls: Sequence[Callable[[], object]]) -> None:
    """First calls, which compile kernels, many at once; where a person looks on, with their progress."""

    def first(call: Callable[[], object]) -> None:
        # What is refused is so again where it is timed.
        with torch.no_grad(), suppress(Exception):
            call()

    shown = {"console": Console(stderr=True), "transient": True, "disable": not sys.stderr.isatty()}
    with ThreadPoolExecutor(os.cpu_count() or 1) as pool:
        for _ in track(pool.map(first, calls), "compiling", len(calls), **shown):  # type: ignore[arg-type]
            pass


def _by_tapwise(module: Either, arguments: Arguments) -> object:
    return module.by_tapwise(*_tensors(arguments))


def _times(module: Either, tensors: Arguments, recorded: bool) -> tuple[float, float, str, str]:
    """Microseconds here and in PyTorch, why it is PyTorch's, and why no CUDA graph was captured."""
    runs: dict[str, Callable[[], object]] = {"PyTorch": lambda: module.by_pytorch(*tensors)}
    refused = ""
    try:
        module.by_tapwise(*tensors)
        runs["tapwise"] = lambda: module.by_tapwise(*tensors)
    except Exception as error:
        refused = f"refused: {error}"
    if recorded and tensors[0].is_cpu:
        runs = {name: record(run)[0].replay for name, run in runs.items()}
    times, uncaptured = medians(runs, tensors[0].device)
    ours, theirs = times.get("tapwise", math.inf), times["PyTorch"]
    return ours, theirs, refused or ("PyTorch is faster" if ours > theirs else ""), uncaptured


def table(layers: list[Layer]) -> str:
    """Rows of text, a problem each, the largest share of the layers' time first."""
    alike: dict[str, Layer] = {}
    for layer in layers:
        uses = layer.uses + (alike[layer.problem].uses if layer.problem in alike else 0)
        alike[layer.problem] = replace(layer, uses=uses)
    taken = {problem: layer.uses * min(layer.time_us, layer.torch_us) for problem, layer in alike.items()}
    total = sum(taken.values()) or 1.0
    rows = [f"{'share':>6} {'uses':>4} {'tapwise':>9} {'PyTorch':>9}  by       layer"]
    for problem in sorted(taken, key=taken.__getitem__, reverse=True):
        layer = alike[problem]
        by = "PyTorch" if layer.by_torch else "tapwise"
        times = f"{layer.time_us:6.0f} us {layer.torch_us:6.0f} us"
        rows.append(f"{taken[problem] / total:6.1%} {layer.uses:4} {times}  {by:8} {problem}")
        if layer.reason.startswith("refused"):
            rows.append(f"{'':41}{layer.reason}")
        if layer.uncaptured:
            rows.append(f"{'':41}times of eager calls, no CUDA graph: {layer.uncaptured}")
    return "\n".join(rows)
