"""What LLVM makes of the generators, for every instruction set, whatever this machine has."""

from __future__ import annotations

import os
import re
import subprocess
import sys
from collections.abc import Callable, Iterable
from functools import partial
from typing import Any

import pytest

import neon_instructions
from tapwise.cpu import jit, tile
from tapwise.cpu.device import features
from tapwise.cpu.simd import Kernel, Target, target
from tapwise.ops.conv.cpu import dgrad_direct_kernel as dgrad
from tapwise.ops.conv.cpu import gemm_col2im_kernel
from tapwise.ops.conv.cpu.depthwise import in_place, planes, small_planes
from tapwise.ops.conv.cpu.depthwise import kernel as depthwise
from tapwise.ops.conv.cpu.depthwise import pixels as pixels_in_place
from tapwise.ops.conv.cpu.depthwise.small_planes import Plane
from tapwise.ops.conv.cpu.depthwise.tile import Rows, Tile
from tapwise.ops.conv.cpu.dgrad_direct import tiles as dgrad_tiles
from tapwise.ops.conv.cpu.direct import kernel as direct
from tapwise.ops.conv.cpu.direct.blocking import IN_PLACE_M
from tapwise.ops.conv.cpu.winograd import kernel as winograd
from tapwise.ops.conv.winograd.transforms import Axis

Share = Callable[[Iterable[Any]], list[Any]]
FMA = {
    ("avx512", "f32"): r"vfn?madd\w+ps\s.*%zmm",
    ("avx512", "f64"): r"vfn?madd\w+pd\s.*%zmm",
    ("avx2", "f32"): r"vfn?madd\w+ps\s.*%ymm",
    ("avx2", "f64"): r"vfn?madd\w+pd\s.*%ymm",
    ("neon", "f32"): r"fmla\s+v\d+\.4s",
    ("neon", "f64"): r"fmla\s+v\d+\.2d",
}
# A vector register stored to the stack.
SPILL = re.compile(r"vmov[au]p[sd]\s+%[yz]mm\d+, -?\d*\(%rsp\)|str\s+q\d+, \[sp")
PLAIN = {"storage": "f32", "bias": True, "residual": False, "activation": "relu"}


def generators(vector: Target) -> dict[str, Callable[..., Kernel]]:
    m, n = tile.shapes(vector)[0]
    pixels, channels = tile.shapes(vector, "channels")[0]
    plane = {"taps_h": 3, "stride_h": 1, "dilation_h": 1}
    three, one, seven = (Axis(taps, 1, 1, 1) for taps in (3, 1, 7))
    run = pixels_in_place.RUNS[vector.registers][0]
    four: dict[str, Any] = {"rows": three, "columns": three, "tile_h": 4, "tile_w": 4}
    one_by_seven: dict[str, Any] = {"rows": one, "columns": seven, "tile_h": 1, "tile_w": 2}
    transposed = Axis(3, 2, 1, 1, first=1)
    strided: dict[str, Any] = {"rows": transposed, "columns": transposed, "tile_h": 4, "tile_w": 4}
    packed: dict[str, Any] = {"layout": "nchw", "panels": True}
    given: dict[str, Any] = {"layout": "nchw", "panels": False}
    fewer, wider = next(one for one in tile.shapes(vector) if one[0] <= IN_PLACE_M)
    dgrad_m, dgrad_n = dgrad_tiles(vector.registers, 2)[0]
    rows, vectors = max(planes.tiles(vector.registers, 3, 1, 1), key=lambda tile: tile[0] * tile[1])
    return {
        "direct-pixels": partial(direct.generate, route="sums", lanes="pixels", m=m, n=n, **packed),
        "direct-channels": partial(
            direct.generate, layout="nhwc", route="sums", lanes="channels", panels=True, m=pixels, n=channels
        ),
        "direct-pieces": partial(
            direct.generate, route="sums", lanes="channels", m=pixels, n=channels, pieces=True, **packed
        ),
        "direct-straight": partial(direct.generate, route="straight", lanes="pixels", m=m, n=n, **packed),
        "direct-fetches-y": partial(
            direct.generate, route="straight", lanes="pixels", m=m, n=n, fetch_y=True, **packed
        ),
        "direct-in-place": partial(direct.generate, route="in place", lanes="pixels", m=m, n=n, **packed),
        "filters-in-place": partial(direct.generate, route="sums", lanes="pixels", m=fewer, n=wider, **given),
        "filters-in-place-straight": partial(
            direct.generate, route="straight", lanes="pixels", m=fewer, n=wider, **given
        ),
        "filters-in-place-channels": partial(
            direct.generate, route="sums", lanes="channels", m=pixels, n=channels, **given
        ),
        "dgrad-direct": partial(dgrad.generate, m=dgrad_m, n=dgrad_n, ways=2),
        "depthwise-nchw": partial(depthwise.generate, layout="nchw", rows=rows, vectors=vectors, **plane),
        "depthwise-nhwc": partial(depthwise.generate, layout="nhwc", rows=4, vectors=2, **plane),
        "depthwise-pixels": partial(pixels_in_place.generate, pixels=run[0], vectors=run[1]),
        "winograd-4": partial(winograd.generate, layout="nchw", lanes="tiles", **four, m=m, n=n),
        "winograd-planes": partial(winograd.generate, layout="nchw", lanes="channels", **four, m=pixels, n=channels),
        "winograd-nhwc": partial(winograd.generate, layout="nhwc", lanes="channels", **four, m=pixels, n=channels),
        "winograd-dgrad": partial(winograd.generate, layout="nchw", lanes="channels", **strided, m=pixels, n=channels),
        "winograd-1x2": partial(winograd.generate, layout="nchw", lanes="tiles", **one_by_seven, m=m, n=n),
    }


