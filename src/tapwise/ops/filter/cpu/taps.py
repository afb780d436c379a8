"""The record of taps that the kernel of filters reads: declared once, for `write` on the host and `Taps` in the kernel.

A record is a row of 8-byte words: a head (`head_of`), the places of all lists, and their weights in the arithmetic
dtype, filled up to a word. The lists follow one another in the order of LISTS:

first: the taps of the first sweep, or of the only one, whose result is y.
second: the taps of the sweep from the column sums to y; none where there is one sweep.
columns: the first sweep's window without holes, as columns of `column_height` taps: a place a column, a weight a tap.
groups: equal taps whose sums stand for several taps of the second sweep.

Of a kernel in order (`ordered_terms`) the first two lists have two places a term, and for weights its weight and sign.

A place is a distance in elements, from the element of scratch that lies under the window's first tap.
"""

from __future__ import annotations

from collections.abc import Mapping
from dataclasses import dataclass
from typing import Any, Final

import numpy as np

from tapwise.cpu.simd import BYTES, Int, Kernel, Ptr
from tapwise.integers import ceil_div

Lists = Mapping[str, np.ndarray]
LISTS: Final = ("first", "second", "columns", "groups")
WORD_BYTES: Final = 8


def head_of(dtype: str) -> np.dtype[np.void]:
    """The head of a record whose arithmetic dtype is `dtype` ("f32"); each field begins a word.

    Of each list the number of places; taps of a column; and what is added to the size of a sum before it is truncated,
    of the column's sums and of the result's.
    """
    value = f"{dtype[0]}{BYTES[dtype]}"
    fields = {
        "first": "i8", "second": "i8", "column_epsilon": value, "result_epsilon": value, "columns": "i8",
        "column_height": "i8", "groups": "i8",
    }  # fmt: skip
    places = [WORD_BYTES * number for number in range(len(fields))]
    size = WORD_BYTES * len(fields)
    return np.dtype({"names": [*fields], "formats": [*fields.values()], "offsets": places, "itemsize": size})


def write(dtype: str, places: Lists, weights: Lists, column_height: int, epsilons: tuple[float, float]) -> np.ndarray:
    """The record of these lists, int64. A list that is not given is empty; weights are of the arithmetic dtype."""
    head = np.zeros(1, head_of(dtype))
    for name in LISTS:
        head[name] = len(places.get(name, ()))
    head["column_height"] = column_height
    head["column_epsilon"], head["result_epsilon"] = epsilons
    given = np.concatenate([weights[name] for name in LISTS if name in weights])
    values = np.zeros(ceil_div(given.nbytes, WORD_BYTES) * WORD_BYTES // given.itemsize, given.dtype)
    values[: len(given)] = given
    ordered = [places[name].astype(np.int64) for name in LISTS if name in places]
    return np.concatenate([head.view(np.int64), *ordered, values.view(np.int64)])


@dataclass(frozen=True)
class TapList:
    """A list of the record, inside a kernel."""

    count: Int
    places: Ptr
    weights: Ptr


class Taps:
    """The record inside a kernel: `first`, `second`, `columns`, `groups`, and the head's other fields."""

    def __init__(self, k: Kernel, record: Ptr, dtype: str) -> None:
        head, values = head_of(dtype), WORD_BYTES // BYTES[dtype]
        assert head.names is not None and head.fields is not None
        words = {name: head.fields[name][1] // WORD_BYTES for name in head.names}
        fields: dict[str, Any] = {}
        for name, word in words.items():
            is_epsilon = name.endswith("_epsilon")
            fields[name] = record.to(dtype) + word * values if is_epsilon else k.load_int(record + word)
        self.column_epsilon, self.result_epsilon = fields["column_epsilon"], fields["result_epsilon"]
        self.column_height, self._second = fields["column_height"], fields["second"]
        places, total = record + len(words), fields["first"] + fields["second"] + fields["columns"] + fields["groups"]
        weights = record.to(dtype) + (total + len(words)) * values
        self.first = TapList(fields["first"], places, weights)
        place = fields["first"] + fields["second"]
        self.columns = TapList(fields["columns"], places + place, weights + place)
        last, before = places + (place + fields["columns"]), place + fields["columns"] * self.column_height
        self.groups = TapList(fields["groups"], last, weights + before)

    @property
    def is_single(self) -> Any:
        """Whether the first sweep is the only one."""
        return self._second.eq(0)

    @property
    def second(self) -> TapList:
        """Its addresses are worked out where it is read, so that they take no registers before."""
        return TapList(self._second, self.first.places + self.first.count, self.first.weights + self.first.count)
