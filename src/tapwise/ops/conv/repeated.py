"""A problem's call whose filters change, as in training: what leads to a kernel is done once.

`repeat` computes a call and gives what makes the same call with other arrays of the same kind. Filters are packed by
each call. A caller that holds such a call checks nothing but that its arrays are of that kind.
"""

from __future__ import annotations

from collections.abc import Callable
from typing import Any

import numpy as np

from tapwise import arrays
from tapwise.arrays.replay import CALL_IT as CALL_IT
from tapwise.arrays.replay import captured
from tapwise.ops.conv.gradients import weight_gradient, weight_gradient_again
from tapwise.ops.conv.prepared import again, execute, plan_of
from tapwise.ops.conv.problem import ConvProblem
from tapwise.ops.parameters import device_of

# The result of (x, w, bias); for dgrad of (dy, w, bias), for wgrad of (x, dy, None).
HostCall = Callable[..., np.ndarray]
# The result for addresses of those that there are, CALL_IT where this thread's GPU is another.
DeviceCall = Callable[[list[int]], Any]


def on_host(problem: ConvProblem, x: np.ndarray, w: np.ndarray) -> HostCall | None:
    """A call with NumPy arrays of a problem of two spatial axes. None for arrays that are not dense in its layout.

    Arrays are of x's, w's and the problem's shapes, strides and dtype; bias (c,) or (k,) is contiguous.
    """
    layout, is_weight = problem.layout, problem.direction == "wgrad"
    if not arrays.is_dense(x, layout) or (is_weight and not arrays.is_dense(w, layout)):
        return None
    _choice, plan = plan_of(problem, device_of(x), "auto", None, False)
    return weight_gradient_again(problem, plan) if is_weight else again(problem, False, plan)


def on_gpu(problem: ConvProblem, x: Any, w: Any, bias: Any = None) -> tuple[Any, DeviceCall | None]:
    """(the result for PyTorch's tensors on a GPU, that call with others of the same shapes, strides, dtypes, GPU and
    alignment): no call where it cannot be made again."""

    def compute(x: Any, w: Any, bias: Any) -> Any:
        index, _ = arrays.place(x, None)
        source, other = arrays.anywhere(x, "x", index), arrays.anywhere(w, "w", index)
        if problem.direction == "wgrad":
            return weight_gradient(problem, x, source, other)
        _choice, plan = plan_of(problem, device_of(source), "auto", None, False)
        offset = None if bias is None else arrays.dense(arrays.anywhere(bias, "bias", index), "nchw")
        return execute(problem, False, plan, plan.pack(other), offset, x, source, None, None)

    result, run = captured(compute, x, w, bias)
    return result, None if run is None else lambda addresses: run((), addresses)
