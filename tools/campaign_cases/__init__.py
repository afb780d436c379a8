"""What a campaign tries: each module draws cases of one kind, runs one, and says how it may be made simpler.

A case is a dict of JSON values that names all it depends on, its random data by a seed. `run` gives None where all is
right, or one line that begins with the kind of failure: "wrong", "raised", "unnamed", "changed", "differs".
"""

from __future__ import annotations

from collections.abc import Callable, Iterator
from dataclasses import dataclass
from typing import Any

import numpy as np

Case = dict[str, Any]


@dataclass(frozen=True)
class Family:
    """`draw(rng, backend)` makes a case; `run` raises Refused for one that is refused on purpose."""

    draw: Callable[[np.random.Generator, str], Case]
    run: Callable[[Case], str | None]
    simpler: Callable[[Case], Iterator[Case]]
    # Share of a campaign's time.
    share: float = 1.0
    backends: tuple[str, ...] = ("cpu", "cuda")
    # Seconds after which a case counts as a hang.
    patience: float = 60.0


class Refused(Exception):
    """The case is one that tapwise refuses by name, as it should."""


def pick(rng: np.random.Generator, *values: Any) -> Any:
    """One of the values, as a plain one."""
    return values[int(rng.integers(len(values)))]


def plainly(case: Case, simple: Case) -> Iterator[Case]:
    """The case with one value at a time replaced by the simple one that `simple` gives."""
    for name, value in simple.items():
        if case.get(name) not in (None, value):
            yield {**case, name: value}
