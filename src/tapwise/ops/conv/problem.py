"""Problems of convolution."""

from __future__ import annotations

import re
from dataclasses import dataclass
from functools import cached_property
from math import prod
from typing import ClassVar, Final, Literal, Self

from tapwise.errors import InvalidProblem
from tapwise.problem import (
    ACTIVATIONS,
    AXIS_NAMES,
    FILTER_LETTERS,
    INPUT_LETTERS,
    ITEMSIZE,
    LAYOUTS,
    Pair,
    Problem,
    join,
    parameter,
)  # fmt: skip

Direction = Literal["fprop", "dgrad", "wgrad"]

DIRECTIONS: Final = ("fprop", "dgrad", "wgrad")
MATHS: Final = ("ieee", "tf32", "3xtf32")

_SIZE_WORD = re.compile(r"([ncdhwktrs])(\d+)")
_PARAMETER_WORD = re.compile(r"(stride|pad|dilation)(\d[\d:x]*)")
_GROUPS_WORD = re.compile(r"groups(\d+)")


@dataclass(frozen=True)
class ConvProblem(Problem):
    """A convolution (cross-correlation, as in PyTorch and ONNX) of 1 to 3 spatial axes.

    Shapes: x (n, c, *spatial), w (k, c / groups, *kernel), y (n, k, *output). `padding` holds (before, after) for each
    spatial axis; stride, padding, dilation are in elements. `layout` is the memory order of x and y: "nchw" or "nhwc",
    whatever the number of axes. `bias`, `activation` and `residual` say what is fused behind the convolution:
    y = activation(conv(x, w) + bias + residual).

    Raises InvalidProblem for sizes that are negative, a stride, dilation or kernel below 1, groups that do not divide
    c and k, and a padded input smaller than the dilated kernel.
    """

    operator: ClassVar[str] = "conv"

    n: int
    c: int
    spatial: tuple[int, ...]
    k: int
    kernel: tuple[int, ...]
    stride: tuple[int, ...]
    padding: tuple[Pair, ...]
    dilation: tuple[int, ...]
    groups: int = 1
    direction: Direction = "fprop"
    dtype: str = "f32"
    math: str = "ieee"
    layout: str = "nchw"
    bias: bool = False
    activation: str | None = None
    residual: bool = False

    def __post_init__(self) -> None:
        axes = len(self.spatial)
        if axes not in INPUT_LETTERS:
            raise InvalidProblem(f"spatial={self.spatial}: 1, 2 or 3 axes are allowed, not {axes}")
        for name in ("kernel", "stride", "padding", "dilation"):
            if len(getattr(self, name)) != axes:
                raise InvalidProblem(f"{name}={getattr(self, name)}: one value for each of the {axes} spatial axes")
        for name, value, least in (("n", self.n, 0), ("c", self.c, 0), ("k", self.k, 0), ("groups", self.groups, 1)):
            if value < least:
                raise InvalidProblem(f"{name}={value}: at least {least}")
        for name, sizes, least in (
            ("spatial", self.spatial, 0),
            ("kernel", self.kernel, 1),
            ("stride", self.stride, 1),
            ("dilation", self.dilation, 1),
        ):
            if min(sizes) < least:
                raise InvalidProblem(f"{name}={sizes}: each at least {least}")
        if min(min(pair) for pair in self.padding) < 0:
            raise InvalidProblem(f"padding={self.padding}: each side at least 0")
        if self.c % self.groups or self.k % self.groups:
            raise InvalidProblem(f"groups={self.groups}: must divide the channels, c={self.c} and k={self.k}")
        for name, word, allowed in (
            ("direction", self.direction, DIRECTIONS),
            ("dtype", self.dtype, tuple(ITEMSIZE)),
            ("math", self.math, MATHS),
            ("layout", self.layout, LAYOUTS),
            ("activation", self.activation, (None, *ACTIVATIONS)),
        ):
            if word not in allowed:
                raise InvalidProblem(f"{name}={word!r}: one of {', '.join(map(str, allowed))}")
        if self.math != "ieee" and self.dtype != "f32":
            raise InvalidProblem(f"math={self.math!r}: arithmetic on f32 arrays, not on {self.dtype}")
        for axis, reach in enumerate(self.reach):
            padded = self.spatial[axis] + sum(self.padding[axis])
            if padded < reach:
                name = AXIS_NAMES[axes][axis]
                raise InvalidProblem(
                    f"kernel={self.kernel} with dilation={self.dilation} spans {reach} in {name}, "
                    f"larger than the padded input of {padded} (input {self.spatial[axis]}, "
                    f"padding {self.padding[axis]})"
                )

    @cached_property
    def reach(self) -> tuple[int, ...]:
        """Extent of the dilated filter on each axis."""
        return tuple((r - 1) * d + 1 for r, d in zip(self.kernel, self.dilation, strict=True))

    @cached_property
    def output(self) -> tuple[int, ...]:
        """Spatial size of y."""
        return tuple(
            (size + sum(pad) - reach) // stride + 1
            for size, pad, reach, stride in zip(self.spatial, self.padding, self.reach, self.stride, strict=True)
        )

    @property
    def x_shape(self) -> tuple[int, ...]:
        return (self.n, self.c, *self.spatial)

    @property
    def w_shape(self) -> tuple[int, ...]:
        return (self.k, self.c // self.groups, *self.kernel)

    @property
    def y_shape(self) -> tuple[int, ...]:
        return (self.n, self.k, *self.output)

    @property
    def group_c(self) -> int:
        """Input channels of one group."""
        return self.c // self.groups

    @property
    def group_k(self) -> int:
        """Output channels of one group."""
        return self.k // self.groups

    @property
    def gemm_m(self) -> int:
        return self.group_k

    @property
    def gemm_n(self) -> int:
        return self.n * prod(self.output)

    @property
    def gemm_k(self) -> int:
        """Terms in each output's sum: channels of a group times filter taps."""
        return self.group_c * prod(self.kernel)

    @property
    def depthwise(self) -> bool:
        """One input channel a group (and any number of outputs from it)."""
        return self.groups > 1 and self.group_c == 1

    @property
    def flops(self) -> int:
        """Floating-point operations of the definition: a multiply and an add each term."""
        return 2 * self.n * self.k * prod(self.output) * self.gemm_k

    @property
    def bytes(self) -> int:
        """Bytes that must move when every operand moves once."""
        elements = prod(self.x_shape) + prod(self.w_shape) + prod(self.y_shape) * (2 if self.residual else 1)
        return self.itemsize * elements

    @property
    def trivial(self) -> bool:
        return self.empty or self.c == 0

    @property
    def spatial_axes(self) -> int:
        return len(self.spatial)

    @classmethod
    def parse(cls, text: str) -> Self:
        """The problem that a string names; the inverse of str().

        Words, in any order: `n8 c64 h56 w56 k64 r3 s3` sizes (n defaults to 1); `stride2` or `stride2x1`; `pad1`,
        `pad1x0` or `pad0:1x0:1` (top:bottom x left:right); `dilation2`; `groups4`; a dtype `f32 f64 f16 bf16` or
        `tf32`, `3xtf32`; `nchw nhwc`; `fprop dgrad wgrad`; `bias`, `residual`, an activation.
        """
        sizes: dict[str, int] = {}
        seen: dict[str, object] = {}

        def once(name: str, value: object, word: str) -> None:
            if name in seen:
                raise InvalidProblem(f"problem {text!r}: word {word!r} gives {name} a second time")
            seen[name] = value

        for word in text.split():
            if match := _SIZE_WORD.fullmatch(word):
                once(match[1], True, word)
                sizes[match[1]] = int(match[2])
            elif match := _PARAMETER_WORD.fullmatch(word):
                once({"pad": "padding"}.get(match[1], match[1]), match[2], word)
            elif match := _GROUPS_WORD.fullmatch(word):
                once("groups", int(match[1]), word)
            elif word in ITEMSIZE:
                once("dtype", word, word)
            elif word in ("tf32", "3xtf32"):
                once("dtype", "f32", word)
                once("math", word, word)
            elif word in LAYOUTS:
                once("layout", word, word)
            elif word in DIRECTIONS:
                once("direction", word, word)
            elif word in ACTIVATIONS:
                once("activation", word, word)
            elif word in ("bias", "residual"):
                once(word, True, word)
            else:
                raise InvalidProblem(
                    f"problem {text!r}: word {word!r} is not known; an example is "
                    "'c64 h56 w56 k64 r3 s3 stride2 pad1 dilation1 groups1'"
                )
        axes = 3 if "d" in sizes or "t" in sizes else 2 if "h" in sizes or "r" in sizes else 1
        for letter in ("c", "k", *INPUT_LETTERS[axes], *FILTER_LETTERS[axes]):
            if letter not in sizes:
                raise InvalidProblem(f"problem {text!r}: no word gives {letter}")
        strides, dilations = (parameter(str(seen.pop(name, "1")), axes, name, text) for name in ("stride", "dilation"))
        padding = parameter(str(seen.pop("padding", "0")), axes, "pad", text)
        for name, pairs in (("stride", strides), ("dilation", dilations)):
            if any(before != after for before, after in pairs):
                raise InvalidProblem(f"problem {text!r}: {name} takes one number an axis, not two with ':'")
        options = {name: value for name, value in seen.items() if name not in sizes}
        try:
            return cls(
                n=sizes.get("n", 1),
                c=sizes["c"],
                spatial=tuple(sizes[letter] for letter in INPUT_LETTERS[axes]),
                k=sizes["k"],
                kernel=tuple(sizes[letter] for letter in FILTER_LETTERS[axes]),
                stride=tuple(pair[0] for pair in strides),
                padding=padding,
                dilation=tuple(pair[0] for pair in dilations),
                **options,  # type: ignore[arg-type]
            )
        except InvalidProblem as error:
            raise InvalidProblem(f"problem {text!r}: {error}") from None

    def __str__(self) -> str:
        axes = len(self.spatial)
        words = [f"n{self.n}"] if self.n != 1 else []
        words.append(f"c{self.c}")
        words += [f"{a}{v}" for a, v in zip(INPUT_LETTERS[axes], self.spatial, strict=True)]
        words.append(f"k{self.k}")
        words += [f"{a}{v}" for a, v in zip(FILTER_LETTERS[axes], self.kernel, strict=True)]
        if set(self.stride) != {1}:
            words.append("stride" + join(self.stride))
        if any(any(pair) for pair in self.padding):
            words.append("pad" + join([f"{a}" if a == b else f"{a}:{b}" for a, b in self.padding]))
        if set(self.dilation) != {1}:
            words.append("dilation" + join(self.dilation))
        if self.groups != 1:
            words.append(f"groups{self.groups}")
        if self.math != "ieee":
            words.append(self.math)
        elif self.dtype != "f32":
            words.append(self.dtype)
        if self.layout != "nchw":
            words.append(self.layout)
        if self.direction != "fprop":
            words.append(self.direction)
        if self.bias:
            words.append("bias")
        if self.activation:
            words.append(self.activation)
        if self.residual:
            words.append("residual")
        return " ".join(words)
