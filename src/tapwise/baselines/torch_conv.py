"""oneDNN and cuDNN through PyTorch's conv2d, as its users call it: on NCHW tensors, or channels-last ones ("-cl").

And "aten", PyTorch's own CUDA kernels: what it computes where cuDNN is off.
"""

from __future__ import annotations

from collections.abc import Callable
from contextlib import nullcontext
from functools import partial
from typing import Any

import numpy as np

from tapwise.activation import LEAKY_RELU, named_activation
from tapwise.arrays.host import numpy_of, tensor_of
from tapwise.baselines import Prepared
from tapwise.errors import PeerUnavailable
from tapwise.ops.conv.problem import ConvProblem
from tapwise.problem import Inputs


def activation(word: str) -> Callable[[Any], Any]:
    """PyTorch's function of an activation's word."""
    import torch.nn.functional as functional

    name, slope = named_activation(word)
    if name == LEAKY_RELU:
        return partial(functional.leaky_relu, negative_slope=slope)
    if name == "gelu_tanh":
        return partial(functional.gelu, approximate="tanh")
    found: Callable[[Any], Any] = getattr(functional, word)
    return found


def prepare(name: str, problem: ConvProblem, inputs: Inputs, threads: int) -> Prepared:
    """`name`: onednn or onednn-cl for NumPy arrays; cudnn or cudnn-cl for CUDA tensors, fastest algorithm searched, or
    aten for them.

    Four-sided padding goes through torch.nn.functional.pad on each call; cuDNN is not measured with it. What is fused
    behind the convolution is done by PyTorch's own operators. Raises PeerUnavailable.
    """
    import torch
    import torch.nn.functional as functional

    if len(problem.spatial) != 2:
        raise PeerUnavailable("measured for two spatial axes")
    if problem.direction != "fprop" and problem != problem.bare():
        raise PeerUnavailable("gradients are measured without what is fused behind them")
    even, gpu = all(before == after for before, after in problem.padding), not name.startswith("onednn")
    if gpu:
        if not even:
            raise PeerUnavailable("PyTorch's conv2d takes equal padding on both sides")
        if name == "aten" and problem.math != "ieee":
            raise PeerUnavailable("measured in IEEE arithmetic")
        if name == "aten" and problem.n > 1 and not problem.depthwise:
            raise PeerUnavailable("measured with one image, or depthwise: others go one by one, far behind cuDNN")
        torch.backends.cudnn.benchmark = True
        torch.backends.cudnn.allow_tf32 = problem.math == "tf32"
    else:
        torch.set_num_threads(threads)
    order = torch.channels_last if name.endswith("-cl") else torch.contiguous_format

    def tensor(array: Any) -> Any:
        if array is None or array.ndim == 1:
            return array if gpu or array is None else tensor_of(array)
        return (array if gpu else tensor_of(np.ascontiguousarray(array))).contiguous(memory_format=order)

    source, filters, offset, added = map(tensor, inputs[:4])
    padding = tuple(before for before, _ in problem.padding) if even else (0, 0)
    sides = [side for pair in reversed(problem.padding) for side in pair]
    after = None if problem.activation is None else activation(problem.activation)

    without: Callable[[], Any] = partial(torch.backends.cudnn.flags, enabled=False) if name == "aten" else nullcontext

    def gradient() -> Any:
        with torch.inference_mode(), without():
            return torch.ops.aten.convolution_backward(
                *parts, None, problem.stride, padding, problem.dilation, False, (0, 0), problem.groups, wanted
            )[wanted.index(True)]

    def convolution() -> Any:
        with torch.inference_mode(), without():
            data = source if even else functional.pad(source, sides)
            y = functional.conv2d(data, filters, offset, problem.stride, padding, problem.dilation, problem.groups)
            if added is not None:
                y = y + added
            return y if after is None else after(y)

    run = convolution
    if problem.direction != "fprop":
        if not even:
            raise PeerUnavailable("PyTorch's conv2d takes equal padding on both sides")
        # dy, x and w, of which PyTorch wants all: of what is computed, the shape and the order count.
        empty = torch.zeros(problem.result_shape, dtype=source.dtype, device=source.device).contiguous(
            memory_format=order
        )
        parts = (source, empty, filters) if problem.direction == "dgrad" else (filters, source, empty)
        wanted = (problem.direction == "dgrad", problem.direction == "wgrad", False)
        run = gradient

    def result() -> Any:
        return run() if gpu else numpy_of(run().contiguous())

    if not gpu:
        try:
            run()
        except RuntimeError as error:
            raise PeerUnavailable(str(error).splitlines()[0]) from None
    return Prepared(run, result)
