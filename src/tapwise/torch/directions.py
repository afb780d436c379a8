"""Which library computes a direction of a layer that is trained: times of each, and what the host takes beside them."""

from __future__ import annotations

import time
from collections.abc import Callable, Mapping
from functools import cache, partial
from itertools import combinations
from math import inf
from statistics import median
from typing import TYPE_CHECKING, Any, Final, NamedTuple

import torch

from tapwise.ops.conv.problem import DIRECTIONS
from tapwise.torch.convolution import More, convolution, forward, gradients
from tapwise.torch.layers import Kind, Layer, by_threads
from tapwise.torch.tensors import memory_format
from tapwise.torch.timing import CALLS, SECONDS, in_turns, medians

if TYPE_CHECKING:
    from tapwise.torch.training import Trained

ALL: Final = frozenset(DIRECTIONS)
# Of one call of the host's time.
BLOCK: Final = 5
_NOT_WORTH_IT: Final = "it gains less than the host takes more"


class Use(NamedTuple):
    """What a module is called with: x, and the output_padding of a transposed convolution."""

    kind: Kind
    more: More


class Times(NamedTuple):
    """Microseconds here and in PyTorch, and why it is refused here."""

    ours: float
    theirs: float
    refused: str

    @property
    def gain(self) -> float:
        return -inf if self.refused else self.theirs - self.ours


def measured(
    model: torch.nn.Module, modules: Mapping[str, Trained], inputs: tuple[Any, ...], captured: bool
) -> list[Layer]:
    """Each module set to compute every direction by whichever library is faster on the model's inputs; their times.

    A convolution of which tapwise computes a part takes more of the host's time than PyTorch's own: unless the training
    step is `captured` (or compiled), what gains less than that stays PyTorch's.
    """
    uses: dict[str, Use] = {}

    def record(name: str, module: Trained, arguments: tuple[Any, ...], named: dict[str, Any]) -> None:
        x, *size = arguments or (named["input"],)
        if "output_size" in named:
            size = [named["output_size"]]
        if x.ndim != 4:
            return
        more = module.more(x, *size)
        if torch.is_autocast_enabled(x.device.type):
            x = x.to(torch.get_autocast_dtype(x.device.type))
        meta = torch.empty_strided(x.shape, x.stride(), dtype=x.dtype, device="meta")
        uses.setdefault(name, Use(Kind(meta, x.device), more))

    hooks = [
        one.register_forward_pre_hook(partial(record, name), with_kwargs=True)  # type: ignore[attr-defined]
        for name, one in modules.items()
    ]
    # Statistics of normalisation stay as they are.
    was = model.training
    try:
        with torch.no_grad():
            model.eval()(*inputs)
    finally:
        model.train(was)
        for hook in hooks:
            hook.remove()
    times: dict[str, Times] = {}
    found = []
    problems_of = {
        name: {one: str(modules[name].problem(use.kind.meta, use.more, one)) for one in DIRECTIONS}
        for name, use in uses.items()
    }
    firsts = {
        problem: partial(_first, modules[name], uses[name], direction)
        for name, problems in problems_of.items()
        for direction, problem in problems.items()
    }
    by_threads(list(firsts.values()))
    for name, use in uses.items():
        module, here, problems = modules[name], {}, problems_of[name]
        for direction, problem in problems.items():
            if problem not in times:
                times[problem] = _times(module, use, direction)
            here[direction] = times[problem]
        host = {} if captured else host_us(use.kind.device, use.kind.meta.dtype, use.more is not None)
        module.by_torch = chosen({one: taken.gain for one, taken in here.items()}, host)
        for direction, taken in here.items():
            why = taken.refused or ("PyTorch is faster" if taken.gain < 0 else _NOT_WORTH_IT)
            why = why if direction in module.by_torch else ""
            found.append(Layer(f"{name} {direction}", problems[direction], 1, taken.ours, taken.theirs, why))
    return found


def chosen(gains: Mapping[str, float], host: Mapping[frozenset[str], float]) -> frozenset[str]:
    """The directions that stay PyTorch's: what others gain, less the host's time more, is largest."""
    best, most = ALL, 0.0
    for by_torch in _subsets():
        gain = sum(gains[one] for one in ALL - by_torch) - host.get(by_torch, 0.0)
        if gain > most:
            best, most = by_torch, gain
    return best


