"""tapwise: convolution operators with several algorithms each, verified, measured and chosen for you.

Importing this package imports neither numba, torch nor any kernel; names are resolved on first use.
"""

from __future__ import annotations

from typing import TYPE_CHECKING, Any

if TYPE_CHECKING:
    from tapwise import image
    from tapwise.errors import CompileError, InvalidProblem, NotApplicable, TapwiseError
    from tapwise.operators.conv import PreparedConv, conv1d, conv2d, prepare
    from tapwise.operators.patches import col2im, im2col
    from tapwise.operators.pool import avg_pool1d, avg_pool2d, max_pool1d, max_pool2d
    from tapwise.operators.reductions import log_softmax, reduce, softmax
    from tapwise.problem import ConvProblem

__version__ = "0.1.0"

# The module that a name comes from; "" for a module of the package.
_HOMES = {
    "CompileError": "tapwise.errors",
    "ConvProblem": "tapwise.problem",
    "InvalidProblem": "tapwise.errors",
    "NotApplicable": "tapwise.errors",
    "PreparedConv": "tapwise.operators.conv",
    "TapwiseError": "tapwise.errors",
    "avg_pool1d": "tapwise.operators.pool",
    "avg_pool2d": "tapwise.operators.pool",
    "col2im": "tapwise.operators.patches",
    "conv1d": "tapwise.operators.conv",
    "conv2d": "tapwise.operators.conv",
    "im2col": "tapwise.operators.patches",
    "image": "",
    "log_softmax": "tapwise.operators.reductions",
    "max_pool1d": "tapwise.operators.pool",
    "max_pool2d": "tapwise.operators.pool",
    "prepare": "tapwise.operators.conv",
    "reduce": "tapwise.operators.reductions",
    "softmax": "tapwise.operators.reductions",
}

__all__ = [
    "CompileError",
    "ConvProblem",
    "InvalidProblem",
    "NotApplicable",
    "PreparedConv",
    "TapwiseError",
    "avg_pool1d",
    "avg_pool2d",
    "col2im",
    "conv1d",
    "conv2d",
    "im2col",
    "image",
    "log_softmax",
    "max_pool1d",
    "max_pool2d",
    "prepare",
    "reduce",
    "softmax",
]


def __getattr__(name: str) -> Any:
    """Resolve a public name on first use."""
    home = _HOMES.get(name)
    if home is None:
        raise AttributeError(f"module 'tapwise' has no attribute {name!r}")
    from importlib import import_module

    value = getattr(import_module(home), name) if home else import_module(f"tapwise.{name}")
    globals()[name] = value
    return value


def __dir__() -> list[str]:
    return sorted([*globals(), *_HOMES])
