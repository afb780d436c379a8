"""cuda.implicit_gemm: Hopper's tensor cores fed by its copy engine; no window is ever written to global memory.

Two kernels. `stream` copies the part of the window that each step of gemm_k needs, one tap's line of channels
for all pixels of a tile. `slab` (stride 1) keeps a tile's padded pixels in shared memory while all taps pass: a tap
is the same memory, read from a later line. `box` is a slab of a piece of a wide image, with what is around it.
implicit_gemm_geometry.py counts lines, tiles and blocks, implicit_gemm_configs.py lists what fits.

Source: Chetlur et al., "cuDNN: efficient primitives for deep learning", 2014 (the product whose matrix is
never built); PTX ISA on cp.async.bulk.tensor (im2col mode) and wgmma.
"""

from __future__ import annotations

from collections.abc import Mapping, Sequence
from math import prod
from typing import Any, ClassVar, Final

from tapwise.algorithm import Device, Plan
from tapwise.arrays.device import DeviceArray
from tapwise.cuda.jit.compile import Source, stub, traits
from tapwise.cuda.jit.launch import Launch
from tapwise.cuda.jit.tensor_map import WORDS
from tapwise.cuda.plan import CudaAlgorithm, CudaPlan
from tapwise.cuda.types import tensor_core_type
from tapwise.ops.conv.cuda import pack, window
from tapwise.ops.conv.cuda.implicit_gemm import configs, geometry, model, outputs
from tapwise.ops.conv.cuda.implicit_gemm.geometry import Config
from tapwise.ops.conv.problem import ConvProblem

FOLDER: Final = "ops/conv/cuda/implicit_gemm"
GEMM: Final = (
    *(f"{name}{word}" for name in ("x", "w", "out") for word in range(WORDS)),
    "y", "bias", "residual", "pixels", "filters", "groups", "tiles_f", "tiles", "p", "q", "taps_w", "chunks",
    "part_chunks", "steps", "stride_h", "stride_w", "pad_h", "pad_w", "dilation_h", "dilation_w", "weights_ready",
)  # fmt: skip
SLAB: Final = (
    *(f"{name}{word}" for name in ("x", "w", "res") for word in range(WORDS)),
    "y", "bias", "residual", "image", "n", "filters", "groups", "tiles_f", "tiles", "p", "q", "r", "s", "chunks",
    "part_chunks", "wide", "high", "halo_pixels", "copy_pixels", "pad_h", "pad_w", "dilation_h", "dilation_w",
    "height", "width", "c", "group_c", "down", "across", "tiles_h", "tiles_w", "weights_ready",
)  # fmt: skip
INSTRUCTIONS: Final = {"f16": "k16.f32.f16.f16", "bf16": "k16.f32.bf16.bf16", "f32": "k8.f32.tf32.tf32"}


class ImplicitGemmPlan(CudaPlan):
    """Perhaps a launch that packs x, and the product."""

    def __init__(
        self, problem: ConvProblem, view: ConvProblem, device: Device, first: Launch | None, gemm: Launch,
        order: int, workspace_bytes: int,
    ) -> None:  # fmt: skip
        super().__init__(problem, device, [gemm] if first is None else [first, gemm], workspace_bytes)
        self._first, self._gemm, self._view, self._device, self._order = first, gemm, view, device, order

    def pack(self, w: Any) -> DeviceArray:
        """The filters as [k][tap][channel], each tap's channels of a group padded to whole pieces."""
        return pack.filters(self._view, w, geometry.filter_line(self._view), self._device, order=self._order)

    def enqueue(self, addresses: Mapping[str, int], stream: int) -> None:
        if self._first is not None:
            self._first({"x": addresses["x"], "y": addresses["workspace"]}, stream)
            addresses = {**addresses, "x": addresses["workspace"]}
        self._gemm(addresses, stream)


