"""tapwise: convolution operators with several algorithms each, verified, measured and chosen for you.

Importing this package imports neither numba, torch nor any kernel; names are resolved on first use.
"""

from __future__ import annotations

from typing import TYPE_CHECKING, Any

if TYPE_CHECKING:
    from tapwise import image
    from tapwise.errors import (
        CompileError,
        DeviceUnavailable,
        InvalidPicture,
        InvalidProblem,
        NotApplicable,
        PeerUnavailable,
        TapwiseError,
    )
    from tapwise.ops.batch_norm.api import batch_norm_backward, batch_norm_stats
    from tapwise.ops.bias_activation.api import bias_activation_backward, bias_backward
    from tapwise.ops.conv.api import conv1d, conv2d, prepare
    from tapwise.ops.conv.gradients import conv2d_input, conv2d_weight, conv_transpose1d, conv_transpose2d
    from tapwise.ops.conv.prepared import PreparedConv
    from tapwise.ops.conv.problem import ConvProblem
    from tapwise.ops.patches.api import col2im, im2col
    from tapwise.ops.pool.api import avg_pool1d, avg_pool2d, max_pool1d, max_pool2d
    from tapwise.ops.pool.gradients import avg_pool2d_backward, max_pool2d_backward
    from tapwise.ops.reduce.api import reduce
    from tapwise.ops.softmax.api import log_softmax, softmax
    from tapwise.ops.softmax.gradients import log_softmax_backward, softmax_backward
    from tapwise.ops.squeeze_excitation.api import squeeze_excitation

__version__ = "0.1.0"

# The names of each module; of the package itself: its modules.
_NAMES = {
    "tapwise": ("image",),
    "tapwise.errors": (
        *("CompileError", "DeviceUnavailable", "InvalidPicture", "InvalidProblem"),
        *("NotApplicable", "PeerUnavailable", "TapwiseError"),
    ),
    "tapwise.ops.batch_norm.api": ("batch_norm_backward", "batch_norm_stats"),
    "tapwise.ops.bias_activation.api": ("bias_activation_backward", "bias_backward"),
    "tapwise.ops.conv.api": ("conv1d", "conv2d", "prepare"),
    "tapwise.ops.conv.gradients": ("conv2d_input", "conv2d_weight", "conv_transpose1d", "conv_transpose2d"),
    "tapwise.ops.conv.prepared": ("PreparedConv",),
    "tapwise.ops.conv.problem": ("ConvProblem",),
    "tapwise.ops.patches.api": ("col2im", "im2col"),
    "tapwise.ops.pool.api": ("avg_pool1d", "avg_pool2d", "max_pool1d", "max_pool2d"),
    "tapwise.ops.pool.gradients": ("avg_pool2d_backward", "max_pool2d_backward"),
    "tapwise.ops.reduce.api": ("reduce",),
    "tapwise.ops.softmax.api": ("log_softmax", "softmax"),
    "tapwise.ops.softmax.gradients": ("log_softmax_backward", "softmax_backward"),
    "tapwise.ops.squeeze_excitation.api": ("squeeze_excitation",),
}
_HOMES = {name: module for module, names in _NAMES.items() for name in names}

__all__ = [
    "CompileError",
    "ConvProblem",
    "DeviceUnavailable",
    "InvalidPicture",
    "InvalidProblem",
    "NotApplicable",
    "PeerUnavailable",
    "PreparedConv",
    "TapwiseError",
    "avg_pool1d",
    "avg_pool2d",
    "avg_pool2d_backward",
    "batch_norm_backward",
    "batch_norm_stats",
    "bias_activation_backward",
    "bias_backward",
    "col2im",
    "conv1d",
    "conv2d",
    "conv2d_input",
    "conv2d_weight",
    "conv_transpose1d",
    "conv_transpose2d",
    "im2col",
    "image",
    "log_softmax",
    "log_softmax_backward",
    "max_pool1d",
    "max_pool2d",
    "max_pool2d_backward",
    "prepare",
    "reduce",
    "softmax",
    "softmax_backward",
    "squeeze_excitation",
]


def __getattr__(name: str) -> Any:
    """Resolve a public name on first use."""
    home = _HOMES.get(name)
    if home is None:
        raise AttributeError(f"module 'tapwise' has no attribute {name!r}")
    from importlib import import_module

    from tapwise.forks import making

    with making:
        value = import_module(f"tapwise.{name}") if home == "tapwise" else getattr(import_module(home), name)
    globals()[name] = value
    return value


def __dir__() -> list[str]:
    return sorted([*globals(), *_HOMES])
