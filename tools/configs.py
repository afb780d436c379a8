"""Times of an algorithm's configs on a GPU, verified first: what cost models are fitted to, and judged by.

    configs.py cuda.depthwise layers.txt --words "n32 f16 nhwc" --json times.json
    configs.py cuda.implicit_gemm_simt layers.txt --words "n1" --best 12 --others 12 --seconds 300
    configs.py auto layers.txt --words "n1 f16 nhwc"

A line of the file is a problem's words, what follows # is left out; `--words` are added to each. Of every problem the
configs that the model holds best are timed, and others drawn at random, in CUDA graphs and in turns. The model's choice
is verified against float64, the others against its result. Printed is a line a problem: the best config's time, the
model's choice over it, and how far off its prediction was; at the end the mean and the worst of the choice over the
best. "auto": of every algorithm that may be chosen, those configs that are held to take up to four times as long as the
choice.
"""

from __future__ import annotations

import argparse
import json
import random
import time
from collections.abc import Iterator
from concurrent.futures import ThreadPoolExecutor
from dataclasses import asdict
from functools import partial
from pathlib import Path
from typing import Any

import numpy as np

from tapwise import dispatch, registry, verify
from tapwise.algorithm import Buffers, Config, Device
from tapwise.arrays import device as cuda
from tapwise.cuda.jit import compile as compiler
from tapwise.cuda.jit.device import gpu
from tapwise.errors import InvalidProblem
from tapwise.lab import gpu as clock
from tapwise.problem import Problem

# Threads that compile ahead.
COMPILERS = 14
# rtol and atol between two configs' results.
TOLERANCES = {
    "ieee": {"f32": (1e-3, 1e-3), "f64": (1e-9, 1e-9), "f16": (1e-2, 2e-2), "bf16": (5e-2, 5e-2)},
    "3xtf32": {"f32": (1e-3, 1e-3)}, "tf32": {"f32": (1e-2, 1.0)},
}  # fmt: skip


def problems(path: Path, words: str) -> Iterator[Problem]:
    for line in path.read_text().splitlines():
        if text := line.partition("#")[0].strip():
            try:
                yield registry.parse(f"{text} {words}")
            except InvalidProblem as error:
                print(f"{text}: {error}")


# An algorithm and one of its configs.
Candidate = tuple[Any, Config]


def some(problem: Problem, device: Device, given: argparse.Namespace) -> list[Candidate]:
    """The model's choice first."""
    if given.algorithm != "auto":
        algorithm = registry.get(given.algorithm, problem.operator)
        if algorithm.refusal(problem, device) is not None:
            return []
        return _some(algorithm, problem, device, given, 0)
    choice = dispatch.choose(problem, device)
    found: list[Candidate] = [(registry.get(choice.algorithm, problem.operator), choice.config)]
    for algorithm in registry.of_backend("cuda", problem.operator):
        if algorithm.refusal(problem, device) is None:
            found += _some(algorithm, problem, device, given, 4 * choice.predicted_us)
    return list(dict.fromkeys(found))


def _some(
    algorithm: Any, problem: Problem, device: Device, given: argparse.Namespace, most_us: float
) -> list[Candidate]:
    """Of one algorithm, those that may be chosen; held to take up to so long, if that is not 0."""
    configs = (one for one in algorithm.configs(problem, device) if given.only in repr(one) and one.automatic)
    held = {one: algorithm.predict_us(problem, one, device) for one in configs}
    ordered = sorted((one for one in held if not most_us or held[one] <= most_us), key=lambda one: held[one])
    rest = ordered[given.best :]
    chosen = ordered[: given.best] + random.Random(str(problem)).sample(rest, min(given.others, len(rest)))
    return [(algorithm, one) for one in chosen]


def close(y: Any, expected: Any, problem: Problem) -> bool:
    """Whether a result is as another: integers, that sums were cut to, within one."""
    if y.is_floating_point():
        return bool(clock.torch().allclose(y, expected, *TOLERANCES[problem.math][problem.dtype]))
    return bool((y.long() - expected.long()).abs().max() <= 1)


