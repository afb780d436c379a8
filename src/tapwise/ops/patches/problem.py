"""Problems of im2col and col2im: patches of an image as columns, and their sums back in place."""

from __future__ import annotations

import re
from dataclasses import dataclass
from functools import cached_property
from math import prod
from typing import Any, ClassVar, Final, Self

from tapwise.errors import InvalidProblem
from tapwise.problem import AXIS_NAMES, FILTER_LETTERS, INPUT_LETTERS, ITEMSIZE, Pair, Problem, join, parameter

_SIZE: Final = re.compile(r"([ncdhwtrs])(\d+)")
_PARAMETER: Final = re.compile(r"(stride|pad|dilation)(\d[\d:x]*)")


@dataclass(frozen=True)
class PatchProblem(Problem):
    """Image (n, c, *spatial) and columns (n, c * prod(kernel), prod(output)), of 1 to 3 spatial axes.

    Column l holds the elements of window l, channel by channel, tap by tap. `accumulate` (col2im): add to what is
    there. Raises InvalidProblem for sizes out of range, and a padded image smaller than the dilated kernel.
    """

    n: int
    c: int
    spatial: tuple[int, ...]
    kernel: tuple[int, ...]
    stride: tuple[int, ...]
    padding: tuple[Pair, ...]
    dilation: tuple[int, ...]
    accumulate: bool = False
    dtype: str = "f32"
    layout: str = "nchw"

    def __post_init__(self) -> None:
        axes = len(self.spatial)
        if axes not in (1, 2, 3):
            raise InvalidProblem(f"spatial={self.spatial}: 1 to 3 axes are allowed, not {axes}")
        for name in ("kernel", "stride", "padding", "dilation"):
            if len(getattr(self, name)) != axes:
                raise InvalidProblem(f"{name}={getattr(self, name)}: one value for each of the {axes} spatial axes")
        for name, sizes, least in (
            ("n", (self.n,), 0), ("c", (self.c,), 0), ("spatial", self.spatial, 0), ("kernel", self.kernel, 1),
            ("stride", self.stride, 1), ("dilation", self.dilation, 1),
        ):  # fmt: skip
            if min(sizes) < least:
                raise InvalidProblem(f"{name}={getattr(self, name)}: each at least {least}")
        if min(min(pair) for pair in self.padding) < 0:
            raise InvalidProblem(f"padding={self.padding}: each side at least 0")
        if self.dtype not in ITEMSIZE or self.layout != "nchw":
            raise InvalidProblem(f"dtype={self.dtype!r}, layout={self.layout!r}: not known")
        for axis in range(axes):
            reach = (self.kernel[axis] - 1) * self.dilation[axis] + 1
            padded = self.spatial[axis] + sum(self.padding[axis])
            if padded < reach:
                raise InvalidProblem(
                    f"kernel={self.kernel} with dilation={self.dilation} spans {reach} in {AXIS_NAMES[axes][axis]}, "
                    f"larger than the padded image of {padded}"
                )

    @cached_property
    def output(self) -> tuple[int, ...]:
        """Windows on each axis."""
        return tuple(
            (size + sum(pad) - (r - 1) * d - 1) // stride + 1
            for size, pad, r, d, stride in zip(
                self.spatial, self.padding, self.kernel, self.dilation, self.stride, strict=True
            )
        )

    @property
    def image_shape(self) -> tuple[int, ...]:
        return (self.n, self.c, *self.spatial)

    @property
    def columns_shape(self) -> tuple[int, ...]:
        return (self.n, self.c * prod(self.kernel), prod(self.output))

    @property
    def flops(self) -> int:
        return prod(self.columns_shape)

    def lifted(self) -> Self:
        """The same with three spatial axes."""
        extra = 3 - len(self.spatial)
        ones, sides = (1,) * extra, ((0, 0),) * extra
        return self.replace(
            spatial=ones + self.spatial, kernel=ones + self.kernel, stride=ones + self.stride,
            padding=sides + self.padding, dilation=ones + self.dilation,
        )  # fmt: skip

    @property
    def spatial_axes(self) -> int:
        return len(self.spatial)

    @classmethod
    def parse(cls, text: str) -> Self:
        """The problem that a string names: "im2col c64 h56 w56 r3 s3 pad1", "col2im n2 c3 w9 s2 accumulate f16"."""
        first, *words = text.split() or [""]
        if first != cls.operator:
            raise InvalidProblem(f"problem {text!r}: an example is '{cls.operator} c64 h56 w56 r3 s3 pad1'")
        sizes: dict[str, int] = {}
        given: dict[str, str] = {}
        options: dict[str, Any] = {}
        for word in words:
            if (match := _SIZE.fullmatch(word)) and match[1] not in sizes:
                sizes[match[1]] = int(match[2])
            elif (match := _PARAMETER.fullmatch(word)) and match[1] not in given:
                given[match[1]] = match[2]
            elif word in ITEMSIZE and "dtype" not in options:
                options["dtype"] = word
            elif word == "accumulate" and word not in options and cls.operator == "col2im":
                options[word] = True
            else:
                raise InvalidProblem(f"problem {text!r}: word {word!r} is not known, or stands there twice")
        axes = 3 if "d" in sizes or "t" in sizes else 2 if "h" in sizes or "r" in sizes else 1
        for letter in ("c", *INPUT_LETTERS[axes], *FILTER_LETTERS[axes]):
            if letter not in sizes:
                raise InvalidProblem(f"problem {text!r}: no word gives {letter}")
        strides, dilations = (parameter(given.get(name, "1"), axes, name, text) for name in ("stride", "dilation"))
        spatial = tuple(sizes[letter] for letter in INPUT_LETTERS[axes])
        kernel = tuple(sizes[letter] for letter in FILTER_LETTERS[axes])
        try:
            return cls(
                sizes.get("n", 1), sizes["c"], spatial, kernel, tuple(a for a, _ in strides),
                parameter(given.get("pad", "0"), axes, "pad", text), tuple(a for a, _ in dilations), **options,
            )  # fmt: skip
        except InvalidProblem as error:
            raise InvalidProblem(f"problem {text!r}: {error}") from None

    def __str__(self) -> str:
        axes = len(self.spatial)
        words = [self.operator] + ([f"n{self.n}"] if self.n != 1 else []) + [f"c{self.c}"]
        words += [f"{a}{v}" for a, v in zip(INPUT_LETTERS[axes], self.spatial, strict=True)]
        words += [f"{a}{v}" for a, v in zip(FILTER_LETTERS[axes], self.kernel, strict=True)]
        words += ["stride" + join(self.stride)] if set(self.stride) != {1} else []
        if any(any(pair) for pair in self.padding):
            words.append("pad" + join([f"{a}" if a == b else f"{a}:{b}" for a, b in self.padding]))
        words += ["dilation" + join(self.dilation)] if set(self.dilation) != {1} else []
        words += ["accumulate"] if self.accumulate else []
        return " ".join(words + ([self.dtype] if self.dtype != "f32" else []))


@dataclass(frozen=True)
class Im2colProblem(PatchProblem):
    """Image in, columns out."""

    operator: ClassVar[str] = "im2col"

    @property
    def x_shape(self) -> tuple[int, ...]:
        return self.image_shape

    @property
    def y_shape(self) -> tuple[int, ...]:
        return self.columns_shape

    __str__ = PatchProblem.__str__


@dataclass(frozen=True)
class Col2imProblem(PatchProblem):
    """Columns in, image out: the adjoint of im2col."""

    operator: ClassVar[str] = "col2im"

    @property
    def x_shape(self) -> tuple[int, ...]:
        return self.columns_shape

    @property
    def y_shape(self) -> tuple[int, ...]:
        return self.image_shape

    __str__ = PatchProblem.__str__
