"""Two versions of the code on a GPU, in turns: the time of what each of them chooses.

    git worktree add ../before HEAD~3
    turns.py ../before layers.txt --words "n32 f16 nhwc" --json times.json

A line of the file is a problem's words, as in configs.py. Each round is a process with the other version's `src`, and
one with this one's. Results are compared with none: `tapwise verify` is for that. Printed is a line a problem, its
times and the new one over the old; at the end their geometric mean.
"""

from __future__ import annotations

import argparse
import json
import os
import subprocess
import sys
from concurrent.futures import ThreadPoolExecutor
from pathlib import Path
from typing import Any

import numpy as np

import configs
from tapwise import dispatch, registry
from tapwise.algorithm import Config
from tapwise.cuda.jit import compile as compiler
from tapwise.cuda.jit.device import gpu
from tapwise.lab import gpu as clock
from tapwise.problem import Problem

HERE = Path(__file__).resolve().parents[1]


def times(path: Path, words: str) -> dict[str, float]:
    """Microseconds of what this process's version chooses, by problem."""
    device, found = gpu(), {}
    choices = [(problem, dispatch.choose(problem, device)) for problem in configs.problems(path, words)]
    chosen: list[tuple[Problem, Any, Config]] = [
        (problem, registry.get(one.algorithm, problem.operator), one.config) for problem, one in choices
    ]
    with ThreadPoolExecutor(configs.COMPILERS) as pool:
        sources = dict.fromkeys(source for problem, one, config in chosen for source in one.sources(problem, config))
        list(pool.map(lambda source: compiler.cubin(source, device.architecture), sources))
    for problem, algorithm, config in chosen:
        runs = configs.runs(problem, [(algorithm, config)], device, verified=False)
        (time,) = clock.measure(runs, repeats=9).values()
        found[str(problem)] = time.time_us
    return found


def in_process(version: Path, path: Path, words: str) -> dict[str, float]:
    """The same by a version of the code, in a process of its own."""
    paths = os.pathsep.join([str(version / "src"), str(HERE / "tools"), os.environ.get("PYTHONPATH", "")])
    command = [sys.executable, __file__, str(version), str(path), "--words", words, "--own"]
    done = subprocess.run(command, env={**os.environ, "PYTHONPATH": paths}, stdout=subprocess.PIPE, check=True)
    by_problem: dict[str, float] = json.loads(done.stdout.splitlines()[-1])
    return by_problem


def main() -> None:
    parser = argparse.ArgumentParser(description=__doc__, formatter_class=argparse.RawDescriptionHelpFormatter)
    parser.add_argument("version", type=Path, help="a folder with the other version's src")
    parser.add_argument("file", type=Path)
    parser.add_argument("--words", default="", help="added to every problem")
    parser.add_argument("--rounds", type=int, default=2)
    parser.add_argument("--json", type=Path, help="where times go: a list a problem for each version")
    parser.add_argument("--own", action="store_true", help="print this process's times alone")
    given = parser.parse_args()
    if given.own:
        print(json.dumps(times(given.file, given.words)))
        return
    kept: dict[str, dict[str, list[float]]] = {"old": {}, "new": {}}
    for _ in range(given.rounds):
        for name, version in (("old", given.version), ("new", HERE)):
            for problem, time_us in in_process(version, given.file, given.words).items():
                kept[name].setdefault(problem, []).append(time_us)
    ratios = []
    for problem, old in kept["old"].items():
        new = kept["new"][problem]
        ratios.append(float(np.exp(np.mean(np.log(new)) - np.mean(np.log(old)))))
        words = " ".join(f"{time_us:.2f}" for time_us in (*old, *new))
        print(f"{problem}: {words} us, new / old {ratios[-1]:.3f}")
    if ratios:
        print(f"{len(ratios)} problems: new / old {np.exp(np.mean(np.log(ratios))):.3f}")
    if given.json:
        given.json.write_text(json.dumps(kept, indent=1) + "\n")


if __name__ == "__main__":
    main()
