"""cuda.implicit_gemm: Hopper's tensor cores fed by TMA; no window is ever written to global memory.

Two kernels. implicit_gemm_im2col.cu copies the part of the window that each step of gemm_k needs, one tap's chunk of
channels for all pixels of a tile. implicit_gemm_halo.cu (stride 1) keeps a tile's pixels with their halo in shared
memory while all taps pass: a tap is the same memory, read from a later pixel. view.py counts chunks, tiles and CTAs,
configs.py lists what fits, epilogue.py says how outputs go to y, cost.py what all of it takes.

Source: Chetlur et al., "cuDNN: efficient primitives for deep learning", 2014 (the product whose matrix is
never built); PTX ISA on cp.async.bulk.tensor (im2col mode) and wgmma.
"""

from __future__ import annotations

from collections.abc import Mapping, Sequence
from math import prod
from typing import Any, ClassVar, Final

from tapwise.algorithm import Device, Plan
from tapwise.arrays.device import DeviceArray
from tapwise.cuda.jit.compile import Source, struct_words, stub, traits
from tapwise.cuda.jit.launch import Launch
from tapwise.cuda.plan import CudaPlan
from tapwise.cuda.types import INDEX_LIMIT, tensor_core_type
from tapwise.integers import ceil_div, round_up
from tapwise.ops.conv.cuda import pack, window
from tapwise.ops.conv.cuda.implicit_gemm import configs, tensor_maps
from tapwise.ops.conv.cuda.implicit_gemm.config import Config, HaloRowsConfig, HaloTileConfig, Im2colConfig
from tapwise.ops.conv.cuda.implicit_gemm.cost import Cost, cost
from tapwise.ops.conv.cuda.implicit_gemm.epilogue import Epilogue
from tapwise.ops.conv.cuda.implicit_gemm.view import View, has_group_axis, is_exact, padded, unfoldings
from tapwise.ops.conv.cuda.window import OutputStrides
from tapwise.ops.conv.problem import ConvProblem

FOLDER: Final = "ops/conv/cuda/implicit_gemm"
# What the kernels are compiled for, beside the problem's own words.
CONFIG_WORDS: Final = (
    "swap_ab", "tile_pixels", "tile_filters", "warpgroups", "ping_pong", "stages", "split_k", "groups_per_tile",
    "filter_stationary",
)  # fmt: skip
VIEW_WORDS: Final = ("chunk_bytes", "last_chunk_steps")
EPILOGUE_WORDS: Final = ("vector", "tma_store", "epilogue_buffers", "permuted_n", "tma_residual", "strided")
INSTRUCTIONS: Final = {"f16": "k16.f32.f16.f16", "bf16": "k16.f32.bf16.bf16", "f32": "k8.f32.tf32.tf32"}


class ImplicitGemmPlan(CudaPlan):
    """Perhaps a launch that packs x, and the product."""

    def __init__(
        self, view: View, device: Device, first: Launch | None, gemm: Launch, permuted_n: int, workspace_bytes: int
    ) -> None:
        super().__init__(view.original, device, [gemm] if first is None else [first, gemm], workspace_bytes)
        self._first, self._gemm, self._base, self._device = first, gemm, view.unfolded, device
        self._permuted_n = permuted_n

    def pack(self, w: Any) -> DeviceArray:
        """The filters as [k][tap][channel], each tap's channels of a group padded to whole pieces."""
        channels = tensor_maps.filter_channels(self._base)
        return pack.filters(self._base, w, channels, self._device, order=self._permuted_n)

    def enqueue(self, addresses: Mapping[str, int], stream: int) -> None:
        if self._first is not None:
            self._first({"x": addresses["x"], "y": addresses["workspace"]}, stream)
            addresses = {**addresses, "x": addresses["workspace"]}
        self._gemm(addresses, stream)


