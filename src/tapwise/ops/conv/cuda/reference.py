"""Convolution in float64 on a GPU, from the definition: what large problems are verified with. Never chosen."""

from __future__ import annotations

from typing import Final

import numpy as np

from tapwise.algorithm import Device
from tapwise.arrays import dense
from tapwise.arrays import device as arrays
from tapwise.arrays.device import DeviceArray
from tapwise.cuda.jit.compile import Source, stub
from tapwise.cuda.jit.launch import Launch
from tapwise.cuda.types import DTYPES, template_args
from tapwise.integers import ceil_div
from tapwise.ops.conv.cuda import window
from tapwise.ops.conv.problem import ConvProblem

THREADS: Final = 256


def source(dtype: str, direction: str = "fprop") -> Source:
    """The kernel for arrays of that dtype."""
    words = template_args(DTYPES[dtype].cpp, direction.upper())
    return stub("ops/conv/cuda/reference.cu", "reference", words, "Reference", THREADS)


def convolve(problem: ConvProblem, x: DeviceArray, w: DeviceArray, device: Device) -> tuple[np.ndarray, np.ndarray]:
    """(the problem's result, that of absolute values) in float64, in this machine's memory, of the two arrays that its
    direction is computed from. Images by any strides."""
    kernel = source(problem.dtype, problem.direction)
    fields = window.window_fields(problem, kernel)
    image, dy = {"fprop": (x, None), "dgrad": (None, x), "wgrad": (x, w)}[problem.direction]
    for names, array in ((("step_n", "step_c", "step_h", "step_w"), image), (("dy_n", "dy_k", "dy_p", "dy_q"), dy)):
        steps = (0,) * 4 if array is None else [step // array.dtype.itemsize for step in array.strides]
        fields |= dict(zip(names, steps, strict=True))
    if problem.direction != "wgrad":
        w = dense(w, "nchw")
    y, magnitude = (arrays.allocate(problem.result_shape, np.dtype(np.float64), x.index) for _ in range(2))
    blocks = min(ceil_div(y.size, THREADS), 64 * device.multiprocessors)
    launch = Launch(kernel, fields, (blocks, 1, 1), THREADS)
    launch.load(device.architecture, device.index)
    launch({"x": x.ptr, "w": w.ptr, "y": y.ptr, "magnitude": magnitude.ptr}, x.stream)
    return arrays.download(y), arrays.download(magnitude)
