"""The names of activations, and a word's name and slope."""

from __future__ import annotations

from typing import Final

ACTIVATIONS: Final = (
    "relu", "relu6", "silu", "gelu", "sigmoid", "tanh", "hardswish", "hardsigmoid", "leaky_relu", "gelu_tanh",
)  # fmt: skip
# The activation with a parameter, and what this is where none is given.
LEAKY_RELU: Final = "leaky_relu"
LEAKY_SLOPE: Final = 0.01


def named_activation(word: str | None) -> tuple[str | None, float]:
    """An activation's name, and its slope (of a leaky_relu; else 0)."""
    if word is None or not word.startswith(LEAKY_RELU):
        return word, 0.0
    return LEAKY_RELU, float(word[len(LEAKY_RELU) :] or LEAKY_SLOPE)
