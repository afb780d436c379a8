"""Squeeze-and-excitation in float64, straight from the definition."""

from __future__ import annotations

from typing import NamedTuple

import numpy as np

from tapwise.ops.conv.reference import activate


class Steps(NamedTuple):
    """y (n, c, h, w), and what it comes from: means (n, c), squeezed (n, m)."""

    y: np.ndarray
    means: np.ndarray
    squeezed: np.ndarray


def squeeze_excitation(x: np.ndarray, w: np.ndarray, bias: np.ndarray, activation: str, gate: str) -> Steps:
    """x (n, c, h, w), w (2, m, c), bias (m + c,)."""
    x, (reduce, expand), bias = (one.astype(np.float64) for one in (x, w, bias))
    means = x.mean(axis=(2, 3))
    squeezed = activate(activation, means @ reduce.T + bias[: len(reduce)])
    gates = activate(gate, squeezed @ expand + bias[len(reduce) :])
    return Steps(x * gates[:, :, None, None], means, squeezed)
