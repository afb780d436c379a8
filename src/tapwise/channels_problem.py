"""What problems share that add up an image over all but its channels: batch normalisation's and bias gradients'."""

from __future__ import annotations

import re
from dataclasses import dataclass
from math import prod
from typing import Any, ClassVar, Final, Self

from tapwise.arguments import number_in, one_of, shown, whole, words_of
from tapwise.errors import InvalidProblem
from tapwise.problem import DTYPES, LAYOUTS, Direction, Problem, activation_word

SIZES: Final = "nchw"
_SIZE: Final = re.compile(rf"([{SIZES}])([0-9]+)")
# Roundings of an activation's derivative, in units of roundoff.
DERIVATIVE_ROUNDINGS: Final = 32.0


@dataclass(frozen=True, kw_only=True)
class ChannelsProblem(Problem):
    """x (n, c, h, w). `directions`: the known ones, the first of which is meant where a string names none."""

    name: ClassVar[str]
    directions: ClassVar[tuple[Direction, ...]]
    example: ClassVar[str]

    n: int
    c: int
    h: int
    w: int
    activation: str | None = None
    dtype: str = "f32"
    layout: str = "nchw"
    direction: Direction = "fprop"

    def __post_init__(self) -> None:
        for name in SIZES:
            least = 1 if name == "c" else 0
            size = whole(getattr(self, name), name)
            if size < least:
                raise InvalidProblem(f"{name}={size}: at least {least} is allowed")
            object.__setattr__(self, name, size)
        object.__setattr__(self, "activation", activation_word(self.activation))
        for name, allowed in (("dtype", tuple(DTYPES)), ("layout", LAYOUTS), ("direction", self.directions)):
            one_of(getattr(self, name), name, allowed)
        if self.direction == "fprop" and self.activation is not None:
            raise InvalidProblem(f"activation={self.activation}: None is allowed where moments are computed")
        self._check_extent()

    @property
    def operator(self) -> str:
        """The gradient has algorithms of its own."""
        return self.name if self.direction == "fprop" else f"{self.name}_dgrad"

    @property
    def x_shape(self) -> tuple[int, ...]:
        return (self.n, self.c, self.h, self.w)

    @property
    def pixels(self) -> int:
        return self.h * self.w

    @property
    def trivial(self) -> bool:
        return prod(self.x_shape) == 0

    @property
    def spatial_axes(self) -> int:
        return 2

    @classmethod
    def parse(cls, text: str) -> Self:
        """The problem that a string names, as `example` does; without a word n is 1, the dtype f32, the layout nchw,
        the direction the first one, and there is no activation."""
        first, *words = words_of(text) or [""]
        fields: dict[str, Any] = {"n": 1}
        for word in words:
            size = _SIZE.fullmatch(word)
            kinds = {"direction": ("dgrad",), "dtype": tuple(DTYPES), "layout": LAYOUTS}
            name = size[1] if size else next((kind for kind, known in kinds.items() if word in known), "activation")
            if name in fields and name != "n":
                raise InvalidProblem(
                    f"problem {shown(text)}: {shown(word)} has no place; an example is '{cls.example}'"
                )
            fields[name] = number_in(size[2], text) if size else word
        if first != cls.name or not set(SIZES) <= set(fields):
            raise InvalidProblem(f"problem {shown(text)}: an example is '{cls.example}'")
        return cls(**fields)

    def __str__(self) -> str:
        words = [self.name, *(f"{name}{getattr(self, name)}" for name in SIZES if name != "n" or self.n != 1)]
        words += ["dgrad"] if self.direction == "dgrad" else []
        words += [self.activation] if self.activation else []
        words += [self.dtype] if self.dtype != "f32" else []
        return " ".join(words + ([self.layout] if self.layout != "nchw" else []))
