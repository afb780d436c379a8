"""cpu.im2col_gemm: expand the input into a matrix, then one BLAS product a group.

Every output pixel becomes a column (NCHW) or a row (NHWC) of the gemm_k inputs under the filter. Chunks of output
pixels are expanded, multiplied and finished one after another, so the matrix stays in cache where that pays, and never
outgrows a limit. The expansion is a copy for each tap; a 1x1 filter of stride 1 needs none.
"""

from __future__ import annotations

from collections.abc import Iterator, Sequence
from dataclasses import dataclass
from math import prod
from typing import ClassVar, Final

import numpy as np

from tapwise.algorithm import Algorithm, Buffers, Device, Plan
from tapwise.algorithm import Config as BaseConfig
from tapwise.integers import ceil_div, round_up
from tapwise.ops.conv.problem import ConvProblem
from tapwise.ops.conv.reference import activate

WORKSPACE_BYTES: Final = 64 << 20
ALIGNMENT: Final = 64

# Of the cost model; see Im2colGemm.predict_us.
RUN_US: Final = 20.0
# BLAS's threads go on spinning for 25 ms and more, and what comes next on their cores takes longer: 0.3 ms, or 4 to 12
# where a team of OpenMP's waits as it does by default (team.py).
AFTER_US: Final = 1000.0
COPY_US: Final = 5.0
ROW_NS: Final = 6.0
ELEMENT_NS: Final = 0.45
CONVERTED_NS: Final = 1.3
GEMM_US: Final = 1.0
BLAS_SHARE: Final = 0.62
# NumPy's copy of filters whose channels and filters are swapped.
SCATTERED_NS: Final = 1.5
# Of the memory's, where it streams filters once.
STREAM_SHARE: Final = 0.85
EPILOGUE_NS: Final = {
    None: 0.0, "relu": 0.3, "relu6": 0.5, "sigmoid": 6.0, "silu": 6.0, "tanh": 8.0, "gelu": 100.0, "gelu_tanh": 7.5,
    "hardswish": 1.5, "hardsigmoid": 1.5, "leaky_relu": 1.0,
}  # fmt: skip


@dataclass(frozen=True)
class Config(BaseConfig):
    """The chunk: `rows` whole rows of outputs, or `cols` pixels of a single one."""

    rows: int
    cols: int


def expands(problem: ConvProblem) -> bool:
    """Whether a matrix must be built at all: not where the image already is the matrix."""
    same = set(problem.kernel) == {1} == set(problem.stride) and not any(map(any, problem.padding))
    return problem.widened or not same


class Geometry:
    """Bytes of the two parts of the workspace: the matrix, and float32 sums of what is stored in 16 bits."""

    def __init__(self, problem: ConvProblem, config: Config) -> None:
        pixels = config.rows * config.cols
        size = problem.accumulator_bytes
        self.matrix = round_up(problem.c * prod(problem.kernel) * pixels * size, ALIGNMENT) if expands(problem) else 0
        self.sums = round_up(problem.k * pixels * size, ALIGNMENT) if problem.widened else 0

    @property
    def workspace_bytes(self) -> int:
        return self.matrix + self.sums


