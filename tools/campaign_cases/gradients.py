"""Calls of gradients and transposed convolutions, on arrays in any form, against PyTorch's autograd in float64."""

from __future__ import annotations

import warnings
from collections.abc import Iterator
from typing import Any, Final

import numpy as np

import tapwise
from campaign_cases import Case, Family, Refused, pick, plainly
from campaign_cases.calls import lifted, order_of
from campaign_cases.memory import FORMS, SPECIALS, data, laid, plain
from campaign_cases.problems import draw_problem, enter, simpler_problem, surroundings
from tapwise import dispatch, registry
from tapwise.baselines.torch_conv import activation
from tapwise.errors import NotApplicable
from tapwise.ops.conv.problem import ConvProblem
from tapwise.problem import Inputs
from tapwise.verify import compare

# The number of spatial axes of each function.
FUNCTIONS: Final = {"conv2d_input": 2, "conv2d_weight": 2, "conv_transpose2d": 2, "conv_transpose1d": 1}


def draw(rng: np.random.Generator, backend: str) -> Case:
    function = pick(rng, *FUNCTIONS)
    operator = "wgrad" if function == "conv2d_weight" else "dgrad"
    problem: Any = draw_problem(rng, operator, backend)
    while len(problem.spatial) != FUNCTIONS[function]:
        problem = draw_problem(rng, operator, backend)
    if function == "conv2d_input":
        problem = problem.bare()
    rows = [identifier for identifier in registry.ALGORITHMS[operator] if identifier.startswith(backend)]
    more = [int(rng.integers(0, 3)) if rng.random() < 0.3 else 0 for _ in problem.spatial]
    return {
        "function": function,
        "problem": str(problem),
        # Of a transposed convolution: output_padding beyond what the problem's sizes say.
        "more": more if "transpose" in function else [0] * len(more),
        "algorithm": pick(rng, "auto", "auto", *rows),
        "form": pick(rng, *FORMS),
        "special": pick(rng, *SPECIALS),
        "out": pick(rng, "", "", *FORMS),
        "batch": bool(rng.random() < 0.8),
        "repeat": bool(rng.random() < 0.1),
        "seed": int(rng.integers(1 << 30)),
        **surroundings(rng, backend),
    }


def run(case: Case) -> str | None:
    device, backend, function = enter(case), case["backend"], case["function"]
    problem: Any = registry.parse(case["problem"])
    behind = _output_padding(problem, case["more"])
    rng = np.random.default_rng(case["seed"])
    first, second, bias, _ = problem.inputs(lambda shape: shape)[:4]
    arrays: list[Any] = [data(rng, first, problem.x_dtype, case["special"])]
    arrays += [None if shape is None else data(rng, shape, problem.x_dtype, "normal") for shape in (second, bias)]
    if case["special"] in ("nan", "inf") and arrays[1].size and case["seed"] % 2:
        arrays[1].reshape(-1)[rng.integers(arrays[1].size)] = np.nan if case["special"] == "nan" else np.inf
    if problem.layout == "nhwc":
        arrays[0] = np.moveaxis(np.ascontiguousarray(np.moveaxis(arrays[0], 1, -1)), -1, 1)
    forms = [case["form"], pick(rng, *FORMS), pick(rng, *FORMS)]
    if any(form.startswith("torch") for form in forms):
        forms = ["torch" if not form.startswith("torch") else form for form in forms]
    users: list[Any] = [None if a is None else laid(a, form, backend) for a, form in zip(arrays, forms, strict=True)]
    result = problem if not any(case["more"]) else _of_result(problem, behind)
    problem, result = (one.replace(layout=order_of(users[0], backend)) for one in (problem, result))
    single = problem.n == 1 and not case["batch"]
    if single:
        users[0] = users[0][0]
        users[1] = users[1][0] if function == "conv2d_weight" else users[1]
    before = [None if a is None else plain(a).tobytes() for a in users]
    try:
        y = _call(result, behind, users, case, single)
        again = _call(result, behind, users, case, single) if case["repeat"] else y
    except NotApplicable as error:
        if case["algorithm"] == "auto":
            return f"raised NotApplicable of auto: {error}"
        raise Refused from None
    if [None if a is None else plain(a).tobytes() for a in users] != before:
        return "changed an input"
    if plain(y).tobytes() != plain(again).tobytes():
        return "differs when it is repeated"
    if isinstance(y, np.ndarray) != isinstance(users[0], np.ndarray):
        return f"wrong: a {type(y).__name__} of a {type(users[0]).__name__}"
    values = plain(y)[None] if single and function != "conv2d_weight" else plain(y)
    if values.shape != result.result_shape or values.dtype != result.x_dtype:
        return f"wrong: {values.dtype} {values.shape}, not {result.x_dtype} {result.result_shape}"
    if values.size == 0:
        return None
    return _judge(result, Inputs(_extended(arrays[0], result.given_shape), *arrays[1:]), values, case, device)


def _output_padding(problem: ConvProblem, more: list[int]) -> tuple[int, ...]:
    """What its sizes leave, and as much more as is allowed."""
    sizes = zip(problem.spatial, problem.padding, problem.ends, problem.stride, problem.dilation, more, strict=True)
    found = []
    for size, sides, end, step, distance, wanted in sizes:
        rest = size + sum(sides) - end
        found.append(min(rest + wanted, max(rest, max(step, distance) - 1)))
    return tuple(found)


def _of_result(problem: ConvProblem, behind: tuple[int, ...]) -> ConvProblem:
    """The convolution whose x is the result with that output_padding."""
    sizes = zip(problem.ends, problem.padding, behind, strict=True)
    return problem.replace(spatial=tuple(end - sum(sides) + more for end, sides, more in sizes))


