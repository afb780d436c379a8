"""Times on a GPU (torch/timing.py), of the host, and the GPU's measured roof. PyTorch provides all of them."""

from __future__ import annotations

import time
from collections.abc import Callable, Mapping
from functools import cache
from typing import Any, Final

from tapwise.algorithm import Device
from tapwise.errors import PeerUnavailable
from tapwise.lab.roofline import Ceilings
from tapwise.lab.timing import Timing

# Of calls that are enqueued one by one.
QUEUED_US: Final = 10_000.0
EAGER_CALLS: Final = 200
# Of the GPU's work that eager calls enqueue: they would wait for it, or for a place in the queue.
EAGER_US: Final = 50_000.0
# Elements that are compared at a time.
SLICE: Final = 1 << 26
# Spreads, as a part of the time, from which on something disturbed what was measured; how often it is then again.
DISTURBED, AGAIN = 0.05, 2
# PyTorch's names of dtypes in which a GPU's ceiling is known.
DTYPES: Final = {"f32": "float32", "f64": "float64", "f16": "float16", "bf16": "bfloat16"}

Call = Callable[[], object]


def torch() -> Any:
    """PyTorch with CUDA. Raises PeerUnavailable where it is missing."""
    try:
        import torch as module
    except ImportError as error:
        raise PeerUnavailable(f"times on a GPU need PyTorch: {error}") from None
    if not module.cuda.is_available():
        raise PeerUnavailable("times on a GPU need PyTorch with CUDA: this one has none")
    return module


def difference(result: Any, expected: Any) -> tuple[float, float]:
    """(largest difference of two tensors, largest magnitude in the second): NaN where there is any."""
    off = largest = expected.new_zeros(()).double()
    for one, other in zip(result.reshape(-1).split(SLICE), expected.reshape(-1).split(SLICE), strict=True):
        if one.numel():
            off = off.maximum((one.double() - other.double()).abs().max())
            largest = largest.maximum(other.double().abs().max())
    return float(off), float(largest)


def measure(runs: Mapping[str, Call], *, repeats: int = 15, cold: bool = False) -> dict[str, Timing]:
    """Times of contestants by name, on the GPU, captured in CUDA graphs, in turns.

    `cold`: one call a replay, behind a write over more memory than L2 holds, so nothing is found in it.
    """
    torch()
    from tapwise.torch.timing import captured_us

    rounds = captured_us(runs, repeats=repeats, before=_scrubber() if cold else None)
    return {name: Timing(values) for name, values in rounds.items()}


def measure_steadily(runs: Mapping[str, Call], *, repeats: int = 15) -> dict[str, Timing]:
    """The same; where something disturbed them again, up to AGAIN times, and those that were disturbed least."""

    def disturbed(times: Mapping[str, Timing]) -> float:
        return max(one.spread_us / one.time_us for one in times.values())

    found = measure(runs, repeats=repeats)
    for _ in range(AGAIN):
        if disturbed(found) <= DISTURBED:
            break
        found = min(found, measure(runs, repeats=repeats), key=disturbed)
    return found


def measure_queued(runs: Mapping[str, Call], *, seconds: float = 2.0, repeats: int = 15) -> dict[str, Timing]:
    """Times of contestants by name, on the GPU, in turns: of calls that are enqueued one behind the other."""
    torch()
    from tapwise.torch.timing import queued_us

    rounds = queued_us(runs, repeats=repeats, seconds=seconds, block_us=QUEUED_US)
    return {name: Timing(values) for name, values in rounds.items()}


@cache
def _scrubber() -> Call:
    module = torch()
    memory = module.empty(256 << 20, dtype=module.uint8, device="cuda")
    return lambda: memory.zero_()


def wall_us(run: Call, time_us: float) -> float:
    """Microseconds of the host for one call that is not captured: arguments, allocation, launch; no waiting.

    `time_us`: what it takes of the GPU.
    """
    module = torch()
    best = float("inf")
    calls = max(10, min(EAGER_CALLS, round(EAGER_US / time_us)))
    for _ in range(5):
        module.cuda.synchronize()
        began = time.perf_counter()
        for _ in range(calls):
            run()
        best = min(best, (time.perf_counter() - began) / calls)
        module.cuda.synchronize()
    return best * 1e6


@cache
def ceilings(device: Device, dtype: str, math: str) -> Ceilings:
    """What PyTorch's matrix product and copy reach on this GPU: the measured roof."""
    module = torch()
    kind = getattr(module, DTYPES[dtype])
    module.backends.cuda.matmul.allow_tf32 = math == "tf32"
    size = 4096 if dtype == "f64" else 8192
    left, right = (module.randn(size, size, device="cuda").to(kind) for _ in range(2))
    out = module.empty(size, size, device="cuda", dtype=kind)
    # A kernel that copies: in a graph, copy_ is another engine's work, and slower.
    source = module.ones(1 << 28, device="cuda")
    target = module.empty_like(source)
    runs: dict[str, Call] = {
        "product": lambda: module.matmul(left, right, out=out),
        "copy": lambda: module.neg(source, out=target),
    }
    times = {name: min(timing.rounds_us) for name, timing in measure(runs, repeats=5).items()}
    return Ceilings(2 * size**3 / times["product"] / 1e3, 2 * (1 << 30) / times["copy"] / 1e3)