def _subsets() -> list[frozenset[str]]:
    return [frozenset(some) for size in range(len(DIRECTIONS)) for some in combinations(DIRECTIONS, size)]


@cache
def host_us(device: torch.device, dtype: torch.dtype, transposed: bool = False) -> dict[frozenset[str], float]:
    """Microseconds that a convolution and its gradients take more than PyTorch's own, by the directions that are
    PyTorch's, beside what the directions themselves take: on a GPU all of the host's time, on a CPU what autograd does.

    Of one pixel, of which the kernels take next to nothing.
    """
    window, more = ((1, 1), (0, 0), (1, 1), 1), (0, 0) if transposed else None
    with torch.enable_grad():
        x = torch.ones(1, 8, 1, 1, dtype=dtype, device=device, requires_grad=True)
        w = torch.ones(8, 8, 1, 1, dtype=dtype, device=device, requires_grad=True)
        dy = torch.ones(1, 8, 1, 1, dtype=dtype, device=device)

        def step(by_torch: frozenset[str] | None) -> None:
            if by_torch is not None:
                y = convolution(x, w, None, window, more, by_torch=by_torch)
            elif more is None:
                y = torch.conv2d(x, w)
            else:
                y = torch.conv_transpose2d(x, w)
            torch.autograd.grad(y, (x, w), dy)

        runs: dict[frozenset[str] | None, Callable[[], None]] = {one: partial(step, one) for one in (None, *_subsets())}
        taken = _walls(runs, device)
        beside = dict.fromkeys(DIRECTIONS, 0.0)
        if device.type != "cuda":
            for one in DIRECTIONS:
                ours, theirs = (partial(_one, x, w, dy, window, more, one, by) for by in (frozenset(), ALL))
                alone = _walls({"ours": ours, "theirs": theirs}, device)
                beside[one] = alone["ours"] - alone["theirs"]
    return {
        by_torch: max(0.0, taken[by_torch] - taken[None] - sum(beside[one] for one in ALL - by_torch))
        for by_torch in _subsets()
    }


def _one(
    x: torch.Tensor, w: torch.Tensor, dy: torch.Tensor, window: Any, more: More, direction: str,
    by_torch: frozenset[str], math: str = "ieee",
) -> object:  # fmt: skip
    """One direction alone."""
    roles = ("fprop", "dgrad") if more is None else ("dgrad", "fprop")
    with torch.no_grad():
        if direction == roles[0]:
            return forward(x, w, None, window, more, math, by_torch)
        wanted = direction == roles[1], direction == "wgrad", False
        return gradients(dy, x, w, window, more, math, by_torch, wanted)


def _walls(runs: Mapping[Any, Callable[[], object]], device: torch.device) -> dict[Any, float]:
    """Microseconds of the host for a call of each, in turns: on a GPU without what is enqueued."""

    def block(run: Callable[[], object]) -> float:
        if device.type == "cuda":
            torch.cuda.synchronize(device)
        start = time.perf_counter()
        for _ in range(BLOCK):
            run()
        return (time.perf_counter() - start) * 1e6 / BLOCK

    for run in runs.values():
        block(run)
    rounds = in_turns({name: partial(block, run) for name, run in runs.items()}, CALLS, SECONDS * len(runs))
    return {name: median(values) for name, values in rounds.items()}


def _first(module: Trained, use: Use, direction: str) -> None:
    _calls(module, use, direction)[0]()


def _calls(module: Trained, use: Use, direction: str) -> tuple[Callable[[], object], Callable[[], object]]:
    """A direction of a layer on random data, here and in PyTorch."""
    with torch.no_grad():
        x, more, window = use.kind.random(), use.more, module.window
        weight, math = module.weight.detach().to(x.dtype), module.math_of(x.dtype)
        dy = torch.randn_like(forward(x, weight, None, window, more, math, ALL))
        dy = dy.contiguous(memory_format=memory_format(x))
    ours, theirs = (partial(_one, x, weight, dy, window, more, direction, by, math) for by in (frozenset(), ALL))
    return ours, theirs


def _times(module: Trained, use: Use, direction: str) -> Times:
    with torch.no_grad():
        ours, theirs = _calls(module, use, direction)
        runs, refused = {"PyTorch": theirs}, ""
        try:
            ours()
            runs["tapwise"] = ours
        except Exception as error:
            refused = f"refused: {error}"
        taken, _ = medians(runs, use.kind.device)
    return Times(taken.get("tapwise", inf), taken["PyTorch"], refused)
