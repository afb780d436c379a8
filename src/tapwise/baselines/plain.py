"""Peers of the operators around convolution: PyTorch, NumPy and onnxruntime, called as their users would."""

from __future__ import annotations

from collections.abc import Callable
from typing import Any, Final

import numpy as np

from tapwise.arrays.host import numpy_of, tensor_of
from tapwise.baselines import Prepared, mlas
from tapwise.baselines.torch_conv import activation
from tapwise.errors import PeerUnavailable
from tapwise.ops.batch_norm.problem import BatchNormProblem
from tapwise.ops.bias_activation.problem import BiasActivationProblem
from tapwise.ops.patches.problem import PatchProblem
from tapwise.ops.pool.problem import PoolProblem
from tapwise.ops.reduce.problem import ReduceProblem
from tapwise.ops.softmax.problem import SoftmaxProblem
from tapwise.ops.squeeze_excitation.problem import SqueezeExcitationProblem
from tapwise.problem import Inputs, Problem

Call = Callable[[], Any]


def prepare(name: str, problem: Problem, inputs: Inputs, threads: int) -> Prepared:
    """`name`: torch, torch-cuda (x is a tensor on a GPU), numpy or onnxruntime.

    Raises PeerUnavailable where the library has no such operator.
    """
    x = inputs.x
    if name.startswith("torch"):
        return _torch(problem, inputs, threads)
    if name == "numpy":
        if problem.operator != "reduce":
            raise PeerUnavailable(f"NumPy has no {problem.operator}")
        call = _numpy(problem, x)  # type: ignore[arg-type]
        return Prepared(call, lambda: np.asarray(call()))
    if problem.operator not in _ONNXRUNTIME:
        raise PeerUnavailable(f"onnxruntime is not measured for {problem.operator}")
    return _ONNXRUNTIME[problem.operator](problem, x, threads)


def _torch(problem: Problem, inputs: Inputs, threads: int) -> Prepared:
    import torch

    here = isinstance(inputs.x, np.ndarray)
    if here:
        if problem.dtype == "f16":
            raise PeerUnavailable("PyTorch is measured in f32, f64 and bf16")
        torch.set_num_threads(threads)
    if problem.operator not in _TORCH:
        raise PeerUnavailable(f"PyTorch is not measured for {problem.operator}")
    tensors = (tensor_of(one) if isinstance(one, np.ndarray) else one for one in inputs[:4])
    call = _TORCH[problem.operator](problem, Inputs(*tensors))

    def run() -> Any:
        with torch.inference_mode():
            return call()

    def read() -> Any:
        found = _READ.get(problem.operator, lambda found: found)(run())
        return numpy_of(found) if here else found

    return Prepared(run, read)


def _torch_softmax(problem: SoftmaxProblem, given: Inputs) -> Call:
    import torch

    t = given.x
    function = torch.log_softmax if problem.log else torch.softmax
    return lambda: function(t, problem.axes[0])


def _torch_softmax_gradient(problem: SoftmaxProblem, given: Inputs) -> Call:
    import torch

    aten, dy, y = torch.ops.aten, given.x, given.w
    function = aten._log_softmax_backward_data if problem.log else aten._softmax_backward_data
    return lambda: function(dy, y, problem.axes[0], dy.dtype)


def _torch_patches(problem: PatchProblem, given: Inputs) -> Call:
    import torch.nn.functional as functional

    t = given.x
    if len(problem.spatial) != 2 or any(before != after for before, after in problem.padding) or problem.accumulate:
        raise PeerUnavailable("PyTorch unfolds and folds 2 spatial axes with equal padding")
    padding = tuple(before for before, _ in problem.padding)
    window = (problem.kernel, problem.dilation, padding, problem.stride)
    if problem.operator == "im2col":
        return lambda: functional.unfold(t, *window)
    return lambda: functional.fold(t, problem.spatial, *window)


def _torch_squeeze_excitation(problem: SqueezeExcitationProblem, given: Inputs) -> Call:
    """The layers one by one, as models have them."""
    from torch.nn import functional

    x, w, bias, m = given.x, given.w, given.bias, problem.m
    between, gate = activation(problem.activation), activation(problem.gate)
    reduce, expand = w[0][:, :, None, None].clone(), w[1].T[:, :, None, None].clone()
    squeeze, excite = bias[:m].clone(), bias[m:].clone()

    def call() -> Any:
        squeezed = between(functional.conv2d(functional.adaptive_avg_pool2d(x, 1), reduce, squeeze))
        return x * gate(functional.conv2d(squeezed, expand, excite))

    return call


