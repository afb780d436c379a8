"""Convolution in float64 on a GPU, from the definition: what large problems are verified with. Never chosen."""

from __future__ import annotations

from typing import Final

import numpy as np

from tapwise.algorithm import Device
from tapwise.arrays import device as arrays
from tapwise.arrays.device import DeviceArray
from tapwise.cuda.jit.compile import Source, stub
from tapwise.cuda.jit.launch import Launch
from tapwise.cuda.types import DTYPES, template_args
from tapwise.integers import ceil_div
from tapwise.ops.conv.cuda import window
from tapwise.ops.conv.problem import ConvProblem

THREADS: Final = 256


def source(dtype: str) -> Source:
    """The kernel for images and filters of that dtype."""
    return stub("ops/conv/cuda/reference.cu", "reference", template_args(DTYPES[dtype].cpp), "Reference", THREADS)


def convolve(problem: ConvProblem, x: DeviceArray, w: DeviceArray, device: Device) -> tuple[np.ndarray, np.ndarray]:
    """(conv(x, w), conv(|x|, |w|)) in float64, of shape (n, k, p, q), in this machine's memory. x by any strides."""
    kernel = source(problem.dtype)
    fields = window.window_fields(problem, kernel)
    names = ("step_n", "step_c", "step_h", "step_w")
    fields |= {name: step // x.dtype.itemsize for name, step in zip(names, x.strides, strict=True)}
    y, magnitude = (arrays.allocate(problem.y_shape, np.dtype(np.float64), x.index) for _ in range(2))
    blocks = min(ceil_div(y.size, THREADS), 64 * device.multiprocessors)
    launch = Launch(kernel, fields, (blocks, 1, 1), THREADS)
    launch.load(device.architecture, device.index)
    launch({"x": x.ptr, "w": w.ptr, "y": y.ptr, "magnitude": magnitude.ptr}, x.stream)
    return arrays.download(y), arrays.download(magnitude)
