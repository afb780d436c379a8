"""Suites: problem strings in text files, one a line, with notes behind a `#`. The package's own lie beside this
file."""

from __future__ import annotations

import re
from collections.abc import Sequence
from dataclasses import dataclass, fields, replace
from pathlib import Path

from tapwise import registry
from tapwise.errors import InvalidProblem
from tapwise.ops.filter.problem import DTYPES as PICTURE_DTYPES
from tapwise.problem import DTYPES as FLOATS
from tapwise.problem import Problem

_FOLDER = Path(__file__).parent
_NOTE = re.compile(r"(\w+)=(\S+)")

# Other words for dtypes; arithmetic that is asked for like one.
ALIASES = {
    "float32": "f32", "fp32": "f32", "float": "f32", "float64": "f64", "fp64": "f64", "double": "f64",
    "float16": "f16", "fp16": "f16", "half": "f16", "bfloat16": "bf16",
}  # fmt: skip
MATHS = ("tf32", "3xtf32")
DTYPES = tuple(dict.fromkeys((*FLOATS, *PICTURE_DTYPES)))

# The suite name of problems given as strings.
LOOSE = "problems"


@dataclass(frozen=True)
class Case:
    """A problem to measure and what is known about it.

    `suite` is the stem of its file, `category` groups rows of tables (the note `class`), `uses` says how often the
    layer occurs in the collection that it is from, `source` where it is from.
    """

    problem: Problem
    suite: str = LOOSE
    category: str = "other"
    uses: int = 1
    source: str = ""


def names() -> list[str]:
    """The suites of the package."""
    return sorted(path.stem for path in _FOLDER.glob("*.txt"))


def parse(text: str, suite: str) -> list[Case]:
    """The cases of a suite file's text. Raises InvalidProblem with the suite and line number."""
    cases = []
    for number, line in enumerate(text.splitlines(), 1):
        words, _, comment = line.partition("#")
        if not words.strip():
            continue
        notes = dict(_NOTE.findall(comment))
        uses = notes.get("uses", "1")
        try:
            if not re.fullmatch("[0-9]{1,9}", uses):
                raise InvalidProblem(f"uses={uses!r}: a whole number")
            problem = registry.parse(words)
        except InvalidProblem as error:
            raise InvalidProblem(f"{suite}, line {number}: {error}") from None
        cases.append(Case(problem, suite, notes.get("class", "other"), int(uses), notes.get("from", "")))
    return cases


def read(path: Path) -> list[Case]:
    """The cases of a suite file. Raises InvalidProblem when it cannot be read or holds no problem."""
    try:
        cases = parse(path.read_text(encoding="utf-8"), path.stem)
    except (OSError, UnicodeDecodeError) as error:
        raise InvalidProblem(f"suite file {str(path)!r}: {error}") from None
    if not cases:
        raise InvalidProblem(f"suite file {str(path)!r}: no problem in it")
    return cases


def load(target: str) -> list[Case]:
    """The cases that a target names: a suite of the package, a suite file, or a problem string."""
    if target in names():
        return read(_FOLDER / f"{target}.txt")
    if Path(target).is_file():
        return read(Path(target))
    if len(target.split()) > 1:
        return [Case(registry.parse(target))]
    raise InvalidProblem(
        f"{target!r} is neither a suite ({', '.join(names())}), nor a file, nor a problem such as "
        "'c64 h56 w56 k64 r3 s3 pad1'"
    )


def _changed(problem: Problem, changes: dict[str, object]) -> Problem:
    """The problem with changes made to it. Raises InvalidProblem for what its operator has not."""
    if "direction" in changes:
        problem = problem.bare()
    has = {field.name for field in fields(problem)}  # type: ignore[arg-type]
    wanted = {name: value for name, value in changes.items() if name in has or (name, value) != ("math", "ieee")}
    words = {"n": "batch", "math": "dtype"}
    for name, value in wanted.items():
        if name not in has:
            said = f"{words.get(name, name)}={value!r}"
            raise InvalidProblem(f"{said}: problems of {problem.operator} have no such choice")
    return problem.replace(**wanted)


def select(
    targets: Sequence[str],
    *,
    batch: int | None = None,
    dtype: str | None = None,
    layout: str | None = None,
    direction: str | None = None,
    categories: Sequence[str] = (),
) -> list[Case]:
    """The cases of all targets, in order, each once, with changes made to every problem.

    `dtype` may also be "tf32" or "3xtf32". `direction`: gradients are computed without what is fused behind them.
    Raises InvalidProblem for a bad target or change, and for categories that select nothing.
    """
    changes: dict[str, object] = {}
    if batch is not None:
        changes["n"] = batch
    if dtype is not None:
        dtype = ALIASES.get(dtype, dtype)
        if dtype not in (*DTYPES, *MATHS):
            raise InvalidProblem(f"dtype={dtype!r}: one of {', '.join((*DTYPES, *MATHS))}")
        changes |= {"dtype": "f32", "math": dtype} if "tf32" in dtype else {"dtype": dtype, "math": "ieee"}
    if layout is not None:
        changes["layout"] = layout
    if direction is not None:
        changes["direction"] = direction
    cases: dict[tuple[str, Problem], Case] = {}
    for target in targets:
        for case in load(target):
            problem = _changed(case.problem, changes)
            cases.setdefault((case.suite, problem), replace(case, problem=problem))
    found = sorted({case.category for case in cases.values()})
    for category in categories:
        if category not in found:
            raise InvalidProblem(f"class={category!r}: one of {', '.join(found)}")
    return [case for case in cases.values() if not categories or case.category in categories]
