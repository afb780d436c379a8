"""A model's convolutions one by one: what each takes, here and in PyTorch, and which of them computes it."""

from __future__ import annotations

import time
from collections import Counter
from collections.abc import Callable
from dataclasses import dataclass
from statistics import median
from typing import Any, Final

import torch
from torch import fx

from tapwise.ops.conv.problem import ConvProblem
from tapwise.torch.fused import FusedConv
from tapwise.torch.tensors import memory_format

# Seconds and calls that a layer is timed for, each way.
SECONDS: Final = 0.05
CALLS: Final = 30
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
    """The layers of a traced model on its inputs; each is set to compute by whichever was faster."""
    seen: dict[str, tuple[torch.Tensor, ...]] = {}
    uses: Counter[str] = Counter()

    class Recorder(fx.Interpreter):
        def call_module(self, target: Any, args: Any, kwargs: Any) -> Any:
            if target in names:
                uses[target] += 1
                seen.setdefault(target, args)
            return super().call_module(target, args, kwargs)

    with torch.no_grad():
        Recorder(traced).run(*inputs)
        return [_layer(name, traced.get_submodule(name), seen[name], uses[name]) for name in names if name in seen]


def _layer(name: str, module: FusedConv, tensors: tuple[torch.Tensor, ...], uses: int) -> Layer:
    problem, reason, ours = problem_of(module, tensors), "", float("inf")
    module.by_torch = True
    theirs = wall_us(lambda: module(*tensors))
    module.by_torch = False
    try:
        ours = wall_us(lambda: module(*tensors))
    except Exception as error:
        reason = f"refused: {error}"
    if not reason and ours > theirs:
        reason = "PyTorch is faster"
    module.by_torch = bool(reason)
    return Layer(name, problem, uses, ours, theirs, reason)


def problem_of(module: FusedConv, tensors: tuple[torch.Tensor, ...]) -> str:
    x = tensors[0]
    sizes = " ".join(f"{axis}{size}" for axis, size in zip("nchw" if x.ndim == 4 else "ncw", x.shape, strict=True))
    k, _, *kernel = module.weight.shape
    taps = " ".join(f"{axis}{size}" for axis, size in zip("rs"[-len(kernel) :], kernel, strict=True))
    more = [NAMES[x.dtype]] if not module.math or module.math == "ieee" or x.dtype is not torch.float32 else []
    more += ["nhwc"] if memory_format(x) is torch.channels_last else []
    more += ["bias"] if module.bias is not None else []
    words = module.words if x.dtype is torch.float32 else module.words.replace(f" {module.math}", "")
    text = f"{sizes} k{k} {taps} {words} {' '.join(more)}{' residual' * (len(tensors) > 1)}"
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
    """Rows of text, slowest first: share of the convolutions' time, times, who computes, problem."""
    taken = [layer.uses * min(layer.time_us, layer.torch_us) for layer in layers]
    total = sum(taken) or 1.0
    rows = [f"{'share':>6} {'tapwise':>9} {'PyTorch':>9}  by       layer"]
    for layer, part in sorted(zip(layers, taken, strict=True), key=lambda row: -row[1]):
        by = "PyTorch" if layer.by_torch else "tapwise"
        rows.append(f"{part / total:6.1%} {layer.time_us:6.0f} us {layer.torch_us:6.0f} us  {by:8} {layer.problem}")
        if layer.reason and layer.reason != "PyTorch is faster":
            rows.append(f"{'':36}{layer.reason}")
    return "\n".join(rows)
