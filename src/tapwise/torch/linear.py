"""A linear layer of a model with what follows it, as a convolution of one tap over as many pixels as x has rows."""

from __future__ import annotations

from math import prod
from typing import Any

import torch
from torch.nn import functional

from tapwise.ops.conv.problem import ConvProblem
from tapwise.torch.folded import Folded
from tapwise.torch.nn import activated, is_taken
from tapwise.torch.tensors import NAMES


class FusedLinear(Folded):
    """y = activation(scale * linear(x) + residual) of x (..., c).

    `linear`: torch.nn.Linear; `scale`: a parameter with an element a channel, or None. `planar`: of x (n, h, w, c),
    with y and residual (n, k, h, w). `by_torch`: PyTorch's own product with the folded weights computes, then the
    rest; so it is until it is measured.
    """

    def __init__(
        self, linear: Any, scale: torch.Tensor | None = None, activation: str | None = None, math: str = "ieee",
        planar: bool = False,
    ) -> None:  # fmt: skip
        super().__init__(linear, scale)
        self.activation, self.math, self.planar, self.by_torch = activation, math, planar, True

    def originals(self) -> tuple[torch.Tensor | None, ...]:
        linear, scale = self.__dict__["parts"]
        return linear.weight, linear.bias, scale

    def folded(self) -> tuple[torch.Tensor, torch.Tensor | None]:
        """Filters (k, c, 1, 1)."""
        weight, bias, scale = (None if one is None else one.detach() for one in self.originals())
        assert weight is not None
        if scale is not None:
            gain = scale.flatten().double()
            bias = None if bias is None else (bias * gain).to(bias.dtype)
            weight = (weight * gain[:, None]).to(weight.dtype)
        return weight[:, :, None, None], bias

    def forward(self, x: torch.Tensor, residual: Any = None) -> torch.Tensor:
        """x (..., c); residual: a tensor or a number, broadcast where it has another shape than y."""
        linear, scale = self.__dict__["parts"]
        if scale is not None or not self.by_torch:
            self.follow()
        added = residual if isinstance(residual, torch.Tensor) else None
        if not is_taken(x, linear.weight, scale, added):
            y = linear(x)
            return self._rest(y if scale is None else y * scale.flatten(), residual)
        by_tapwise = not self.by_torch and x.numel() > 0
        return self.by_tapwise(x, residual) if by_tapwise else self.by_pytorch(x, residual)

    def by_pytorch(self, x: torch.Tensor, residual: Any = None) -> torch.Tensor:
        """With the folded weights, one after the other."""
        linear, scale = self.__dict__["parts"]
        # Where nothing is folded the layer itself costs the host less.
        y = linear(x) if scale is None else functional.linear(x, self.weight.flatten(1).to(x.dtype), self.bias_of(x))
        return self._rest(y, residual)

    def by_tapwise(self, x: torch.Tensor, residual: Any = None) -> torch.Tensor:
        """With the folded weights, in one operator; a residual that is broadcast comes after it."""
        fits = self.fits(x, residual)
        added = None
        if fits and residual is not None:
            added = _image(residual.permute(0, 2, 3, 1) if self.planar else residual)
        words = self.words_for(x, fits)
        y = torch.ops.tapwise.conv_frozen(_image(x), self.weight, self.bias, added, words)
        y = y.permute(0, 2, 3, 1).reshape(*x.shape[:-1], -1)
        if not fits:
            return self._rest(y, residual)
        return y.permute(0, 3, 1, 2) if self.planar else y

    def words_for(self, x: torch.Tensor, fits: bool) -> str:
        """The operator's words; where a residual does not fit, without the activation that comes after it."""
        math = self.math if self.math != "ieee" and x.dtype is torch.float32 else ""
        return f"{(self.activation or '') if fits else ''} {math}".strip()

    def fits(self, x: torch.Tensor, residual: Any) -> bool:
        """Whether a residual, if any, has the result's shape: others are broadcast."""
        if residual is None:
            return True
        shape = [*x.shape[:-1], self.weight.shape[0]]
        if self.planar:
            shape = [shape[0], shape[3], shape[1], shape[2]]
        return isinstance(residual, torch.Tensor) and residual.dtype == x.dtype and list(residual.shape) == shape

    def problem(self, x: torch.Tensor, residual: Any = None) -> ConvProblem:
        """What a call computes."""
        (k, c, *_), fits = self.weight.shape, self.fits(x, residual)
        more = [NAMES[x.dtype]] if self.math == "ieee" or x.dtype is not torch.float32 else []
        more += ["bias"] if self.bias is not None else []
        more += ["residual"] if residual is not None and fits else []
        sizes = f"c{c} h1 w{max(1, prod(x.shape[:-1]))} k{k} r1 s1 nhwc"
        return ConvProblem.parse(f"{sizes} {self.words_for(x, fits)} {' '.join(more)}")

    def _rest(self, y: torch.Tensor, residual: Any) -> torch.Tensor:
        y = y.permute(0, 3, 1, 2) if self.planar else y
        y = y if residual is None else y + residual
        return activated(self.activation, y)

    def extra_repr(self) -> str:
        linear, scale = self.__dict__["parts"]
        fused = f"{linear.in_features}, {linear.out_features}, {self.activation}{', scaled' * (scale is not None)}"
        return f"{fused}{', by PyTorch' * self.by_torch}"


def _image(rows: torch.Tensor) -> torch.Tensor:
    """(..., c) as an image (1, c, 1, rows), channels last."""
    return rows.reshape(1, 1, -1, rows.shape[-1]).permute(0, 3, 1, 2)
