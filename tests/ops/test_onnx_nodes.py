"""ONNX's own node tests, through a small adapter: attributes of a node in, a call of ours, outputs compared."""

from __future__ import annotations

import re
import warnings
from collections.abc import Callable
from importlib import import_module
from typing import Any

import numpy as np
import onnx
import pytest

import tapwise


class Unsupported(Exception):
    """What tapwise does not offer: another dtype, another rank, another meaning."""


def cases(operator: str) -> list[Any]:
    """Every test of an operator that consists of its node: onnx makes them when it imports the operator's module."""
    from onnx.backend.test.case import node

    words = operator.lower() if operator not in ("ReduceLogSum", "ReduceLogSumExp") else snake(operator)
    with warnings.catch_warnings():
        warnings.simplefilter("ignore", RuntimeWarning)
        import_module(f"{node.__name__}.{words}")
    whole = [case for case in node._NodeTestCases if case.model is not None and len(case.model.graph.node) == 1]
    return [case for case in whole if case.model.graph.node[0].op_type == operator]


def snake(name: str) -> str:
    """reduce_log_sum of ReduceLogSum."""
    return re.sub(r"(?<=[a-z])(?=[A-Z])", "_", name).lower()


def attributes(node: Any) -> dict[str, Any]:
    values = {one.name: onnx.helper.get_attribute_value(one) for one in node.attribute}
    return {name: value.decode() if isinstance(value, bytes) else value for name, value in values.items()}


