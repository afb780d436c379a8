"""The kernels and launches of cuda.implicit_gemm for a view of a problem."""

from __future__ import annotations

from collections.abc import Sequence
from math import prod
from typing import Final

from tapwise.algorithm import Device
from tapwise.cuda.jit.compile import Source, struct_words, stub, traits
from tapwise.cuda.jit.launch import Launch
from tapwise.cuda.types import tensor_core_type
from tapwise.integers import ceil_div, round_up
from tapwise.ops.conv.cuda import pack, window
from tapwise.ops.conv.cuda.implicit_gemm import tensor_maps
from tapwise.ops.conv.cuda.implicit_gemm.config import HaloRowsConfig, HaloTileConfig, Im2colConfig
from tapwise.ops.conv.cuda.implicit_gemm.epilogue import Epilogue
from tapwise.ops.conv.cuda.implicit_gemm.rectangle import residues_of
from tapwise.ops.conv.cuda.implicit_gemm.view import STEP_BYTES, View, has_group_axis, padded

FOLDER: Final = "ops/conv/cuda/implicit_gemm"
# What the kernels are compiled for, beside the problem's own words.
CONFIG_WORDS: Final = (
    "swap_ab", "tile_pixels", "tile_filters", "warpgroups", "ping_pong", "stages", "split_k", "groups_per_tile",
    "filter_stationary", "transposed_pixels", "gather_bytes", "share_filters",
)  # fmt: skip
VIEW_WORDS: Final = ("chunk_bytes", "last_chunk_bytes", "last_chunk_steps", "transposed_filters")
EPILOGUE_WORDS: Final = (
    "vector", "run_vector", "runs", "tma_store", "epilogue_buffers", "permuted_n", "tma_residual", "strided",
)  # fmt: skip
INSTRUCTIONS: Final = {"f16": "k16.f32.f16.f16", "bf16": "k16.f32.bf16.bf16", "f32": "k8.f32.tf32.tf32"}


