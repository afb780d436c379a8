"""cuda.depthwise: a filter a channel, by what each size is bound by.

    rolling     a thread goes down the rows of a few columns: weights in registers, every row of x read once
    rows        a thread computes whole rows of outputs, channels last: images of few columns
    planes      as rolling, NCHW: planes come to shared memory as they lie
    planes_large    large filters, NCHW: planes and filters in shared memory
    streamed    as rolling, channels last: rows of x come to shared memory first, where neighbouring columns find them
    blocked     the same for large filters: a block of rows at a time, weights read where they are used
    windows     few outputs: a thread asks for all of a window at once
    toeplitz    16 bits, channels last: tensor cores, small images whole
    banded      16 bits, channels last: tensor cores, the rows of a channel's filter as bands of matrices
    sparse      the same on sparse tensor cores, two channels at once, pixels as they lie; Hopper

Source: columns streamed through registers as in the rolling windows of image filters; PTX ISA on mma.sync and ldmatrix.
"""

from __future__ import annotations

from collections.abc import Sequence
from typing import Any, ClassVar, Final

from tapwise import arrays
from tapwise.algorithm import Device, Plan
from tapwise.cuda.jit import compile as compiler
from tapwise.cuda.jit.compile import Source
from tapwise.cuda.jit.launch import Launch
from tapwise.cuda.plan import CudaAlgorithm, CudaPlan
from tapwise.ops.conv.cuda.depthwise import banded, columns, planes, planes_large, rows, sparse, streamed, toeplitz
from tapwise.ops.conv.cuda.depthwise.banded import Banded
from tapwise.ops.conv.cuda.depthwise.columns import Columns
from tapwise.ops.conv.cuda.depthwise.planes import Planes
from tapwise.ops.conv.cuda.depthwise.planes_large import LargePlanes
from tapwise.ops.conv.cuda.depthwise.rows import Rows
from tapwise.ops.conv.cuda.depthwise.sparse import Sparse
from tapwise.ops.conv.cuda.depthwise.streamed import Streamed
from tapwise.ops.conv.cuda.depthwise.toeplitz import Toeplitz
from tapwise.ops.conv.cuda.window import FpropFilters, OutputStrides
from tapwise.ops.conv.problem import ConvProblem

Kind = Columns | Planes | LargePlanes | Rows | Streamed | Banded | Toeplitz | Sparse
# Bytes of a filter's tap for a block's channels up to which these come to shared memory as they lie.
MOST_FILTERS: Final = 1 << 10
# The module of each kind of config.
MODULES: Final[dict[type, Any]] = {
    Columns: columns,
    Planes: planes,
    LargePlanes: planes_large,
    Rows: rows,
    Streamed: streamed,
    Banded: banded,
    Toeplitz: toeplitz,
    Sparse: sparse,
}


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
    summary: ClassVar[str] = "a filter a channel: columns through registers, bands or small images on tensor cores"
    axes: ClassVar[tuple[int, ...]] = (2,)

    def rejects(self, problem: ConvProblem, device: Device) -> str | None:
        if not problem.depthwise:
            found = f"{problem.group_c} in {problem.groups}"
            return f"takes one input channel a group and several groups, not {found}"
        return columns.unsuited(problem)

    def configs(self, problem: ConvProblem, device: Device) -> Sequence[Kind]:
        """Columns straight from global memory where no shared memory helps: measured, they were hardly ever faster."""
        shared: list[Kind] = [*streamed.configs(problem, device), *planes.configs(problem, device)]
        shared += planes_large.configs(problem, device)
        tensor_cores: list[Kind] = [*banded.configs(problem, device), *toeplitz.configs(problem, device)]
        tensor_cores += sparse.configs(problem, device)
        others = shared or columns.configs(problem)
        return [*tensor_cores, *rows.configs(problem, device), *columns.windows(problem), *others]

    def predict_us(self, problem: ConvProblem, config: Kind, device: Device) -> float:
        """That of the config's own module."""
        return float(MODULES[type(config)].predict_us(problem, config, device))

    def writes_strided(self, problem: ConvProblem, config: Kind) -> bool:
        """Those that compute in registers."""
        return taps_first(problem, config)

    def reads_in_place(self, problem: ConvProblem, config: Kind, filters: FpropFilters) -> bool:
        """Those that bring a filter's taps one by one anyway, or by way of shared memory."""
        if problem.group_k > 1:
            return False
        if isinstance(config, Streamed):
            return streamed.filter_bytes(problem, config, 1) <= MOST_FILTERS
        if isinstance(config, Sparse):
            return sparse.reads_in_place(problem, config, filters)
        return isinstance(config, Rows) or (isinstance(config, Banded) and config.kernel == "rolling")

    def plan(
        self, problem: ConvProblem, config: Kind, device: Device, strides: OutputStrides | None = None,
        filters: FpropFilters | None = None, beside: bool = False,
    ) -> Plan:  # fmt: skip
        """`beside`: it needs nothing of the launch before it."""
        launches = self.launches(problem, config, device, strides, filters)
        if beside:
            for launch in launches:
                launch.source = compiler.beside(launch.source)
        return DepthwisePlan(problem, device, launches, filters is None and taps_first(problem, config))

    def source(
        self, problem: ConvProblem, config: Kind, strides: OutputStrides | None = None,
        filters: FpropFilters | None = None,
    ) -> Source:  # fmt: skip
        made: Source = MODULES[type(config)].source(problem, config, **_given(strides, filters))
        return made

    def sources(
        self, problem: ConvProblem, config: Kind, strides: OutputStrides | None = None,
        filters: FpropFilters | None = None, beside: bool = False,
    ) -> list[Source]:  # fmt: skip
        made = self.source(problem, config, strides, filters)
        return [compiler.beside(made) if beside else made]

    def launches(
        self, problem: ConvProblem, config: Kind, device: Device, strides: OutputStrides | None = None,
        filters: FpropFilters | None = None,
    ) -> list[Launch]:  # fmt: skip
        return [MODULES[type(config)].launch(problem, config, device, **_given(strides, filters))]


def _given(strides: OutputStrides | None, filters: FpropFilters | None) -> dict[str, Any]:
    """What is given to modules: some know no strides, or no filters of fprop."""
    given: dict[str, Any] = {"strides": strides, "filters": filters}
    return {name: value for name, value in given.items() if value is not None}


def taps_first(problem: ConvProblem, config: Kind) -> bool:
    """Whether threads beside each other take channels beside each other."""
    return isinstance(config, Columns | Rows | Streamed) and problem.layout == "nhwc"