def _extended(array: np.ndarray, shape: tuple[int, ...]) -> np.ndarray:
    """With zeros behind, up to a shape."""
    wide = np.zeros(shape, array.dtype)
    wide[tuple(map(slice, array.shape))] = array
    return wide


def _call(problem: ConvProblem, behind: tuple[int, ...], users: list[Any], case: Case, single: bool) -> Any:
    """The public function on the arrays, with `out` where the case has one."""
    function, (first, second, bias) = getattr(tapwise, case["function"]), users
    options: dict[str, Any] = {
        "stride": problem.stride, "padding": problem.padding, "dilation": problem.dilation, "groups": problem.groups,
        "math": problem.math, "algorithm": case["algorithm"],
    }  # fmt: skip
    weight = case["function"] == "conv2d_weight"
    if case["out"]:
        form = "c" if case["out"] in ("readonly", "swapped", "broadcast") else case["out"]
        shape = problem.result_shape[single and not weight :]
        out = laid(np.full(shape, np.nan, problem.x_dtype), form, case["backend"])
        if isinstance(out, np.ndarray) == isinstance(first, np.ndarray):
            options["out"] = out
    if weight:
        return function(first, problem.w_shape, second, **options)
    if case["function"] == "conv2d_input":
        return function(problem.x_shape[single:], second, first, **options)
    return function(first, second, bias, output_padding=behind, activation=problem.activation, **options)


def _judge(problem: ConvProblem, inputs: Inputs, values: np.ndarray, case: Case, device: Any) -> str | None:
    """The result against PyTorch's and our own reference, within the bound that tapwise states."""
    chosen, planar = None, problem.canonical()
    finite = [np.isfinite(a.astype(np.float64)).all() for a in (inputs.x, inputs.w)]
    if not planar.trivial:
        identifier = dispatch.choose(planar, device, case["algorithm"], prepared=False).algorithm
        chosen = registry.get(identifier, problem.operator)
        # What these do to other numbers is on their pages.
        if not all(finite) and (not chosen.exact or problem.math == "3xtf32"):
            return None
    arrays: list[Any] = [None if a is None else lifted(problem, number, a) for number, a in enumerate(inputs[:3])]
    with warnings.catch_warnings():
        warnings.simplefilter("ignore", RuntimeWarning)
        expected, bound = planar.reference(Inputs(*arrays), chosen)
        expected = expected.reshape(problem.result_shape)
        bound = bound if bound.ndim == 0 else bound.reshape(problem.result_shape)
        # An activation that makes an infinity finite makes it exact.
        bound = np.where(np.isfinite(bound), bound, 16 * problem.roundoff)
        peer = expected if planar.trivial else _peer(problem, inputs)
    if not all(finite) and chosen is not None and not chosen.keeps_infinities:
        unknown = np.isnan(values)
        values, peer = (np.where(unknown, expected, one).astype(one.dtype) for one in (values, peer))
    if not finite[1]:
        values = np.where(_beside(problem, inputs), expected, values).astype(values.dtype)
        peer = np.where(_beside(problem, inputs), expected, peer)
    verdict = compare(values, peer, bound, problem.x_dtype)
    if not verdict:
        return f"wrong against the peer: {verdict.message}"
    verdict = compare(values, expected, bound, problem.x_dtype)
    return None if verdict else f"wrong: {verdict.message}"


def _beside(problem: ConvProblem, inputs: Inputs) -> np.ndarray:
    """Elements that a NaN or an infinity of the second operand meets in zeros alone, which may be multiplied or not."""
    wild = ~np.isfinite(inputs.w.astype(np.float64))
    met = problem.bare().convolve(np.ones(inputs.x.shape), wild.astype(np.float64)) > 0
    if problem.direction == "wgrad":
        same = wild.any(axis=(0, *range(2, wild.ndim))).reshape(-1, *[1] * (wild.ndim - 1))
    else:
        grouped = wild.reshape(problem.groups, problem.group_k, problem.group_c, -1)
        same = grouped.any(axis=(1, 3)).reshape(1, problem.c, *[1] * len(problem.spatial))
    beside: np.ndarray = same & ~met
    return beside


def _peer(problem: ConvProblem, inputs: Inputs) -> np.ndarray:
    """The result by PyTorch's autograd in float64."""
    import torch
    from torch.nn import functional

    first, second, bias = (None if a is None else torch.from_numpy(a.astype(np.float64)) for a in inputs[:3])
    assert first is not None and second is not None
    backward = problem.direction == "wgrad"
    x = first if backward else torch.zeros(problem.x_shape, dtype=torch.float64, requires_grad=True)
    w = torch.zeros(problem.w_shape, dtype=torch.float64, requires_grad=True) if backward else second
    pads = [side for pair in reversed(problem.padding) for side in pair]
    convolve = functional.conv1d if len(problem.spatial) == 1 else functional.conv2d
    y = convolve(functional.pad(x, pads), w, None, problem.stride, 0, problem.dilation, problem.groups)
    (found,) = torch.autograd.grad(y, w if backward else x, second if backward else first)
    if bias is not None:
        found = found + bias.reshape(-1, *[1] * len(problem.spatial))
    if problem.activation:
        found = activation(problem.activation)(found)
    result: np.ndarray = found.numpy()
    return result


def simpler(case: Case) -> Iterator[Case]:
    for text in simpler_problem(case["problem"]):
        yield {**case, "problem": text}
    simple = {"threads": 1, "target": "host", "form": "c", "out": "", "batch": True, "repeat": False, "seed": 0}
    yield from plainly(case, {**simple, "special": "normal", "more": [0] * len(case["more"])})


FAMILY: Final = Family(draw, run, simpler, share=1.5)
