"""An algorithm of convolution by emulation, against float64."""

from __future__ import annotations

import time
from typing import Any, Final

import numpy as np

from emulated import run
from tapwise import registry
from tapwise.algorithm import Config
from tapwise.cuda.jit.compile import Source
from tapwise.cuda.jit.device import H200
from tapwise.cuda.jit.launch import Launch
from tapwise.ops.conv.cuda import winograd
from tapwise.ops.conv.cuda.depthwise.depthwise import Depthwise, taps_first
from tapwise.ops.conv.cuda.implicit_gemm_rows import ImplicitGemmRows
from tapwise.ops.conv.cuda.implicit_gemm_simt import ImplicitGemmSimt
from tapwise.ops.conv.cuda.implicit_gemm_wgrad.wgrad import ImplicitGemmWgrad
from tapwise.ops.conv.cuda.row_tiles import RowTiles
from tapwise.ops.conv.cuda.winograd import Winograd
from tapwise.ops.conv.problem import ConvProblem
from tapwise.verify import Verdict, compare

# Kernels whose outputs are not finite compute them again by the definition, and so hide what is missing.
_ONCE: Final = (
    '#define __syncthreads_and(all) (__syncthreads_and(all) || (fail("computed again"), 0))\n'
    '#define __all_sync(lanes, all) (__all_sync(lanes, all) || (fail("computed again"), 0))\n'
)


def check(
    problem: ConvProblem, algorithm: Any, config: Config, seed: int = 0, backwards: bool = False, once: bool = False
) -> Verdict:
    """One config on random data. The algorithm's `launches(problem, config, device)` are its kernels in order. `once`:
    an error where one computes outputs again by the definition."""
    inputs = problem.sample(np.random.default_rng(seed), False)
    last = problem.layout == "nhwc"

    def laid(array: np.ndarray) -> np.ndarray:
        return np.ascontiguousarray(np.moveaxis(array, 1, -1) if last else array)

    y = laid(np.full(problem.result_shape, np.nan, problem.y_dtype))
    second = laid(inputs.w) if problem.direction == "wgrad" else packed(problem, algorithm, config, inputs.w)
    arrays = {"x": laid(inputs.x), "w": second, "y": y}
    if size := algorithm.workspace_bytes(problem, config, H200):
        memory = arrays["workspace"] = np.full(size, 0xFF, np.uint8)
        if isinstance(algorithm, ImplicitGemmWgrad):
            places = algorithm.workspace_arrays(problem, config)  # type: ignore[arg-type]
            arrays |= {name: memory[begin:end] for name, (begin, end) in places.items()}
    if inputs.bias is not None:
        arrays["bias"] = np.ascontiguousarray(inputs.bias)
    if inputs.residual is not None:
        arrays["residual"] = laid(inputs.residual)
    if isinstance(algorithm, Winograd):
        _run_winograd(problem, config, arrays, backwards)  # type: ignore[arg-type]
    else:
        for launch in launches(problem, algorithm, config):
            run(refusing(launch) if once else launch, arrays, backwards)
    result = np.moveaxis(y, -1, 1) if last else y
    return compare(result, *problem.reference(inputs, algorithm), problem.y_dtype)


def launches(problem: ConvProblem, algorithm: Any, config: Any) -> list[Launch]:
    """An algorithm's kernels in order, on an H200."""
    one = isinstance(algorithm, RowTiles)
    return [algorithm.launch(problem, config, H200)] if one else algorithm.launches(problem, config, H200)


def _run_winograd(
    problem: ConvProblem, config: winograd.Config, arrays: dict[str, np.ndarray], backwards: bool
) -> None:
    for part, before, product, after in winograd.steps_of(problem, config, H200):
        memory = arrays["workspace"]
        transformed, products = memory[: part.products_at], memory[part.products_at : part.parts_at]
        inner = {"x": transformed, "w": arrays["w"], "y": products, "workspace": memory[part.parts_at :]}
        run(before, {**arrays, "transformed": transformed}, backwards)
        for launch in product:
            run(launch, inner, backwards)
        run(after, {**arrays, "products": products}, backwards)


