"""Residue classes of a dilated convolution: outputs whose taps meet the same elements of x.

Along an axis they are p = residue + phases * i. In one class elements of x lie `dilation` apart, and outputs so many of
them as `steps` says.
"""

from __future__ import annotations

from math import gcd

from tapwise.ops.conv.problem import ConvProblem


def steps(problem: ConvProblem) -> tuple[int, int]:
    """Strides in one class along both axes."""
    (high, wide), (apart_h, apart_w) = problem.stride, problem.dilation
    return high // gcd(high, apart_h), wide // gcd(wide, apart_w)


def phases(problem: ConvProblem) -> tuple[int, int]:
    """How many classes have an output along both axes, which is how far a class's outputs lie apart."""
    (high, wide), (apart_h, apart_w), (p, q) = problem.stride, problem.dilation, problem.output
    return min(apart_h // gcd(high, apart_h), p), min(apart_w // gcd(wide, apart_w), q)
