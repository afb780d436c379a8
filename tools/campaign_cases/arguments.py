"""Calls with one bad argument: a result, or an error of tapwise that names the argument, soon."""

from __future__ import annotations

import math
from collections.abc import Callable, Iterator
from decimal import Decimal
from typing import Any, Final

import numpy as np

import tapwise
from campaign_cases import Case, Family, pick, plainly
from campaign_cases.memory import plain
from campaign_cases.problems import enter, surroundings
from tapwise import image
from tapwise.errors import NotApplicable, TapwiseError


class _Strange:
    """An object of no use."""

    def __repr__(self) -> str:
        return "strange"


# Values by what stands in a case.
VALUES: Final[dict[str, Callable[[], Any]]] = {
    "none": lambda: None, "true": lambda: True, "0": lambda: 0, "-1": lambda: -1, "1": lambda: 1, "2": lambda: 2,
    "1.5": lambda: 1.5, "nan": lambda: math.nan, "inf": lambda: math.inf, "-inf": lambda: -math.inf,
    "2**31": lambda: 2**31, "2**40": lambda: 2**40, "2**63": lambda: 2**63, "10**30": lambda: 10**30,
    "-2**63": lambda: -(2**63), "'2'": lambda: "2", "'abc'": lambda: "abc", "''": lambda: "", "'same'": lambda: "same",
    "'\u00b2'": lambda: "\u00b2", "digits": lambda: "c" + "9" * 5000, "b'relu'": lambda: b"relu", "[]": list,
    "()": tuple, "{}": dict, "set": lambda: {1, 2}, "[1, 2]": lambda: [1, 2], "(1, 2, 3)": lambda: (1, 2, 3),
    "(2, 2)": lambda: (2, 2), "((1, 1), (1, 1))": lambda: ((1, 1), (1, 1)), "((1, 2), 3)": lambda: ((1, 2), 3),
    "(-1, 2)": lambda: (-1, 2), "(1.0, 1.0)": lambda: (1.0, 1.0), "(None, 1)": lambda: (None, 1),
    "np.int64": lambda: np.int64(1), "np.float32": lambda: np.float32(1), "array": lambda: np.ones(2),
    "scalar array": lambda: np.array(1), "empty array": lambda: np.zeros((0, 3, 5, 5), np.float32),
    "objects": lambda: np.array([1, None], object), "words": lambda: np.array(["a"]),
    "complex": lambda: np.ones((1, 4, 9, 9), complex), "dates": lambda: np.zeros((1, 4, 9, 9), "M8[s]"),
    "records": lambda: np.zeros((1, 4, 9, 9), [("a", "f4")]), "half": lambda: np.ones((1, 4, 9, 9), np.float16),
    "big-endian half": lambda: np.ones((1, 4, 9, 9), ">f2"), "bools": lambda: np.ones((1, 4, 9, 9), bool),
    "integers": lambda: np.ones((1, 4, 9, 9), np.int64), "masked": lambda: np.ma.masked_array(np.ones((1, 4, 9, 9))),
    "matrix": lambda: np.ones((4, 4), np.float32), "function": lambda: len, "class": lambda: int,
    "decimal": lambda: Decimal(1), "strange": _Strange, "range": lambda: range(2), "generator": lambda: iter((1, 2)),
    "'cuda:-1'": lambda: "cuda:-1", "'cuda:x'": lambda: "cuda:x", "'cuda:999'": lambda: "cuda:999",
    "'cpu.nothing'": lambda: "cpu.nothing", "'cpu.winograd'": lambda: "cpu.winograd", "'RELU'": lambda: "RELU",
    "slice": lambda: slice(None), "1e400": lambda: float("1e400"), "tuple of 99": lambda: (1,) * 99,
    "recursive": lambda: _recursive(), "'nchw'": lambda: "nchw", "bytes": lambda: bytearray(16),
}  # fmt: skip


def _recursive() -> list[Any]:
    one: list[Any] = []
    one.append(one)
    return one


def _tensors() -> dict[str, Callable[[], Any]]:
    """Tensors of PyTorch that are not plain memory."""
    import torch

    x = torch.ones(1, 4, 9, 9)
    return {
        "sparse": lambda: x.to_sparse(),
        "meta": lambda: x.to("meta"),
        "requires grad": lambda: x.clone().requires_grad_(),
        "conjugate": lambda: torch.ones(1, 4, 9, 9, dtype=torch.complex64).conj(),
        "imaginary": lambda: torch.ones(1, 4, 9, 9, dtype=torch.complex64).conj().imag,
        "quantized": lambda: torch.quantize_per_tensor(x, 0.1, 0, torch.quint8),
        "nested": lambda: torch.nested.nested_tensor([x[0], x[0]]),
        "bfloat16": lambda: x.bfloat16(),
        "mkldnn": lambda: x.to_mkldnn(),
    }


