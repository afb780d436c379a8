"""Constants of a cost model, fitted to times of configs.

    configs.py cuda.implicit_gemm layers.txt --words "f16 nhwc" --best 24 --others 6 --json times.json
    fit.py times.json --module tapwise.ops.conv.cuda.implicit_gemm.cost --constants STEP HALO_STEP LATENCY TMA

Files are those of configs.py, of one algorithm or of several. The constants are of a module, numbers or tuples of them;
those that another module imported by name stay there as they are. They are changed at random, a few at a time, and kept
where the loss falls: what a choice among near predictions costs, the error of the logarithm near the best, and how far
constants are from where they began.

First two halves of the problems are fitted, each judged by the other: if that gains nothing, the fit has learned its
layers alone, and constants had better stay. Then all. Printed are, before and after, the choice over the best config
(mean and worst) and the error; at the end the constants.
"""

from __future__ import annotations

import argparse
import dataclasses
import importlib
import json
import math
import random
import zlib
from collections.abc import Sequence
from pathlib import Path
from types import ModuleType
from typing import Any, NamedTuple

import numpy as np

from tapwise import registry
from tapwise.algorithm import Config
from tapwise.cuda.jit.device import H200

# Configs that take longer than so many times the best are left out. Predictions count as near within such a part.
NEAR, ALIKE = 1.7, 0.02
# What counts of a choice's loss and of an error at most; weights of the error, and of a constant's change.
MOST_LOSS, MOST_ERROR, ERROR, CHANGE = 0.5, 0.5, 1.0, 0.002
# Steps of constants' logarithms, and how a constant's own step goes on where it helped or did not.
STEP, LONGER, SHORTER, LEAST, MOST = 0.1, 1.4, 0.94, 0.1, 3.0


class Timed(NamedTuple):
    """A problem's configs, each with its algorithm, and their times in microseconds."""

    problem: Any
    configs: list[tuple[Any, Config]]
    times: np.ndarray


# A constant: its name, and its place in a tuple.
Name = tuple[str, int | None]


def read(paths: Sequence[Path]) -> list[Timed]:
    found = []
    for entry in (entry for path in paths for entry in json.loads(path.read_text())):
        problem, best = registry.parse(entry["problem"]), min(row["time_us"] for row in entry["times"])
        rows = [row for row in entry["times"] if row["time_us"] <= NEAR * best]
        algorithms = [registry.get(row["algorithm"], problem.operator) for row in rows]
        made = [config_of(row["kind"], row["config"]) for row in rows]
        found.append(Timed(problem, [*zip(algorithms, made, strict=True)], np.array([row["time_us"] for row in rows])))
    return found


def config_of(kind: str, fields: dict[str, Any]) -> Config:
    """The config whose class has that name and those fields."""
    if any(isinstance(value, (dict, list)) for value in fields.values()):
        raise SystemExit(f"fit.py: '{kind}' is a config of configs: fit what it is made of")
    classes = [Config]
    for one in classes:
        classes += one.__subclasses__()
    for one in classes:
        if one.__name__ == kind and {field.name for field in dataclasses.fields(one)} == set(fields):
            return one(**fields)
    raise SystemExit(f"fit.py: no algorithm has configs '{kind}' of {', '.join(fields)}")


def predicted(one: Timed) -> np.ndarray:
    return np.array([algorithm.predict_us(one.problem, config, H200) for algorithm, config in one.configs])


def judge(problems: Sequence[Timed]) -> tuple[float, float, float, float]:
    """Loss; the choice over the best, in geometric mean and at worst; the error."""
    losses, regrets, errors = [], [], []
    for one in problems:
        behind, off = np.log(one.times / one.times.min()), np.log(predicted(one))
        near = np.exp((off.min() - off) / ALIKE)
        losses.append(np.average(np.minimum(behind, MOST_LOSS), weights=near))
        regrets.append(behind[off.argmin()])
        off, weights = off - np.log(one.times), np.exp(-3 * behind)
        mean = np.average(off, weights=weights)
        errors.append(np.average(np.minimum(abs(off - mean), MOST_ERROR) ** 2, weights=weights) + 0.3 * mean**2)
    error = float(np.mean(errors))
    return float(np.mean(losses)) + ERROR * error, math.exp(np.mean(regrets)), math.exp(max(regrets)), math.sqrt(error)


