"""The operators of a call that is recorded; what of them a kernel computes: concatenation, batch norm and relu as one
of them, layer norm."""

from __future__ import annotations

from collections import Counter
from collections.abc import Iterator, Sequence
from math import prod
from typing import Any, Final, NamedTuple

import numpy as np
import torch
from torch.utils import _pytree as pytree

from tapwise.arrays.host import numpy_of
from tapwise.cpu import pieces
from tapwise.cpu.pieces import Piece, Pieces, Scale
from tapwise.cpu.row_norms import RowNorms

_ATEN: Final = torch.ops.aten
# What gives a copy of its first argument, which other words but lay out and type.
COPIES: Final = (_ATEN.clone.default, _ATEN._to_copy.default)
RELUS: Final = (_ATEN.relu_.default, _ATEN.relu.default)
# In the place of an operator: relu, or nothing, of batch norm in evaluation, of tensors side by side. Its arguments:
# the tensors, factors, offsets, the activation.
NORMED: Final = "batch norm of pieces"
# Of layer norm whose mean and deviation nobody reads. Its arguments: x and the result as rows, factors, offsets, eps.
ROWS_NORMED: Final = "layer norm of rows"


class Event(NamedTuple):
    """An operator that wrote results; which of them are `fresh`, in memory that was not given to it. `given`: its
    arguments themselves; the others are tensors of the event's own."""

    given: Any
    function: Any
    args: Any
    kwargs: Any
    results: list[Any]
    fresh: list[bool]

    def tensors(self) -> Iterator[torch.Tensor]:
        leaves = pytree.tree_leaves((self.args, self.kwargs, self.results))
        return (one for one in leaves if isinstance(one, torch.Tensor))


def memory_of(tensor: torch.Tensor) -> int:
    return int(tensor.untyped_storage()._cdata)


def normed(events: list[Event], outputs: Sequence[torch.Tensor]) -> list[Event]:
    """Batch norm as one event with the relu behind it, and with the concatenation before it, whose result nobody else
    reads."""
    users = Counter(one for event in events for one in {memory_of(tensor) for tensor in event.tensors()})
    users.update(map(memory_of, outputs))
    written = {memory_of(one) for event in events for one in event.results if one is not None}
    kept: list[Event] = []
    for event in events:
        # Nothing to compute, such as what batch norm keeps for a gradient.
        if not any(one is not None and one.numel() for one in event.results):
            continue
        last = kept[-1] if kept else None
        if (rows := _layer_norm(event, users)) is not None:
            kept.append(rows)
        elif (made := _norm(event, last, users, written)) is not None:
            if len(made.args[0]) > 1:
                kept.pop()
            kept.append(made)
        elif last is not None and _is_relu_of(event, last, users):
            kept[-1] = last._replace(args=(*last.args[:3], "relu"), results=event.results)
        else:
            kept.append(event)
    return kept


def _norm(event: Event, before: Event | None, users: Counter[int], written: set[int]) -> Event | None:
    if event.function is not _ATEN.native_batch_norm.default or event.kwargs or not event.fresh[0]:
        return None
    x, weight, bias, mean, variance, training, _, eps = event.args
    if training or mean is None or variance is None or x.dtype != torch.float32:
        return None
    # Factors are worked out now, of what no call changes.
    if any(one is not None and memory_of(one) in written for one in event.args[1:5]):
        return None
    tensors, result = [x], event.results[0]
    if before is not None and before.function is _ATEN.cat.default and _dim(before) == 1:
        whole = before.results[0]
        alone = memory_of(whole) == memory_of(x) and users[memory_of(x)] == 2
        if alone and (whole.shape, whole.stride()) == (x.shape, x.stride()):
            parts = list(before.args[0])
            tensors = parts if pieces.suited(_side_by_side(parts, result), True) else tensors
    if not pieces.suited(_side_by_side(tensors, result), True):
        return None
    factors = (variance.double() + eps).rsqrt() * (1.0 if weight is None else weight.double())
    offsets = (0.0 if bias is None else bias.double()) - mean.double() * factors
    args = tensors, factors.float(), offsets.float(), None
    return Event(event.given, NORMED, args, {}, event.results[:1], event.fresh[:1])