TENSORS: Final = (
    *("sparse", "meta", "requires grad", "conjugate", "imaginary", "quantized", "nested", "bfloat16", "mkldnn"),
)
# What errors call an argument by, where that is not its name.
_WORDS: Final[dict[str, str]] = {"text": "problem", "divisor_override": "divisor", "kernel_size": "kernel"}
_STEPS: Final = ("stride", "padding", "dilation")
_CONV: Final = (
    *("x", "w", "bias", *_STEPS, "groups", "activation", "residual", "output_size", "math", "algorithm", "device"),
    "out",
)
_TRANSPOSED: Final = (
    *("x", "w", "bias", *_STEPS, "output_padding", "groups", "activation", "math", "algorithm", "device", "out"),
)
_GRADIENT: Final = ("dy", *_STEPS, "groups", "math", "algorithm", "device", "out")
_POOL: Final = ("x", "kernel_size", *_STEPS, "ceil_mode", "return_indices", "algorithm", "device", "out")
_AVERAGE: Final = (
    *("x", "kernel_size", *_STEPS, "ceil_mode", "count_include_pad", "divisor_override", "algorithm", "device", "out"),
)
_EDGES: Final = ("input", "output", "mode", "cval")
# function -> arguments that may be replaced.
ARGUMENTS: Final[dict[str, tuple[str, ...]]] = {
    "conv2d": _CONV,
    "conv1d": _CONV,
    "conv_transpose2d": _TRANSPOSED,
    "conv_transpose1d": _TRANSPOSED,
    "conv2d_input": ("input_size", "w", *_GRADIENT),
    "conv2d_weight": ("x", "weight_size", *_GRADIENT),
    "prepare": (
        *("problem", "w", "bias", *_STEPS, "groups", "activation", "residual", "output_size", "math", "layout"),
        *("algorithm", "config", "threads", "device"),
    ),
    "prepare of a string": ("problem", "w", "bias", "algorithm", "config", "threads", "device", "stride", "layout"),
    "im2col": ("x", "kernel_size", *_STEPS, "out", "algorithm", "device"),
    "col2im": ("cols", "output_size", "kernel_size", *_STEPS, "out", "accumulate", "algorithm", "device"),
    "max_pool2d": _POOL,
    "max_pool1d": _POOL,
    "avg_pool2d": _AVERAGE,
    "avg_pool1d": _AVERAGE,
    "max_pool2d_backward": ("dy", "indices", "input_size", *_POOL[1:6], *_POOL[7:]),
    "avg_pool2d_backward": ("dy", "input_size", *_AVERAGE[1:]),
    "softmax": ("x", "axis", "algorithm", "device", "out"),
    "log_softmax": ("x", "axis", "algorithm", "device", "out"),
    "softmax_backward": ("dy", "y", "axis", "algorithm", "device", "out"),
    "log_softmax_backward": ("dy", "y", "axis", "algorithm", "device", "out"),
    "reduce": ("x", "op", "axis", "keepdims", "algorithm", "device"),
    "image.gaussian_filter": (*_EDGES, "sigma", "order", "truncate", "radius", "axes", "channel_axis"),
    "image.uniform_filter": (*_EDGES, "size", "origin", "axes", "channel_axis"),
    "image.maximum_filter": (*_EDGES, "size", "footprint", "origin", "axes", "channel_axis"),
    "image.correlate": (*_EDGES, "weights", "origin", "axes", "channel_axis"),
    "image.correlate1d": (*_EDGES, "weights", "axis", "origin"),
    "image.sobel": (*_EDGES, "axis", "channel_axis"),
    "image.gaussian_laplace": (*_EDGES, "sigma", "truncate", "radius", "axes"),
    "ConvProblem.parse": ("text",),
}