def names_of(module: ModuleType, constants: Sequence[str]) -> list[Name]:
    found: list[Name] = []
    for name in constants:
        if not hasattr(module, name):
            raise SystemExit(f"fit.py: {module.__name__} has no {name}")
        value = getattr(module, name)
        if not all(isinstance(one, float) for one in (value if isinstance(value, tuple) else (value,))):
            raise SystemExit(f"fit.py: {name} is no number with a fraction, nor a tuple of them: {value}")
        found += [(name, place) for place in range(len(value))] if isinstance(value, tuple) else [(name, None)]
    return found


def value_of(module: ModuleType, name: Name) -> float:
    value = getattr(module, name[0])
    return float(value if name[1] is None else value[name[1]])


def put(module: ModuleType, values: dict[Name, float]) -> None:
    for (name, place), value in values.items():
        whole = getattr(module, name)
        setattr(module, name, value if place is None else (*whole[:place], value, *whole[place + 1 :]))


def fit(problems: Sequence[Timed], module: ModuleType, names: Sequence[Name], tries: int, seed: int) -> None:
    """Leaves the constants that it found in the module."""
    rng, steps = random.Random(seed), dict.fromkeys(names, 1.0)
    began = {name: value_of(module, name) for name in names}
    moved = [name for name in names if began[name]]
    best, kept = judge(problems)[0], began
    for _ in range(tries if moved else 0):
        some = rng.sample(moved, min(len(moved), rng.choice((1, 1, 1, 2, 3))))
        tried = {**kept, **{name: kept[name] * math.exp(rng.gauss(0, STEP) * steps[name]) for name in some}}
        put(module, tried)
        change = sum(math.log(tried[name] / began[name]) ** 2 for name in moved)
        loss = judge(problems)[0] + CHANGE * change
        for name in some:
            steps[name] = min(MOST, steps[name] * LONGER) if loss < best else max(LEAST, steps[name] * SHORTER)
        if loss < best:
            best, kept = loss, tried
    put(module, kept)


def said(what: str, problems: Sequence[Timed]) -> str:
    _, mean, worst, error = judge(problems)
    return f"{what}: {len(problems)} problems, choice {mean:.3f}, worst {worst:.2f}, error {error:.3f}"


def main() -> None:
    parser = argparse.ArgumentParser(description=__doc__, formatter_class=argparse.RawDescriptionHelpFormatter)
    parser.add_argument("files", type=Path, nargs="+")
    parser.add_argument("--module", required=True, help="where the constants are")
    parser.add_argument("--constants", nargs="+", required=True)
    parser.add_argument("--tries", type=int, default=1000, help="for each half and for all")
    parser.add_argument("--seed", type=int, default=1)
    given = parser.parse_args()
    module, problems = importlib.import_module(given.module), read(given.files)
    names = names_of(module, given.constants)
    began = {name: value_of(module, name) for name in names}
    halves: tuple[list[Timed], list[Timed]] = ([], [])
    for one in problems:
        halves[zlib.crc32(str(one.problem).encode()) % 2].append(one)
    for number, other in enumerate(reversed(halves)):
        if other and halves[number]:
            print(said(f"half {number} before", halves[number]))
            fit(other, module, names, given.tries, given.seed)
            print(said(f"half {number}, fitted to the other", halves[number]), flush=True)
            put(module, began)
    print(said("all before", problems))
    fit(problems, module, names, given.tries, given.seed)
    print(said("all after", problems))
    for name in dict.fromkeys(name for name, _ in names):
        values = [f"{value_of(module, one):.3g}" for one in names if one[0] == name]
        print(name, "=", f"({', '.join(values)})" if len(values) > 1 else values[0])


if __name__ == "__main__":
    main()
