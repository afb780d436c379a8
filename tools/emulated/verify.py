"""An algorithm of convolution by emulation, against float64."""

from __future__ import annotations

import time
from typing import Any

import numpy as np

from emulated import run
from tapwise import registry
from tapwise.algorithm import Config
from tapwise.cuda.jit.device import H200
from tapwise.ops.conv.cuda import winograd
from tapwise.ops.conv.cuda.depthwise.depthwise import Depthwise, taps_first
from tapwise.ops.conv.cuda.implicit_gemm_rows import ImplicitGemmRows
from tapwise.ops.conv.cuda.implicit_gemm_simt import ImplicitGemmSimt
from tapwise.ops.conv.cuda.winograd import Winograd
from tapwise.ops.conv.problem import ConvProblem
from tapwise.verify import Verdict, compare


def check(problem: ConvProblem, algorithm: Any, config: Config, seed: int = 0, backwards: bool = False) -> Verdict:
    """One config on random data. The algorithm's `launches(problem, config, device)` are its kernels in order."""
    inputs = problem.sample(np.random.default_rng(seed), False)
    last = problem.layout == "nhwc"

    def laid(array: np.ndarray) -> np.ndarray:
        return np.ascontiguousarray(np.moveaxis(array, 1, -1) if last else array)

    y = laid(np.full(problem.y_shape, np.nan, problem.y_dtype))
    arrays = {"x": laid(inputs.x), "w": packed(problem, algorithm, config, inputs.w), "y": y}
    if size := algorithm.workspace_bytes(problem, config, H200):
        arrays["workspace"] = np.full(size, 0xFF, np.uint8)
    if inputs.bias is not None:
        arrays["bias"] = np.ascontiguousarray(inputs.bias)
    if inputs.residual is not None:
        arrays["residual"] = laid(inputs.residual)
    if isinstance(algorithm, Winograd):
        _run_winograd(problem, config, arrays, backwards)  # type: ignore[arg-type]
    else:
        for launch in algorithm.launches(problem, config, H200):
            run(launch, arrays, backwards)
    result = np.moveaxis(y, -1, 1) if last else y
    return compare(result, *problem.reference(inputs, algorithm), problem.y_dtype)


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


def packed(problem: ConvProblem, algorithm: Any, config: Config, w: np.ndarray) -> np.ndarray:
    """The filters as the kernels want them, by the algorithm's own kernel where it has one."""
    if isinstance(algorithm, ImplicitGemmSimt):
        w = np.ascontiguousarray(w)
        launch = algorithm.pack_launch(problem, config, tuple(step // w.itemsize for step in w.strides))  # type: ignore[arg-type]
        words = dict(zip(launch.names, launch.words, strict=True))
        y = np.full((problem.groups, words["rows"], words["pitch"]), np.nan, w.dtype)
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
