"""Problems: what is to be computed, apart from any array and any algorithm.

A problem is frozen and hashable, has one string form that names it everywhere (command line, suite files, test ids,
databases), and knows its floating-point operations and the bytes it must move.
"""

from __future__ import annotations

import re
from dataclasses import replace
from math import prod
from typing import ClassVar, Final, Literal, Self

from tapwise.errors import InvalidProblem

Direction = Literal["fprop", "dgrad", "wgrad"]
Pair = tuple[int, int]

DIRECTIONS: Final = ("fprop", "dgrad", "wgrad")
LAYOUTS: Final = ("nchw", "nhwc")
MATHS: Final = ("ieee", "tf32", "3xtf32")
ACTIVATIONS: Final = ("relu", "relu6", "silu", "gelu", "sigmoid", "tanh")
ITEMSIZE: Final = {"f32": 4, "f64": 8, "f16": 2, "bf16": 2}

# Letters of the spatial axes by their number, innermost last: input, output and filter sizes.
INPUT_LETTERS: Final = {1: ("w",), 2: ("h", "w"), 3: ("d", "h", "w")}
FILTER_LETTERS: Final = {1: ("s",), 2: ("r", "s"), 3: ("t", "r", "s")}
AXIS_NAMES: Final = {1: ("width",), 2: ("height", "width"), 3: ("depth", "height", "width")}

_SIZE_WORD = re.compile(r"([ncdhwktrs])(\d+)")
_PARAMETER_WORD = re.compile(r"(stride|pad|dilation)(\d[\d:x]*)")
_GROUPS_WORD = re.compile(r"groups(\d+)")


class Problem:
    """What every problem has: frozen, hashable, named by its string.

    `operator` is its key in the registry, `layout` the memory order of its arrays. flops and bytes are those of the
    definition, every operand moved once.
    """

    operator: ClassVar[str]
    dtype: str
    layout: str
    # Of operators that know but one.
    direction: Direction = "fprop"
    math: str = "ieee"

    @property
    def x_shape(self) -> tuple[int, ...]:
        raise NotImplementedError

    @property
    def y_shape(self) -> tuple[int, ...]:
        raise NotImplementedError

    @property
    def itemsize(self) -> int:
        return ITEMSIZE[self.dtype]

    @property
    def flops(self) -> int:
        raise NotImplementedError

    @property
    def bytes(self) -> int:
        """Bytes that must move when every operand moves once."""
        return self.itemsize * (prod(self.x_shape) + prod(self.y_shape))

    @property
    def empty(self) -> bool:
        """No output element at all."""
        return prod(self.y_shape) == 0

    @property
    def trivial(self) -> bool:
        """No output element, or nothing that goes into one."""
        return self.empty

    @property
    def spatial_axes(self) -> int:
        """Spatial axes; 0 where axes are all alike."""
        return 0

    def replace(self, **changes: object) -> Self:
        return replace(self, **changes)  # type: ignore[type-var]


def join(values: tuple[int, ...] | list[str]) -> str:
    """One number when all axes agree, else `axb`."""
    texts = [str(v) for v in values]
    return texts[0] if len(set(texts)) == 1 else "x".join(texts)


def parameter(value: str, axes: int, name: str, text: str) -> tuple[Pair, ...]:
    """`2`, `2x1` or `0:1x0:1` as a (before, after) pair for each axis."""
    pairs = []
    for part in value.split("x"):
        numbers = part.split(":")
        if len(numbers) > 2 or not all(number.isdigit() for number in numbers):
            raise InvalidProblem(f"problem {text!r}: word {name + value!r} is not a number, a pair or sides a:bxc:d")
        pairs.append((int(numbers[0]), int(numbers[-1])))
    if len(pairs) == 1:
        pairs *= axes
    if len(pairs) != axes:
        raise InvalidProblem(f"problem {text!r}: word {name + value!r} gives {len(pairs)} values for {axes} axes")
    return tuple(pairs)
