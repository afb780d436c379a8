"""Calls as users make them: every memory order and special value, against PyTorch and NumPy in float64."""

from __future__ import annotations

import pickle
import warnings
from collections.abc import Iterator
from typing import Any, Final

import numpy as np

import tapwise
from campaign_cases import Case, Family, Refused, pick, plainly
from campaign_cases.memory import FORMS, SPECIALS, data, laid, plain
from campaign_cases.problems import OPERATORS, draw_problem, enter, simpler_problem, surroundings
from tapwise import arrays as tapwise_arrays
from tapwise import dispatch, registry
from tapwise.baselines.torch_conv import activation
from tapwise.errors import NotApplicable
from tapwise.problem import Inputs
from tapwise.verify import compare


def draw(rng: np.random.Generator, backend: str) -> Case:
    operator = pick(rng, *(one for one in OPERATORS if not one.endswith(("dgrad", "wgrad"))))
    rows = [identifier for identifier in registry.ALGORITHMS[operator] if identifier.startswith(backend)]
    return {
        "problem": str(draw_problem(rng, operator, backend)),
        "algorithm": pick(rng, "auto", "auto", *rows),
        "form": pick(rng, *FORMS),
        "special": pick(rng, *SPECIALS),
        "out": pick(rng, "", "", *FORMS),
        "prepared": pick(rng, "", "", "", "plain", "shape", "other batch", "pickled") if operator == "conv" else "",
        "repeat": bool(rng.random() < 0.1),
        "seed": int(rng.integers(1 << 30)),
        **surroundings(rng, backend),
    }


def run(case: Case) -> str | None:
    device = enter(case)
    problem: Any = registry.parse(case["problem"])
    backend, special = case["backend"], case["special"]
    if problem.operator == "reduce" and problem.op in ("prod", "norm2", "sumsquare", "logsumexp") and special != "nan":
        special = "normal"  # what overflows in between is described on the page, not promised
    rng = np.random.default_rng(case["seed"])
    given = problem.inputs(lambda shape: shape)
    arrays: list[Any] = [None if shape is None else data(rng, shape, problem.x_dtype, "normal") for shape in given[:4]]
    arrays[0] = data(rng, problem.x_shape, problem.x_dtype, special)
    filters = (
        arrays[1] is not None and arrays[1].size and not (problem.operator == "conv" and any(map(any, problem.padding)))
    )
    if special == "nan" and filters and case["seed"] % 2:
        # Without padding, which may be multiplied or not.
        arrays[1].reshape(-1)[rng.integers(arrays[1].size)] = np.nan
    if problem.layout == "nhwc":
        arrays[0] = np.moveaxis(np.ascontiguousarray(np.moveaxis(arrays[0], 1, -1)), -1, 1)
    forms = [case["form"], *(pick(rng, *FORMS) for _ in range(3))]
    if any(form.startswith("torch") for form in forms):
        forms = ["torch" if not form.startswith("torch") else form for form in forms]
    users = [None if a is None else laid(a, form, backend) for a, form in zip(arrays, forms, strict=True)]
    before = [None if a is None else plain(a).tobytes() for a in users]
    try:
        y = _call(problem, users, case)
        again = _call(problem, users, case) if case["repeat"] else y
    except NotApplicable as error:
        if case["algorithm"] == "auto" and backend == "cpu":
            return f"raised NotApplicable of auto: {error}"
        raise Refused from None
    if [None if a is None else plain(a).tobytes() for a in users] != before:
        return "changed an input"
    if type(y) is not type(again) or any(plain(a).tobytes() != plain(b).tobytes() for a, b in _pairs(y, again)):
        return "differs when it is repeated"
    if problem.operator == "conv" and not case["prepared"]:
        problem = problem.replace(layout=order_of(users[0], backend))
    return _judge(problem, Inputs(*arrays[:4]), y, case, device)


def order_of(x: Any, backend: str) -> str:
    """The memory order that a call on the array has: a form may be dense in the other."""
    index = 0 if backend == "cuda" else None
    return str(tapwise_arrays.layout_of(tapwise_arrays.anywhere(x, "x", index)))


def _pairs(a: Any, b: Any) -> Iterator[tuple[Any, Any]]:
    return zip(a, b, strict=True) if isinstance(a, tuple) else iter([(a, b)])