class Im2colPlan(Plan):
    def __init__(self, problem: ConvProblem, config: Config) -> None:
        self.problem = problem
        self._config = config
        self._geometry = Geometry(problem, config)
        self._dtype = np.dtype(f"f{problem.accumulator_bytes}")
        self._planar = problem.layout == "nchw"
        self._expands = expands(problem)
        self.workspace_bytes = self._geometry.workspace_bytes

    def pack(self, w: np.ndarray) -> np.ndarray:
        """(groups, group_k, gemm_k) for NCHW, (groups, gemm_k, group_k) with channels innermost in gemm_k for NHWC."""
        p = self.problem
        w = w.reshape(p.groups, p.group_k, p.group_c, *p.kernel)
        if not self._planar:
            w = w.transpose(0, 3, 4, 2, 1)
        packed = np.array(w, self._dtype, order="C")
        return packed.reshape((p.groups, p.group_k, p.gemm_k) if self._planar else (p.groups, p.gemm_k, p.group_k))

    def run(self, buffers: Buffers) -> None:
        x, packed, y, workspace, bias, residual, _ = buffers
        if bias is not None:
            bias = bias.astype(self._dtype).reshape((-1, 1, 1) if self._planar else (1, 1, -1))
        # NaN and infinity are results like others.
        with np.errstate(all="ignore"):
            for image, *chunk in self._chunks():
                pixels = self._pixels(*chunk)
                # Outputs of the chunk: (k, rows, cols), or (rows, cols, k) for NHWC.
                out = self._in_order(y[image])[pixels]
                sums = self._temporary(workspace, out.shape) if self.problem.widened else out
                self._multiply(packed, self._matrix(x[image], workspace, *chunk), sums)
                if bias is not None:
                    sums += bias
                if residual is not None:
                    sums += self._in_order(residual[image])[pixels]
                activate(self.problem.activation, sums)
                if sums is not out:
                    out[...] = sums

    def _chunks(self) -> Iterator[tuple[int, int, int, int, int]]:
        """(image, p0, p1, q0, q1), in the order in which outputs lie in memory."""
        height, width = self.problem.output
        for image in range(self.problem.n):
            for p0 in range(0, height, self._config.rows):
                for q0 in range(0, width, self._config.cols):
                    yield image, p0, min(p0 + self._config.rows, height), q0, min(q0 + self._config.cols, width)

    def _in_order(self, image: np.ndarray) -> np.ndarray:
        """(channels, height, width) with its axes as they lie in memory."""
        return image if self._planar else image.transpose(1, 2, 0)

    def _pixels(self, p0: int, p1: int, q0: int, q1: int) -> tuple[slice, ...]:
        rows, cols = slice(p0, p1), slice(q0, q1)
        return (slice(None), rows, cols) if self._planar else (rows, cols)

    def _temporary(self, workspace: np.ndarray, shape: tuple[int, ...]) -> np.ndarray:
        start = self._geometry.matrix
        return workspace[start : start + prod(shape) * self._dtype.itemsize].view(self._dtype).reshape(shape)

    def _matrix(self, image: np.ndarray, workspace: np.ndarray, p0: int, p1: int, q0: int, q1: int) -> np.ndarray:
        """(groups, gemm_k, pixels), or (groups, pixels, gemm_k) for NHWC: the image itself, or its expansion."""
        p = self.problem
        pixels = (p1 - p0) * (q1 - q0)
        if not self._expands:
            part = self._in_order(image)[self._pixels(p0, p1, q0, q1)]
            if self._planar:
                return part.reshape(p.groups, p.group_c, pixels)
            return part.reshape(pixels, p.groups, p.group_c).transpose(1, 0, 2)
        flat = workspace[: p.c * prod(p.kernel) * pixels * self._dtype.itemsize].view(self._dtype)
        if self._planar:
            columns = flat.reshape(p.c, *p.kernel, p1 - p0, q1 - q0)
        else:
            columns = flat.reshape(p.groups, p1 - p0, q1 - q0, *p.kernel, p.group_c)
        for r in range(p.kernel[0]):
            rows, source_rows = self._span(0, r, p0, p1)
            for s in range(p.kernel[1]):
                cols, source_cols = self._span(1, s, q0, q1)
                if self._planar:
                    tap, source = columns[:, r, s], image[:, source_rows, source_cols]
                else:
                    # (group_c, groups, rows, cols) of the matrix, and the same of the image.
                    tap = columns[:, :, :, r, s].transpose(3, 0, 1, 2)
                    source = image[:, source_rows, source_cols]
                    source = source.reshape(p.groups, p.group_c, *source.shape[1:]).swapaxes(0, 1)
                tap[..., : rows.start, :] = 0
                tap[..., rows.stop :, :] = 0
                tap[..., rows, : cols.start] = 0
                tap[..., rows, cols.stop :] = 0
                tap[..., rows, cols] = source
        return flat.reshape((p.groups, p.gemm_k, pixels) if self._planar else (p.groups, pixels, p.gemm_k))

    def _span(self, axis: int, tap: int, first: int, end: int) -> tuple[slice, slice]:
        """Which outputs of first..end (counted from first) a tap reads inside the image, and what they read."""
        p = self.problem
        stride = p.stride[axis]
        start = tap * p.dilation[axis] - p.padding[axis][0]
        low = min(max(first, -(start // stride)), end)
        high = max(low, min(end, (p.spatial[axis] - 1 - start) // stride + 1))
        source = slice(low * stride + start, (high - 1) * stride + start + 1, stride) if low < high else slice(0)
        return slice(low - first, high - first), source

    def _multiply(self, packed: np.ndarray, matrix: np.ndarray, sums: np.ndarray) -> None:
        """sums = filters times matrix, group by group, into the chunk as it lies."""
        p = self.problem
        if self._planar:
            np.matmul(packed, matrix, out=sums.reshape(p.groups, p.group_k, -1))
        else:
            np.matmul(matrix, packed, out=sums.reshape(-1, p.groups, p.group_k).transpose(1, 0, 2))


class Im2colGemm(Algorithm[Config]):
    """Expansion and BLAS. float32, float64, float16, bfloat16 (computed in float32); NCHW and NHWC; any groups.

    NumPy's BLAS decides on its own threads. Rejects other directions, anything but two spatial axes, and problems
    with no output or no channel.
    """

    id: ClassVar[str] = "cpu.im2col_gemm"
    summary: ClassVar[str] = "expansion into a matrix, then BLAS"
    axes: ClassVar[tuple[int, ...]] = (2,)

    def configs(self, problem: ConvProblem, device: Device) -> Sequence[Config]:
        """Chunks that fit the workspace limit, the shared cache, and one core's cache, without repetitions."""
        height, width = problem.output
        pixel = Geometry(problem, Config(1, 1)).workspace_bytes or problem.itemsize * (problem.c + problem.k)
        found: dict[Config, None] = {}
        for limit in (WORKSPACE_BYTES, device.l3_bytes // 2, device.l2_bytes):
            pixels = max(1, min(limit, WORKSPACE_BYTES) // pixel)
            config = Config(min(height, pixels // width), width) if pixels >= width else Config(1, pixels)
            found[config] = None
        return list(found)

    def predict_us(self, problem: ConvProblem, config: Config, device: Device) -> float:
        """Expansion, products and epilogue, one after the other.

        A copy of a tap costs a call, a time for each of its rows and one for each element, more where it converts,
        and where the matrix does not stay in the shared cache it goes through memory at the memory's bandwidth. BLAS
        reaches a share of the peak that falls with gemm_m below a register tile, and with few terms to
        sum. Outputs are passed over in cache.
        """
        height, width = problem.output
        pixels, taps = height * width, prod(problem.kernel)
        chunks = problem.n * ceil_div(height, config.rows) * ceil_div(width, config.cols)
        outputs = problem.n * problem.k * pixels
        expansion = 0.0
        if expands(problem):
            copied = problem.n * problem.c * taps * pixels
            run = problem.group_c if problem.layout == "nhwc" else min(config.cols, width)
            element = CONVERTED_NS if problem.widened else ELEMENT_NS
            expansion = chunks * taps * COPY_US + 1e-3 * copied * (element + ROW_NS / max(1, run))
            if Geometry(problem, config).workspace_bytes > device.l3_bytes // 2:
                expansion += 1e-3 * copied * problem.accumulator_bytes / device.gbps
        peak = device.gflops * device.threads * (0.5 if problem.dtype == "f64" else 1.0)
        narrow = min(1.0, min(problem.group_k, problem.gemm_k) / 16) * problem.gemm_k / (problem.gemm_k + 20)
        # BLAS cuts a product in as many parts as there are threads, and waits for the slowest.
        slowest = 1 + device.uneven * (device.threads > 1)
        product = chunks * problem.groups * GEMM_US + 1e-3 * problem.flops * slowest / (peak * BLAS_SHARE * narrow)
        # Filters that no cache holds come from memory for each product.
        filters = problem.k * problem.gemm_k * problem.accumulator_bytes
        if filters > device.l3_bytes // 2:
            memory = 1e-3 * chunks * filters / (device.gbps * STREAM_SHARE)
            product = max(product, memory)
        passes = EPILOGUE_NS[problem.activation_name] + 0.4 * (problem.bias + problem.residual)
        if problem.widened:
            passes += CONVERTED_NS
        return RUN_US + expansion + product + 1e-3 * outputs * passes

    def pack_us(self, problem: ConvProblem, config: Config, device: Device) -> float:
        """A copy of the filters; converted from 16 bits, transposed for NHWC."""
        each = CONVERTED_NS if problem.widened else ELEMENT_NS
        return 3.0 + 1e-3 * problem.k * problem.gemm_k * (each + (0.0 if problem.layout == "nchw" else 1.0))

    def turned_us(self, problem: ConvProblem, config: Config, device: Device, apart: int) -> float:
        """NumPy's copy goes element by element."""
        return 1e-3 * SCATTERED_NS * problem.k * problem.gemm_k

    def after_us(self, problem: ConvProblem, config: Config) -> float:
        return AFTER_US

    def workspace_bytes(self, problem: ConvProblem, config: Config, device: Device) -> int:
        return Geometry(problem, config).workspace_bytes

    def plan(self, problem: ConvProblem, config: Config, device: Device) -> Plan:
        return Im2colPlan(problem, config)
