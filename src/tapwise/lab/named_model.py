"""Models by name: of torchvision, of a function in a file, or of an ONNX file."""

from __future__ import annotations

import sys
from importlib import util
from pathlib import Path
from typing import Any, Final

import torch

from tapwise.errors import InvalidProblem

FORMS: Final = "a model of torchvision, file.py:function, or MODEL.onnx"
# Images that set the scales of batch norm.
SETTLING: Final = 4
# Mean square of a channel, as a part of that of all.
LEAST_CHANNEL: Final = 0.1


def load(name: str, size: int) -> torch.nn.Module:
    """The model of a name, in float32 on the CPU, for inference.

    `resnet50` and the like: torchvision's, with random weights, and batch norm scaled by random
    images of that size. `file.py:function`: what the function gives without arguments, as it is. `MODEL.onnx`: by
    onnx2torch. Raises InvalidProblem, also where what is needed is not installed.
    """
    try:
        if ".py:" in name:
            model = _of_function(*name.rsplit(":", 1))
        elif name.endswith(".onnx"):
            model = _of_onnx(name)
        else:
            model = _of_torchvision(name, size)
    except InvalidProblem as error:
        raise InvalidProblem(f"model={name!r}: {error}") from None
    except Exception as error:
        raise InvalidProblem(f"model={name!r}: {reason(error)}") from error
    if not isinstance(model, torch.nn.Module):
        raise InvalidProblem(f"model={name!r}: gives a {type(model).__name__}; a torch.nn.Module is allowed")
    return model.float().eval()


def label(name: str) -> str:
    """A short name for tables and files: of `folder/file.py:function` "file-function"."""
    file, _, function = name.partition(".py:")
    return f"{Path(file).name}-{function}" if function else Path(name).stem


def reason(error: BaseException) -> str:
    """An exception in a line."""
    lines = [line.strip() for line in str(error).splitlines() if line.strip()]
    return f"{type(error).__name__}: {lines[0][:200]}" if lines else type(error).__name__


def _of_function(file: str, function: str) -> Any:
    path = Path(file).resolve()
    if not path.is_file():
        raise InvalidProblem(f"there is no file {file}")
    spec = util.spec_from_file_location(f"tapwise_model_{path.stem}", path)
    assert spec is not None and spec.loader is not None
    module = util.module_from_spec(spec)
    # Copies and compilers look its classes up there.
    sys.modules[spec.name] = module
    spec.loader.exec_module(module)
    if not callable(getattr(module, function, None)):
        raise InvalidProblem(f"{path.name} has no function {function}")
    return getattr(module, function)()


def _of_onnx(name: str) -> Any:
    if not Path(name).is_file():
        raise InvalidProblem(f"there is no file {name}")
    try:
        from onnx2torch import convert
    except ImportError as error:
        raise InvalidProblem(f"reading ONNX files needs onnx2torch: {error}") from None
    return convert(name)


def _of_torchvision(name: str, size: int) -> Any:
    try:
        from torchvision import models
    except Exception as error:  # one that was built for another PyTorch raises RuntimeError
        raise InvalidProblem(f"{FORMS} is allowed; torchvision cannot be imported: {reason(error)}") from None
    if name not in models.list_models():
        raise InvalidProblem(f"{FORMS} is allowed; torchvision has none of this name")
    try:
        model = models.get_model(name, weights=None, weights_backbone=None)
    except TypeError:  # it has no backbone of its own
        model = models.get_model(name, weights=None)
    _settle(model.eval(), size)
    return model


@torch.no_grad()
def _settle(model: torch.nn.Module, size: int) -> None:
    """Scales for batch norm, layer by layer, from random images: without, values grow or vanish.

    Means stay zero: without them an untrained network blows up rounding errors three times as much.
    """

    def settle(norm: Any, inputs: tuple[torch.Tensor, ...]) -> None:
        (x,) = inputs
        squares = x.transpose(0, 1).flatten(1).square().mean(1)
        # A channel that these images hardly reach may be reached by others.
        norm.running_var.copy_(squares.clamp(min=LEAST_CHANNEL * float(squares.mean())))

    norms = [one for one in model.modules() if isinstance(one, torch.nn.modules.batchnorm._BatchNorm)]
    hooks = [norm.register_forward_pre_hook(settle) for norm in norms]
    if norms:
        model(torch.randn(SETTLING, 3, size, size))
    for hook in hooks:
        hook.remove()