def _call(problem: Any, users: list[Any], case: Case) -> Any:
    """The public function on the arrays, with `out` where the case has one."""
    x, w, bias, residual = users
    options: dict[str, Any] = {"algorithm": case["algorithm"]}
    out = None
    if case["out"] and problem.operator != "reduce" and not getattr(problem, "indices", False):
        form = "c" if case["out"] in ("readonly", "swapped", "broadcast") else case["out"]
        out = laid(np.full(problem.y_shape, np.nan, problem.y_dtype), form, case["backend"])
        if case["backend"] == "cpu" and isinstance(out, np.ndarray) != isinstance(x, np.ndarray):
            out = None
    if out is not None:
        options["out"] = out
    if problem.operator in ("softmax", "reduce"):
        axes = problem.axes if len(problem.axes) > 1 else problem.axes[0]
        if problem.operator == "reduce":
            return tapwise.reduce(x, problem.op, axes, problem.keepdims, **options)
        return (tapwise.log_softmax if problem.log else tapwise.softmax)(x, problem.axes[0], **options)
    if problem.operator == "batch_norm":
        return tapwise.batch_norm_stats(x, **options)
    if problem.operator == "squeeze_excitation":
        return tapwise.squeeze_excitation(x, w, bias, problem.activation, problem.gate, **options)
    steps = {"stride": problem.stride, "padding": problem.padding, "dilation": problem.dilation}
    if problem.operator == "conv" and case["prepared"]:
        return _prepared(problem, w, bias, case)(x, residual, options.get("out"))
    one = len(problem.spatial) == 1
    if problem.operator == "conv":
        options |= {"groups": problem.groups, "activation": problem.activation, "residual": residual}
        return (tapwise.conv1d if one else tapwise.conv2d)(x, w, bias, **steps, **options, math=problem.math)
    if problem.operator == "im2col":
        return tapwise.im2col(x, problem.kernel, **steps, **options)
    if problem.operator == "col2im":
        return tapwise.col2im(x, problem.spatial, problem.kernel, **steps, **options)
    if problem.op == "max":
        options |= {"ceil_mode": problem.ceil_mode, "return_indices": problem.indices}
        return (tapwise.max_pool1d if one else tapwise.max_pool2d)(x, problem.kernel, **steps, **options)
    options |= {"ceil_mode": problem.ceil_mode, "count_include_pad": problem.count_include_pad}
    options |= {"divisor_override": problem.divisor}
    return (tapwise.avg_pool1d if one else tapwise.avg_pool2d)(x, problem.kernel, **steps, **options)


def _prepared(problem: Any, w: Any, bias: Any, case: Case) -> Any:
    way, algorithm = case["prepared"], case["algorithm"]
    if way == "shape":
        steps = {"stride": problem.stride, "padding": problem.padding, "dilation": problem.dilation}
        steps |= {"groups": problem.groups, "activation": problem.activation, "math": problem.math}
        steps |= {"residual": problem.residual, "layout": problem.layout}
        return tapwise.prepare(problem.x_shape, w, bias, **steps, algorithm=algorithm)
    asked = problem.replace(n=problem.n + 1) if way == "other batch" else problem
    prepared = tapwise.prepare(asked, w, bias, algorithm=algorithm)
    return pickle.loads(pickle.dumps(prepared)) if way == "pickled" else prepared


def _judge(problem: Any, inputs: Inputs, y: Any, case: Case, device: Any) -> str | None:
    """The result against an independent one where there is one, within the bound that tapwise states."""
    values, places = (y[0], y[1]) if isinstance(y, tuple) else (y, None)
    if problem.empty:
        same = plain(values).shape == problem.y_shape and plain(values).dtype == problem.y_dtype
        return None if same else f"wrong: {plain(values).dtype} {plain(values).shape} of no element"
    chosen: list[Any] = [None]
    if problem.operator == "conv" and not problem.canonical().trivial:
        planar, more = problem.canonical(), problem.replace(n=problem.n + 1).canonical()
        # A prepared layer may be of another algorithm than a plain call, also where it was prepared for another batch.
        way = case["prepared"]
        asked = (planar, more) if way == "other batch" else (planar,)
        choices = [dispatch.choose(one, device, case["algorithm"], prepared=way != "").algorithm for one in asked]
        chosen = [registry.get(identifier) for identifier in dict.fromkeys(choices)]
        finite = all(np.isfinite(a.astype(np.float64)).all() for a in (inputs.x, inputs.w))
        if not all(one.exact and one.keeps_infinities for one in chosen) and not finite:
            return None  # Winograd spreads what is not finite over a tile, others to pixels beside: their pages say so
        if problem.math == "3xtf32" and not finite:
            return None  # infinity less its high part is NaN: its page says so
    arrays: list[Any] = [None if a is None else lifted(problem, number, a) for number, a in enumerate(inputs[:4])]
    given = Inputs(*arrays)
    with warnings.catch_warnings():
        warnings.simplefilter("ignore", RuntimeWarning)
        references = [problem.canonical().reference(given, one) for one in chosen]
        expected = np.reshape(references[0][0], problem.y_shape)
        bound = _shaped(np.maximum.reduce([one[1] for one in references]), problem.y_shape)
        # An activation that makes an infinity finite makes it exact.
        bound = np.where(np.isfinite(bound), bound, 16 * problem.roundoff)
        independent = _peer(problem, inputs)
    if independent is not None:
        verdict = compare(plain(values), independent[0], bound, problem.y_dtype)
        if not verdict:
            return f"wrong against the peer: {verdict.message}"
        if places is not None:
            # PyTorch gives a position outside of the plane where a window sees nothing.
            apart = (plain(places) != independent[1]) & ~np.isneginf(plain(values).astype(np.float64))
            if apart.any():
                return f"wrong index at {np.argwhere(apart)[0].tolist()}"
    verdict = compare(plain(values), expected, bound, problem.y_dtype)
    return None if verdict else f"wrong: {verdict.message}"


