"""The gradient before an activation, in float64."""

from __future__ import annotations

import numpy as np

from tapwise.activation import named_activation
from tapwise.ops.batch_norm.reference import derivative


def slope(activation: str | None, w: np.ndarray) -> np.ndarray:
    """The derivative from what tanh and sigmoid gave, and from what others were given."""
    name, _ = named_activation(activation)
    if name == "tanh":
        return np.asarray(1 - w * w)
    return np.asarray(w * (1 - w)) if name == "sigmoid" else derivative(activation, w)


def before(dy: np.ndarray, w: np.ndarray | None, activation: str | None) -> np.ndarray:
    """dy, or dy times the derivative; 0 where that is 0."""
    dy = dy.astype(np.float64)
    if w is None:
        return dy
    slopes = slope(activation, w.astype(np.float64))
    return np.where(slopes == 0, 0.0, dy * slopes)