def finite_elsewhere(problem: ConvProblem, algorithm: Any, config: Config) -> str:
    """Why a result is wrong where x and w have infinities and NaN, or "": zeros of operands must not spread them.
    Problems of one image, no bf16, of eight channels and more, filters of 2x2 and more."""
    inputs = problem.sample(np.random.default_rng(0), False)
    x, w = inputs.x.copy(), inputs.w.copy()
    x[0, 3, 4, 5], x[0, 5, 2, 2], x[0, 7, 0, 0], w[2, 0, 1, 1], w[1, 0, 0, 0] = np.inf, np.nan, -np.inf, np.nan, np.inf
    with np.errstate(all="ignore"):
        expected = problem.convolve(x, w)
    last = problem.layout == "nhwc"
    y = np.zeros((1, *problem.output, problem.k) if last else problem.y_shape, problem.y_dtype)
    laid = np.ascontiguousarray(np.moveaxis(x, 1, -1) if last else x)
    arrays = {"x": laid, "w": packed(problem, algorithm, config, w), "y": y}
    for launch in launches(problem, algorithm, config):
        run(launch, arrays)
    found, finite = (np.moveaxis(y, -1, 1) if last else y).astype(np.float64), np.isfinite(expected)
    if not np.array_equal(finite, np.isfinite(found)):
        return "other outputs are finite"
    if not np.array_equal(found[~finite], expected[~finite], equal_nan=True):
        return "infinities and NaN are others"
    return "" if np.allclose(found[finite], expected[finite], rtol=1e-2, atol=1e-1) else "numbers are wrong"


def run_once(problem: ConvProblem, algorithm: Any, config: Config) -> None:
    """One config on finite data: an error where its kernel computes outputs again by the definition."""
    inputs = problem.sample(np.random.default_rng(0), False)
    x = np.ascontiguousarray(np.moveaxis(inputs.x, 1, -1))
    y = np.zeros((problem.n, *problem.output, problem.k), x.dtype)
    (launch,) = algorithm.launches(problem, config, H200)
    run(refusing(launch), {"x": x, "w": packed(problem, algorithm, config, inputs.w), "y": y})


def refusing(launch: Launch) -> Launch:
    """A launch whose kernel fails where it computes outputs again."""
    launch.source = Source(launch.source.name, _ONCE + launch.source.text)
    return launch


def packed(problem: ConvProblem, algorithm: Any, config: Config, w: np.ndarray) -> np.ndarray:
    """The filters as the kernels want them, by the algorithm's own kernel where it has one."""
    if isinstance(algorithm, ImplicitGemmSimt):
        w = np.ascontiguousarray(w)
        launch = algorithm.pack_launch(problem, config, tuple(step // w.itemsize for step in w.strides))  # type: ignore[arg-type]
        words = dict(zip(launch.names, launch.words, strict=True))
        y = np.full((problem.groups, words["rows"], words["pitch"]), np.nan, w.dtype)
        run(launch, {"w": w, "y": y})
        return y
    if isinstance(algorithm, RowTiles):
        steps = tuple(step // w.itemsize for step in w.strides)
        launch = algorithm.pack_launch(problem, config, steps)
        words = dict(zip(launch.names, launch.words, strict=True))
        y = np.full(words["words"], -1, np.int32)
        run(launch, {"w": w, "y": y})
        return y
    if isinstance(algorithm, Winograd):
        y = np.full(winograd.packed_bytes(problem, config) // w.itemsize, np.nan, w.dtype)  # type: ignore[arg-type]
        steps = tuple(step // w.itemsize for step in w.strides)
        run(winograd.pack_launch(problem, config, H200, "", steps), {"w": w, "y": y})  # type: ignore[arg-type]
        return y
    rows = isinstance(algorithm, ImplicitGemmRows)
    first = rows or (isinstance(algorithm, Depthwise) and taps_first(problem, config))  # type: ignore[arg-type]
    return np.ascontiguousarray(w.transpose(2, 3, 0, 1) if first else w)


def verify(text: str, identifier: str, word: str = "") -> bool:
    """All configs of an algorithm for a problem, those with `word` in them; prints a line each."""
    problem, algorithm = ConvProblem.parse(text), registry.get(identifier)
    if why := algorithm.refusal(problem, H200):
        print(f"{identifier} {why}")
        return False
    passed = True
    for config in algorithm.configs(problem, H200):
        if word in str(config):
            start = time.perf_counter()
            verdict = check(problem, algorithm, config, backwards=bool(hash(config) % 2))
            passed &= verdict.verified
            print(f"{'ok' if verdict else 'WRONG'} {config}: {verdict.message} {time.perf_counter() - start:.1f} s")
    return passed
