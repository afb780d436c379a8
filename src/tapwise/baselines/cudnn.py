"""cuDNN through PyTorch, as its users call it: fastest algorithm searched (benchmark), in both memory orders."""

from __future__ import annotations

from typing import Any

import numpy as np

from tapwise.baselines import Prepared
from tapwise.errors import PeerUnavailable
from tapwise.ops.conv.problem import ConvProblem
from tapwise.problem import Inputs

ACTIVATIONS = {"relu": "relu", "relu6": "relu6", "silu": "silu", "gelu": "gelu", "sigmoid": "sigmoid", "tanh": "tanh"}


def prepare(name: str, problem: ConvProblem, inputs: Inputs, threads: int) -> Prepared:
    """`name`: cudnn, or cudnn-cl for channels-last. Arrays are CUDA tensors of PyTorch. Raises PeerUnavailable."""
    import torch
    import torch.nn.functional as functional

    x, w, bias, residual, _ = inputs
    if any(before != after for before, after in problem.padding):
        raise PeerUnavailable("PyTorch's conv2d takes equal padding on both sides")
    torch.backends.cudnn.benchmark = True
    torch.backends.cudnn.allow_tf32 = problem.math == "tf32"
    order = torch.channels_last if name == "cudnn-cl" else torch.contiguous_format
    images, filters = x.contiguous(memory_format=order), w.contiguous(memory_format=order)
    added = None if residual is None else residual.contiguous(memory_format=order)
    sides = tuple(before for before, _ in problem.padding)
    activation = None if problem.activation is None else getattr(functional, ACTIVATIONS[problem.activation])

    def run() -> Any:
        with torch.inference_mode():
            y = functional.conv2d(images, filters, bias, problem.stride, sides, problem.dilation, problem.groups)
            if added is not None:
                y = y + added
            return y if activation is None else activation(y)

    def result() -> np.ndarray:
        y = run().cpu()
        # NumPy has no bfloat16.
        return np.asarray((y.float() if y.dtype is torch.bfloat16 else y).numpy())

    return Prepared(run, result)