def runs(problem: Problem, candidates: list[Candidate], device: Device, verified: bool = True) -> dict[str, clock.Call]:
    """A call of each candidate that is right, or the first (not `verified`), by its words; arrays are the same for
    all."""
    inputs, torch = problem.sample(np.random.default_rng(0), False), clock.torch()

    def there(array: np.ndarray | None) -> Any:
        if array is None:
            return None
        wide = torch.from_numpy(array.astype(np.float32)).cuda().to(getattr(torch, array.dtype.name))
        last = problem.layout == "nhwc" and wide.ndim == 4
        return cuda.view(wide.contiguous(memory_format=torch.channels_last) if last else wide, "array")

    x, w, bias, residual = (there(one) for one in inputs[:4])
    y, expected = there(np.zeros(problem.result_shape, problem.y_dtype)), None
    found: dict[str, clock.Call] = {}
    for algorithm, config in candidates:
        plan = algorithm.plan(problem, config, device)
        scratch = torch.empty(max(1, plan.workspace_bytes), dtype=torch.uint8, device="cuda")
        memory = cuda.view(scratch, "workspace") if plan.workspace_bytes else None
        packed = None if w is None and problem.operator != "filter" else plan.pack(w)
        run = partial(plan.run, Buffers(x, packed, y, memory, bias, residual))
        y.owner.fill_(float("nan") if y.owner.is_floating_point() else 1)
        run()
        if expected is None and not verified:
            right, why, expected = True, "", y.owner.clone()
        elif expected is None:
            verdict = verify.check(problem, algorithm.id, config, device=device)
            right, why, expected = bool(verdict), verdict.message, y.owner.clone()
        else:
            right, why = close(y.owner, expected, problem), "not as the model's choice"
        if right:
            found[f"{algorithm.id} {config}"] = run
        else:
            print(f"WRONG {problem} {algorithm.id} {config}: {why}", flush=True)
    return found


def main() -> None:
    parser = argparse.ArgumentParser(description=__doc__, formatter_class=argparse.RawDescriptionHelpFormatter)
    parser.add_argument("algorithm", help="an id, or auto")
    parser.add_argument("file", type=Path)
    parser.add_argument("--words", default="", help="added to every problem")
    parser.add_argument("--only", default="", help="what a config's repr has: its kind, or a field")
    parser.add_argument("--best", type=int, default=8, help="configs that the model holds best")
    parser.add_argument("--others", type=int, default=8, help="configs drawn from the rest")
    parser.add_argument("--seconds", type=float, default=500.0, help="no problem is begun after so long")
    parser.add_argument("--json", type=Path, help="where times go: a list, a problem each")
    given = parser.parse_args()
    device, began, kept = gpu(), time.perf_counter(), []
    wanted = [(problem, some(problem, device, given)) for problem in problems(given.file, given.words)]
    regrets: list[float] = []
    with ThreadPoolExecutor(COMPILERS) as pool:
        sources = (source for problem, found in wanted for one, c in found for source in one.sources(problem, c))
        for source in dict.fromkeys(sources):
            pool.submit(compiler.cubin, source, device.architecture)
        for problem, candidates in wanted:
            if not candidates:
                continue
            if time.perf_counter() - began > given.seconds:
                print(f"stopped before {problem}")
                break
            times = clock.measure(runs(problem, candidates, device), repeats=7)
            rows: list[dict[str, Any]] = [
                {"algorithm": one.id, "config": asdict(config), "kind": type(config).__name__,
                 "time_us": times[f"{one.id} {config}"].time_us, "spread_us": times[f"{one.id} {config}"].spread_us,
                 "predicted_us": one.predict_us(problem, config, device)}
                for one, config in candidates if f"{one.id} {config}" in times
            ]  # fmt: skip
            if not rows:
                continue
            kept.append({"problem": str(problem), "algorithm": given.algorithm, "device": device.name, "times": rows})
            best, chosen = min(rows, key=lambda row: row["time_us"]), rows[0]
            regrets.append(chosen["time_us"] / best["time_us"])
            print(
                f"{problem}: {best['time_us']:.2f} us, chosen {regrets[-1]:.2f}, "
                f"predicted {chosen['predicted_us'] / chosen['time_us']:.2f}, roof "
                f"{problem.bytes / device.gbps / 1e3:.2f} | {best['algorithm']} {best['kind']} {best['config']}",
                flush=True,
            )
            if given.json:
                given.json.write_text(json.dumps(kept))
    if regrets:
        print(f"{len(regrets)} problems: chosen {np.exp(np.mean(np.log(regrets))):.3f}, worst {max(regrets):.2f}")


if __name__ == "__main__":
    main()
