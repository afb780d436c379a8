"""Problems of convolution."""

from __future__ import annotations

from collections.abc import Callable, Mapping
from dataclasses import dataclass
from math import prod
from typing import Any, ClassVar, Final

import numpy as np

from tapwise.activation import named_activation
from tapwise.arguments import whole
from tapwise.errors import InvalidProblem
from tapwise.ops.conv import reference, reference_backward
from tapwise.problem import (
    DTYPES,
    LARGEST_INTEGER,
    LAYOUTS,
    Accuracy,
    Direction,
    Inputs,
    activation_word,
    sum_factor,
)  # fmt: skip
from tapwise.window_problem import WindowProblem, Words, choices, flag

DIRECTIONS: Final = ("fprop", "dgrad", "wgrad")
MATHS: Final = ("ieee", "tf32", "3xtf32")
_TENSOR_CORES: Final = {math: {"dtype": "f32", "math": math} for math in MATHS[1:]}

# Steepest slope of each activation (of leaky_relu at least), those that are no more than a comparison, and those in
# which terms of the argument's size cancel.
SLOPES: Final = {
    None: 1.0, "relu": 1.0, "relu6": 1.0, "tanh": 1.0, "sigmoid": 0.25, "silu": 1.1, "gelu": 1.13, "gelu_tanh": 1.13,
    "hardswish": 1.5, "hardsigmoid": 1 / 6, "leaky_relu": 1.0,
}  # fmt: skip
EXACT_ACTIVATIONS: Final = (None, "relu", "relu6")
CANCELLING_ACTIVATIONS: Final = ("gelu", "gelu_tanh", "hardswish", "hardsigmoid")
# Roundings that evaluating an activation takes.
EVALUATION: Final = 16.0


def _activation(word: str) -> str | None:
    """The activation that a word of a problem's string names."""
    try:
        return activation_word(word)
    except InvalidProblem:
        return None


