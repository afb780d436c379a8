"""Squeeze-and-excitation on tensors of a CPU with filters that do not change between calls: its plan, kept by shape."""

from __future__ import annotations

import numpy as np
import torch

from tapwise import dispatch
from tapwise.algorithm import Buffers, Plan, Steady
from tapwise.arrays.host import numpy_of
from tapwise.arrays.workspaces import aligned, workspace
from tapwise.cpu.device import host
from tapwise.ops.squeeze_excitation.problem import SqueezeExcitationProblem
from tapwise.torch import frozen
from tapwise.torch.tensors import NAMES, memory_format


def problem_of(x: torch.Tensor, m: int, words: tuple[str, str]) -> SqueezeExcitationProblem:
    """What is computed, of an activation and a gate."""
    (n, c, h, w), (activation, gate) = x.shape, words
    layout = "nhwc" if memory_format(x) is torch.channels_last else "nchw"
    return SqueezeExcitationProblem(
        n=n, c=c, h=h, w=w, m=m, activation=activation, gate=gate, dtype=NAMES[x.dtype], layout=layout
    )


class Gate:
    """x * gate(expand @ activation(reduce @ mean(x))) for tensors x of one shape, order and dtype."""

    def __init__(self, x: torch.Tensor, weight: torch.Tensor, bias: torch.Tensor, words: tuple[str, str]) -> None:
        problem, there = problem_of(x, weight.shape[1], words), host()
        self._plan: Plan = dispatch.plan_for(problem, dispatch.choose(problem, there), there)
        self._filters = self._plan.pack(numpy_of(weight.detach().to(x.dtype)))
        self._bias = numpy_of(bias.detach().flatten().to(x.dtype))

    def step(self, x: np.ndarray, y: np.ndarray) -> Steady:
        """Computes y; arrays are to stay where they are."""
        memory = aligned(self._plan.workspace_bytes)
        return Steady(self._plan, Buffers(x, self._filters, y, memory, self._bias))

    def __call__(self, x: torch.Tensor) -> torch.Tensor:
        y, image = torch.empty_like(x), numpy_of(x)
        with workspace(self._plan.workspace_bytes, image) as memory:
            self._plan.run(Buffers(image, self._filters, numpy_of(y), memory, self._bias))
        return y


def is_taken(x: torch.Tensor) -> bool:
    """Whether a kernel reads a CPU's tensor as it lies."""
    dense = x.is_contiguous() or x.is_contiguous(memory_format=torch.channels_last)
    return x.is_cpu and x.dtype in NAMES and x.numel() > 0 and dense


def gate_frozen(x: torch.Tensor, weight: torch.Tensor, bias: torch.Tensor, activation: str, gate: str) -> torch.Tensor:
    """As torch.ops.tapwise.squeeze_excitation, of a tensor that is_taken and that nobody else looks at; bias: m + c
    elements of any shape."""
    key = "gate", activation, gate, x.shape, x.stride(), x.dtype
    call = frozen.find(weight, bias, key)
    if call is None:
        call = Gate(x, weight, bias, (activation, gate))
        frozen.keep(weight, bias, key, call)
    y: torch.Tensor = call(x)
    return y


def steady(
    y: torch.Tensor, x: torch.Tensor, weight: torch.Tensor, bias: torch.Tensor, activation: str = "relu",
    gate: str = "sigmoid",
) -> Steady | None:  # fmt: skip
    """What computes y again, the operator's result for tensors of a CPU that stay where they are; None where more than
    its kernels are to run. Defaults are the operator's: PyTorch leaves them out."""
    if not is_taken(x) or y.stride() != x.stride():
        return None
    return Gate(x, weight, bias, (activation, gate)).step(numpy_of(x), numpy_of(y))