def _shaped(bound: np.ndarray, shape: tuple[int, ...]) -> np.ndarray:
    return bound if bound.ndim == 0 else np.reshape(bound, shape)


def lifted(problem: Any, number: int, array: np.ndarray) -> np.ndarray:
    """An operand in the shape that the canonical problem has."""
    shapes = problem.canonical().inputs(lambda shape: shape) if number != 2 else None
    return array if shapes is None or shapes[number] is None else array.reshape(shapes[number])


def _peer(problem: Any, inputs: Inputs) -> tuple[np.ndarray, Any] | None:
    """(y, indices) by PyTorch in float64; None where it has no such operator."""
    import torch
    from torch.nn import functional

    if problem.empty or problem.trivial:
        return None
    x, w, bias, residual = (None if a is None else torch.from_numpy(a.astype(np.float64)) for a in inputs[:4])
    assert x is not None
    if problem.operator in ("softmax", "reduce"):
        if problem.operator == "reduce":
            return _numpy_reduction(problem, inputs.x)
        return (functional.log_softmax if problem.log else functional.softmax)(x, problem.axes[0]).numpy(), None
    if problem.operator == "batch_norm":
        # Both from var_mean, an infinity would leave no mean.
        return torch.stack((x.mean((0, 2, 3)), x.var((0, 2, 3), correction=0))).numpy(), None
    if problem.operator == "squeeze_excitation":
        assert w is not None and bias is not None
        squeezed = activation(problem.activation)(x.mean((2, 3)) @ w[0].T + bias[: problem.m])
        gates = activation(problem.gate)(squeezed @ w[1] + bias[problem.m :])
        return (x * gates[:, :, None, None]).numpy(), None
    axes = len(problem.spatial)
    pads = [side for pair in reversed(problem.padding) for side in pair]
    if problem.operator == "conv":
        convolve = functional.conv1d if axes == 1 else functional.conv2d
        y = convolve(functional.pad(x, pads), w, None, problem.stride, 0, problem.dilation, problem.groups)
        y = y if bias is None else y + bias.reshape(-1, *[1] * axes)
        y = y if residual is None else y + residual
        if problem.activation:
            y = activation(problem.activation)(y)
        return y.numpy(), None
    if any(a != b for a, b in problem.padding):
        return None
    sides = [a for a, _ in problem.padding]
    rest: tuple[Any, ...]
    if problem.operator in ("im2col", "col2im"):
        if axes != 2:
            return None
        rest = problem.dilation, sides, problem.stride
        if problem.operator == "im2col":
            return functional.unfold(x, problem.kernel, *rest).numpy(), None
        return functional.fold(x, problem.spatial, problem.kernel, *rest).numpy(), None
    if any(a > r // 2 for a, r in zip(sides, problem.kernel, strict=True)):
        return None
    if problem.op == "max":
        largest = functional.max_pool1d if axes == 1 else functional.max_pool2d
        rest = problem.stride, sides, problem.dilation, problem.ceil_mode, problem.indices
        y = largest(x, problem.kernel, *rest)
        return (y[0].numpy(), y[1].numpy()) if problem.indices else (y.numpy(), None)
    if axes == 1 or set(problem.dilation) != {1}:
        return None
    rest = problem.stride, sides, problem.ceil_mode, problem.count_include_pad, problem.divisor
    return functional.avg_pool2d(x, problem.kernel, *rest).numpy(), None


def _numpy_reduction(problem: Any, x: np.ndarray) -> tuple[np.ndarray, Any] | None:
    if problem.op not in ("sum", "mean", "max", "min", "prod", "argmax", "argmin"):
        return None
    axis: Any = problem.axes if len(problem.axes) > 1 else problem.axes[0]
    if problem.op in ("argmax", "argmin") and len(problem.axes) > 1:
        axis = None
    y = getattr(np, problem.op)(x.astype(np.float64), axis=axis, keepdims=problem.keepdims)
    return np.asarray(y), None


def simpler(case: Case) -> Iterator[Case]:
    for text in simpler_problem(case["problem"]):
        yield {**case, "problem": text}
    simple = {"threads": 1, "target": "host", "form": "c", "out": "", "prepared": "", "repeat": False, "seed": 0}
    yield from plainly(case, {**simple, "special": "normal"})


FAMILY: Final = Family(draw, run, simpler, share=2.0)
