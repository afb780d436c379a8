"""A convolution of a model with zeros before it, and batch norm, residual and activation behind it, in one operator.

It refers to the model's own modules, which keep their parameters, names and state_dict. Folded filters are worked out
again when those change. In training, where a gradient is recorded, and for what tapwise does not take, the parts
compute.
"""

from __future__ import annotations

from typing import Any

import torch
from torch.nn import functional
from torch.nn.utils.fusion import fuse_conv_bn_weights

from tapwise.ops.conv.problem import ConvProblem
from tapwise.torch.folded import Folded
from tapwise.torch.frozen import conv_frozen
from tapwise.torch.nn import activated, is_taken, words_of
from tapwise.torch.tensors import NAMES, alone, layout_of


class FusedConv(Folded):
    """y = activation(bn(conv(pad(x))) + residual).

    `conv`: torch.nn.Conv1d or Conv2d with zeros as padding; `bn`: its batch norm or None. `pad`: zeros before and
    after, from the last axis to the first, besides the convolution's own. `by_torch`: PyTorch's own convolution with
    the folded filters computes, then the rest.
    """

    def __init__(
        self, conv: Any, bn: Any = None, activation: str | None = None, math: str = "ieee", pad: tuple[int, ...] = ()
    ) -> None:
        super().__init__(conv, bn)
        self.activation, self.math, self.by_torch = activation, math, False
        self.pad = pad
        own = conv._reversed_padding_repeated_twice
        self.sides = tuple(map(sum, zip(own, pad, strict=True))) if pad else tuple(own)
        self.words = words_of(conv, activation, math, self.sides)

    def _tensors(self) -> tuple[torch.Tensor | None, ...]:
        conv, bn = self.__dict__["parts"]
        own = conv.weight, conv.bias
        return own if bn is None else (*own, bn.weight, bn.bias, bn.running_mean, bn.running_var)

    def originals(self) -> tuple[torch.Tensor | None, ...]:
        # Training writes running statistics without counting it, but for the number of batches.
        _, bn = self.__dict__["parts"]
        return self._tensors() if bn is None else (*self._tensors(), bn.num_batches_tracked)

    def folded(self) -> tuple[torch.Tensor, torch.Tensor | None]:
        conv, bn = self.__dict__["parts"]
        weight, bias = conv.weight.detach(), None if conv.bias is None else conv.bias.detach()
        if bn is not None:
            wide = [None if one is None else one.detach().double() for one in self._tensors()]
            w, b, gain, offset, mean, variance = wide
            folded = fuse_conv_bn_weights(w, b, mean, variance, bn.eps, gain, offset)
            weight, bias = (one.detach().to(weight.dtype) for one in folded)
        return weight, bias

    def forward(self, x: torch.Tensor, residual: Any = None) -> torch.Tensor:
        """x (n, c, h, w) or (n, c, w); residual: a tensor or a number, broadcast where it has another shape."""
        conv, bn = self.__dict__["parts"]
        tensors = x, conv.weight, residual if isinstance(residual, torch.Tensor) else None
        self.follow()
        if (bn is not None and bn.training) or not is_taken(*tensors) or x.ndim != conv.weight.ndim:
            y = conv(functional.pad(x, self.pad) if self.pad else x)
            return self._rest(y if bn is None else bn(y), residual)
        return self.by_pytorch(x, residual) if self.by_torch else self.by_tapwise(x, residual)

    def by_pytorch(self, x: torch.Tensor, residual: Any = None) -> torch.Tensor:
        """With the folded filters, one after the other."""
        conv, _ = self.__dict__["parts"]
        function = torch.conv2d if x.ndim == 4 else torch.conv1d
        before, after = self.sides[::2], self.sides[1::2]
        padding: Any = before[::-1]
        if before != after:
            x, padding = functional.pad(x, self.sides), 0
        y = function(x, self.weight.to(x.dtype), self.bias_of(x), conv.stride, padding, conv.dilation, conv.groups)
        return self._rest(y, residual)

    def by_tapwise(self, x: torch.Tensor, residual: Any = None) -> torch.Tensor:
        """With the folded filters, in one operator; a residual that is broadcast comes after it."""
        fits = self.fits(x, residual)
        added = residual if fits else None
        compute = conv_frozen if alone(x) else torch.ops.tapwise.conv_frozen
        y = compute(x, self.weight, self.bias, added, self.words_for(x, fits))
        return y if fits else self._rest(y, residual)

    def words_for(self, x: torch.Tensor, fits: bool) -> str:
        """The operator's words; where a residual does not fit, without the activation that comes after it."""
        words = self.words if fits else words_of(self.__dict__["parts"][0], None, self.math, self.sides)
        return words if x.dtype is torch.float32 else words.replace(f" {self.math}", "")

    def fits(self, x: torch.Tensor, residual: Any) -> bool:
        """Whether a residual, if any, has the result's shape: others are broadcast."""
        if residual is None:
            return True
        conv, _ = self.__dict__["parts"]
        sizes = [x.shape[0], self.weight.shape[0]]
        for axis, size in enumerate(x.shape[2:]):
            at = 2 * (x.ndim - 3 - axis)
            reach = conv.dilation[axis] * (self.weight.shape[2 + axis] - 1) + 1
            sizes.append((size + self.sides[at] + self.sides[at + 1] - reach) // conv.stride[axis] + 1)
        return isinstance(residual, torch.Tensor) and residual.dtype == x.dtype and list(residual.shape) == sizes

    def problem(self, x: torch.Tensor, residual: Any = None) -> ConvProblem:
        """What a call computes."""
        sizes = " ".join(f"{axis}{size}" for axis, size in zip("nchw" if x.ndim == 4 else "ncw", x.shape, strict=True))
        k, _, *kernel = self.weight.shape
        taps = " ".join(f"{axis}{size}" for axis, size in zip("rs"[-len(kernel) :], kernel, strict=True))
        # tf32 says its dtype, too.
        more = [NAMES[x.dtype]] if self.math == "ieee" or x.dtype is not torch.float32 else []
        more += [layout_of(x, self.weight)]
        more += ["bias"] if self.bias is not None else []
        fits = self.fits(x, residual)
        more += ["residual"] if residual is not None and fits else []
        return ConvProblem.parse(f"{sizes} k{k} {taps} {self.words_for(x, fits)} {' '.join(more)}")

    def _rest(self, y: torch.Tensor, residual: Any) -> torch.Tensor:
        y = y if residual is None else y + residual
        return activated(self.activation, y)

    def extra_repr(self) -> str:
        _, bn = self.__dict__["parts"]
        return f"{self.words}{'' if bn is None else ', batch norm folded'}{', by PyTorch' * self.by_torch}"