def functions(assembly: str) -> dict[str, str]:
    """Assembly text by function."""
    parts = re.split(r"^([A-Za-z_]\w*):.*$", assembly, flags=re.MULTILINE)
    return dict(zip(parts[1::2], parts[2::2], strict=True))


# Each kernel for each instruction set in float32, in float64 for one of them: that has as many vectors in its tiles.
TARGETS = ("avx512", "avx2", "neon")


@pytest.mark.many
@pytest.mark.parametrize(("number", "kernel"), enumerate(generators(target("avx2"))))
def test_vector_fma_and_no_spills_in_tiles(number: int, kernel: str, share: Share) -> None:
    # What is in place is never chosen on NEON.
    known = [name for name in TARGETS if target(name).vector_bytes > 16 or not kernel.startswith("filters-in-place")]
    for name, dtype in share([*((name, "f32") for name in known), (known[number % len(known)], "f64")]):
        vector = target(name)
        options = PLAIN | {"storage": dtype}
        assembly = jit.assembly(generators(vector)[kernel](vector, dtype=dtype, **options))
        assert re.search(FMA[name, dtype], assembly)
        tiles = {
            label: text
            for label, text in functions(assembly).items()
            if re.fullmatch(r"tile_\d+(_\d+)?|outputs", label)
        }
        assert tiles
        for lanes in ("pixels", "channels"):
            m, n = tile.shapes(vector, lanes)[0]
            widest = tiles.get(f"tile_{m}_{n}", "")
            assert not SPILL.search(widest)
        largest = max(tiles.values(), key=len)
        assert re.search(FMA[name, dtype], largest) and not SPILL.search(largest)


@pytest.mark.many
@pytest.mark.parametrize("kernel", ["direct-channels", "direct-pieces"])
@pytest.mark.parametrize("name", TARGETS)
def test_one_vector_of_channels_has_pixels_by_twos(name: str, kernel: str) -> None:
    """Else its sums would not hide a product's latency."""
    vector = target(name)
    for m, n in tile.shapes(vector, "channels", split_loads=False):
        assembly = jit.assembly(generators(vector)[kernel](vector, dtype="f32", m=m, n=n, **PLAIN))
        text = functions(assembly)[f"tile_{2 * m}_1"]
        assert not SPILL.search(text) and len(re.findall(FMA[name, "f32"], text)) >= 2 * m


@pytest.mark.parametrize(
    ("name", "sum_"), [("avx512", r"vaddps\s.*%zmm"), ("avx2", r"vaddps\s.*%ymm"), ("neon", r"fadd\s")]
)
def test_products_are_added_up_as_vectors(name: str, sum_: str) -> None:
    task = functions(jit.assembly(gemm_col2im_kernel.generate(target(name), dtype="f32", ways=2, **PLAIN)))["task"]
    assert re.search(sum_, task)
    if name != "neon":
        assert re.search(r"vmovups\s.*\{%k\d\} \{z\}|vmaskmovps\s|vblendvps\s|vaddps\s.*\{%k\d\}", task)