def _good(function: str) -> dict[str, Any]:
    """Arguments that are right."""
    x = np.ones((1, 4, 9, 9), np.float32)
    if function.startswith("image."):
        name = function.partition(".")[2]
        own: dict[str, dict[str, Any]] = {
            "gaussian_filter": {"sigma": 1.0}, "gaussian_laplace": {"sigma": 1.0}, "uniform_filter": {"size": 3},
            "maximum_filter": {"size": 3}, "correlate": {"weights": np.ones((3, 3))}, "sobel": {},
            "correlate1d": {"weights": np.ones(3)},
        }  # fmt: skip
        return {"input": np.ones((9, 11), np.float32), **own[name]}
    if function == "prepare":
        x = np.ones((1, 4, 9, 9), np.float32)
        return {"problem": x.shape, "w": x[0, :, None, :3, :3].repeat(4, 1)}
    if function == "prepare of a string":
        return {"problem": "c4 h9 w9 k4 r3 s3 pad1", "w": np.ones((4, 4, 3, 3), np.float32)}
    if function == "ConvProblem.parse":
        return {"text": "c4 h9 w9 k4 r3 s3"}
    if function == "reduce":
        return {"x": x, "op": "sum"}
    if function == "col2im":
        return {"cols": np.ones((1, 36, 49), np.float32), "output_size": (9, 9), "kernel_size": 3}
    if function == "conv2d_input":
        return {"dy": x[..., 2:, 2:], "input_size": x.shape, "w": np.ones((4, 4, 3, 3), np.float32)}
    if function == "conv2d_weight":
        return {"x": x, "weight_size": (4, 4, 3, 3), "dy": x[..., 2:, 2:]}
    if function.endswith("2d_backward"):
        dy = {"dy": np.ones((1, 4, 3, 3), np.float32), "input_size": x.shape, "kernel_size": 3}
        return dy if function.startswith("avg") else {**dy, "indices": np.zeros((1, 4, 3, 3), np.int64)}
    if function.endswith("softmax_backward"):
        return {"dy": x, "y": x.copy()}
    x = x[:, :, 0] if function.endswith("1d") else x
    if function.startswith("conv"):
        return {"x": x, "w": np.ones((4, 4, *(3,) * (x.ndim - 2)), np.float32)}
    return {"x": x, "kernel_size": 3} if "softmax" not in function else {"x": x}


def draw(rng: np.random.Generator, backend: str) -> Case:
    function = pick(rng, *ARGUMENTS)
    names = (*VALUES, *TENSORS) if rng.random() < 0.9 else TENSORS
    found = {"function": function, "argument": pick(rng, *ARGUMENTS[function]), "value": pick(rng, *names)}
    return {**found, **surroundings(rng, backend)}


def run(case: Case) -> str | None:
    enter(case)
    name, argument, value = case["function"], case["argument"], case["value"]
    arguments = _good(name)
    if case["backend"] == "cuda" and not name.startswith(("prepare", "ConvProblem")):
        first = next(iter(arguments))
        arguments |= {first: _there(arguments[first])}
        for other in {"w", "dy", "indices", "y"} & set(arguments):
            arguments[other] = _there(arguments[other])
    arguments[argument] = _tensors()[value]() if value in TENSORS else VALUES[value]()
    try:
        _function(name)(**arguments)
    except NotApplicable:
        # Of a problem that is right and too much: the error lists what each algorithm takes.
        return None
    except TapwiseError as error:
        text = str(error)
        word = str(_WORDS.get(argument) or argument)
        if word not in text and not _about_both(text, argument):
            return f"unnamed: {type(error).__name__}: {text[:300]}"
        return f"long: {len(text)} characters" if len(text) > 600 else None
    except MemoryError:
        # A legal result that is larger than the memory, which NumPy says.
        return None
    return None


def _about_both(text: str, argument: str) -> bool:
    """An error may name what the bad argument does not fit."""
    return any(
        f"{word}" in text for word in ("w has", "x has", "cols has", "x is", "w is", "x:", "w:")
    ) and argument in (
        *("x", "w", "cols", "input", "kernel_size", "output_size", "problem", "groups", "device", "axis"),
    )


def _there(array: Any) -> Any:
    import torch

    return torch.from_numpy(plain(array).copy()).cuda()


def _function(name: str) -> Callable[..., Any]:
    if name == "ConvProblem.parse":
        return tapwise.ConvProblem.parse
    home, word = (image, name[6:]) if name.startswith("image.") else (tapwise, name.split()[0])
    found: Callable[..., Any] = getattr(home, word)
    return found


def simpler(case: Case) -> Iterator[Case]:
    yield from plainly(case, {"threads": 1, "target": "host"})


FAMILY: Final = Family(draw, run, simpler, share=0.7, patience=10.0)