class ImplicitGemm(window.TensorCoreAlgorithm[Config]):
    """Any stride up to 8 (any at all where a few channels are packed with their taps), padding, dilation and groups;
    NHWC, and NCHW by packing x first; float16, bfloat16, and float32 with math="tf32" or "3xtf32". Hopper."""

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

    def predict_us(self, problem: ConvProblem, config: Config, device: Device) -> float:
        """cost.py says how."""
        return self._cost(problem, config, device).us

    def explain(self, problem: ConvProblem, config: Config, device: Device) -> str:
        """What the predicted time is made of."""
        return str(self._cost(problem, config, device))

    def _cost(self, problem: ConvProblem, config: Config, device: Device) -> Cost:
        return cost(View.of(problem, config), device, self.workspace_bytes(problem, config, device))

    def workspace_bytes(self, problem: ConvProblem, config: Config, device: Device) -> int:
        view = View.of(problem, config)
        return pack.images_bytes(view.unfolded) if view.is_packed else 0

    def writes_strided(self, problem: ConvProblem, config: Config) -> bool:
        return problem.layout == "nhwc" and not problem.residual

    def plan(self, problem: ConvProblem, config: Config, device: Device, strides: OutputStrides | None = None) -> Plan:
        view = View.of(problem, config, strides)
        first = None
        if config.unfold:
            first = pack.windows(problem, view.unfolded, device)
        elif view.is_packed:
            first = pack.images(problem, device)
        gemm = self.launch(problem, config, device, strides)
        needed = self.workspace_bytes(problem, config, device)
        return ImplicitGemmPlan(view, device, first, gemm, Epilogue(view).permuted_n, needed)

    def source(self, problem: ConvProblem, config: Config, strides: OutputStrides | None = None) -> Source:
        """The product's kernel."""
        view = View.of(problem, config, strides)
        seen, epilogue = view.seen, Epilogue(view)
        halo = not isinstance(config, Im2colConfig)
        own = (*CONFIG_WORDS, *(("halo_buffers", "gather_bytes") if halo else ()))
        owners = ((config, own), (view, VIEW_WORDS), (epilogue, EPILOGUE_WORDS), (seen, ("bias", "residual")))
        values = {word.upper(): getattr(owner, word) for owner, words in owners for word in words} | {
            "GROUP_AXIS": has_group_axis(seen), "NCHW": seen.layout == "nchw",
            "ACTIVATION": window.activation(seen.activation),
        }  # fmt: skip
        if halo:
            values["HALO_TILE"] = isinstance(config, HaloTileConfig)
        name = f"implicit_gemm_{'halo' if halo else 'im2col'}"
        return stub(
            f"{FOLDER}/{name}.cu", name, "Traits", "HaloGemm" if halo else "Im2colGemm", view.threads,
            config.min_blocks_per_sm, instruction(seen.dtype, config.instruction_n), config.split_k,
            traits(tensor_core_type(seen.dtype), values),
        )  # fmt: skip

    def sources(self, problem: ConvProblem, config: Config, strides: OutputStrides | None = None) -> list[Source]:
        sources = [pack.filters_source(problem), self.source(problem, config, strides)]
        if config.unfold:
            sources.append(pack.windows_source(problem))
        elif View.of(problem, config).is_packed:
            sources.append(pack.images_source(problem))
        return sources

    def launch(
        self, problem: ConvProblem, config: Config, device: Device, strides: OutputStrides | None = None
    ) -> Launch:
        """The product's launch."""
        view = View.of(problem, config, strides)
        seen, epilogue = view.seen, Epilogue(view)
        source = self.source(problem, config, strides)
        fields = window.window_fields(seen, source) | {
            "pixels": seen.n * prod(seen.output), "filters": seen.group_k,
            "tiles_f": view.tiles_f, "tiles": view.tiles, "taps_w": seen.kernel[1],
            "chunks": view.chunks * view.parts, "part_chunks": view.chunks, "steps": view.steps,
        } | window.stride_fields(strides)  # fmt: skip
        if isinstance(config, HaloRowsConfig):
            fields["high"], fields["wide"] = padded(seen)
            fields["halo_pixels"], fields["copy_pixels"] = view.halo_rows
        elif isinstance(config, HaloTileConfig):
            tile, pixels = view.rectangle, view.halo_pixels
            fields |= {
                "high": tile.high, "wide": tile.wide, "halo_pixels": pixels,
                # A halo takes whole patterns of eight pixels.
                "copy_pixels": round_up(pixels, 8) - pixels + tile.behind,
                "down": tile.down, "across": config.across, "tiles_h": ceil_div(seen.output[0], tile.down),
                "tiles_w": ceil_div(seen.output[1], config.across),
            }  # fmt: skip
        maps = {"w": tensor_maps.map_w(view, pack.filter_rows(view.unfolded, epilogue.permuted_n))}
        if not config.gather_bytes:
            maps["x"] = tensor_maps.map_x(view)
        if epilogue.tma_store:
            maps["out"] = tensor_maps.map_y(view)
        if epilogue.tma_residual:
            maps["res"] = tensor_maps.map_residual(view)
        names = struct_words(source)
        return Launch(
            source, {name: value for name, value in fields.items() if name in names}, (view.blocks(device), 1, 1),
            view.threads, epilogue.shared_bytes, maps, True, {"image": "x", "out": "y", "res": "residual"},
        )  # fmt: skip


def instruction(dtype: str, columns: int, transposed: bool = False) -> str:
    """The matrix instruction of so many columns, as include/hopper.cuh wants it: 64 rows by one step of 32 bytes.
    `transposed`: both operands are, which 16-bit elements alone can be."""
    sums = columns // 2
    registers = ", ".join(f"%{i}" for i in range(sums))
    # For 16-bit elements the instruction says whether operands are transposed.
    orders = "" if dtype == "f32" else ", 1, 1" if transposed else ", 0, 0"
    outputs = ", ".join(f'"+f"(d[{i}])' for i in range(sums))
    return (
        f'#define WGMMA "{{ .reg .pred p; setp.ne.b32 p, %{sums + 2}, 0; wgmma.mma_async.sync.aligned.m64n{columns}'
        f'{INSTRUCTIONS[dtype]} {{{registers}}}, %{sums}, %{sums + 1}, p, 1, 1{orders}; }}"\n'
        f"#define WGMMA_N {columns}\n#define WGMMA_SUMS {outputs}\n"
    )
