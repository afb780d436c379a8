"""What is no argument of a public function, or field of a problem, by their names."""

from __future__ import annotations

from collections.abc import Callable
from typing import Any

import numpy as np

import tapwise
from tapwise import dispatch
from tapwise.algorithm import Config
from tapwise.cpu.device import host
from tapwise.ops.conv.problem import ConvProblem


class Hostile:
    """An object that answers nothing."""

    def __repr__(self) -> str:
        raise ValueError("no words")


class Shapeless(Hostile):
    """As a nested tensor of PyTorch is."""

    @property
    def shape(self) -> tuple[int, ...]:
        raise RuntimeError("no shape")


F32 = np.float32
IMAGE, PLANE, SERIES = np.ones((2, 4, 6, 6), F32), np.ones((5, 7), F32), np.ones((2, 4, 9), F32)
FILTERS, TAPS = np.ones((4, 4, 3, 3), F32), np.ones((4, 4, 3), F32)
MATRIX = np.arange(12, dtype=F32).reshape(3, 4)

THINGS: list[Any] = [
    Hostile(),
    Shapeless(),
    object(),
    {},
    {1},
    b"1",
    MATRIX,
    np.array([], F32),
    ["auto"],
    [[1]],
    np.datetime64("NaT"),
]
# No number of anything.
NUMBERS: list[Any] = [
    *THINGS, 1.5, float("nan"), float("inf"), True, np.True_, "2", "\u00b2", "\u0663", np.float32(2), 2j,
    (1, 2, 3, 4), (1.0, 1), 10**30, -(10**30), 10**5000, -(10**5000), [10**5000] * 2, 2**63, "a" * 10**6,
]  # fmt: skip
STEPS = [*NUMBERS, 0, -1, 2**31, 2**40, 2**62, np.int64(-1), (0, 0), None, ()]
WORDS: list[Any] = [
    *THINGS,
    1,
    True,
    1.5,
    float("nan"),
    "",
    "no such",
    "\u00b2",
    "x" * 10**6,
    "cpu",
    "cuda.x\n",
    ("auto",),
]
FLAGS: list[Any] = [*THINGS, 1.5, "yes", None, 2, (), float("nan"), 10**5000]
ARRAYS: list[Any] = [
    *[thing for thing in THINGS if not isinstance(thing, np.ndarray)], 1, 1.5, "x", [1.0, 2.0], np.ndarray, np.float32,
    np.ones(4, object), np.ones((2, 4, 6, 6), "U3"), np.ones((2, 4, 6, 6), complex), np.ones((2, 4, 6, 6), bool),
    np.zeros((2, 4, 6, 6), "M8[s]"), np.zeros((2, 4, 6, 6), [("a", "f4"), ("b", "i8")]), np.ones((2, 4, 6, 6), np.int8),
    np.ones((2, 4, 6, 6), np.longdouble), np.ma.masked_array(IMAGE, IMAGE > 0),
]  # fmt: skip
SHAPED: list[Any] = [*ARRAYS, np.float32(1), np.ones((), F32), np.ones((1,) * 9, F32), np.ones((0,), F32)]
INPUTS, PLAIN, NAMES = [*SHAPED, None], [*ARRAYS, None], [*WORDS, None]
PADDING = [
    *NUMBERS,
    -1,
    2**31,
    2**40,
    2**62,
    np.int64(-1),
    ((1, 2, 3), (1, 1)),
    ((1,), (1,)),
    "SAME",
    "full",
    (((1, 1), 1), 1),
    None,
    (),
]
# Other than a size that is fitting.
SIZES = [*NUMBERS, 0, -1, 2**40, (0, 0), (2**31, 2**31)]
AXES = [
    *THINGS,
    1.5,
    float("nan"),
    True,
    "1",
    "\u00b2",
    9,
    -9,
    10**30,
    10**5000,
    (0, 0),
    (0, 1.0),
    (0, 10**5000),
    ((0,),),
]
DEVICES = [*WORDS[:-4], "cuda:-1", "cuda:x", "cuda:", "cuda:\u00b2", "cuda:1.0", "CUDA", "gpu", "cuda:" + "9" * 5000]
OUTS = [*SHAPED, IMAGE.copy(), IMAGE[:1], np.ones(3, F32), np.ones((2, 4, 4, 4))]

