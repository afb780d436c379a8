"""tapwise in PyTorch: operators (torch.ops.tapwise), modules, and whole models.

Importing this package imports torch and registers the operators; `nn` and `optimize` are imported when they are used.
"""

from __future__ import annotations

from typing import TYPE_CHECKING, Any

from tapwise.torch import derivatives as derivatives
from tapwise.torch import operators as operators
from tapwise.torch import rules as rules

if TYPE_CHECKING:
    from tapwise.torch import nn
    from tapwise.torch.optimized import Optimized, optimize

_NAMES = {"nn": "tapwise.torch.nn", "optimize": "tapwise.torch.optimized", "Optimized": "tapwise.torch.optimized"}

__all__ = ["Optimized", "nn", "optimize"]


def __getattr__(name: str) -> Any:
    """Resolve a public name on first use."""
    if name not in _NAMES:
        raise AttributeError(f"module 'tapwise.torch' has no attribute {name!r}")
    from importlib import import_module

    module = import_module(_NAMES[name])
    return module if name == "nn" else getattr(module, name)
