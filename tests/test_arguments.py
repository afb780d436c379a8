"""Bad arguments of every public function: an error that names the argument, in one line and at once."""

from __future__ import annotations

import time
from collections.abc import Callable, Iterator
from typing import Any

import numpy as np
import pytest

import tapwise
from tapwise import arguments, dispatch
from tapwise.algorithm import Config
from tapwise.cpu.device import host
from tapwise.errors import InvalidProblem, TapwiseError
from tapwise.ops.conv.problem import ConvProblem
from tapwise.ops.filter.problem import FilterProblem
from tapwise.ops.patches.problem import Col2imProblem, Im2colProblem
from tapwise.ops.pool.problem import PoolProblem
from tapwise.ops.reduce.problem import ReduceProblem
from tapwise.ops.softmax.problem import SoftmaxProblem
from tapwise.registry import parse


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
    "batch_norm_reduce": (
        tapwise.batch_norm_reduce, {"grad_output": IMAGE, "x": IMAGE, "parameters": np.ones((4, 4), F32)},
        {
            "grad_output": INPUTS, "x": INPUTS, "parameters": INPUTS, "activation": WORDS,
            "out": [*SHAPED, IMAGE[:1]], "algorithm": NAMES, "device": DEVICES,
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
    "squeeze_excitation c4 h6 w6 m3": {
        **dict.fromkeys("nchwm", FIELDS["n"]), "activation": NAMES, "gate": NAMES, "dtype": FIELDS["dtype"],
        "layout": FIELDS["layout"],
    },
    "reduce sum 5x7": {**AXES_FIELDS, "op": NAMES, "keepdims": FLAGS},
}  # fmt: skip
# What an argument is called in an error.
CALLED = {
    "kernel_size": "kernel",
    "divisor": "divisor_override",
    "axes": "axis",
    "modes": "mode",
    "spatial": "",
    "n": "",
    "c": "",
    "k": "",
}


def rows() -> Iterator[Any]:
    for function, (_, _, bad) in CALLS.items():
        yield from (pytest.param(function, name, id=f"{function}-{name}") for name in bad)


def check(call: Callable[[], object], name: str, value: Any) -> None:
    start = time.perf_counter()
    try:
        call()
    except TapwiseError as error:
        message = str(error)
    except Exception as error:
        pytest.fail(f"{name}={arguments.shown(value)}: {type(error).__name__}: {str(error)[:200]}")
    else:
        pytest.fail(f"{name}={arguments.shown(value)}: no error")
    assert time.perf_counter() - start < 1.0, f"{name}={arguments.shown(value)} took long"
    assert CALLED.get(name, name) in message, f"{arguments.shown(value)}: {message}"
    assert "\n" not in message
    assert len(message) < 600, message


@pytest.mark.parametrize(("function", "name"), list(rows()))
def test_a_bad_argument_is_named(function: str, name: str) -> None:
    call, good, bad = CALLS[function]
    call(**good)
    for value in bad[name]:
        check(lambda value=value: call(**{**good, name: value}), name, value)  # type: ignore[misc]


def test_numbers_of_any_kind_are_numbers() -> None:
    """What is refused is no number: NumPy's whole numbers, lists and one-element tuples are."""
    wanted = tapwise.conv2d(IMAGE, FILTERS, stride=2, padding=1, groups=1)
    for two, one in ((np.int64(2), np.uint8(1)), ([2, 2], [1, 1]), ((2,), (1,)), ((np.int32(2), 2), ((1, 1), [1, 1]))):
        np.testing.assert_array_equal(tapwise.conv2d(IMAGE, FILTERS, stride=two, padding=one), wanted)
    assert tapwise.max_pool2d(IMAGE, 2, ceil_mode=np.True_).shape == (2, 4, 3, 3)
    assert tapwise.reduce(PLANE, "sum", np.int64(-1), keepdims=1).shape == (5, 1)
    assert tapwise.avg_pool2d(IMAGE, 1, stride=2**31 - 1).shape == (2, 4, 1, 1)
    problem = ConvProblem.parse("c4 h6 w6 k4 r3 s3")
    same = problem.replace(n=np.int64(1), spatial=[6, np.int32(6)], stride=[np.uint8(1), 1], padding=[[0, 0], (0, 0)])
    assert same == problem and hash(same) == hash(problem) and str(same) == str(problem)
    assert host(np.int64(2)) == host(2)


@pytest.mark.parametrize("text", PROBLEMS)
def test_a_bad_field_is_named(text: str) -> None:
    problem = parse(text)
    for name, values in PROBLEMS[text].items():
        for value in values:
            check(lambda name=name, value=value: problem.replace(**{name: value}), name, value)  # type: ignore[misc]


@pytest.mark.parametrize(
    "kind", [ConvProblem, PoolProblem, Im2colProblem, Col2imProblem, SoftmaxProblem, ReduceProblem, FilterProblem]
)
def test_a_bad_string_is_refused(kind: Any) -> None:
    texts = [
        *NAMES, "\0", "c", "conv", "reduce", "softmax", "maxpool",
        *[
            text.replace("6", digits).replace("7", digits)
            for text in PROBLEMS
            for digits in ("9" * 5000, "\u00b2", "\u0663", "1" * 19, "6:", ":", "-6", "6.0", "1e3", "x", "6x")
        ],
        *[
            f"{text} {word}"
            for text in PROBLEMS
            for word in ("axis" + "9" * 5000, "stride" + "9" * 5000, "pad\u00b2", "a" * 10**6)
        ],
    ]  # fmt: skip
    for text in texts:
        check(lambda text=text: kind.parse(text), "", text)  # type: ignore[misc]
        check(lambda text=text: parse(text), "", text)  # type: ignore[misc]


def test_sizes_beyond_any_memory_are_refused() -> None:
    for text in (
        "c4000000000 h4000000000 w6 k4 r3 s3", "n0 c4000000000 h4000000000 w6 k4 r3 s3",
        "c6 h6 w6 k9000000000000000000 r3 s3",
        "c1 h4 w4 k1 r1 s1 pad2147483647", "softmax 4000000000x4000000000", "softmax 0x4000000000x4000000000",
        "im2col c4 h1000000000 w1000000000 r9 s9",
    ):  # fmt: skip
        with pytest.raises(InvalidProblem, match=r"has shape .*: sizes whose product is below 2\^60 are allowed"):
            parse(text)
    with pytest.raises(InvalidProblem, match="padding="):
        tapwise.conv2d(IMAGE, FILTERS, padding=2**31 - 1)
    assert parse("maxpool c1 w68719476736 s68719476736").y_shape == (1, 1, 1)


class Odd:
    """An array of a library that fails in its own ways."""

    def __init__(self, place: Any, error: type[Exception]) -> None:
        self.place, self.error = place, error

    def __dlpack_device__(self) -> Any:
        return self.place

    def __dlpack__(self, **_: Any) -> Any:
        raise self.error("no memory")


@pytest.mark.parametrize("error", [KeyError, AssertionError, TypeError, BufferError])
@pytest.mark.parametrize("place", [7, None, (1, 0), (2, 0), ("x",)])
def test_what_another_library_raises_is_told_of(place: Any, error: type[Exception]) -> None:
    for call, name in (
        (lambda odd: tapwise.softmax(odd), "x"),
        (lambda odd: tapwise.conv2d(IMAGE, odd), "w"),
        (lambda odd: tapwise.softmax(PLANE, out=odd), "out"),
    ):
        check(lambda call=call: call(Odd(place, error)), name, Hostile())  # type: ignore[misc]


def test_a_value_in_an_error_is_one_short_line() -> None:
    assert arguments.shown(np.zeros((3, 4))) == "an array of shape (3, 4)"
    assert arguments.shown("two\nlines") == r"'two\nlines'"
    assert arguments.shown(10**5000) == "a int"
    assert arguments.shown(Hostile()) == "a Hostile"
    assert arguments.shown(Shapeless()) == "a Shapeless"
    assert len(arguments.shown("x" * 10**6)) < 110
    assert arguments.shown([MATRIX] * 9).count("\n") == 0