def source(view: View, independent: bool = False, phases: bool = False, empty: bool = False) -> Source:
    """The kernel; `independent` of the launch before (include/grid.cuh); of several `phases` of dgrad, some of which
    may be `empty`."""
    config, seen, epilogue = view.config, view.seen, Epilogue(view)
    halo = not isinstance(config, Im2colConfig)
    own = (*CONFIG_WORDS, *(("halo_buffers", "staged_strips") if halo else ()))
    owners = ((config, own), (view, VIEW_WORDS), (epilogue, EPILOGUE_WORDS), (seen, ("bias", "residual")))
    values = {word.upper(): getattr(owner, word) for owner, words in owners for word in words} | {
        "GROUP_AXIS": has_group_axis(seen), "NCHW": seen.layout == "nchw",
        "ACTIVATION": window.activation(seen.activation), "INDEPENDENT": independent,
        "BIAS_PERIOD": view.joined.filters if view.joined else 0,
    }  # fmt: skip
    if halo:
        values |= {
            "HALO_TILE": isinstance(config, HaloTileConfig), "FLAT_PLANES": view.flat_planes,
            "PLANE_CLASSES": view.plane_classes, "PARTIAL_TAPS": view.partial_taps is not None,
        }  # fmt: skip
        if partial := view.partial_taps:
            values |= {"FIRST_TAP_BEGIN": partial.begin // STEP_BYTES}
            values |= {"LAST_TAP_STEPS": ceil_div(partial.end, STEP_BYTES)}
        residues = residues_of(seen)
        assert residues is not None
        for side, stride, met in zip("HW", seen.stride, residues, strict=True):
            values |= {f"STRIDE_{side}": stride, f"RESIDUES_{side}": met.count, f"GRAIN_{side}": met.grain}
    else:
        shifted = view.shifted
        values |= {"EMPTY": empty} if phases else {}
        values |= {
            "SHIFT_CLASSES": shifted.classes if shifted else 1, "SHIFT_WARPS": shifted.warps if shifted else 1,
            "WHOLE_PLANES": shifted is not None and shifted.whole,
        }  # fmt: skip
    # The instruction's own operands, A and B.
    pixels, filters = config.transposed_pixels, view.transposed_filters
    transposed = (filters, pixels) if config.swap_ab else (pixels, filters)
    name = f"implicit_gemm_{'phases' if phases else 'halo' if halo else 'im2col'}"
    struct = "PhasedGemm" if phases else "HaloGemm" if halo else "Im2colGemm"
    return stub(
        f"{FOLDER}/{name}.cu", name, "Traits", struct, view.threads,
        config.min_blocks_per_sm, instruction(seen.dtype, config.instruction_n, *transposed), config.cluster,
        traits(tensor_core_type(seen.dtype), values),
    )  # fmt: skip


def takes_filters_as_given(view: View) -> bool:
    """Whether packed filters would be what channels-last ones are: nothing is padded, permuted or rounded. Where they
    stay in shared memory, and are copied once, the last tile may reach beyond them."""
    base, config = view.unfolded, view.config
    same = not config.unfold and base.itemsize == 2 and tensor_maps.filter_channels(base) == base.group_c
    whole = config.filter_stationary or base.groups > 1 or base.k % config.tile_filters == 0
    return same and whole and not Epilogue(view).permuted_n and view.plane_classes == 1


def filter_tile(view: View) -> int:
    """Packed filters are whole tiles of so many: TMA takes up to four times as long for boxes that reach beyond them
    (192 filters in tiles of 128: 10.5 us instead of 7.4)."""
    return 1 if takes_filters_as_given(view) else view.config.tile_filters


def launch(view: View, device: Device, independent: bool = False) -> Launch:
    """The launch, `independent` of the one before."""
    config, seen, epilogue = view.config, view.seen, Epilogue(view)
    kernel = source(view, independent)
    fields = window.window_fields(seen, kernel) | {
        "pixels": seen.n * prod(seen.output), "filters": seen.group_k,
        "tiles_f": view.tiles_f, "tiles_p": view.tiles_p, "tiles": view.tiles, "units": view.units,
        "taps_w": seen.kernel[1], "chunks": view.chunks * view.parts, "part_chunks": view.chunks, "steps": view.steps,
    } | window.stride_fields(view.strides) | window.filter_fields(view.filters)  # fmt: skip
    if isinstance(config, HaloRowsConfig):
        fields["high"], fields["wide"] = padded(seen)
        fields["halo_pixels"], fields["copy_pixels"] = view.halo_rows
    elif isinstance(config, HaloTileConfig):
        tile, pixels = view.rectangle, view.halo_pixels
        fields |= {
            "high": tile.high, "wide": tile.wide, "halo_pixels": pixels,
            # A halo takes whole patterns of eight pixels.
            "copy_pixels": round_up(pixels, 8) - pixels + tile.behind, "residue_pixels": tile.apart,
            "down": tile.down, "across": config.across, "tiles_h": ceil_div(seen.output[0], tile.down),
            "tiles_w": ceil_div(seen.output[1], config.across),
        }  # fmt: skip
        if strips := view.strips:
            fields |= {
                "strips": strips.count, "strip_rows": strips.rows, "strip_pitch": strips.pitch,
                "strip_pieces": strips.pieces, "rows_x": strips.high, "table_words": strips.table_words,
            }  # fmt: skip
    maps = {"w": tensor_maps.map_w(view, pack.filter_rows(view.unfolded, epilogue.permuted_n, filter_tile(view)))}
    if not config.gather_bytes:
        maps["x"] = tensor_maps.map_x(view)
    if view.is_narrow or view.last_pixels:
        maps["x_last"] = tensor_maps.map_x(view, last=True)
        if view.transposed_filters:
            maps["w_last"] = tensor_maps.map_w(view, 0, last=True)
    if epilogue.tma_store:
        maps["out"] = tensor_maps.map_y(view)
    if epilogue.last_stored:
        maps["out_last"] = tensor_maps.map_y(view, epilogue.last_stored)
    if epilogue.tma_residual:
        maps["res"] = tensor_maps.map_residual(view)
    held = {"image": "x", "out": "y", "out_last": "y", "res": "residual", "x_last": "x", "w_last": "w"}
    names = struct_words(kernel)
    return Launch(
        kernel, {name: value for name, value in fields.items() if name in names}, (view.blocks(device), 1, 1),
        view.threads, epilogue.shared_bytes, maps, True, held,
    )  # fmt: skip


def phases_launch(views: Sequence[View], by_place: bool, device: Device, independent: bool = False) -> Launch:
    """The launch of up to four phases of one config, whose places in dx are "y0" to "y3"; `by_place`: the order of
    their tiles (implicit_gemm_phases.cu)."""
    first = views[0]
    config, seen, epilogue = first.config, first.seen, Epilogue(first)
    kernel = source(first, independent, True, any(view.steps == 0 for view in views))
    tiles = [view.tiles for view in views]
    fields = {
        "filters": seen.group_k, "groups": seen.groups, "tiles_f": first.tiles_f, "chunks": first.chunks,
        "phases": len(views), "places": by_place * max(tiles), "dilation_h": seen.dilation[0],
        "dilation_w": seen.dilation[1],
    } | window.stride_fields(first.strides)  # fmt: skip
    maps, names_of = {"w": tensor_maps.map_w(first, 0)}, {}
    if first.is_narrow:
        maps["w_last"], names_of["w_last"] = tensor_maps.map_w(first, 0, last=True), "w"
    for number, view in enumerate(views):
        (p, q), one = view.seen.output, window.filter_fields(view.filters)
        own = {
            "tiles": view.tiles, "pixels": view.seen.n * p * q, "p": p, "q": q, "steps": view.steps,
            "taps_w": view.seen.kernel[1], "pad_h": view.seen.padding[0][0], "pad_w": view.seen.padding[1][0],
            "first_r": one["first_r"], "first_s": one["first_s"],
        }  # fmt: skip
        fields |= {f"{name}{number}": value for name, value in own.items()} | {
            name: one[name] for name in ("step_r", "step_s")
        }
        maps[f"x{number}_"] = tensor_maps.map_x(view)
        names_of[f"x{number}_"] = "x"
        if first.is_narrow:
            maps[f"x_last{number}_"], names_of[f"x_last{number}_"] = tensor_maps.map_x(view, last=True), "x"
        if epilogue.tma_store:
            maps[f"out{number}_"] = tensor_maps.map_y(view)
            names_of[f"out{number}_"] = f"y{number}"
        if epilogue.last_stored:
            maps[f"out_last{number}_"] = tensor_maps.map_y(view, epilogue.last_stored)
            names_of[f"out_last{number}_"] = f"y{number}"
    blocks = min(max(tiles) if by_place else sum(tiles), device.multiprocessors * config.min_blocks_per_sm)
    return Launch(kernel, fields, (blocks, 1, 1), first.threads, epilogue.shared_bytes, maps, True, names_of)


def instruction(dtype: str, columns: int, transposed_a: bool = False, transposed_b: bool = False) -> str:
    """The matrix instruction of so many columns, as include/hopper.cuh wants it: 64 rows by one step of 32 bytes.
    Operands of 16-bit elements may be transposed: what runs along gemm_k is the slow axis."""
    sums = columns // 2
    registers = ", ".join(f"%{i}" for i in range(sums))
    # For 16-bit elements the instruction says whether operands are transposed.
    orders = "" if dtype == "f32" else f", {int(transposed_a)}, {int(transposed_b)}"
    outputs = ", ".join(f'"+f"(d[{i}])' for i in range(sums))
    return (
        f'#define WGMMA "{{ .reg .pred p; setp.ne.b32 p, %{sums + 2}, 0; wgmma.mma_async.sync.aligned.m64n{columns}'
        f'{INSTRUCTIONS[dtype]} {{{registers}}}, %{sums}, %{sums + 1}, p, 1, 1{orders}; }}"\n'
        f"#define WGMMA_N {columns}\n#define WGMMA_SUMS {outputs}\n"
    )
