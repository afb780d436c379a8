"""cuda.depthwise: a filter a channel, by what each size is bound by.

    rolling     a thread goes down the rows of a few columns: weights in registers, every row of x read once
    blocked     the same for large filters: a block of rows at a time, weights read where they are used
    diagonal    16 bits, channels last: tensor cores, with weights of eight channels as diagonal matrices
    banded      the same with the rows of one channel's filter as bands of matrices; for large filters in shared memory

Source: columns streamed through registers as in the rolling windows of image filters; PTX ISA on mma.sync and ldmatrix.
"""

from __future__ import annotations

from collections.abc import Iterable, Sequence
from itertools import chain
from typing import Any, ClassVar

from tapwise import arrays
from tapwise.algorithm import Device, Plan
from tapwise.cuda.jit.compile import Source
from tapwise.cuda.jit.launch import Launch
from tapwise.cuda.plan import CudaAlgorithm, CudaPlan
from tapwise.ops.conv.cuda.depthwise import banded, columns, diagonal
from tapwise.ops.conv.cuda.depthwise.banded import Banded
from tapwise.ops.conv.cuda.depthwise.columns import Columns
from tapwise.ops.conv.cuda.depthwise.diagonal import Diagonal
from tapwise.ops.conv.problem import ConvProblem

Kind = Columns | Diagonal | Banded


class DepthwisePlan(CudaPlan):
    """`taps_first`: filters as [tap][channel], else as they are."""

    def __init__(self, problem: ConvProblem, device: Device, launches: Sequence[Launch], taps_first: bool) -> None:
        super().__init__(problem, device, launches)
        self._taps_first = taps_first

    def pack(self, w: Any) -> Any:
        return arrays.dense(w.transpose(2, 3, 0, 1) if self._taps_first else w, "nchw")


class Depthwise(CudaAlgorithm[Kind]):
    """One input channel a group and any number of filters on it; filters of up to 31 columns; any height, stride,
    dilation and padding; both memory orders; float32, float64, float16 and bfloat16 (in float32)."""

    id: ClassVar[str] = "cuda.depthwise"
    summary: ClassVar[str] = "a filter a channel: columns through registers, or diagonals and bands on tensor cores"
    axes: ClassVar[tuple[int, ...]] = (2,)

    def rejects(self, problem: ConvProblem, device: Device) -> str | None:
        if not problem.depthwise:
            found = f"{problem.group_c} in {problem.groups}"
            return f"takes one input channel a group and several groups, not {found}"
        return columns.unsuited(problem)

    def configs(self, problem: ConvProblem, device: Device) -> Sequence[Kind]:
        found: Iterable[Kind] = columns.configs(problem)
        if banded.unsuited(problem) is None:
            found = chain(banded.configs(problem, device), found)
        if diagonal.unsuited(problem) is None:
            found = chain(diagonal.configs(problem, device), found)
        return list(found)

    def predict_us(self, problem: ConvProblem, config: Kind, device: Device) -> float:
        """That of the config's own module."""
        if isinstance(config, Banded):
            return banded.predict_us(problem, config, device)
        if isinstance(config, Diagonal):
            return diagonal.predict_us(problem, config, device)
        return columns.predict_us(problem, config, device)

    def plan(self, problem: ConvProblem, config: Kind, device: Device) -> Plan:
        return DepthwisePlan(problem, device, self.launches(problem, config, device), taps_first(problem, config))

    def source(self, problem: ConvProblem, config: Kind) -> Source:
        if isinstance(config, Banded):
            return banded.source(problem, config)
        if isinstance(config, Diagonal):
            return diagonal.source(problem, config)
        return columns.source(problem, config)

    def launches(self, problem: ConvProblem, config: Kind, device: Device) -> list[Launch]:
        if isinstance(config, Banded):
            return [banded.launch(problem, config, device)]
        if isinstance(config, Diagonal):
            return [diagonal.launch(problem, config, device)]
        return [columns.launch(problem, config, device)]


def taps_first(problem: ConvProblem, config: Kind) -> bool:
    """Whether threads beside each other take channels beside each other."""
    return isinstance(config, Columns) and problem.layout == "nhwc"
