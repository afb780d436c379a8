"""Block reductions without a GPU: their geometry."""

from __future__ import annotations

import numpy as np
import pytest

from tapwise import registry
from tapwise.cuda.jit.device import H200


@pytest.mark.parametrize(
    "text",
    [
        "reduce sum 7x1000x5 axis1",
        "reduce sum 300000",
        "softmax 9x41",
        "softmax 3x70000",
        "reduce sum 3x600x12 axis1",
        "reduce mean 2x9000x40 axis1 f16",
    ],
)
def test_every_element_is_reduced_once(text: str) -> None:
    """What each thread goes through, from the geometry alone: every element of every run once, in one part."""
    problem = registry.parse(text)
    algorithm = registry.get("cuda.block_reduction", problem.operator)
    outer, length, inner = problem.collapsed  # type: ignore[attr-defined]
    for config in algorithm.configs(problem, H200):  # type: ignore[arg-type]
        first, *_ = algorithm.launches(problem, config)  # type: ignore[attr-defined]
        assert first.block[0] * config.neighbours == config.runs * config.down  # type: ignore[attr-defined]
        assert 32 <= first.block[0] <= 512
        parts, runs = config.parts, config.runs  # type: ignore[attr-defined]
        vector = config.vector  # type: ignore[attr-defined]
        share = -(-length // (parts * vector)) * vector
        count = np.zeros((outer * inner, length), int)
        for block in range(first.grid[0]):
            columns = slice(block // parts * runs, (block // parts + 1) * runs)
            count[columns, block % parts * share : (block % parts + 1) * share] += 1
        assert (count == 1).all(), config
        words = dict(zip(first.names, first.words, strict=True))
        assert (words["outer"], words["length"], words["inner"], words["parts"]) == (outer, length, inner, parts)
