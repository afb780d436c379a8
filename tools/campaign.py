"""Random and hostile calls, for as long as is wanted: nothing may be wrong, crash, hang, or fail without a clear error.

    campaign.py --minutes 20                     every family, on the CPU, in as many processes as there are cores
    campaign.py --minutes 20 --device cuda       the same on a GPU
    campaign.py --only filters --seed 7          one family; a seed repeats a campaign
    campaign.py --case '{"family": "calls", …}'  one case again, as a failure prints it

Cases are drawn from a seed, run in child processes, so that a crash or a hang is a finding like any other, and made as
simple as they can be before they are printed. Exit status 1 where a case failed.
"""

from __future__ import annotations

import argparse
import json
import os
import re
import select
import subprocess
import sys
import threading
import time
import traceback
import warnings
from collections import Counter
from collections.abc import Callable
from pathlib import Path
from typing import Any, Final

import numpy as np

from campaign_cases import Case, Family, Refused, arguments, calls, faults, filters, gradients, problems

FAMILIES: Final[dict[str, Family]] = {
    "problems": problems.FAMILY,
    "calls": calls.FAMILY,
    "gradients": gradients.FAMILY,
    "filters": filters.FAMILY,
    "arguments": arguments.FAMILY,
    "faults": faults.FAMILY,
}
# Threading layers that a process of the CPU may be given.
_LAYERS: Final = ("", "", "omp", "workqueue", "tbb")
# A leg is one process's run of one family; a new process after it sees other surroundings.
_LEG_SECONDS: Final = 25.0
_SHRINK_SECONDS: Final = 20.0
_RECORD: Final = Path(__file__).parents[1] / "docs" / "reliability.md"


def outcome(case: Case) -> tuple[str, str]:
    """("passed" | "refused" | "failed", why)."""
    try:
        with warnings.catch_warnings():
            warnings.simplefilter("ignore")
            text = FAMILIES[case["family"]].run(case)
    except Refused:
        return "refused", ""
    except Exception as error:
        frame = traceback.extract_tb(error.__traceback__)[-1]
        place = f"{Path(frame.filename).name}:{frame.lineno}"
        return "failed", _line(f"raised {type(error).__name__} at {place}: {error}")
    return ("failed", _line(text)) if text else ("passed", "")


def _line(text: str) -> str:
    """One line of at most 300 characters."""
    text = " ".join(text.split())
    return text if len(text) <= 300 else f"{text[:300]}…"


def kind(text: str) -> str:
    """What failures have in common: their first words."""
    return " ".join(re.sub(r"[^A-Za-z_ ]+", " ", text).split()[:3])


def shrunk(case: Case, text: str, again: Callable[[Case], tuple[str, str]], seconds: float) -> tuple[Case, str]:
    """The simplest case found that fails in the same way."""
    end, wanted = time.monotonic() + seconds, kind(text)
    found = True
    while found:
        found = False
        for simple in FAMILIES[case["family"]].simpler(case):
            if time.monotonic() > end:
                return case, text
            status, said = again(simple)
            if status == "failed" and kind(said) == wanted:
                case, text, found = simple, said, True
                break
    return case, text


def drawn(family: str, backend: str, seed: int, leg: int, number: int) -> Case:
    rng = np.random.default_rng([seed, leg, number])
    return {"family": family, **FAMILIES[family].draw(rng, backend)}


def worker(family: str, backend: str, seed: int, leg: int, first: int, seconds: float, pipe: int) -> None:
    """Cases one after the other; what is begun and what came of it go through the pipe, a line each."""
    end, number = time.monotonic() + seconds, first
    with os.fdopen(pipe, "w", buffering=1) as out:
        while time.monotonic() < end:
            case = drawn(family, backend, seed, leg, number)
            out.write(json.dumps(["begun", number, case]) + "\n")
            status, text = outcome(case)
            if status == "failed":
                case, text = shrunk(case, text, outcome, _SHRINK_SECONDS if family != "faults" else 0.0)
            what = case.get("algorithm") or case.get("name") or case.get("function") or case.get("fault") or ""
            out.write(json.dumps([status, text, case if status == "failed" else what]) + "\n")
            number += 1


