"""A model's convolutions one by one: what each takes, here and in PyTorch, and which of them computes it."""

from __future__ import annotations

import os
import sys
import time
from collections import Counter
from collections.abc import Callable
from concurrent.futures import ThreadPoolExecutor
from contextlib import suppress
from dataclasses import dataclass, replace
from statistics import median
from typing import Any, Final

import torch
from rich.console import Console
from rich.progress import track
from torch import fx

from tapwise.ops.conv.problem import ConvProblem
from tapwise.torch.fused import FusedConv
from tapwise.torch.tensors import memory_format

# Seconds and calls that a layer is timed for, each way.
SECONDS: Final = 0.02
CALLS: Final = 20
NAMES: Final = {torch.float32: "f32", torch.float64: "f64", torch.float16: "f16", torch.bfloat16: "bf16"}


@dataclass(frozen=True)
class Layer:
    """Wall times of a call, in microseconds; `reason` where it is not tapwise's, else empty."""

    name: str
    problem: str
    uses: int
    time_us: float
    torch_us: float
    reason: str = ""

    @property
    def by_torch(self) -> bool:
        return bool(self.reason)


def measured(traced: fx.GraphModule, names: list[str], inputs: tuple[Any, ...]) -> list[Layer]:
    """The layers of a traced model on its inputs; each is set to compute by whichever was faster.

    Kernels are compiled by many threads first. Layers of one problem are timed once.
    """
    modules: dict[str, FusedConv] = {name: traced.get_submodule(name) for name in names}
    kinds: dict[str, tuple[torch.Tensor, ...]] = {}
    uses: Counter[str] = Counter()

    class Recorder(fx.Interpreter):
        def call_module(self, target: Any, args: Any, kwargs: Any) -> Any:
            if target in modules:
                uses[target] += 1
                # Their values are not kept.
                kinds.setdefault(target, tuple(map(_empty, args)))
            return super().call_module(target, args, kwargs)

    for module in modules.values():
        module.by_torch = True
    with torch.no_grad():
        Recorder(traced).run(*inputs)
        problems = {name: problem_of(modules[name], kind) for name, kind in kinds.items()}
        _prepare({problem: (modules[name], kinds[name]) for name, problem in problems.items()})
        times: dict[str, tuple[float, float, str]] = {}
        for name, problem in problems.items():
            if problem not in times:
                times[problem] = _times(modules[name], tuple(map(_random, kinds[name])))
            modules[name].by_torch = bool(times[problem][2])
    return [Layer(name, problem, uses[name], *times[problem]) for name, problem in problems.items()]


def _empty(tensor: torch.Tensor) -> torch.Tensor:
    """A tensor's kind, without memory."""
    empty = torch.empty_strided(tensor.shape, tensor.stride(), dtype=tensor.dtype, device="meta")
    empty.place = tensor.device
    return empty


def _random(kind: torch.Tensor) -> torch.Tensor:
    return torch.empty_strided(kind.shape, kind.stride(), dtype=kind.dtype, device=kind.place).normal_()


def _prepare(layers: dict[str, tuple[FusedConv, tuple[torch.Tensor, ...]]]) -> None:
    """A first call of each problem, many at once; where a person looks on, with its progress."""

    def first(layer: tuple[FusedConv, tuple[torch.Tensor, ...]]) -> None:
        module, kinds = layer
        # What is refused is so again where it is timed.
        with torch.no_grad(), suppress(Exception):
            module.by_tapwise(*map(_random, kinds))

    with ThreadPoolExecutor(os.cpu_count() or 1) as pool:
        done = pool.map(first, layers.values())
        list(
            track(
                done,
                "compiling",
                len(layers),
                console=Console(stderr=True),
                transient=True,
                disable=not sys.stderr.isatty(),
            )
        )


def _times(module: FusedConv, tensors: tuple[torch.Tensor, ...]) -> tuple[float, float, str]:
    """Microseconds here and in PyTorch, and why it is PyTorch's."""
    theirs = wall_us(lambda: module.by_pytorch(*tensors))
    try:
        ours = wall_us(lambda: module.by_tapwise(*tensors))
    except Exception as error:
        return float("inf"), theirs, f"refused: {error}"
    return ours, theirs, "PyTorch is faster" if ours > theirs else ""


def problem_of(module: FusedConv, tensors: tuple[torch.Tensor, ...]) -> str:
    x = tensors[0]
    sizes = " ".join(f"{axis}{size}" for axis, size in zip("nchw" if x.ndim == 4 else "ncw", x.shape, strict=True))
    k, _, *kernel = module.weight.shape
    taps = " ".join(f"{axis}{size}" for axis, size in zip("rs"[-len(kernel) :], kernel, strict=True))
    more = [NAMES[x.dtype]] if not module.math or module.math == "ieee" or x.dtype is not torch.float32 else []
    more += ["nhwc"] if memory_format(x) is torch.channels_last else []
    more += ["bias"] if module.bias is not None else []
    residual = tensors[1] if len(tensors) > 1 else None
    fits = module.fits(x, residual)
    more += ["residual"] if residual is not None and fits else []
    text = f"{sizes} k{k} {taps} {module.words_for(x, fits)} {' '.join(more)}"
    return str(ConvProblem.parse(text))


def wall_us(call: Callable[[], Any]) -> float:
    """Microseconds of a call with what it leaves on the GPU, the median of some, after one more."""
    synchronize = torch.cuda.synchronize if torch.cuda.is_available() else lambda: None
    call()
    synchronize()
    times: list[float] = []
    began = time.perf_counter()
    while len(times) < 3 or (len(times) < CALLS and time.perf_counter() - began < SECONDS):
        start = time.perf_counter()
        call()
        synchronize()
        times.append((time.perf_counter() - start) * 1e6)
    return median(times)


def table(layers: list[Layer]) -> str:
    """Rows of text, a problem each, the largest share of the convolutions' time first."""
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
    return "\n".join(rows)
