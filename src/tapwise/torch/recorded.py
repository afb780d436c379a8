"""What a CUDA graph is on a GPU, on a CPU: the operators of one call, with the memory of their results, to run again.

Python and PyTorch's dispatcher take 50 us a layer in a model; a prepared operator on memory that stays takes 5.
"""

from __future__ import annotations

from collections.abc import Callable
from functools import partial
from typing import Any, Final

import torch
from torch.utils import _pytree as pytree
from torch.utils._python_dispatch import TorchDispatchMode

from tapwise.torch import frozen, gates

# Results whose shape or value the next call may not have.
UNSTEADY: Final = {torch.Tag.dynamic_output_shape, torch.Tag.data_dependent_output}


class Recorded:
    """One call of a function; `replay` overwrites its results."""

    def __init__(self, steps: list[Callable[[], Any]]) -> None:
        self._steps = steps

    @torch.no_grad()
    def replay(self) -> None:
        for step in self._steps:
            step()


def record(function: Callable[[], Any]) -> tuple[Recorded, Any]:
    """(a call of a function, its result). The function works on the same tensors each time, and all that it does to
    their elements it does by PyTorch's operators.

    Raises what the function raises, and RuntimeError where what it does depends on elements.
    """
    with torch.inference_mode(False), torch.no_grad():
        function()
        with _Recorder() as recorder:
            result = function()
    return Recorded(recorder.steps), result


class _Recorder(TorchDispatchMode):
    def __init__(self) -> None:
        super().__init__()
        self.steps: list[Callable[[], Any]] = []

    def __torch_dispatch__(self, function: Any, _types: Any, args: Any = (), kwargs: Any = None) -> Any:
        kwargs = kwargs or {}
        if UNSTEADY.intersection(function.tags):
            raise RuntimeError(f"{function}: what it gives depends on elements, which cannot be recorded")
        result = function(*args, **kwargs)
        results = pytree.tree_leaves(result)
        if not all(one is None or isinstance(one, torch.Tensor) for one in results):
            raise RuntimeError(f"{function}: a result is no tensor, which cannot be recorded")
        given = {_memory(one) for one in pytree.tree_leaves((args, kwargs)) if isinstance(one, torch.Tensor)}
        fresh = [one is not None and _memory(one) not in given for one in results]
        # Views see what is written to the memory that they share. What changes a tensor's shape in place does not do so
        # again, and steps have tensors of their own, which keep their shapes.
        if any(fresh) or (function._schema.is_mutable and torch.Tag.inplace_view not in function.tags):
            steady = _STEADY.get(str(function))
            step = None if steady is None else steady(result, *args)
            if step is None:
                words, named, kept = pytree.tree_map_only(torch.Tensor, torch.Tensor.detach, (args, kwargs, results))
                step = partial(_again, function, words, named, kept, fresh)
            self.steps.append(step)
        return result


# Our operators on memory that stays: what runs their kernels alone.
_STEADY: Final[dict[str, Callable[..., Callable[[], None] | None]]] = {
    "tapwise.conv_frozen.default": frozen.steady,
    "tapwise.squeeze_excitation.default": gates.steady,
}


def _memory(tensor: torch.Tensor) -> int:
    return int(tensor.untyped_storage()._cdata)


def _again(function: Any, args: Any, kwargs: Any, results: list[torch.Tensor], fresh: list[bool]) -> None:
    for kept, new, own in zip(results, pytree.tree_leaves(function(*args, **kwargs)), fresh, strict=True):
        if own:
            kept.copy_(new)
