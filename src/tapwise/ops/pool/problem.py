"""Problems of max and average pooling."""

from __future__ import annotations

import re
from dataclasses import dataclass
from functools import cached_property
from math import prod
from typing import Any, ClassVar, Final, Self

from tapwise.errors import InvalidProblem
from tapwise.problem import AXIS_NAMES, FILTER_LETTERS, INPUT_LETTERS, ITEMSIZE, LAYOUTS, Pair, Problem, join, parameter

OPS: Final = ("max", "avg")
_SIZE = re.compile(r"([nchwrs])(\d+)")
_PARAMETER = re.compile(r"(stride|pad|dilation)(\d[\d:x]*)")
_DIVISOR = re.compile(r"divisor(\d+)")
_FLAGS: Final = {"ceil": "ceil_mode", "indices": "indices"}


@dataclass(frozen=True)
class PoolProblem(Problem):
    """The largest or the mean of each window, of 1 or 2 spatial axes, as PyTorch and ONNX mean it.

    x (n, c, *spatial), y (n, c, *output). `padding` holds (before, after) an axis and is smaller than the dilated
    kernel: max never sees it, avg counts it unless `count_include_pad` is off. `ceil_mode`: a last window that only
    begins inside the input or the padding before it is kept; what it sees beyond the padding is not counted. `divisor`
    replaces the count. `indices` (max): positions in the plane besides values.

    Raises InvalidProblem for sizes out of range, and a padded input smaller than the dilated kernel.
    """

    operator: ClassVar[str] = "pool"

    op: str
    n: int
    c: int
    spatial: tuple[int, ...]
    kernel: tuple[int, ...]
    stride: tuple[int, ...]
    padding: tuple[Pair, ...]
    dilation: tuple[int, ...]
    ceil_mode: bool = False
    count_include_pad: bool = True
    divisor: int | None = None
    indices: bool = False
    dtype: str = "f32"
    layout: str = "nchw"

    def __post_init__(self) -> None:
        axes = len(self.spatial)
        if self.op not in OPS:
            raise InvalidProblem(f"op={self.op!r}: one of {', '.join(OPS)}")
        if axes not in (1, 2):
            raise InvalidProblem(f"spatial={self.spatial}: 1 or 2 axes are allowed, not {axes}")
        for name in ("kernel", "stride", "padding", "dilation"):
            if len(getattr(self, name)) != axes:
                raise InvalidProblem(f"{name}={getattr(self, name)}: one value for each of the {axes} spatial axes")
        for name, sizes, least in (
            ("n", (self.n,), 0), ("c", (self.c,), 0), ("spatial", self.spatial, 0), ("kernel", self.kernel, 1),
            ("stride", self.stride, 1), ("dilation", self.dilation, 1),
        ):  # fmt: skip
            if min(sizes) < least:
                raise InvalidProblem(f"{name}={getattr(self, name)}: each at least {least}")
        if self.divisor is not None and self.divisor == 0:
            raise InvalidProblem("divisor_override=0: a number other than 0 is allowed")
        if self.dtype not in ITEMSIZE or self.layout not in LAYOUTS:
            raise InvalidProblem(f"dtype={self.dtype!r}, layout={self.layout!r}: not known")
        for axis, (reach, pair) in enumerate(zip(self.reach, self.padding, strict=True)):
            if min(pair) < 0 or max(pair) >= reach:
                raise InvalidProblem(
                    f"padding={self.padding}: each side at least 0 and below the dilated kernel's {reach}"
                )
            if self.spatial[axis] + sum(pair) < reach:
                raise InvalidProblem(
                    f"kernel={self.kernel} with dilation={self.dilation} spans {reach} in {AXIS_NAMES[axes][axis]}, "
                    f"larger than the padded input of {self.spatial[axis] + sum(pair)}"
                )

    @cached_property
    def reach(self) -> tuple[int, ...]:
        return tuple((r - 1) * d + 1 for r, d in zip(self.kernel, self.dilation, strict=True))

    @cached_property
    def output(self) -> tuple[int, ...]:
        result = []
        for size, (before, after), reach, stride in zip(
            self.spatial, self.padding, self.reach, self.stride, strict=True
        ):
            room = size + before + after - reach
            count = (-(-room // stride) if self.ceil_mode else room // stride) + 1
            # A window wholly in the padding behind is dropped.
            if self.ceil_mode and (count - 1) * stride >= size + before:
                count -= 1
            result.append(count)
        return tuple(result)

    @property
    def x_shape(self) -> tuple[int, ...]:
        return (self.n, self.c, *self.spatial)

    @property
    def y_shape(self) -> tuple[int, ...]:
        return (self.n, self.c, *self.output)

    @property
    def flops(self) -> int:
        return prod(self.y_shape) * prod(self.kernel)

    def counts(self, axis: int) -> list[int]:
        """Taps of each output's window on one axis that an average counts."""
        size, (before, after) = self.spatial[axis], self.padding[axis]
        low, high = (-before, size + after) if self.count_include_pad else (0, size)
        result = []
        for p in range(self.output[axis]):
            start = p * self.stride[axis] - before
            taps = (start + r * self.dilation[axis] for r in range(self.kernel[axis]))
            result.append(sum(1 for tap in taps if low <= tap < high))
        return result

    @property
    def spatial_axes(self) -> int:
        return len(self.spatial)

    @classmethod
    def parse(cls, text: str) -> Self:
        """The problem that a string names: "maxpool c64 h112 w112 r3 s3 stride2 pad1". The stride is the kernel's size
        unless given; further words: ceil, indices, exclude_pad, divisor4, dilation2, dtypes, nchw, nhwc."""
        first, *words = text.split() or [""]
        if first not in ("maxpool", "avgpool"):
            raise InvalidProblem(f"problem {text!r}: an example is 'maxpool c64 h112 w112 r3 s3 stride2 pad1'")
        sizes: dict[str, int] = {}
        given: dict[str, str] = {}
        options: dict[str, Any] = {}
        for word in words:
            if (match := _SIZE.fullmatch(word)) and match[1] not in sizes:
                sizes[match[1]] = int(match[2])
            elif (match := _PARAMETER.fullmatch(word)) and match[1] not in given:
                given[match[1]] = match[2]
            elif (match := _DIVISOR.fullmatch(word)) and "divisor" not in options:
                options["divisor"] = int(match[1])
            elif word in _FLAGS and _FLAGS[word] not in options:
                options[_FLAGS[word]] = True
            elif word == "exclude_pad" and "count_include_pad" not in options:
                options["count_include_pad"] = False
            elif word in ITEMSIZE and "dtype" not in options:
                options["dtype"] = word
            elif word in LAYOUTS and "layout" not in options:
                options["layout"] = word
            else:
                raise InvalidProblem(f"problem {text!r}: word {word!r} is not known, or stands there twice")
        axes = 2 if "h" in sizes or "r" in sizes else 1
        for letter in ("c", *INPUT_LETTERS[axes], *FILTER_LETTERS[axes]):
            if letter not in sizes:
                raise InvalidProblem(f"problem {text!r}: no word gives {letter}")
        kernel = tuple(sizes[letter] for letter in FILTER_LETTERS[axes])
        stride = (
            parameter(given["stride"], axes, "stride", text) if "stride" in given else tuple((r, r) for r in kernel)
        )
        dilation = parameter(given.get("dilation", "1"), axes, "dilation", text)
        padding = parameter(given.get("pad", "0"), axes, "pad", text)
        spatial = tuple(sizes[letter] for letter in INPUT_LETTERS[axes])
        try:
            return cls(
                first[:3], sizes.get("n", 1), sizes["c"], spatial, kernel, tuple(a for a, _ in stride), padding,
                tuple(a for a, _ in dilation), **options,
            )  # fmt: skip
        except InvalidProblem as error:
            raise InvalidProblem(f"problem {text!r}: {error}") from None

    def __str__(self) -> str:
        axes = len(self.spatial)
        words = [f"{self.op}pool"] + ([f"n{self.n}"] if self.n != 1 else []) + [f"c{self.c}"]
        words += [f"{a}{v}" for a, v in zip(INPUT_LETTERS[axes], self.spatial, strict=True)]
        words += [f"{a}{v}" for a, v in zip(FILTER_LETTERS[axes], self.kernel, strict=True)]
        words += ["stride" + join(self.stride)] if self.stride != self.kernel else []
        if any(any(pair) for pair in self.padding):
            words.append("pad" + join([f"{a}" if a == b else f"{a}:{b}" for a, b in self.padding]))
        words += ["dilation" + join(self.dilation)] if set(self.dilation) != {1} else []
        words += ["ceil"] if self.ceil_mode else []
        words += [] if self.count_include_pad else ["exclude_pad"]
        words += [f"divisor{self.divisor}"] if self.divisor is not None else []
        words += ["indices"] if self.indices else []
        words += [self.dtype] if self.dtype != "f32" else []
        return " ".join(words + ([self.layout] if self.layout != "nchw" else []))