@pytest.mark.parametrize(("name", "planes", "weights"), [("avx512", 2, 7), ("avx2", 1, 4)])
def test_masked_loads_and_no_spills_in_place(name: str, planes: int, weights: int) -> None:
    place = Rows(h=7, p=7, rows=7, pad=3, taps=7, stride=1, dilation=1)
    shape = Tile(place, (8,), exact=False, planes=planes, weights=weights, ways=1, columns=1, odd=False)
    kernel = in_place.generate(target(name), dtype="f32", tile=shape, **PLAIN)
    (tile,) = [text for label, text in functions(jit.assembly(kernel)).items() if label.startswith("tile_")]
    assert re.search(r"vmovups\s.*%ymm\d+ \{%k\d\} \{z\}|vmaskmovps\s.*, %ymm", tile)
    assert re.search(r"vfn?madd\w+ps\s.*%ymm", tile) and not SPILL.search(tile)


@pytest.mark.parametrize("shape", [(7, 3, 1), (7, 7, 3), (7, 9, 4), (4, 3, 1), (14, 3, 1), (9, 5, 2)])
def test_small_planes_do_not_spill(shape: tuple[int, int, int]) -> None:
    """A load of each vector of x, whatever the taps."""
    size, taps, pad = shape
    plane = Plane(size, size, size, size, taps, taps, pad, pad, 1, 1, joined=16 // size, lanes=16)
    columns = plane.by_columns(32)
    assert columns or plane.by_rows(32)
    kernel = small_planes.generate(target("avx512"), dtype="f32", plane=plane, columns=columns, **PLAIN)
    tile = functions(jit.assembly(kernel))["tile"]
    assert not SPILL.search(tile)
    assert len(re.findall(r"vmovups\s+-?\d*\(%rdi\), %zmm", tile)) == len(plane.users)


@pytest.mark.parametrize(("rows", "vectors", "planes"), [(7, (8,), 1), (13, (16,), 1), (4, (16, 16), 1)])
def test_rows_loaded_once_do_not_spill(rows: int, vectors: tuple[int, ...], planes: int) -> None:
    place = Rows(h=28, p=14, rows=rows, pad=1, taps=3, stride=2, dilation=1)
    shape = Tile(place, vectors, False, planes, weights=3, ways=2, columns=2, odd=True, once=3)
    kernel = in_place.generate(target("avx512"), dtype="f32", tile=shape, **PLAIN)
    tiles = [text for label, text in functions(jit.assembly(kernel)).items() if label.startswith("tile_")]
    assert tiles and not any(SPILL.search(text) for text in tiles)


@pytest.mark.parametrize(("rows", "stride", "planes"), [(7, 1, 2), (4, 2, 1)])
def test_tasks_in_place_ask_for_rows_of_x(rows: int, stride: int, planes: int) -> None:
    """A line of each row that a later tile begins with, before each kind of tile."""
    place = Rows(h=14, p=14 // stride, rows=rows, pad=1, taps=3, stride=stride, dilation=1)
    shape = Tile(place, (8,), exact=False, planes=planes, weights=3, ways=stride, columns=stride, odd=False)
    task = functions(jit.assembly(in_place.generate(target("avx512"), dtype="f32", tile=shape, **PLAIN)))["task"]
    assert len(re.findall(r"prefetcht1\s", task)) == rows * stride * planes * len(list(place.runs()))


@pytest.mark.parametrize(("name", "asks"), [("avx512", r"prefetchw\s"), ("neon", r"prfm\s+pst")])
def test_tiles_ask_for_the_output_that_they_write(name: str, asks: str) -> None:
    vector = target(name)
    m, n = tile.shapes(vector)[0]
    for kernel, times in (("direct-fetches-y", m * n), ("direct-straight", 0)):
        assembly = jit.assembly(generators(vector)[kernel](vector, dtype="f32", **PLAIN))
        assert len(re.findall(asks, functions(assembly)[f"tile_{m}_{n}"])) == times


def test_tiles_in_place_ask_for_lines_of_the_next_pixels() -> None:
    """One a term, from an address that is the tile's own: the tiles of a column ask for different lines."""
    vector = target("avx512")
    m, n = tile.shapes(vector)[0]
    for kernel in ("direct-in-place", "direct-straight"):
        parts = functions(jit.assembly(generators(vector)[kernel](vector, dtype="f32", **PLAIN)))
        asked = len(re.findall(r"prefetcht1\s+\(", parts[f"tile_{m}_{n}"]))
        assert asked == (tile.UNROLL + 1 if kernel == "direct-in-place" else 0)


@pytest.mark.parametrize("kernel", ["direct-pixels", "direct-channels", "direct-straight"])
def test_pairs_of_bfloat16(kernel: str, share: Share) -> None:
    """Tiles multiply pairs, without spills; the rest of AVX-512 and NEON has neither that nor the rounding."""
    product = {"avx512": r"vdpbf16ps\s.*%zmm", "neon": r"bfdot\s+v\d+\.4s"}
    rounding = {"avx512": r"vcvtneps2bf16\s.*%zmm", "neon": r"bfcvtn2?\s+v\d+"}
    choices = ("avx512-bf16", True), ("neon-bf16", True), ("avx512", False), ("neon", False)
    for name, pairs in share(choices):
        vector = target(name)
        options = PLAIN | {"storage": "bf16", "pairs": pairs}
        assembly = jit.assembly(generators(vector)[kernel](vector, dtype="f32", **options))
        tiles = [text for label, text in functions(assembly).items() if re.fullmatch(r"tile_\d+_\d+", label)]
        largest = max(tiles, key=len)
        assert not SPILL.search(largest)
        kind = name.removesuffix("-bf16")
        assert bool(re.search(product[kind], largest)) == pairs == vector.bf16_pairs
        assert bool(re.search(FMA[kind, "f32"], largest)) != pairs
        assert bool(re.search(rounding[kind], assembly)) == pairs == vector.rounds_bf16


def test_pairs_of_bfloat16_in_place() -> None:
    """Tiles multiply pairs as they lie in memory, without spills, on an aligned stack: longer filters do spill."""
    place = Rows(h=14, p=14, rows=14, pad=1, taps=3, stride=1, dilation=1)
    shape = Tile(place, (16,), exact=False, planes=1, weights=3, ways=1, columns=1, odd=True, pairs=True)
    kernel = in_place.generate(target("avx512-bf16"), dtype="f32", tile=shape, **PLAIN | {"storage": "bf16"})
    (tile,) = [text for label, text in functions(jit.assembly(kernel)).items() if label.startswith("tile_")]
    # Of 14 rows the first and the last meet two of three rows of taps.
    assert len(re.findall(r"vdpbf16ps\s.*%zmm", tile)) == 2 * (3 * 14 - 2) and not re.search(r"vfn?madd", tile)
    assert re.search(r"vpermw\s.*%zmm", tile) and not re.search(r"vpslld", tile)
    assert re.search(r"andq\s+\$-64, %rsp", tile) and not SPILL.search(tile)


def test_spill_pattern_finds_spills() -> None:
    assert SPILL.search("\tvmovups\t%ymm11, -40(%rsp)")
    assert SPILL.search("\tstr\tq8, [sp, #16]")
    assert not SPILL.search("\tvmovups\t%ymm11, -40(%rdi)")


def test_avx2_code_runs_here() -> None:
    """In a process of its own: the target is fixed for a process's plans."""
    program = (
        "from tapwise import registry, verify\n"
        "from tapwise.cpu.device import host\n"
        "from tapwise.ops.conv.problem import ConvProblem\n"
        "assert host().vector_bytes == 32\n"
        "for text in ('c9 h9 w11 k7 r3 s3 pad1', 'c9 h7 w5 k11 r1 s1', 'c9 h9 w9 k9 r5 s5 pad2 groups9'):\n"
        "    problem = ConvProblem.parse(text)\n"
        "    for identifier in registry.ALGORITHMS['conv']:\n"
        "        if registry.get(identifier).refusal(problem, host()) is None:\n"
        "            assert verify.check(problem, identifier), identifier\n"
        "print('ran')\n"
    )
    if "avx2" not in features():
        pytest.skip("this CPU has no AVX2")
    environment = os.environ | {"TAPWISE_CPU_TARGET": "avx2"}
    result = subprocess.run([sys.executable, "-c", program], env=environment, capture_output=True, text=True)
    assert result.stdout.strip() == "ran", result.stderr


def test_instructions_are_counted(capsys: pytest.CaptureFixture[str]) -> None:
    neon_instructions.main()
    rows = capsys.readouterr().out.splitlines()[2:]
    assert len(rows) == len(neon_instructions.KERNELS)
    assert all("`fmla`" in row for row in rows if row.startswith("| conv2d"))
