"""What stands in for a GPU's driver where there is none."""

from __future__ import annotations

import ctypes
from dataclasses import dataclass, field
from typing import Any

from tapwise.cuda.jit import launch as launches
from tapwise.cuda.jit.compile import Source


@dataclass
class Driver:
    """What was launched: (stream, grid, attributes, words of the struct)."""

    seen: list[tuple[int, list[int], int, list[int]]] = field(default_factory=list)
    status: int = 0

    def launch(self, config: Any, function: Any, parameters: Any, extra: None) -> int:
        head = launches._Head.from_address(config.value)
        assert function.value == 77 and extra is None
        start = ctypes.c_uint64.from_address(parameters.value).value
        words = list((ctypes.c_int64 * 4).from_address(start))
        self.seen.append((head.stream, [*head.grid, *head.block], head.attribute_count, words))
        return self.status


class Launched(list[tuple[Source, list[int]]]):
    """(source, all words) of each launch; `computed`: kernels run by emulation."""

    computed = False
