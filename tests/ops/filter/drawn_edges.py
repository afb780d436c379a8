"""Filters of bytes drawn for the edges of pictures: every mode on both axes, windows off the middle, a constant."""

import numpy as np

from tapwise.ops.filter.edges import MODES
from tapwise.ops.filter.problem import FilterProblem

NUMBERS = range(2 * len(MODES))


def draw(number: int, ops: tuple[str, str], sides: int, whole: bool = False) -> tuple[FilterProblem, np.ndarray]:
    """The problem of a number, with windows of sides below `sides`, and its weights, whole numbers.

    whole: rows of two in three are of whole words, of 16 elements.
    """
    rng = np.random.default_rng(number)
    modes = "reflect", MODES[number % len(MODES)], MODES[(number + 1) % len(MODES)]
    size = 1, int(rng.integers(1, sides)), int(rng.integers(1, sides))
    before = 0, int(rng.integers(size[1])), int(rng.integers(size[2]))
    width = 16 * int(rng.integers(1, 4)) if whole and number % 3 else 41
    op, x_dtype = ops[number % 2], ("u8", "i8")[number // 2 % 2]
    y_dtype = x_dtype if op in ("max", "min") else "f32"
    problem = FilterProblem(op, (2, 37, width), size, before, 1 + number % 4, modes, 77.0, x_dtype, y_dtype)
    return problem, rng.integers(-9, 10, size[1] + size[2] if op == "separable" else size).astype(np.float64)
