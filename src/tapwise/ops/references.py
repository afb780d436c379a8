"""The reference of every operator with one input and no filters: its result in float64, and what it may be off by."""

from __future__ import annotations

from typing import Any

import numpy as np

from tapwise import arrays
from tapwise.algorithm import Plan
from tapwise.arrays import DTYPES
from tapwise.errors import InvalidProblem
from tapwise.ops.filter import problem as problem_filter
from tapwise.ops.filter import reference as reference_filter
from tapwise.ops.filter.problem import FilterProblem
from tapwise.ops.patches import reference as reference_patch
from tapwise.ops.patches.problem import Col2imProblem, Im2colProblem
from tapwise.ops.pool import reference as reference_pool
from tapwise.ops.pool.problem import PoolProblem
from tapwise.ops.reduce import reference as reference_reduction
from tapwise.ops.reduce.problem import POSITIONS, ReduceProblem, SoftmaxProblem
from tapwise.problem import Problem


def expectation(problem: Problem, x: np.ndarray) -> tuple[np.ndarray, np.ndarray]:
    """(y64, bound)."""
    if isinstance(problem, FilterProblem):
        return reference_filter.apply(problem, x)
    if isinstance(problem, PoolProblem):
        return reference_pool.pool(problem, x)
    if isinstance(problem, Im2colProblem):
        return reference_patch.im2col(problem, x)
    if isinstance(problem, Col2imProblem):
        if problem.accumulate:
            raise InvalidProblem("accumulate: what the sums are added to is not part of a problem")
        return reference_patch.col2im(problem, x)
    if isinstance(problem, SoftmaxProblem):
        return reference_reduction.softmax(problem, x)
    if isinstance(problem, ReduceProblem):
        return reference_reduction.reduce(problem, x)
    raise TypeError(f"no reference for {problem.operator}")


def result_dtype(problem: Problem) -> np.dtype[np.generic]:
    """The dtype of y: int64 for positions."""
    if isinstance(problem, FilterProblem):
        return problem_filter.DTYPES[problem.to]
    if isinstance(problem, ReduceProblem) and problem.op in POSITIONS:
        return np.dtype(np.int64)
    return DTYPES[problem.dtype]


def packed(problem: Problem, plan: Plan) -> Any:
    """A filter's own weights as its plan packs them; None for other operators."""
    if not isinstance(problem, FilterProblem):
        return None
    return plan.pack(None if problem.op in ("max", "min") else problem.weights())  # type: ignore[arg-type]


def sample(problem: Problem, rng: np.random.Generator) -> np.ndarray:
    """Random data for x, dense."""
    if isinstance(problem, FilterProblem):
        return problem.sample(rng)
    x = rng.standard_normal(problem.x_shape, dtype=np.float32).astype(DTYPES[problem.dtype], copy=False)
    return arrays.dense(x, "nhwc") if problem.layout == "nhwc" else x