def window(a: dict[str, Any], spatial: tuple[int, ...], kernel: tuple[int, ...]) -> dict[str, Any]:
    """stride, dilation and padding of a node as our arguments."""
    axes = len(spatial)
    strides = tuple(a.get("strides", (1,) * axes))
    dilations = tuple(a.get("dilations", (1,) * axes))
    pads = a.get("pads", (0,) * 2 * axes)
    sides = tuple(zip(pads[:axes], pads[axes:], strict=True))
    same = a.get("auto_pad", "NOTSET")
    if same in ("SAME_UPPER", "SAME_LOWER"):
        totals = [
            max(0, (-(-size // step) - 1) * step + (taps - 1) * apart + 1 - size)
            for size, step, taps, apart in zip(spatial, strides, kernel, dilations, strict=True)
        ]
        halves = [(total // 2, total - total // 2) for total in totals]
        sides = tuple(half if same == "SAME_UPPER" else half[::-1] for half in halves)
    return {"stride": strides, "dilation": dilations, "padding": sides}


def rank_at_most(axes: int, x: np.ndarray) -> None:
    if x.ndim - 2 > axes:
        raise Unsupported(f"{x.ndim - 2} spatial axes")


def conv(a: dict[str, Any], x: np.ndarray, w: np.ndarray, bias: np.ndarray | None = None) -> Any:
    rank_at_most(2, x)
    call = tapwise.conv2d if x.ndim == 4 else tapwise.conv1d
    return call(x, w, bias, groups=a.get("group", 1), **window(a, x.shape[2:], w.shape[2:]))


def conv_transpose(a: dict[str, Any], x: np.ndarray, w: np.ndarray, bias: np.ndarray | None = None) -> Any:
    rank_at_most(2, x)
    call = tapwise.conv_transpose2d if x.ndim == 4 else tapwise.conv_transpose1d
    spatial, kernel, axes = x.shape[2:], w.shape[2:], x.ndim - 2
    options = window(a, spatial, kernel)
    more = list(a.get("output_padding", (0,) * axes))
    same = a.get("auto_pad", "NOTSET")
    wanted = a.get("output_shape")
    if wanted is None and same.startswith("SAME"):
        wanted = [size * step for size, step in zip(spatial, options["stride"], strict=True)]
    if wanted is not None:
        sides = []
        for axis, (size, step, taps, apart) in enumerate(
            zip(spatial, options["stride"], kernel, options["dilation"], strict=True)
        ):
            total = (size - 1) * step + (taps - 1) * apart + 1 + more[axis] - wanted[axis]
            # Less than the whole is cut, more is put behind.
            more[axis] += max(0, -total)
            half, rest = max(0, total) // 2, max(0, total) - max(0, total) // 2
            sides.append((half, rest) if same == "SAME_UPPER" else (rest, half))
        options["padding"] = tuple(sides)
    return call(x, w, bias, output_padding=tuple(more), groups=a.get("group", 1), **options)


def max_pool(a: dict[str, Any], x: np.ndarray) -> Any:
    rank_at_most(2, x)
    call = tapwise.max_pool2d if x.ndim == 4 else tapwise.max_pool1d
    kernel = tuple(a["kernel_shape"])
    options = window(a, x.shape[2:], kernel)
    y, places = call(x, kernel, ceil_mode=bool(a.get("ceil_mode", 0)), return_indices=True, **options)
    # ONNX counts positions through the whole tensor; storage_order 1 counts a plane column by column.
    if a.get("storage_order", 0):
        height, width = x.shape[2:]
        places = places % width * height + places // width
    planes = np.arange(x.shape[0] * x.shape[1]) * np.prod(x.shape[2:])
    return y, places + planes.reshape(*x.shape[:2], *[1] * (x.ndim - 2))


def avg_pool(a: dict[str, Any], x: np.ndarray) -> Any:
    rank_at_most(2, x)
    call = tapwise.avg_pool2d if x.ndim == 4 else tapwise.avg_pool1d
    kernel = tuple(a["kernel_shape"])
    return call(
        x,
        kernel,
        ceil_mode=bool(a.get("ceil_mode", 0)),
        count_include_pad=bool(a.get("count_include_pad", 0)),
        **window(a, x.shape[2:], kernel),
    )


def global_pool(op: str) -> Callable[..., Any]:
    return lambda a, x: tapwise.reduce(x, op, tuple(range(2, x.ndim)), keepdims=True)


def col2im(a: dict[str, Any], x: np.ndarray, size: np.ndarray, block: np.ndarray) -> Any:
    kernel = tuple(block.tolist())
    return tapwise.col2im(x, tuple(size.tolist()), kernel, **window(a, tuple(size.tolist()), kernel))


def softmax(call: Callable[..., Any]) -> Callable[..., Any]:
    return lambda a, x: call(x, a.get("axis", -1))


def reduction(op: str, after: Callable[[Any], Any] = lambda y: y) -> Callable[..., Any]:
    def call(a: dict[str, Any], x: np.ndarray, given: np.ndarray | None = None) -> Any:
        axes = a.get("axes") if given is None or not given.size else given.tolist()
        if not axes and a.get("noop_with_empty_axes", 0):
            axes = ()
        elif not axes:
            axes = None
        if op in ("max", "min") and not x.size:
            raise Unsupported(f"{op} of no element is an error")
        return after(tapwise.reduce(x, op, axes if axes is None else tuple(axes), keepdims=bool(a.get("keepdims", 1))))

    return call


def position(op: str) -> Callable[..., Any]:
    def call(a: dict[str, Any], x: np.ndarray) -> Any:
        if a.get("select_last_index", 0):
            raise Unsupported("the last of equals")
        return tapwise.reduce(x, op, a.get("axis", 0), keepdims=bool(a.get("keepdims", 1)))

    return call


# The operator, our call for it, and how many of its tests must have run: an adapter that refuses is no test.
ADAPTERS: dict[str, tuple[Callable[..., Any], int]] = {
    "Conv": (conv, 6),
    "ConvTranspose": (conv_transpose, 10),
    "MaxPool": (max_pool, 14),
    "AveragePool": (avg_pool, 14),
    "GlobalAveragePool": (global_pool("mean"), 2),
    "GlobalMaxPool": (global_pool("max"), 2),
    "Softmax": (softmax(tapwise.softmax), 7),
    "LogSoftmax": (softmax(tapwise.log_softmax), 7),
    "Col2Im": (col2im, 5),
    "ReduceL1": (reduction("norm1"), 9),
    "ReduceL2": (reduction("norm2"), 9),
    "ReduceLogSum": (reduction("sum", np.log), 5),
    "ReduceLogSumExp": (reduction("logsumexp"), 9),
    "ReduceMax": (reduction("max"), 8),
    "ReduceMean": (reduction("mean"), 8),
    "ReduceMin": (reduction("min"), 8),
    "ReduceProd": (reduction("prod"), 9),
    "ReduceSum": (reduction("sum"), 12),
    "ReduceSumSquare": (reduction("sumsquare"), 9),
    "ArgMax": (position("argmax"), 8),
    "ArgMin": (position("argmin"), 8),
}


@pytest.mark.many
@pytest.mark.parametrize("operator", list(ADAPTERS))
def test_node(operator: str) -> None:
    call, least = ADAPTERS[operator]
    ran, refused = [], {}
    for case in cases(operator):
        node = case.model.graph.node[0]
        for inputs, outputs in case.data_sets:
            arrays = [np.asarray(value) for value in inputs]
            try:
                if arrays[0].dtype not in (np.float32, np.float64, np.float16):
                    raise Unsupported(f"dtype {arrays[0].dtype}")
                with np.errstate(divide="ignore"):
                    found = call(attributes(node), *arrays)
            except Unsupported as reason:
                refused[case.name] = str(reason)
                continue
            found = found if isinstance(found, tuple) else (found,)
            for mine, theirs in zip(found, outputs, strict=False):
                assert mine.shape == theirs.shape, case.name
                np.testing.assert_allclose(mine, theirs, case.rtol, 1e-6, err_msg=case.name)
            ran.append(case.name)
    assert len(ran) >= least, f"only {len(ran)} ran; refused: {refused}"


@pytest.mark.parametrize(
    ("x_shape", "w_shape", "words"),
    [
        ((2, 4, 5, 4), (4, 3, 3, 4), {"auto_pad": "SAME_LOWER", "strides": [2, 3]}),
        ((2, 4, 5, 4), (4, 3, 3, 4), {"auto_pad": "SAME_UPPER", "strides": [2, 1], "dilations": [1, 3]}),
        ((1, 4, 5, 4), (4, 3, 3, 4), {"auto_pad": "VALID", "strides": [3, 2], "output_padding": [2, 1]}),
        ((1, 4, 5, 4), (4, 3, 3, 3), {"pads": [0, 1, 2, 0], "strides": [2, 2]}),
        ((1, 4, 5, 4), (4, 2, 3, 3), {"pads": [1, 0, 0, 2], "output_padding": [1, 0], "strides": [2, 1], "group": 2}),
        ((1, 4, 5, 4), (4, 3, 3, 3), {"output_shape": [10, 7], "strides": [2, 2]}),
        ((2, 4, 9), (4, 3, 4), {"pads": [0, 2], "strides": [3], "output_padding": [1]}),
        ((2, 4, 9), (4, 3, 2), {"auto_pad": "SAME_UPPER", "strides": [2], "dilations": [2]}),
    ],
)
def test_transposed_convolution(x_shape: tuple[int, ...], w_shape: tuple[int, ...], words: dict[str, Any]) -> None:
    """Attributes that no node test has, against onnxruntime."""
    onnxruntime = pytest.importorskip("onnxruntime")
    rng = np.random.default_rng(5)
    x, w = (rng.standard_normal(shape).astype(np.float32) for shape in (x_shape, w_shape))
    bias = rng.standard_normal(w_shape[1] * words.get("group", 1)).astype(np.float32)
    given = [
        onnx.helper.make_tensor_value_info(name, onnx.TensorProto.FLOAT, one.shape)
        for name, one in (("x", x), ("w", w), ("b", bias))
    ]
    node = onnx.helper.make_node("ConvTranspose", ["x", "w", "b"], ["y"], **words)
    y = onnx.helper.make_tensor_value_info("y", onnx.TensorProto.FLOAT, None)
    graph = onnx.helper.make_graph([node], "one", given, [y])
    model = onnx.helper.make_model(graph, opset_imports=[onnx.helper.make_opsetid("", 22)], ir_version=10)
    session = onnxruntime.InferenceSession(model.SerializeToString(), providers=["CPUExecutionProvider"])
    (expected,) = session.run(None, {"x": x, "w": w, "b": bias})
    found = conv_transpose(attributes(node), x, w, bias)
    assert found.shape == expected.shape
    np.testing.assert_allclose(found, expected, 1e-4, 1e-5)