class ImplicitGemm(CudaAlgorithm[Config]):
    """Any stride up to 8 (any at all where a few channels are packed with their taps), padding, dilation and groups;
    NHWC, and NCHW by packing x first; float16, bfloat16, and float32 with math="tf32" or "3xtf32". Hopper."""

    id: ClassVar[str] = "cuda.implicit_gemm"
    summary: ClassVar[str] = "tensor cores (wgmma) fed by the copy engine (TMA)"
    tensor_cores: ClassVar[bool] = True
    dtypes: ClassVar[tuple[str, ...]] = ("f16", "bf16", "tf32", "3xtf32")
    axes: ClassVar[tuple[int, ...]] = (2,)

    def rejects(self, problem: ConvProblem, device: Device) -> str | None:
        if device.architecture != "sm_90a":
            return f"needs Hopper (sm_90a), not {device.architecture}"
        if prod(problem.y_shape) >= geometry.LARGEST or prod(problem.x_shape) >= geometry.LARGEST:
            return "takes fewer than 2^31 elements"
        if geometry.unfoldings(problem):
            return None
        if not geometry.is_exact(problem, problem):
            return f"keeps fp32's bound with 3xtf32 for more channels a group, not {problem.group_c}"
        return f"takes padding, dilation and strides that a tensor map can express, not those of '{problem}'"

    def configs(self, problem: ConvProblem, device: Device) -> Sequence[Config]:
        return configs.all_configs(problem, device)

    def predict_us(self, problem: ConvProblem, config: Config, device: Device) -> float:
        """implicit_gemm_model.py says how."""
        return self._cost(problem, config, device).us

    def explain(self, problem: ConvProblem, config: Config, device: Device) -> str:
        """What the predicted time is made of."""
        return str(self._cost(problem, config, device))

    def _cost(self, problem: ConvProblem, config: Config, device: Device) -> model.Cost:
        size = problem.itemsize
        packed_bytes = self.workspace_bytes(problem, config, device)
        packed_bytes += prod(problem.x_shape) * size if packed_bytes else 0
        # Lines between strides are not read.
        seen = prod(min(1.0, taps / stride) for taps, stride in zip(problem.kernel, problem.stride, strict=True))
        read = (prod(problem.x_shape) * seen + prod(problem.w_shape) + prod(problem.y_shape) * problem.residual) * size
        problem = geometry.view_of(problem, config)
        rows, columns = geometry.sides_of(config)
        columns //= config.bundle
        chunks, line = geometry.chunks_of(problem, config), geometry.line_bytes(problem, config)
        slab = config.kernel != "stream"
        pixel_lines: float = config.pixels
        if slab:
            pixel_lines = geometry.slab_lines(problem, config)[0] / prod(problem.kernel)
        across, tiles = geometry.tiles_of(problem, config)
        blocks = geometry.blocks_of(problem, config, device)
        filter_lines = config.filters / config.bundle
        if config.held:
            # A block copies them once.
            filter_lines = filter_lines / -(-tiles // blocks) if not slab else 0
        overlapped = "turns" if config.turns else "once" if config.split > 1 else "loop"
        if config.resident > 1 and tiles * config.split > device.multiprocessors:
            overlapped = "resident"
        pixel = (pack.wide(problem) if packed_bytes else problem.group_c) * size
        apart = pixel if packed_bytes else problem.c * size
        high = tiles / across / problem.groups
        # Two warpgroups and the one that copies need all registers.
        needed = outputs.shared_bytes(problem, config) + 1024
        room = 1 if config.warpgroups == 2 else (device.shared_bytes + 1024) // needed
        work = model.Work(
            rows=rows, columns=columns, steps=-(-geometry.steps_of(problem, config) // config.split),
            instructions=((chunks - 1) * line / geometry.STEP_BYTES + geometry.last_steps(problem, config)) / chunks,
            stages=config.stages,
            flight=2 if config.turns or config.warpgroups == 1 else 1, pixel_lines=pixel_lines,
            filter_lines=filter_lines, line_bytes=line, parted=config.line > 0, taps=prod(problem.kernel),
            slabs=config.slabs, ragged=model.raggedness(pixel, apart, line),
            pixel_readers=min(across, device.multiprocessors),
            filter_readers=max(1.0, min(device.multiprocessors / across / problem.groups, high)), slab=slab,
            held=config.held, gather=config.gather, outputs=config.pixels * config.filters,
            together=1 if config.turns else config.warpgroups,
            residual=problem.residual,
            ahead=outputs.is_ahead(problem, config),
            paced=not slab and config.turns and outputs.is_delivered(problem, config),
            activation=problem.activation, written=outputs.written_of(problem, config),
            boxes=outputs.boxes_of(problem, config) > 0,
            ordered=outputs.ordered_bytes(problem, config),
            odd=problem.layout == "nhwc" and problem.group_k * size % 4 > 0, tiles=tiles, split=config.split,
            room=room, overlapped=overlapped,
            multiprocessors=min(device.multiprocessors, blocks) if config.held else device.multiprocessors,
            read_bytes=read, written_bytes=prod(problem.y_shape) * size,
            packed_bytes=packed_bytes, windows=config.unfold > 0,
            sectors=max(1.0, 32 / pixel) if problem.groups > 1 else 1.0,
        )  # fmt: skip
        return model.cost(work, device.gbps)

    def workspace_bytes(self, problem: ConvProblem, config: Config, device: Device) -> int:
        view = geometry.unfolded(problem, config.unfold)
        return pack.images_bytes(view) if geometry.is_packed(problem, config) else 0

    def error_factor(self, problem: ConvProblem) -> float:
        """tf32 keeps 11 bits of each factor, cut off at worst: 2^-9 of a product. 3xtf32 has the bound of fp32."""
        return super().error_factor(problem) + (2.0**15 if problem.math == "tf32" else 0.0)

    def plan(self, problem: ConvProblem, config: Config, device: Device) -> Plan:
        view = geometry.unfolded(problem, config.unfold)
        first = None
        if config.unfold:
            first = pack.windows(problem, view, device)
        elif geometry.is_packed(problem, config):
            first = pack.images(problem, device)
        gemm = self.launch(problem, config, device)
        order = outputs.order_of(geometry.view_of(problem, config), config)
        needed = self.workspace_bytes(problem, config, device)
        return ImplicitGemmPlan(problem, view, device, first, gemm, order, needed)

    def source(self, problem: ConvProblem, config: Config) -> Source:
        problem = geometry.view_of(problem, config)
        halo = config.kernel != "stream"
        values: dict[str, int | bool | str] = {
            "SWAP_AB": config.rows == "filters",
            "TILE_PIXELS": config.pixels,
            "TILE_FILTERS": config.filters,
            "WARPGROUPS": config.warpgroups,
            "PING_PONG": config.turns,
            "STAGES": config.stages,
            "SPLIT_K": config.split,
            "CHUNK_BYTES": geometry.line_bytes(problem, config),
            "GROUPS_PER_TILE": config.bundle,
            "LAST_CHUNK_STEPS": geometry.last_steps(problem, config),
            "GROUP_AXIS": geometry.has_groups(problem),
            "VECTOR": outputs.written_of(problem, config),
            "TMA_STORE": outputs.boxes_of(problem, config),
            "EPILOGUE_BUFFERS": outputs.stagings_of(problem, config),
            "PERMUTED_N": outputs.order_of(problem, config),
            "NCHW": problem.layout == "nchw",
            "BIAS": problem.bias,
            "RESIDUAL": problem.residual,
            "TMA_RESIDUAL": outputs.is_delivered(problem, config),
            "ACTIVATION": window.ACTIVATIONS[problem.activation],
            "FILTER_STATIONARY": config.held,
        }
        if halo:
            values |= {
                "HALO_BUFFERS": config.slabs,
                "HALO_TILE": config.kernel == "box",
                "GATHER_BYTES": config.gather,
            }
        name = f"implicit_gemm_{'halo' if halo else 'im2col'}"
        width = geometry.sides_of(config)[1] // config.bundle
        return stub(
            f"{FOLDER}/{name}.cu", name, "Traits", "HaloGemm" if halo else "Im2colGemm", self._threads(config),
            config.resident, instruction(problem.dtype, width), config.split,
            traits(tensor_core_type(problem.dtype), values),
        )  # fmt: skip

    def _threads(self, config: Config) -> int:
        """Warpgroups, and a warp that copies, or beside two a warpgroup."""
        return config.warpgroups * 128 + (128 if config.warpgroups == 2 else 32)

    def sources(self, problem: ConvProblem, config: Config) -> list[Source]:
        sources = [pack.filters_source(problem), self.source(problem, config)]
        if config.unfold:
            sources.append(pack.windows_source(problem))
        elif geometry.is_packed(problem, config):
            sources.append(pack.images_source(problem))
        return sources

    def launch(self, problem: ConvProblem, config: Config, device: Device) -> Launch:
        packed, source = geometry.is_packed(problem, config), self.source(problem, config)
        base, problem = geometry.unfolded(problem, config.unfold), geometry.view_of(problem, config)
        rows = pack.filter_rows(base, outputs.order_of(problem, config))
        filters = geometry.map_w(base, config, rows)
        fields = window.window_fields(problem) | {"group_c": problem.group_c}
        tiles_f, tiles = geometry.tiles_of(problem, config)
        chunks = geometry.chunks_of(problem, config)
        names = GEMM if config.kernel == "stream" else SLAB
        mine = {
            "pixels": problem.n * prod(problem.output), "filters": problem.group_k, "tiles_f": tiles_f, "tiles": tiles,
            "taps_w": problem.kernel[1], "chunks": chunks * (3 if problem.math == "3xtf32" else 1),
            "part_chunks": chunks, "steps": geometry.steps_of(problem, config),
        }  # fmt: skip
        lines = config.pixels
        if config.kernel == "slab":
            mine["high"], mine["wide"] = geometry.padded(problem)
            mine["halo_pixels"], lines = geometry.slab_lines(problem, config)
            mine["copy_pixels"] = lines
        box: tuple[int, ...] = ()
        if config.kernel == "box":
            mine["down"], mine["wide"], high, behind = geometry.box_shape(problem, config)
            box = mine["wide"], high
            mine["high"], mine["halo_pixels"], mine["across"] = high, prod(box), config.across
            # A slab takes whole patterns of eight lines.
            mine["copy_pixels"] = -(-mine["halo_pixels"] // 8) * 8 - mine["halo_pixels"] + behind
            mine["tiles_h"] = -(-problem.output[0] // mine["down"])
            mine["tiles_w"] = -(-problem.output[1] // config.across)
        mine = {name: value for name, value in (fields | mine).items() if name in names}
        blocks = geometry.blocks_of(problem, config, device)
        slab = config.kernel == "slab"
        line = geometry.line_bytes(problem, config)
        maps = {"x": geometry.map_x(problem, line, lines, packed, slab, box), "w": filters}
        if config.gather:
            # Not used, but a struct has a place for it.
            del maps["x"]
        if outputs.boxes_of(problem, config):
            maps["out"] = outputs.map_y(problem, config)
        if outputs.is_delivered(problem, config):
            maps["res"] = outputs.map_residual(problem, config)
        return Launch(
            source, names, mine, (blocks, 1, 1), (self._threads(config), 1, 1),
            outputs.shared_bytes(problem, config), maps, True, {"image": "x", "out": "y", "res": "residual"},
        )  # fmt: skip


def instruction(dtype: str, columns: int) -> str:
    """The matrix instruction of so many columns, as include/hopper.cuh wants it: 64 rows by one step of 32 bytes."""
    sums = columns // 2
    registers = ", ".join(f"%{i}" for i in range(sums))
    # For 16-bit elements the instruction says that neither operand is transposed.
    orders = "" if dtype == "f32" else ", 0, 0"
    outputs = ", ".join(f'"+f"(d[{i}])' for i in range(sums))
    return (
        f'#define WGMMA "{{ .reg .pred p; setp.ne.b32 p, %{sums + 2}, 0; wgmma.mma_async.sync.aligned.m64n{columns}'
        f'{INSTRUCTIONS[dtype]} {{{registers}}}, %{sums}, %{sums + 1}, p, 1, 1{orders}; }}"\n'
        f"#define WGMMA_N {columns}\n#define WGMMA_SUMS {outputs}\n"
    )
