"""ALGORITHMS: the only list of algorithms. Explicit rows, lazily imported, the serial reference last."""

from __future__ import annotations

from functools import cache
from importlib import import_module
from typing import Any

from tapwise.algorithm import Algorithm
from tapwise.errors import InvalidProblem

# id -> "module:class", in the order in which equal predictions are preferred.
ALGORITHMS: dict[str, str] = {
    "cpu.winograd": "tapwise.cpu.winograd:Winograd",
    "cpu.depthwise": "tapwise.cpu.depthwise:Depthwise",
    "cpu.pointwise": "tapwise.cpu.pointwise:Pointwise",
    "cpu.direct": "tapwise.cpu.direct:Direct",
    "cpu.im2col_gemm": "tapwise.cpu.im2col_gemm:Im2colGemm",
    "cpu.serial": "tapwise.cpu.serial:Serial",
}


@cache
def get(identifier: str) -> Algorithm[Any]:
    """The algorithm of that id, e.g. "cpu.winograd". Raises InvalidProblem for an unknown one."""
    row = ALGORITHMS.get(identifier)
    if row is None:
        raise InvalidProblem(f"algorithm={identifier!r}: 'auto' or one of {', '.join(ALGORITHMS)}")
    module, name = row.split(":")
    algorithm: Algorithm[Any] = getattr(import_module(module), name)()
    return algorithm


def of_backend(kind: str) -> list[Algorithm[Any]]:
    """The algorithms of one backend ("cpu"), in registry order."""
    return [get(identifier) for identifier in ALGORITHMS if identifier.startswith(kind + ".")]
