"""Filters that are worked out from a model's own parameters, and again when those change."""

from __future__ import annotations

from typing import Any, Final

import torch

from tapwise.torch.tensors import version

# Elements of a vector that Inductor, with freezing, has in its code instead of in memory.
INLINED: Final = 8


def _kind(tensor: torch.Tensor) -> tuple[Any, ...]:
    return tensor.shape, tensor.dtype, tensor.device


class Folded(torch.nn.Module):
    """`weight` and `bias` of what a subclass folds. Modules and parameters are the model's: they are not registered."""

    weight: torch.Tensor
    bias: torch.Tensor | None

    def __init__(self, *parts: Any) -> None:
        super().__init__()
        self.__dict__["parts"] = parts
        self.register_buffer("weight", None, persistent=False)
        self.register_buffer("bias", None, persistent=False)
        self.state: tuple[Any, ...] = ()
        self.refresh()

    def originals(self) -> tuple[torch.Tensor | None, ...]:
        """What the filters depend on."""
        raise NotImplementedError

    def folded(self) -> tuple[torch.Tensor, torch.Tensor | None]:
        """(weight, bias) from the originals."""
        raise NotImplementedError

    def _state(self) -> tuple[Any, ...]:
        return version(self.originals())

    def follow(self) -> None:
        """The filters anew where the originals have changed."""
        if not torch.compiler.is_compiling() and self.state != self._state():
            self.refresh()

    # Ordinary tensors also when the first call is made in inference mode: they are to be written to later.
    @torch.inference_mode(False)
    @torch.no_grad()
    def refresh(self) -> None:
        """The filters anew."""
        weight, bias = self.folded()
        # A column: what is written anew at each call would be packed anew.
        bias = bias[:, None] if bias is not None and len(bias) <= INLINED else bias
        for name, value in (("weight", weight), ("bias", bias)):
            kept = getattr(self, name)
            # In the same memory: a captured graph has its address.
            if kept is None or value is None or _kind(kept) != _kind(value):
                setattr(self, name, None if value is None else value.clone())
            else:
                kept.copy_(value)
        self.state = self._state()

    def bias_of(self, x: torch.Tensor) -> torch.Tensor | None:
        """The bias as PyTorch's functions take it beside x."""
        return None if self.bias is None else self.bias.flatten().to(x.dtype)