def _layer_norm(event: Event, users: Counter[int]) -> Event | None:
    if event.function is not _ATEN.native_layer_norm.default or event.kwargs or not all(event.fresh):
        return None
    (x, shape, weight, bias, eps), (y, *others) = event.args, event.results
    tensors = [one for one in (x, y, weight, bias) if one is not None]
    if not all(one.dtype == torch.float32 and one.is_contiguous() and not one.is_neg() for one in tensors):
        return None
    if not (x.is_cpu and x.numel()) or any(users[memory_of(one)] != 1 for one in others):
        return None
    factors = (None if one is None else one.view(-1) for one in (weight, bias))
    args = x.view(-1, prod(shape)), y.view(-1, prod(shape)), *factors, eps
    return Event(event.given, ROWS_NORMED, args, {}, event.results[:1], event.fresh[:1])


def _is_relu_of(event: Event, before: Event, users: Counter[int]) -> bool:
    if before.function != NORMED or before.args[3] is not None or event.function not in RELUS:
        return False
    x, y, result = event.args[0], before.results[0], event.results[0]
    same = memory_of(x) == memory_of(y) and all(
        (one.shape, one.stride()) == (y.shape, y.stride()) for one in (x, result)
    )
    return same and (event.function is RELUS[0] or users[memory_of(y)] == 2)


def kernel(event: Event) -> Pieces | RowNorms | None:
    """What computes an event again without PyTorch: copied pieces, normed rows."""
    if event.function == ROWS_NORMED:
        x, y, *vectors, eps = event.args
        factors, offsets = (None if one is None else numpy_of(one) for one in vectors)
        return RowNorms(numpy_of(x), numpy_of(y), factors, offsets, eps)
    if event.function == NORMED:
        tensors, factors, offsets, activation = event.args
        scale = Scale(numpy_of(factors), numpy_of(offsets), activation)
        return Pieces(_side_by_side(tensors, event.results[0]), scale)
    if not event.results or not all(event.fresh) or event.results[0].dtype != torch.float32:
        return None
    y = event.results[0]
    if event.function in COPIES:
        found = [(event.args[0], y)]
    elif event.function is _ATEN.cat.default:
        # An empty tensor of one axis goes with any others.
        tensors = [one for one in event.args[0] if one.numel()]
        return _copies(_side_by_side(tensors, y, _dim(event)))
    elif event.function is _ATEN.stack.default:
        found = [(one, y.select(_dim(event), at)) for at, one in enumerate(event.args[0])]
    else:
        return None
    if any(one.dtype != torch.float32 or one.is_neg() for one, _ in found):
        return None
    return _copies([Piece(numpy_of(one), numpy_of(place)) for one, place in found])


def _copies(found: list[Piece]) -> Pieces | None:
    return Pieces(found) if pieces.suited(found) else None


def _dim(event: Event) -> int:
    dim = event.args[1] if len(event.args) > 1 else event.kwargs.get("dim", 0)
    return int(dim) % event.results[0].ndim


def _side_by_side(tensors: list[torch.Tensor], y: torch.Tensor, dim: int = 1) -> list[Piece]:
    """Each to its place along an axis of y; none where one has another dtype than y."""
    if any(one.dtype != y.dtype or one.is_neg() or not one.is_cpu for one in tensors):
        return []
    firsts = np.cumsum([0, *(one.shape[dim] for one in tensors)])
    return [
        Piece(numpy_of(one), numpy_of(y.narrow(dim, int(first), one.shape[dim])), int(first))
        for one, first in zip(tensors, firsts, strict=False)
    ]
