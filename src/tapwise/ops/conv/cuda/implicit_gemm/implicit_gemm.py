"""cuda.implicit_gemm: Hopper's tensor cores fed by TMA; no window is ever written to global memory.

Two kernels. implicit_gemm_im2col.cu copies the part of the window that each step of gemm_k needs, one tap's chunk of
channels for all pixels of a tile. implicit_gemm_halo.cu (stride 1, or planes of NCHW) keeps a tile's pixels with their
halo in shared memory while all taps pass: a tap is the same memory, read from a later pixel. view.py counts chunks,
tiles and CTAs, strips.py how planes of NCHW come to a halo, configs.py lists what fits, epilogue.py says how outputs go
to y, cost.py what all of it takes.

Source: Chetlur et al., "cuDNN: efficient primitives for deep learning", 2014 (the product whose matrix is
never built); PTX ISA on cp.async.bulk.tensor (im2col mode) and wgmma.
"""

from __future__ import annotations

from collections.abc import Mapping, Sequence
from math import prod
from typing import Any, ClassVar

from tapwise import arrays
from tapwise.algorithm import Device, Plan
from tapwise.arrays.device import DeviceArray
from tapwise.cuda.jit.compile import Source
from tapwise.cuda.jit.launch import Launch
from tapwise.cuda.plan import CudaPlan
from tapwise.cuda.types import INDEX_LIMIT
from tapwise.ops.conv.cuda import pack, window
from tapwise.ops.conv.cuda.implicit_gemm import configs, launches, tensor_maps
from tapwise.ops.conv.cuda.implicit_gemm.config import Config
from tapwise.ops.conv.cuda.implicit_gemm.cost import Cost, cost
from tapwise.ops.conv.cuda.implicit_gemm.epilogue import Epilogue
from tapwise.ops.conv.cuda.implicit_gemm.view import View, is_exact, unfoldings
from tapwise.ops.conv.cuda.window import JoinedFilters, OutputStrides
from tapwise.ops.conv.problem import ConvProblem


class ImplicitGemmPlan(CudaPlan):
    """Perhaps a launch that packs x, and the product."""

    def __init__(self, view: View, device: Device, first: Launch | None, gemm: Launch, workspace_bytes: int) -> None:
        super().__init__(view.original, device, [gemm] if first is None else [first, gemm], workspace_bytes)
        self._first, self._gemm, self._base, self._device = first, gemm, view.unfolded, device
        self._permuted_n, self._as_given = Epilogue(view).permuted_n, launches.takes_filters_as_given(view)
        self._classes = view.plane_classes, view.chunk_bytes // view.itemsize
        self._tile = launches.filter_tile(view)

    def pack(self, w: Any) -> DeviceArray:
        """The filters as [k][tap][channel], each tap's channels of a group padded to whole pieces: perhaps as they
        are."""
        if self._as_given and arrays.is_dense(w, "nhwc"):
            given: DeviceArray = w
            return given
        channels = tensor_maps.filter_channels(self._base)
        return pack.filters(
            self._base, w, channels, self._device, order=self._permuted_n, classes=self._classes, tile=self._tile
        )

    def enqueue(self, addresses: Mapping[str, int], stream: int) -> None:
        if self._first is not None:
            self._first({"x": addresses["x"], "y": addresses["workspace"]}, stream)
            addresses = {**addresses, "x": addresses["workspace"]}
        self._gemm(addresses, stream)


class ImplicitGemm(window.TensorCoreAlgorithm[Config]):
    """Any stride up to 8 (any at all where a few channels are packed with their taps), padding, dilation and groups;
    NHWC, and NCHW as it lies or packed first; float16, bfloat16, and float32 with math="tf32" or "3xtf32". Hopper."""

    id: ClassVar[str] = "cuda.implicit_gemm"
    summary: ClassVar[str] = "tensor cores (wgmma) fed by TMA"

    def rejects(self, problem: ConvProblem, device: Device) -> str | None:
        if device.architecture != "sm_90a":
            return f"needs Hopper (sm_90a), not {device.architecture}"
        if prod(problem.y_shape) >= INDEX_LIMIT or prod(problem.x_shape) >= INDEX_LIMIT:
            return "takes fewer than 2^31 elements"
        if unfoldings(problem):
            return None
        if not is_exact(problem, problem):
            return f"keeps fp32's bound with 3xtf32 for more channels a group, not {problem.group_c}"
        return f"takes padding, dilation and strides that a tensor map can express, not those of '{problem}'"

    def configs(self, problem: ConvProblem, device: Device) -> Sequence[Config]:
        return configs.all_configs(problem, device)

    def predict_us(
        self, problem: ConvProblem, config: Config, device: Device, joined: JoinedFilters | None = None
    ) -> float:
        """cost.py says how."""
        return self._cost(problem, config, device, joined).us

    def pack_us(self, problem: ConvProblem, config: Config, device: Device) -> float:
        """None where filters lie as kernels take them: channels last, as the problem does."""
        given = problem.layout == "nhwc" and launches.takes_filters_as_given(View.of(problem, config))
        return 0.0 if given else super().pack_us(problem, config, device)

    def explain(self, problem: ConvProblem, config: Config, device: Device, joined: JoinedFilters | None = None) -> str:
        """What the predicted time is made of."""
        return str(self._cost(problem, config, device, joined))

    def _cost(self, problem: ConvProblem, config: Config, device: Device, joined: JoinedFilters | None) -> Cost:
        view = View.of(problem, config, None, None, joined)
        return cost(view, device, self.workspace_bytes(problem, config, device))

    def workspace_bytes(self, problem: ConvProblem, config: Config, device: Device) -> int:
        view = View.of(problem, config)
        return pack.images_bytes(view.unfolded) if view.is_packed else 0

    def writes_strided(self, problem: ConvProblem, config: Config) -> bool:
        return problem.layout == "nhwc" and not problem.residual and config.share_filters == 1

    def plan(
        self, problem: ConvProblem, config: Config, device: Device, strides: OutputStrides | None = None,
        joined: JoinedFilters | None = None,
    ) -> Plan:  # fmt: skip
        view = View.of(problem, config, strides, None, joined)
        first = None
        if config.unfold:
            first = pack.windows(problem, view.unfolded, device)
        elif view.is_packed:
            first = pack.images(problem, device, thin=pack.is_thinned(problem))
        gemm = launches.launch(view, device)
        needed = self.workspace_bytes(problem, config, device)
        return ImplicitGemmPlan(view, device, first, gemm, needed)

    def source(self, problem: ConvProblem, config: Config, strides: OutputStrides | None = None) -> Source:
        """The product's kernel."""
        return launches.source(View.of(problem, config, strides))

    def sources(
        self, problem: ConvProblem, config: Config, strides: OutputStrides | None = None,
        joined: JoinedFilters | None = None,
    ) -> list[Source]:  # fmt: skip
        product = launches.source(View.of(problem, config, strides, None, joined))
        sources = [pack.filters_source(problem), product]
        if config.unfold:
            sources.append(pack.windows_source(problem))
        elif View.of(problem, config).is_packed:
            sources.append(pack.images_source(problem, pack.is_thinned(problem)))
        return sources

    def launch(
        self, problem: ConvProblem, config: Config, device: Device, strides: OutputStrides | None = None
    ) -> Launch:
        """The product's launch."""
        return launches.launch(View.of(problem, config, strides), device)
