"""tapwise: convolution operators with several algorithms each, verified, measured and chosen for you.

Importing this package imports neither numba, torch nor any kernel; names are resolved on first use.
"""

from __future__ import annotations

from typing import TYPE_CHECKING, Any

if TYPE_CHECKING:
    from tapwise import image
    from tapwise.errors import CompileError, InvalidProblem, NotApplicable, TapwiseError
    from tapwise.ops.conv.api import conv1d, conv2d, prepare
    from tapwise.ops.conv.prepared import PreparedConv
    from tapwise.ops.conv.problem import ConvProblem
    from tapwise.ops.patches.api import col2im, im2col
    from tapwise.ops.pool.api import avg_pool1d, avg_pool2d, max_pool1d, max_pool2d
    from tapwise.ops.reduce.api import reduce
    from tapwise.ops.softmax.api import log_softmax, softmax

__version__ = "0.1.0"

# The module that a name comes from; "" for a module of the package.
_HOMES = {
    "CompileError": "tapwise.errors",
    "ConvProblem": "tapwise.ops.conv.problem",
    "InvalidProblem": "tapwise.errors",
    "NotApplicable": "tapwise.errors",
    "PreparedConv": "tapwise.ops.conv.prepared",
    "TapwiseError": "tapwise.errors",
    "avg_pool1d": "tapwise.ops.pool.api",
    "avg_pool2d": "tapwise.ops.pool.api",
    "col2im": "tapwise.ops.patches.api",
    "conv1d": "tapwise.ops.conv.api",
    "conv2d": "tapwise.ops.conv.api",
    "im2col": "tapwise.ops.patches.api",
    "image": "",
    "log_softmax": "tapwise.ops.softmax.api",
    "max_pool1d": "tapwise.ops.pool.api",
    "max_pool2d": "tapwise.ops.pool.api",
    "prepare": "tapwise.ops.conv.api",
    "reduce": "tapwise.ops.reduce.api",
    "softmax": "tapwise.ops.softmax.api",
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
