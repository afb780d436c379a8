"""oneDNN through PyTorch: conv2d on NCHW tensors ("onednn") or on channels-last ones ("onednn-cl")."""

from __future__ import annotations

from typing import Any

import numpy as np

from tapwise.baselines import Prepared
from tapwise.errors import PeerUnavailable
from tapwise.ops.conv.problem import ConvProblem
from tapwise.problem import Inputs

_ACTIVATIONS = {"relu": "relu", "relu6": "relu6", "silu": "silu", "gelu": "gelu", "sigmoid": "sigmoid", "tanh": "tanh"}


def prepare(name: str, problem: ConvProblem, inputs: Inputs, threads: int) -> Prepared:
    """Tensors in the wanted memory order; the call is torch.nn.functional.conv2d under inference_mode.

    Four-sided padding goes through torch.nn.functional.pad, on each call. What is fused behind the convolution is
    done by PyTorch's own operators.
    """
    try:
        import torch
        import torch.nn.functional as functional
    except ImportError as error:
        raise PeerUnavailable(f"torch is not installed: {error}") from None
    x, w, bias, residual, _ = inputs
    if problem.direction != "fprop" or len(problem.spatial) != 2:
        raise PeerUnavailable("measured for fprop of two spatial axes")
    torch.set_num_threads(threads)
    order = torch.channels_last if name == "onednn-cl" else torch.contiguous_format

    def tensor(array: np.ndarray) -> Any:
        return torch.from_numpy(np.ascontiguousarray(array)).contiguous(memory_format=order)

    source, filters = tensor(x), tensor(w)
    offset = None if bias is None else torch.from_numpy(bias)
    added = None if residual is None else tensor(residual)
    (top, bottom), (left, right) = problem.padding
    even = top == bottom and left == right
    padding = (top, left) if even else (0, 0)
    activation = None if problem.activation is None else getattr(functional, _ACTIVATIONS[problem.activation])

    def run() -> Any:
        with torch.inference_mode():
            data = source if even else functional.pad(source, (left, right, top, bottom))
            y = functional.conv2d(data, filters, offset, problem.stride, padding, problem.dilation, problem.groups)
            if added is not None:
                y = y + added
            return y if activation is None else activation(y)

    try:
        run()
    except RuntimeError as error:
        raise PeerUnavailable(str(error).splitlines()[0]) from None
    return Prepared(run, lambda: np.asarray(run().contiguous().numpy()))