@dataclass(frozen=True, kw_only=True)
class ConvProblem(WindowProblem):
    """A convolution (cross-correlation, as in PyTorch and ONNX) of 1 to 3 spatial axes.

    Shapes: x (n, c, *spatial), w (k, c / groups, *kernel), y (n, k, *output). `padding` holds (before, after) for each
    spatial axis; stride, padding, dilation are in elements. `layout` is the memory order of x and y: "nchw" or "nhwc",
    whatever the number of axes. `bias`, `activation` and `residual` say what is fused behind the convolution:
    y = activation(conv(x, w) + bias + residual). ("leaky_relu", slope) becomes one word, such as "leaky_relu0.2".

    `direction`: what is computed of that convolution. "fprop": y of x and w. "dgrad": dx of dy and w, which is
    transposed convolution too; bias (c,) and activation are fused behind it. "wgrad": dw of x and dy; `layout` is that
    of all three, so dw is (k, *kernel, c / groups) in memory for "nhwc".

    Raises InvalidProblem for sizes that are negative, a stride, dilation or kernel below 1, groups that do not divide
    c and k, a padded input smaller than the dilated kernel, and what a direction does not fuse.
    """

    EXAMPLE: ClassVar[str] = "c64 h56 w56 k64 r3 s3 stride2 pad1 dilation1 groups1"
    SIZES: ClassVar[tuple[str, ...]] = ("k",)
    WORDS: ClassVar[tuple[Words, ...]] = (
        Words("groups"),
        Words("dtype", {**_TENSOR_CORES, **{dtype: {"dtype": dtype} for dtype in DTYPES}}),
        choices("layout", LAYOUTS),
        choices("direction", DIRECTIONS),
        flag("bias", "bias"),
        Words("activation", read=_activation),
        flag("residual", "residual"),
    )
    ALLOWED: ClassVar[Mapping[str, tuple[Any, ...]]] = {
        **WindowProblem.ALLOWED,
        "direction": DIRECTIONS,
        "math": MATHS,
    }

    k: int
    groups: int = 1
    direction: Direction = "fprop"
    math: str = "ieee"
    bias: bool = False
    activation: str | None = None
    residual: bool = False

    def __post_init__(self) -> None:
        super().__post_init__()
        object.__setattr__(self, "activation", activation_word(self.activation))
        object.__setattr__(self, "groups", whole(self.groups, "groups"))
        if self.groups < 1:
            raise InvalidProblem(f"groups={self.groups}: at least 1")
        if self.c % self.groups or self.k % self.groups:
            raise InvalidProblem(f"groups={self.groups}: must divide the channels, c={self.c} and k={self.k}")
        if self.math != "ieee" and self.dtype != "f32":
            raise InvalidProblem(f"math={self.math!r}: arithmetic on f32 arrays, not on {self.dtype}")
        fused = {"wgrad": ("bias", "activation", "residual"), "dgrad": ("residual",), "fprop": ()}[self.direction]
        for name in fused:
            if getattr(self, name):
                raise InvalidProblem(f"{name}={getattr(self, name)!r}: not fused behind {self.direction}")
        self._check_extent()

    @property
    def operator(self) -> str:
        """Gradients have algorithms of their own."""
        return "conv" if self.direction == "fprop" else self.direction

    @property
    def w_shape(self) -> tuple[int, ...]:
        return (self.k, self.c // self.groups, *self.kernel)

    @property
    def y_shape(self) -> tuple[int, ...]:
        return (self.n, self.k, *self.output)

    @property
    def result_shape(self) -> tuple[int, ...]:
        return {"fprop": self.y_shape, "dgrad": self.x_shape, "wgrad": self.w_shape}[self.direction]

    @property
    def given_shape(self) -> tuple[int, ...]:
        """Of the image that calls bring: x, or dy."""
        return self.y_shape if self.direction == "dgrad" else self.x_shape

    @property
    def group_c(self) -> int:
        """Input channels of one group."""
        return self.c // self.groups

    @property
    def group_k(self) -> int:
        """Output channels of one group."""
        return self.k // self.groups

    @property
    def w_is_image(self) -> bool:
        """w of wgrad is dy."""
        return self.direction == "wgrad"

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
    def terms(self) -> int:
        """Terms in each sum of the result, at most."""
        if self.direction == "wgrad":
            return self.gemm_n
        return (self.group_c if self.direction == "fprop" else self.group_k) * prod(self.kernel)

    @property
    def depthwise(self) -> bool:
        """One input channel a group (and any number of outputs from it)."""
        return self.groups > 1 and self.group_c == 1

    @property
    def activation_name(self) -> str | None:
        """The activation without its parameter."""
        return named_activation(self.activation)[0]

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
        return self.empty or self.terms == 0

    @property
    def exact_on_integers(self) -> bool:
        largest = LARGEST_INTEGER**2 * self.terms + 2 * LARGEST_INTEGER
        return largest < 1 / self.roundoff and self.activation in EXACT_ACTIVATIONS

    @property
    def error_factor(self) -> float:
        """c in the bound of sums in any order."""
        return sum_factor(self.terms)

    def bare(self) -> ConvProblem:
        return self.replace(bias=False, activation=None, residual=False)

    def inputs(self, array: Callable[[tuple[int, ...]], Any]) -> Inputs:
        """(x, w) for fprop, (dy, w) for dgrad, (x, dy) for wgrad; bias and residual where the problem has them."""
        first = array(self.given_shape)
        second = array(self.y_shape if self.direction == "wgrad" else self.w_shape)
        bias = array((self.result_shape[1],)) if self.bias else None
        return Inputs(first, second, bias, array(self.y_shape) if self.residual else None)

    def magnitude(self, x: np.ndarray, w: np.ndarray) -> np.ndarray:
        """The size of what is summed for each element of the result, in float64: |w| * |x| for fprop."""
        return self.bare().convolve(abs(x), abs(w))

    def convolve(
        self, x: np.ndarray, w: np.ndarray, bias: np.ndarray | None = None, residual: np.ndarray | None = None
    ) -> np.ndarray:
        """The result in float64 by the reference, of what `inputs` lists. Raises InvalidProblem for other shapes."""
        wanted = self.inputs(lambda shape: shape)
        for name, array in {"x": x, "w": w, "bias": bias, "residual": residual}.items():
            shape = getattr(wanted, name)
            if (array is None) != (shape is None):
                raise InvalidProblem(f"{name}: the problem has {'none' if shape is None else 'one'}")
            if array is not None and array.shape != shape:
                raise InvalidProblem(f"{name} has shape {array.shape}: {shape} is allowed")
        steps = self.stride, self.padding, self.dilation, self.groups
        if self.direction == "fprop":
            return reference.convolve(x, w, *steps, bias, residual, self.activation)
        if self.direction == "wgrad":
            return reference_backward.weight_gradient(x, w, self.kernel, *steps)
        dx = reference_backward.input_gradient(x, w, self.spatial, *steps)
        if bias is not None:
            dx += bias.astype(np.float64).reshape(-1, *[1] * len(self.spatial))
        return reference.activate(self.activation, dx)

    def reference(
        self, inputs: Inputs, accuracy: Accuracy | None = None, sums: tuple[np.ndarray, np.ndarray] | None = None
    ) -> tuple[np.ndarray, np.ndarray]:
        """|y - y64| <= L * c * u * magnitude + evaluation + rounding of the output

        for each element. u is the accumulator's unit roundoff; c the algorithm's `error_factor`; magnitude what it sums
        in absolute value, with |bias| and |residual|. The activation passes an error on with its steepest slope L, and
        is itself evaluated to 16 u of its value (and of its argument where 1 + erf, 1 + tanh or x + 3 cancels).
        """
        x, w, bias, residual, integers = inputs
        if integers and self.exact_on_integers and (accuracy is None or accuracy.exact):
            y = self.convolve(x, w, bias, residual)
            return y.astype(self.y_dtype).astype(np.float64), np.zeros(())
        plain = self.bare()
        with np.errstate(all="ignore"):
            if sums is None:
                size = self.magnitude(x, w) if accuracy is None else accuracy.magnitude(plain, x, w)
                sums = plain.convolve(x, w), size
            y, magnitude = sums
            for addend in (None if bias is None else bias.reshape(-1, *[1] * len(self.output)), residual):
                if addend is not None:
                    y += addend
                    magnitude = magnitude + np.abs(addend, dtype=np.float64)
            factor = self.error_factor if accuracy is None else accuracy.error_factor(self)
            name, slope = named_activation(self.activation)
            bound: np.ndarray = magnitude * (max(SLOPES[name], abs(slope)) * factor * self.roundoff)
            if name in CANCELLING_ACTIVATIONS:
                bound += EVALUATION * self.roundoff * np.abs(y)
            y = reference.activate(self.activation, y)
            if self.activation not in EXACT_ACTIVATIONS:
                bound += EVALUATION * self.roundoff * np.abs(y)
            bound += self.rounding(y)
        return y, bound