def _torch_batch_norm(problem: BatchNormProblem, given: Inputs) -> Call:
    """PyTorch's own kernels where it has them, on a GPU; `_moments` says what the forward ones' results are."""
    import torch

    x, axes, cuda = given.x, (0, 2, 3), given.x.is_cuda
    if problem.direction == "fprop":
        return lambda: torch.batch_norm_stats(x, 0.0) if cuda else torch.var_mean(x, axes, correction=0)
    if problem.activation is not None or not cuda:
        raise PeerUnavailable("PyTorch computes the gradient of batch norm alone, on a GPU")
    mean, invstd, weight, _ = given.bias
    count = torch.tensor([problem.n * problem.pixels], dtype=torch.int32, device=x.device)

    def call() -> Any:
        of_g, of_gx, _, _ = torch.batch_norm_backward_reduce(x, given.w, mean, invstd, weight, True, True, True)
        return torch.batch_norm_backward_elemt(x, given.w, mean, invstd, weight, of_g, of_gx, count)

    return call


def _moments(found: Any) -> Any:
    """Mean and variance: of batch_norm_stats, which gives 1 / sqrt(variance), or var_mean."""
    import torch

    first, second = found
    return torch.stack((first, second**-2) if first.is_cuda else (second, first))


def _torch_bias_activation(problem: BiasActivationProblem, given: Inputs) -> Call:
    """PyTorch's two kernels; the second one's sums are dropped, as the first one's result is what is compared."""
    from tapwise.torch.activations import through

    dy, w, axes = given.x, given.w, (0, 2, 3)
    if problem.activation is None:
        return lambda: dy.sum(axes)

    def call() -> Any:
        dz = through(problem.activation, dy, w)
        dz.sum(axes)
        return dz

    return call


def _torch_window(problem: PoolProblem) -> tuple[tuple[int, ...], tuple[int, ...], tuple[int, ...]]:
    """Kernel, stride and padding."""
    pairs = zip(problem.padding, problem.kernel, strict=True)
    if any(before != after or 2 * before > r for (before, after), r in pairs):
        raise PeerUnavailable("PyTorch takes equal padding of up to half the kernel")
    if problem.op == "avg" and set(problem.dilation) != {1}:
        raise PeerUnavailable("PyTorch's avg_pool2d has no dilation")
    return problem.kernel, problem.stride, tuple(before for before, _ in problem.padding)


def _torch_pool(problem: PoolProblem, given: Inputs) -> Call:
    import torch.nn.functional as functional

    t, window = given.x, _torch_window(problem)
    if problem.op == "max":
        return lambda: functional.max_pool2d(t, *window, problem.dilation, problem.ceil_mode)
    counted = problem.ceil_mode, problem.count_include_pad, problem.divisor
    return lambda: functional.avg_pool2d(t, *window, *counted)


def _torch_pool_gradient(problem: PoolProblem, given: Inputs) -> Call:
    import torch

    aten, dy, places, window = torch.ops.aten, given.x, given.w, _torch_window(problem)
    order = torch.channels_last if problem.layout == "nhwc" else torch.contiguous_format
    x = torch.empty(problem.x_shape, dtype=dy.dtype, device=dy.device, memory_format=order)
    if problem.op == "avg":
        counted = problem.ceil_mode, problem.count_include_pad, problem.divisor
        return lambda: aten.avg_pool2d_backward(dy, x, *window, *counted)
    if (places < 0).any():
        raise PeerUnavailable("PyTorch writes outside of the plane for a window that sees nothing")
    words = problem.dilation, problem.ceil_mode
    return lambda: aten.max_pool2d_with_indices_backward(dy, x, *window, *words, places)