class Campaign:
    """Counts and failures of all processes."""

    def __init__(self, options: argparse.Namespace) -> None:
        self.options = options
        self.counts: Counter[tuple[str, str]] = Counter()
        self.algorithms: Counter[str] = Counter()
        self.failures: dict[tuple[str, str, str], tuple[str, Case]] = {}
        self.repeats: Counter[tuple[str, str, str]] = Counter()
        self._lock, self._leg = threading.Lock(), 0
        self._end = time.monotonic() + 60 * options.minutes
        self._spent: Counter[str] = Counter()

    def drive(self) -> None:
        """Legs until the time is over: the next is of the family that has had the least of its share."""
        while (left := self._end - time.monotonic()) > 1.0:
            with self._lock:
                names = [name for name in self.options.only if self.options.device in FAMILIES[name].backends]
                family = min(names, key=lambda name: self._spent[name] / FAMILIES[name].share)
                number, self._leg = self._leg, self._leg + 1
                seconds = min(_LEG_SECONDS, left, max(3.0, 6 * self.options.minutes))
                self._spent[family] += int(1000 * seconds)
            self._run_leg(family, number, time.monotonic() + seconds)

    def _run_leg(self, family: str, leg: int, end: float) -> None:
        first = 0
        while (left := end - time.monotonic()) > 0.5:
            reader, pipe = os.pipe()
            words = ["--worker", family, str(leg), str(first), str(left), str(pipe)]
            child = self._start(words, leg, pipe)
            os.close(pipe)
            with os.fdopen(reader, "rb", buffering=0) as lines:
                begun, first = self._listen(family, child, lines)
            if begun is None:
                break
            status = "hang" if child.returncode is None else f"crash: ended with {child.returncode}"
            child.kill()
            child.wait()
            self._add(family, "failed", status, begun)

    def _start(self, words: list[str], leg: int, pipe: int) -> subprocess.Popen[bytes]:
        environment = {**os.environ, "OMP_WAIT_POLICY": "passive"}
        layer = _LAYERS[leg % len(_LAYERS)]
        if layer and self.options.device == "cpu":
            environment["NUMBA_THREADING_LAYER"] = layer
        own = ["--device", self.options.device, "--seed", str(self.options.seed)]
        words = [sys.executable, __file__, *own, *words]
        quiet = subprocess.DEVNULL
        return subprocess.Popen(words, env=environment, pass_fds=(pipe,), stdout=quiet, stderr=quiet)

    def _listen(self, family: str, child: subprocess.Popen[bytes], lines: Any) -> tuple[Case | None, int]:
        """(the case that a process did not survive or end in time, or None; the number of the next)."""
        rest, begun, number = b"", None, -1
        patience = FAMILIES[family].patience + _SHRINK_SECONDS
        while True:
            ready, _, _ = select.select([lines], [], [], patience)
            text = lines.read(1 << 16) if ready else b""
            if not ready:
                return begun or {"family": family}, number + 1
            if not text:
                child.wait()
                return begun, number + 1
            *whole, rest = (rest + text).split(b"\n")
            for line in whole:
                what, one, case = json.loads(line)
                if what == "begun":
                    begun, number = case, one
                    continue
                begun = None
                self._add(family, what, one, case)

    def _add(self, family: str, status: str, text: str, case: Any) -> None:
        with self._lock:
            self.counts[family, status] += 1
            if status != "failed":
                self.algorithms[f"{family} {case}"] += status == "passed"
                return
            what = next((str(case[name]) for name in ("algorithm", "name", "fault", "function") if name in case), "")
            key = (family, f"{what} {case.get('argument', '')}", kind(text))
            self.repeats[key] += 1
            if key not in self.failures:
                self.failures[key] = (text, case)
                print(f"{text}\n    tools/campaign.py --case '{json.dumps(case)}'", flush=True)

    def summary(self) -> str:
        """A table of Markdown."""
        words = ["| family | passed | refused by name | failed |", "| --- | --- | --- | --- |"]
        for name in FAMILIES:
            row = [self.counts[name, status] for status in ("passed", "refused", "failed")]
            if any(row):
                words.append("| " + " | ".join([name, *(f"{count:,}" for count in row)]) + " |")
        return "\n".join(words)


def main() -> int:
    """0 where no case failed."""
    parser = argparse.ArgumentParser(description=__doc__, formatter_class=argparse.RawDescriptionHelpFormatter)
    parser.add_argument("--minutes", type=float, default=1.0)
    parser.add_argument("--seed", type=int, default=int(time.time()) % 100_000)
    parser.add_argument("--device", choices=("cpu", "cuda"), default="cpu")
    parser.add_argument("--only", nargs="+", choices=tuple(FAMILIES), default=list(FAMILIES))
    parser.add_argument("--jobs", type=int, default=len(os.sched_getaffinity(0)))
    parser.add_argument("--case", help="run one case, as JSON")
    parser.add_argument("--record", action="store_true", help=f"write the counts into {_RECORD.name}")
    parser.add_argument("--more", action="store_true", help="with --record: add to the counts that are there")
    parser.add_argument("--worker", nargs=5, help=argparse.SUPPRESS)
    options = parser.parse_args()
    if options.worker:
        family, leg, first, seconds, pipe = options.worker
        worker(family, options.device, options.seed, int(leg), int(first), float(seconds), int(pipe))
        return 0
    if options.case:
        status, text = outcome(json.loads(options.case))
        print(status, text)
        return int(status == "failed")
    print(f"seed {options.seed}, {options.minutes:g} minutes, {options.jobs} processes, {options.device}", flush=True)
    campaign = Campaign(options)
    team = [threading.Thread(target=campaign.drive) for _ in range(options.jobs)]
    for thread in team:
        thread.start()
    for thread in team:
        thread.join()
    print(campaign.summary())
    for key, count in campaign.repeats.items():
        print(f"{count} x {' '.join(key)}")
    if options.record:
        record(campaign, options)
    return int(bool(campaign.failures))


def record(campaign: Campaign, options: argparse.Namespace) -> None:
    """The counts in place of those before, of the same device; with --more added to them."""
    text = _RECORD.read_text(encoding="utf-8")
    begin, close = f"<!-- campaign:{options.device} -->\n", "<!-- /campaign -->"
    head, rest = text.split(begin)
    old, _, tail = rest.partition(close)
    seeds, minutes = str(options.seed), options.minutes
    said = re.search(r"seed (.*), ([0-9.]+) minutes", old)
    if options.more and said is not None:
        seeds, minutes = f"{said[1]} and {seeds}", minutes + float(said[2])
        for name, *counts in re.findall(r"^\| (\w+) \| ([0-9,]+) \| ([0-9,]+) \| ([0-9,]+) \|$", old, re.MULTILINE):
            for status, count in zip(("passed", "refused", "failed"), counts, strict=True):
                campaign.counts[name, status] += int(count.replace(",", ""))
    words = f"{time.strftime('%Y-%m-%d')}, seed {seeds}, {minutes:g} minutes, {options.jobs} processes:\n\n"
    _RECORD.write_text(f"{head}{begin}{words}{campaign.summary()}\n{close}{tail}", encoding="utf-8")


if __name__ == "__main__":
    sys.exit(main())