CONV = {
    "stride": STEPS, "padding": PADDING, "dilation": STEPS, "groups": [*STEPS, 3], "activation": [*WORDS, "RELU"],
    "math": [*WORDS, None, "TF32"], "algorithm": NAMES, "device": DEVICES, "output_size": SIZES,
    "bias": [*SHAPED, np.ones(3, F32), np.ones(4)], "residual": [*SHAPED, IMAGE[:1], np.ones((2, 4, 4, 4))],
}  # fmt: skip
WINDOW = {"kernel_size": STEPS, "padding": PADDING, "dilation": STEPS, "algorithm": NAMES, "device": DEVICES}
MAXIMUM = {**WINDOW, "stride": STEPS[:-2], "ceil_mode": FLAGS, "return_indices": FLAGS}
MEAN = {
    **WINDOW,
    "stride": STEPS[:-2],
    "ceil_mode": FLAGS,
    "count_include_pad": FLAGS,
    "divisor_override": [*NUMBERS, 0],
}
DX = [*SHAPED, IMAGE[:1], IMAGE.astype(float)]
BACKWARD = {**WINDOW, "stride": STEPS[:-2], "ceil_mode": FLAGS}
ALONG = {"algorithm": NAMES, "device": DEVICES}
COLUMNS = np.ones((2, 36, 16), F32)
# Function -> good arguments, and bad ones by name.
CALLS: dict[str, tuple[Callable[..., Any], dict[str, Any], dict[str, list[Any]]]] = {
    "conv2d": (
        tapwise.conv2d, {"x": IMAGE, "w": FILTERS},
        {"x": INPUTS, "w": INPUTS, "out": OUTS, **CONV},
    ),
    "conv1d": (
        tapwise.conv1d, {"x": SERIES, "w": TAPS},
        {"x": INPUTS, "w": INPUTS, "out": OUTS, **CONV},
    ),
    "prepare": (
        tapwise.prepare, {"problem": "c4 h6 w6 k4 r3 s3", "w": FILTERS},
        {
            "w": [*INPUTS, FILTERS[:2]], "bias": CONV["bias"], "algorithm": NAMES, "device": DEVICES,
            "threads": [*NUMBERS, 0, -1, 10**9, (), np.int64(0)], "problem": [*WORDS, None, 2],
            "config": [*WORDS, "m=1", Config()],
        },
    ),
    "prepared": (
        tapwise.prepare("n2 c4 h6 w6 k4 r3 s3 residual", FILTERS),
        {"x": IMAGE, "residual": np.ones((2, 4, 4, 4), F32)},
        {"x": INPUTS, "residual": INPUTS, "out": OUTS},
    ),
    "im2col": (
        tapwise.im2col, {"x": IMAGE, "kernel_size": 3},
        {"x": INPUTS, "out": OUTS, "stride": STEPS, **WINDOW},
    ),
    "col2im": (
        tapwise.col2im, {"cols": COLUMNS, "output_size": 6, "kernel_size": 3},
        {
            "cols": INPUTS, "output_size": [*SIZES, None, ()], "out": OUTS[:-4], "stride": STEPS,
            "accumulate": FLAGS, **WINDOW,
        },
    ),
    "max_pool2d": (tapwise.max_pool2d, {"x": IMAGE, "kernel_size": 3}, {"x": INPUTS, "out": OUTS, **MAXIMUM}),
    "max_pool1d": (tapwise.max_pool1d, {"x": SERIES, "kernel_size": 3}, {"x": INPUTS, "out": OUTS, **MAXIMUM}),
    "avg_pool2d": (tapwise.avg_pool2d, {"x": IMAGE, "kernel_size": 3}, {"x": INPUTS, "out": OUTS, **MEAN}),
    "avg_pool1d": (tapwise.avg_pool1d, {"x": SERIES, "kernel_size": 3}, {"x": INPUTS, "out": OUTS, **MEAN}),
    "max_pool2d_backward": (
        tapwise.max_pool2d_backward,
        {"dy": np.ones((2, 4, 2, 2), F32), "indices": np.zeros((2, 4, 2, 2), int), "input_size": IMAGE.shape,
         "kernel_size": 3},
        {"dy": INPUTS, "indices": INPUTS, "out": DX, "input_size": [*SIZES, None, ()], **BACKWARD},
    ),
    "avg_pool2d_backward": (
        tapwise.avg_pool2d_backward,
        {"dy": np.ones((2, 4, 2, 2), F32), "input_size": IMAGE.shape, "kernel_size": 3},
        {
            "dy": INPUTS, "out": DX, "input_size": [*SIZES, None, ()], "count_include_pad": FLAGS,
            "divisor_override": MEAN["divisor_override"], **BACKWARD,
        },
    ),
    "softmax": (
        tapwise.softmax, {"x": PLANE},
        {"x": PLAIN, "axis": [*AXES, None, (0, 1)], "out": OUTS, **ALONG},
    ),
    "log_softmax": (
        tapwise.log_softmax, {"x": PLANE},
        {"x": PLAIN, "axis": [*AXES, None], "out": OUTS, **ALONG},
    ),
    "softmax_backward": (
        tapwise.softmax_backward, {"dy": PLANE, "y": PLANE},
        {"dy": PLAIN, "y": [*SHAPED, None], "axis": [*AXES, None, (0, 1)], "out": [*SHAPED, PLANE[:1]], **ALONG},
    ),
    "log_softmax_backward": (
        tapwise.log_softmax_backward, {"dy": PLANE, "y": PLANE}, {"y": [*SHAPED, None], "axis": [*AXES, None]},
    ),
    "reduce": (
        tapwise.reduce, {"x": PLANE, "op": "sum"},
        {"x": PLAIN, "op": NAMES, "axis": AXES, "keepdims": FLAGS, **ALONG},
    ),
    "batch_norm_stats": (
        tapwise.batch_norm_stats, {"x": IMAGE},
        {"x": INPUTS, "out": [*SHAPED, IMAGE[:1]], "algorithm": NAMES, "device": DEVICES},
    ),
    "batch_norm_backward": (
        tapwise.batch_norm_backward, {"grad_output": IMAGE, "x": IMAGE, "parameters": np.ones((4, 4), F32)},
        {
            "grad_output": INPUTS, "x": INPUTS, "parameters": INPUTS, "activation": WORDS,
            "out": [*SHAPED, IMAGE[:1]], "algorithm": NAMES, "device": DEVICES,
        },
    ),
    "bias_backward": (
        tapwise.bias_backward, {"grad_output": IMAGE},
        {"grad_output": INPUTS, "out": [*SHAPED, IMAGE[:1]], "algorithm": NAMES, "device": DEVICES},
    ),
    "bias_activation_backward": (
        tapwise.bias_activation_backward, {"grad_output": IMAGE, "y": IMAGE, "activation": "relu"},
        {
            "grad_output": INPUTS, "y": INPUTS, "activation": [*WORDS, None], "out": [*SHAPED, IMAGE[:1]],
            "algorithm": NAMES, "device": DEVICES,
        },
    ),
    "squeeze_excitation": (
        tapwise.squeeze_excitation,
        {"x": IMAGE, "weight": np.ones((2, 3, 4), F32), "bias": np.ones(7, F32)},
        {
            "x": INPUTS, "weight": INPUTS, "bias": INPUTS, "activation": NAMES, "gate": NAMES,
            "out": [*SHAPED, IMAGE[:1]], "algorithm": NAMES, "device": DEVICES,
        },
    ),
    "choose": (
        dispatch.choose, {"problem": ConvProblem.parse("c4 h6 w6 k4 r3 s3"), "device": host()},
        {"algorithm": NAMES, "config": WORDS, "prepared": FLAGS, "workspace_limit": [*NUMBERS, -1, ()]},
    ),
    "host": (host, {}, {"threads": [*NUMBERS, 0, -1, 10**9, ()]}),
}  # fmt: skip
TUPLES = [*NUMBERS, 3, (0, 0), (-1, 1), None, (), (2**62, 2**62), (1.0, 1), ("1", "1")]
FIELDS = {
    "n": [*NUMBERS, -1, None, 2**62], "c": [*NUMBERS, -1, None, 2**62], "spatial": [*TUPLES[:-5], None, ()],
    "kernel": TUPLES, "stride": TUPLES, "dilation": TUPLES, "padding": [*TUPLES, ((1, 1),), ((1, 2, 3), (1, 1))],
    "dtype": [*WORDS, None, "float32"], "layout": [*WORDS, None, "nwhc"],
}  # fmt: skip
AXES_FIELDS = {
    "shape": [*[value for value in NUMBERS if type(value) is not tuple], 3, (-1,), None, (2**62, 2**62), (1,) * 99],
    "axes": [*AXES, (1, 0), 3],
    "dtype": FIELDS["dtype"],
}
PROBLEMS: dict[str, dict[str, list[Any]]] = {
    "c4 h6 w6 k4 r3 s3": {
        **FIELDS, "k": FIELDS["n"], "groups": [*NUMBERS, 0, -1, 3, None], "direction": NAMES,
        "math": NAMES, "bias": FLAGS, "activation": WORDS, "residual": FLAGS,
    },
    "maxpool c4 h6 w6 r3 s3": {
        **FIELDS, "op": NAMES, "ceil_mode": FLAGS, "indices": FLAGS, "divisor": [*NUMBERS, 0], "direction": NAMES,
    },
    "im2col c4 h6 w6 r3 s3": FIELDS,
    "col2im c4 h6 w6 r3 s3": {**FIELDS, "accumulate": FLAGS},
    "filter correlate h6 w6 c4 r3 s3": {
        "op": NAMES, "spatial": TUPLES, "size": TUPLES, "before": TUPLES, "c": FIELDS["n"][:-1], "dtype": NAMES,
        "to": NAMES, "modes": [*NAMES, ("reflect",) * 2, (MATRIX,) * 3, (["wrap"],) * 3],
        "clip": FLAGS, "double": FLAGS,
    },
    "softmax 5x7": {**AXES_FIELDS, "log": FLAGS, "direction": NAMES},
    "batch_norm c4 h6 w6 dgrad": {
        **dict.fromkeys("nchw", FIELDS["n"]), "activation": WORDS, "dtype": FIELDS["dtype"],
        "layout": FIELDS["layout"], "direction": NAMES,
    },
    "bias_activation c4 h6 w6 dgrad relu": {
        **dict.fromkeys("nchw", FIELDS["n"]), "activation": WORDS, "dtype": FIELDS["dtype"],
        "layout": FIELDS["layout"], "direction": NAMES,
    },
    "squeeze_excitation c4 h6 w6 m3": {
        **dict.fromkeys("nchwm", FIELDS["n"]), "activation": NAMES, "gate": NAMES, "dtype": FIELDS["dtype"],
        "layout": FIELDS["layout"],
    },
    "reduce sum 5x7": {**AXES_FIELDS, "op": NAMES, "keepdims": FLAGS},
}  # fmt: skip