def _torch_reduction(problem: ReduceProblem, given: Inputs) -> Call:
    import torch

    t = given.x
    axes, keep, op = problem.axes, problem.keepdims, problem.op
    whole = len(axes) == len(problem.shape)
    if op in ("argmax", "argmin"):
        function = getattr(torch, op)
        return (lambda: function(t)) if whole else (lambda: function(t, axes[0], keep))
    if op == "prod":
        if whole and not keep:
            return lambda: torch.prod(t)
        if len(axes) != 1:
            raise PeerUnavailable("torch.prod goes along one axis, or along all")
        return lambda: torch.prod(t, axes[0], keep)
    functions: dict[str, Call] = {
        "sum": lambda: torch.sum(t, axes, keep),
        "mean": lambda: torch.mean(t, axes, keep),
        "max": lambda: torch.amax(t, axes, keep),
        "min": lambda: torch.amin(t, axes, keep),
        "norm1": lambda: torch.linalg.vector_norm(t, 1, axes, keep),
        "norm2": lambda: torch.linalg.vector_norm(t, 2, axes, keep),
        "sumsquare": lambda: torch.sum(t * t, axes, keep),
        "logsumexp": lambda: torch.logsumexp(t, axes, keep),
    }
    return functions[op]


def _numpy(problem: ReduceProblem, x: np.ndarray) -> Call:
    axes: Any = problem.axes
    keep, op = problem.keepdims, problem.op
    if op in ("argmax", "argmin"):
        axes = None if len(axes) == len(problem.shape) else axes[0]
    if op in ("sum", "mean", "max", "min", "prod", "argmax", "argmin"):
        function = getattr(np, op)
        return lambda: function(x, axis=axes, keepdims=keep)
    functions: dict[str, Call] = {
        "norm1": lambda: np.sum(np.abs(x), axis=axes, keepdims=keep),
        "norm2": lambda: np.sqrt(np.sum(x * x, axis=axes, keepdims=keep)),
        "sumsquare": lambda: np.sum(x * x, axis=axes, keepdims=keep),
    }
    if op not in functions:
        raise PeerUnavailable(f"NumPy has no {op}")
    return functions[op]


def _onnxruntime_softmax(problem: SoftmaxProblem, x: np.ndarray, threads: int) -> Prepared:
    kind = "LogSoftmax" if problem.log else "Softmax"
    graph = mlas.node_model(kind, {"axis": problem.axes[0]}, problem.shape, problem.shape, problem.dtype)
    return mlas.session_of(graph, {"x": x}, threads)


def _onnxruntime_pool(problem: PoolProblem, x: np.ndarray, threads: int) -> Prepared:
    if problem.divisor is not None or problem.layout != "nchw":
        raise PeerUnavailable("onnxruntime pools NCHW, without a divisor")
    attributes = mlas.window_attributes(problem) | {"ceil_mode": int(problem.ceil_mode)}
    if problem.op == "max":
        attributes["dilations"] = problem.dilation
    else:
        if set(problem.dilation) != {1}:
            raise PeerUnavailable("onnxruntime's AveragePool is measured without dilation")
        attributes["count_include_pad"] = int(problem.count_include_pad)
    kind = "MaxPool" if problem.op == "max" else "AveragePool"
    graph = mlas.node_model(kind, attributes, problem.x_shape, problem.y_shape, problem.dtype)
    return mlas.session_of(graph, {"x": x}, threads)


# operator -> how the library is called.
_TORCH: Final[dict[str, Callable[[Any, Inputs], Call]]] = {
    "softmax": _torch_softmax,
    "softmax_dgrad": _torch_softmax_gradient,
    "reduce": _torch_reduction,
    "pool": _torch_pool,
    "pool_dgrad": _torch_pool_gradient,
    "im2col": _torch_patches,
    "col2im": _torch_patches,
    "squeeze_excitation": _torch_squeeze_excitation,
    "batch_norm": _torch_batch_norm,
    "batch_norm_dgrad": _torch_batch_norm,
    "bias_activation_dgrad": _torch_bias_activation,
}
# operator -> its result, of what the call gives; of others that is the result.
_READ: Final[dict[str, Callable[[Any], Any]]] = {"batch_norm": _moments}
_ONNXRUNTIME: Final[dict[str, Callable[[Any, np.ndarray, int], Prepared]]] = {
    "softmax": _onnxruntime_softmax,
    "pool": _onnxruntime_pool,
}
