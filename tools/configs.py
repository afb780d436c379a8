"""Times of an algorithm's configs on a GPU, verified first: what cost models are fitted to, and judged by.

    configs.py cuda.depthwise layers.txt --words "n32 f16 nhwc" --json times.json
    configs.py cuda.implicit_gemm_simt layers.txt --words "n1" --best 12 --others 12 --seconds 300

A line of the file is a problem's words, what follows # is left out; `--words` are added to each. Of every problem the
configs that the model holds best are timed, and others drawn at random, in CUDA graphs and in turns. The model's choice
is verified against float64, the others against its result. Printed is a line a problem: the best config's time, the
model's choice over it, and how far off its prediction was.
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

from tapwise import registry, verify
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
TOLERANCES = {"f32": (1e-3, 1e-3), "f64": (1e-9, 1e-9), "f16": (1e-2, 2e-2), "bf16": (5e-2, 5e-2)}


def problems(path: Path, words: str) -> Iterator[Problem]:
    for line in path.read_text().splitlines():
        if text := line.partition("#")[0].strip():
            try:
                yield registry.parse(f"{text} {words}")
            except InvalidProblem as error:
                print(f"{text}: {error}")


def some(algorithm: Any, problem: Problem, device: Device, word: str, best: int, others: int) -> list[Config]:
    """The model's choice first."""
    found = (one for one in algorithm.configs(problem, device) if word in repr(one))
    configs = sorted(found, key=lambda one: algorithm.predict_us(problem, one, device))
    rest = configs[best:]
    return configs[:best] + random.Random(str(problem)).sample(rest, min(others, len(rest)))


def runs(algorithm: Any, problem: Problem, configs: list[Config], device: Device) -> dict[str, clock.Call]:
    """A call of each config that is right, by its words; arrays are the same for all."""
    inputs, torch = problem.sample(np.random.default_rng(0), False), clock.torch()

    def there(array: np.ndarray | None) -> Any:
        if array is None:
            return None
        wide = torch.from_numpy(array.astype(np.float32)).cuda().to(getattr(torch, problem.x_dtype.name))
        last = problem.layout == "nhwc" and wide.ndim == 4
        return cuda.view(wide.contiguous(memory_format=torch.channels_last) if last else wide, "array")

    x, w, bias, residual = (there(one) for one in inputs[:4])
    y, expected = there(np.zeros(problem.y_shape)), None
    found: dict[str, clock.Call] = {}
    for config in configs:
        plan = algorithm.plan(problem, config, device)
        scratch = torch.empty(max(1, plan.workspace_bytes), dtype=torch.uint8, device="cuda")
        memory = cuda.view(scratch, "workspace") if plan.workspace_bytes else None
        packed = None if w is None else plan.pack(w)
        run = partial(plan.run, Buffers(x, packed, y, memory, bias, residual))
        y.owner.fill_(float("nan"))
        run()
        if expected is None:
            verdict = verify.check(problem, algorithm.id, config, device=device)
            right, why, expected = bool(verdict), verdict.message, y.owner.clone()
        else:
            right, why = torch.allclose(y.owner, expected, *TOLERANCES[problem.dtype]), "not as the model's choice"
        if right:
            found[str(config)] = run
        else:
            print(f"WRONG {problem} {config}: {why}", flush=True)
    return found


def main() -> None:
    parser = argparse.ArgumentParser(description=__doc__, formatter_class=argparse.RawDescriptionHelpFormatter)
    parser.add_argument("algorithm")
    parser.add_argument("file", type=Path)
    parser.add_argument("--words", default="", help="added to every problem")
    parser.add_argument("--only", default="", help="what a config's repr has: its kind, or a field")
    parser.add_argument("--best", type=int, default=8, help="configs that the model holds best")
    parser.add_argument("--others", type=int, default=8, help="configs drawn from the rest")
    parser.add_argument("--seconds", type=float, default=500.0, help="no problem is begun after so long")
    parser.add_argument("--json", type=Path, help="where times go: a list, a problem each")
    given = parser.parse_args()
    device, began, kept = gpu(), time.perf_counter(), []
    wanted = []
    for problem in problems(given.file, given.words):
        algorithm = registry.get(given.algorithm, problem.operator)
        if algorithm.refusal(problem, device) is None:
            configs = some(algorithm, problem, device, given.only, given.best, given.others)
            wanted += [(algorithm, problem, configs)] if configs else []
    with ThreadPoolExecutor(COMPILERS) as pool:
        sources = (source for one, problem, configs in wanted for c in configs for source in one.sources(problem, c))  # type: ignore[attr-defined]
        for source in dict.fromkeys(sources):
            pool.submit(compiler.cubin, source, device.architecture)
        for algorithm, problem, configs in wanted:
            if time.perf_counter() - began > given.seconds:
                print(f"stopped before {problem}")
                break
            times = clock.measure(runs(algorithm, problem, configs, device), repeats=7)
            if not times:
                continue
            rows: list[dict[str, Any]] = [
                {"config": asdict(one), "kind": type(one).__name__, "time_us": times[str(one)].time_us,
                 "spread_us": times[str(one)].spread_us, "predicted_us": algorithm.predict_us(problem, one, device)}
                for one in configs if str(one) in times
            ]  # fmt: skip
            kept.append({"problem": str(problem), "algorithm": given.algorithm, "device": device.name, "times": rows})
            best = min(rows, key=lambda row: row["time_us"])
            chosen = rows[0]
            print(
                f"{problem}: {best['time_us']:.2f} us, chosen {chosen['time_us'] / best['time_us']:.2f}, "
                f"predicted {chosen['predicted_us'] / chosen['time_us']:.2f}, roof "
                f"{problem.bytes / device.gbps / 1e3:.2f} | {best['kind']} {best['config']}",
                flush=True,
            )
            if given.json:
                given.json.write_text(json.dumps(kept))


if __name__ == "__main__":
    main()
