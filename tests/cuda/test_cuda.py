"""The CUDA backend without a GPU: every kernel compiles for every architecture, and what surrounds it is right."""

from __future__ import annotations

import builtins
import re
import struct
import time
from collections.abc import Iterator
from concurrent.futures import ThreadPoolExecutor
from functools import cache
from pathlib import Path
from types import SimpleNamespace
from typing import Any

import numpy as np
import pytest

import tapwise
from tapwise import dispatch, registry
from tapwise.algorithm import Algorithm, Config, Device
from tapwise.arrays import device as device_arrays
from tapwise.arrays.device import DeviceArray
from tapwise.cuda import block_reduction, copy, plan
from tapwise.cuda import partition as partitions
from tapwise.cuda.jit import compile as compiler
from tapwise.cuda.jit import device as devices
from tapwise.cuda.jit.compile import Source
from tapwise.cuda.jit.device import H200, architecture_of, why_none
from tapwise.cuda.jit.launch import Launch
from tapwise.errors import CompileError, DeviceUnavailable, InvalidProblem
from tapwise.ops.conv.cuda import few_channels, im2col_gemm, implicit_gemm_mma, narrow_groups, pack, reference
from tapwise.ops.conv.cuda import window as window_
from tapwise.ops.conv.cuda.direct import STEPS, Direct
from tapwise.ops.conv.cuda.im2col_gemm import Im2colGemm
from tapwise.ops.conv.cuda.implicit_gemm import implicit_gemm
from tapwise.ops.conv.cuda.sliding_window import SlidingWindow
from tapwise.ops.conv.prepared import TorchCall
from tapwise.ops.conv.problem import ConvProblem
from tapwise.ops.filter import cuda as filters
from tapwise.ops.patches import cuda as patches
from tapwise.ops.pool import cuda as pool
from tapwise.ops.reduce.problem import REDUCTIONS
from tapwise.problem import Problem

ARCHITECTURES = ["sm_80", "sm_90a", "sm_100a"]
PROBLEMS = [
    "c6 h768 w512 k6 r6 s6",
    "c3 h1920 w2400 k3 r6 s6",
    "c3 h1024 w1024 k3 r3 s3 bias relu",
    "c3 h4096 w4096 k3 r3 s3 stride2",
    "c1 h640 w640 k1 r3 s3",
    "n2 c5 h11 w13 k7 r3 s3 pad1 residual gelu",
    "c9 h13 w15 k9 r3 s3 pad1 groups9",
    "c4 h10 w12 k5 r1 s7 pad0x3 f64",
    "c5 h12 w16 k13 r3 s3 pad1 f16 silu",
    "c16 h30 w30 k24 r3 s3 stride3 pad1:0x0:2",
]
PLAIN = [
    "im2col n32 c64 h56 w56 r3 s3 pad1",
    "im2col n2 c3 w50 s5 stride2 pad3:1 f16",
    "im2col c2 d5 h6 w19 t2 r3 s3 stride1x2x2 pad1 dilation2x1x1 f64",
    "im2col c3 h20 w20 r5 s5",
    "col2im n32 c64 h56 w56 r3 s3 pad1",
    "col2im c3 h224 w224 r7 s7 stride2 pad3 f64",
    "col2im n2 c3 h20 w33 r3 s2 stride3x2 pad1 accumulate f16",
    "maxpool c64 h112 w112 r3 s3 stride2 pad1",
    "maxpool n2 c3 h20 w22 r2 s3 pad1 indices f16",
    "avgpool c3 h20 w20 r3 s3 stride2 pad1 ceil nhwc",
    "avgpool c3 h20 w20 r7 s7 exclude_pad f64",
    *(f"reduce {op} 64x1000x7 axis1" for op in REDUCTIONS),
    "reduce sum 10000000",
    "reduce argmin 3x100000 axis1 f64",
    "reduce logsumexp 5000000 f16",
    "filter gaussian sigma1 h99 w77 c3",
    "filter gaussian sigma2 h99 w77 u8",
    "filter correlate h99 w77 r7 s5 f64",
    "filter sobel h50 w33 u8 to:i16",
    "filter laplace h50 w33 u64",
    "filter maximum size5 h99 w77 u8",
    "filter minimum size5 h99 w77 i16 to:f64",
    "softmax 1024x1000",
    "softmax 100000 f16",
    "log_softmax 8x21x128x128 axis1",
    "log_softmax 1000000 f64",
]


def algorithms(operator: str) -> list[Algorithm[Config]]:
    """Those of plain arithmetic; tensor cores have tests of their own (test_implicit_gemm.py and others)."""
    return [one for one in registry.of_backend("cuda", operator) if not one.tensor_cores]


def chosen(algorithm: Algorithm[Config], text: str) -> list[Config]:
    """What is compiled of an algorithm for a problem: the model's best configs, three of a convolution."""
    problem = registry.parse(text)
    configs = algorithm.configs(problem, H200)
    count = 3 if problem.operator == "conv" else 1 if "64x1000x7" in text else 2
    return sorted(configs, key=lambda config: algorithm.predict_us(problem, config, H200))[:count]


def sources_of(algorithm: Algorithm[Config], problem: Problem, config: Config) -> list[Source]:
    """The kernels of a config."""
    assert isinstance(algorithm, plan.CudaAlgorithm)
    return algorithm.sources(problem, config)


@cache
def sources() -> dict[str, Source]:
    found = {f"reference {dtype}": reference.source(dtype) for dtype in ("f32", "f64", "f16", "bf16")}
    found |= {f"copy {size}": copy.source(size) for size in (1, 2, 4, 8)}
    for text in (*PROBLEMS, *PLAIN):
        problem = registry.parse(text)
        for algorithm in algorithms(problem.operator):
            for config in chosen(algorithm, text):
                for number, source in enumerate(sources_of(algorithm, problem, config)):
                    found[f"{text}, {algorithm.id} {config} {number}"] = source
    # Every rung of the ladder, and every choice of the RGB report's sliding window.
    direct, window = Direct(), SlidingWindow()
    problem = ConvProblem.parse("c6 h768 w512 k6 r6 s6")
    for step in STEPS:
        config = next(one for one in direct.configs(problem, H200) if one.step == step)
        found[f"direct {step}"] = direct.source(problem, config)
    product = Im2colGemm()
    for text in ("c6 h768 w512 k6 r6 s6", "c16 h30 w30 k24 r3 s3 gelu residual f64", "c16 h30 w30 k24 r3 s3 bias f16"):
        other = ConvProblem.parse(text)
        for one in product.configs(other, H200):
            # Every partition in float32, one size of them in the other dtypes.
            if other.dtype != "f32" and one.threads not in (0, 256):
                continue
            found[f"{text}, im2col_gemm {one}"] = product.source(other, one)
    expansion = patches.Im2colGridStride()
    for text in ("im2col c3 h50 w70 r3 s3 pad1", "im2col c2 d5 h6 w19 t2 r3 s3 f16"):
        other = registry.parse(text)  # type: ignore[assignment]
        for part in expansion.configs(other, H200):  # type: ignore[arg-type]
            if other.dtype != "f32" and part.threads not in (128, 256):
                continue
            found[f"{text} {part}"] = expansion.source(other, part)  # type: ignore[arg-type]
    for config in window.configs(problem, H200):
        if config.threads in (64, 256, 1024):
            found[f"sliding_window {config}"] = window.source(problem, config)
    return found


@pytest.mark.parametrize("architecture", ARCHITECTURES)
def test_every_kernel_compiles_without_spills(architecture: str) -> None:
    assert len(sources()) > 70
    for name, source in sources().items():
        code, used = compiler.compile_now(source, architecture)
        assert code[:4] == b"\x7fELF", name
        assert used.registers > 0
        assert (used.stack_bytes, used.spill_bytes) == (0, 0), f"{name}: {used}"


def test_a_spill_is_seen() -> None:
    text = re.sub(r"__launch_bounds__\(128, \d\)", "__launch_bounds__(128, 12)", sources()["direct outputs"].text)
    _, used = compiler.compile_now(Source("direct", text), "sm_90a")
    assert used.spill_bytes > 0


def words_of(text: str, struct: str) -> tuple[str, ...]:
    """The names of a struct's words in CUDA source."""
    body = text.split(f"struct {struct} {{")[1].split("};")[0]
    lines = [line.split("//")[0] for line in body.splitlines()]
    names: list[str] = []
    for declaration in " ".join(lines).split(";"):
        for word in declaration.replace("*", " ").split(","):
            name = word.split()[-1:]
            if name:
                base, _, count = name[0].partition("[")
                names += [base] if not count else [f"{base}{i}" for i in range(int(count.rstrip("]")))]
    return tuple(names)


@pytest.mark.parametrize(
    ("file", "struct_name", "words"),
    [
        ("cuda/include/window.cuh", "Window", window_.WINDOW),
        ("ops/conv/cuda/reference.cu", "Reference", reference.WORDS),
        ("ops/patches/patches.cu", "Patches", patches.WORDS),
        ("cuda/copy.cu", "Copy", copy.WORDS),
        ("ops/pool/pool.cu", "Pooling", pool.WORDS),
        ("cuda/include/block_reduction.cuh", "Runs", block_reduction.WORDS),
        ("ops/conv/cuda/gemm.cu", "Gemm", im2col_gemm.WORDS),
        ("ops/filter/filter.cu", "Filter", filters.WORDS),
        ("ops/conv/cuda/pack.cu", "Images", pack.IMAGE_WORDS),
        ("ops/conv/cuda/pack.cu", "Filters", pack.FILTER_WORDS),
        ("ops/conv/cuda/implicit_gemm/implicit_gemm_im2col.cu", "Im2colGemm", implicit_gemm.GEMM),
        ("ops/conv/cuda/implicit_gemm/implicit_gemm_halo.cu", "HaloGemm", implicit_gemm.SLAB),
        ("ops/conv/cuda/implicit_gemm_mma.cu", "Gather", implicit_gemm_mma.WORDS),
        ("ops/conv/cuda/implicit_gemm_mma.cu", "Parts", implicit_gemm_mma.PART_WORDS),
        ("ops/conv/cuda/few_channels.cu", "ImageRows", few_channels.WORDS),
        ("ops/conv/cuda/few_channels.cu", "Fragments", few_channels.FRAGMENT_WORDS),
        ("ops/conv/cuda/narrow_groups.cu", "Groups", narrow_groups.WORDS),
        ("ops/conv/cuda/narrow_groups.cu", "GroupFilters", narrow_groups.FILTER_WORDS),
    ],
)
def test_words_are_packed_in_the_order_of_the_struct(file: str, struct_name: str, words: tuple[str, ...]) -> None:
    text = (compiler.FOLDER / file).read_text()
    assert words_of(text, struct_name) == tuple(words)


def test_arguments_are_packed() -> None:
    launch = Launch(Source("any", ""), ("x", "n", "y"), {"n": -7}, (1, 2, 3), (32, 1, 1))
    assert struct.unpack("9q", launch._template) == (0, 0, -7, 0, 0, 0, 0, 0, 0)
    assert launch._open == {"x": 1, "y": 3}
    with pytest.raises(KeyError, match="m"):
        Launch(Source("any", ""), ("x",), {"m": 1}, (1, 1, 1), (1, 1, 1))
    with pytest.raises(CompileError, match="grid"):
        Launch(Source("any", ""), ("x",), {}, (1, 1 << 16, 1), (1, 1, 1))


def covered(text: str, config: Config, algorithm: Direct | SlidingWindow) -> np.ndarray:
    """How often each output (n, k, p, q) is computed, from the geometry alone."""
    problem = ConvProblem.parse(text)
    launch = algorithm.launch(problem, config)  # type: ignore[arg-type]
    words = dict(zip(launch.names, launch.words, strict=True))
    count = np.zeros(problem.y_shape, int)
    if isinstance(config, type(Direct().configs(problem, H200)[0])):
        columns, rows, channels = config.across * config.px, config.down * config.ty * config.each, config.k
    else:
        (columns, rows), channels = config.shape, 1  # type: ignore[attr-defined]
    group_k = problem.k // problem.groups
    for block in range(launch.grid[0]):
        tile_q, rest = block % words["tiles_q"], block // words["tiles_q"]
        tile_p, rest = rest % words["tiles_p"], rest // words["tiles_p"]
        here = np.s_[tile_p * rows : (tile_p + 1) * rows, tile_q * columns : (tile_q + 1) * columns]
        if isinstance(algorithm, SlidingWindow):
            for plane in range(launch.grid[2]):
                count[plane // problem.k, plane % problem.k][here] += 1
            continue
        tile_k, n = rest % words["tiles_k"], rest // words["tiles_k"]
        group, tile = divmod(tile_k, words["tiles_k"] // problem.groups)
        first = group * group_k + tile * channels
        for k in range(first, min(first + channels, (group + 1) * group_k)):
            count[n, k][here] += 1
    return count


@pytest.mark.parametrize("text", ["n2 c5 h37 w41 k7 r3 s3 pad1", "c6 h20 w70 k18 r3 s3 groups2", "c2 h90 w9 k1 r3 s3"])
def test_every_output_is_computed_once(text: str) -> None:
    for algorithm in (Direct(), SlidingWindow()):
        for config in algorithm.configs(ConvProblem.parse(text), H200):
            assert (covered(text, config, algorithm) == 1).all(), config


@pytest.mark.parametrize("pad", range(5))
@pytest.mark.parametrize("dtype", ["f32", "f64", "f16"])
@pytest.mark.parametrize("width", [64, 66, 67])
def test_tiles_of_direct_begin_on_a_copy(width: int, dtype: str, pad: int) -> None:
    direct = Direct()
    problem = ConvProblem.parse(f"c3 h40 w{width} k4 r3 s3 pad{pad} {dtype}")
    for config in direct.configs(problem, H200):
        copy_bytes, shift = direct._copy_bytes(problem, config), direct._shift(problem, config)
        size = problem.itemsize
        assert shift >= 0
        if copy_bytes:
            assert width * size % copy_bytes == 0
            for tile in range(3):
                left = tile * config.across * config.px * problem.stride[1] - pad - shift
                assert left * size % copy_bytes == 0
        _, columns, _ = direct._tile(problem, config)
        assert columns * size % 16 == 0
        assert direct.shared_bytes(problem, config) <= H200.shared_bytes


@pytest.mark.parametrize(
    ("text", "says"),
    [
        ("c4 h5 w5 k4 r3 s3 dgrad", "fprop"),
        ("c4 h5 w5 k4 r3 s3 bf16", "bf16"),
        ("c4 w5 k4 s3", "spatial"),
        ("c4 h5 w5 k4 r3 s3 nhwc", "NCHW"),
        ("n0 c4 h5 w5 k4 r3 s3", "nothing"),
        ("c1 h50000 w50000 k1 r1 s1", "2\\^31"),
    ],
)
def test_refusals_say_why(text: str, says: str) -> None:
    for algorithm in algorithms("conv"):
        reason = algorithm.refusal(ConvProblem.parse(text), H200)  # type: ignore[arg-type]
        assert reason is not None
        assert re.search(says, reason), reason


@pytest.mark.parametrize(
    ("text", "says"),
    [
        ("maxpool c3 w9 s3", "spatial"),
        ("maxpool n0 c3 h9 w9 r3 s3", "nothing"),
        ("avgpool c3 h9 w9 r3 s3 bf16", "bf16"),
        ("avgpool c1 h50000 w50000 r3 s3", "2\\^31"),
        ("reduce sum 3x4x5 axis0,2", "neighbours"),
        ("reduce sum 0x4 axis1", "nothing"),
        ("reduce sum 3x4 axis1 bf16", "bf16"),
        ("softmax 0x4", "nothing"),
        ("softmax 3x4 bf16", "bf16"),
        ("reduce sum 50000x50000x2 axis2", "2\\^31"),
    ],
)
def test_plain_operators_refuse_too(text: str, says: str) -> None:
    problem = registry.parse(text)
    for algorithm in algorithms(problem.operator):
        assert re.search(says, algorithm.refusal(problem, H200) or "")
        assert "GPU" in (algorithm.refusal(problem, Device("cpu", "a CPU", 2)) or "")


@pytest.mark.parametrize("text", ["reduce sum 7x1000x5 axis1", "reduce sum 300000", "softmax 9x41", "softmax 3x70000"])
def test_every_element_is_folded_once(text: str) -> None:
    """What each thread goes through, from the geometry alone: every element of every run once, in one part."""
    problem = registry.parse(text)
    (algorithm,) = algorithms(problem.operator)
    outer, length, inner = problem.folded  # type: ignore[attr-defined]
    for config in algorithm.configs(problem, H200):  # type: ignore[arg-type]
        first, *_ = algorithm.launches(problem, config)  # type: ignore[arg-type]
        assert first.block[0] == config.runs * config.down  # type: ignore[attr-defined]
        assert 32 <= first.block[0] <= 256
        parts, runs = config.parts, config.runs  # type: ignore[attr-defined]
        share = -(-length // parts)
        count = np.zeros((outer * inner, length), int)
        for block in range(first.grid[0]):
            columns = slice(block // parts * runs, (block // parts + 1) * runs)
            count[columns, block % parts * share : (block % parts + 1) * share] += 1
        assert (count == 1).all(), config
        words = dict(zip(first.names, first.words, strict=True))
        assert (words["outer"], words["length"], words["inner"], words["parts"]) == (outer, length, inner, parts)


def test_the_library_is_taken_only_when_asked_for(monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setattr(im2col_gemm, "_library", lambda: True)
    problem = ConvProblem.parse("n2 c513 h7 w7 k512 r3 s3 pad1")
    assert any(not one.automatic for one in Im2colGemm().configs(problem, H200))
    assert "library" not in str(dispatch.choose(problem, H200, "cuda.im2col_gemm").config)
    assert all("library" not in str(one.config) for one in dispatch.explain(problem, H200))
    asked = dispatch.choose(problem, H200, "cuda.im2col_gemm", config="gemm=library images=2")
    assert str(asked.config) == "gemm=library filters=0 images=2 partition=run threads=0"


def test_im2col_gemm_covers_every_image() -> None:
    """Passes of a few images, and the rest."""
    algorithm = Im2colGemm()
    problem = ConvProblem.parse("n7 c3 h9 w11 k13 r3 s3 pad1")
    config = im2col_gemm.Config("shared", 8, 3)
    assert algorithm.workspace_bytes(problem, config, H200) == 3 * 27 * 99 * 4
    for images in (3, 1):
        first, second = algorithm.launches(problem, config, images, H200)
        assert second is not None
        words = dict(zip(second.names, second.words, strict=True))
        assert (words["batch"], words["m"], words["windows"], words["depth"]) == (images, 13, 99, 27)
        assert second.grid == (2 * 1, 1, images)
        assert dict(zip(first.names, first.words, strict=True))["planes"] == images * 3
    large = ConvProblem.parse("c64 h4096 w4096 k64 r3 s3 pad1")
    assert "GiB" in (algorithm.refusal(large, H200) or "")
    assert {one.images for one in algorithm.configs(problem.replace(n=4096), H200)} == {4096, 1}
    many = ConvProblem.parse("n1000 c64 h56 w56 k64 r3 s3 pad1")
    assert {one.images for one in algorithm.configs(many, H200)} == {(4 << 30) // (64 * 9 * 3136 * 4), 1}


def window_of(partition: str, threads: int, tile: int, number: int, lines: int, width: int) -> int:
    """What include/partitions.cuh computes, from the meaning of the words."""
    across, down = partitions.tile_shape(partition, threads)
    assert across * down == threads
    tiles = -(-width // across)
    line, column = tile // tiles * down + number // across, tile % tiles * across + number % across
    return line * width + column if line < lines and column < width else -1


@pytest.mark.parametrize("partition", partitions.PARTITIONS)
@pytest.mark.parametrize("threads", patches.PART_THREADS)
def test_partitions_cover_every_window_once(partition: str, threads: int) -> None:
    """The grids of both halves of im2col + GEMM reach each window once, at odd sizes."""
    problem = ConvProblem.parse("n2 c3 h37 w71 k5 r3 s3")
    lines, width = problem.output
    algorithm = Im2colGemm()
    for one in algorithm.configs(problem, H200):
        if (one.partition, one.threads) != (partition, threads):
            continue
        assert not one.automatic
        first, second = algorithm.launches(problem, one, 2, H200)
        assert second is not None
        words = dict(zip(second.names, second.words, strict=True))
        assert (words["lines"], words["width"]) == (lines, width)
        assert second.block[0] == first.block[0] == threads
        tiles = words["tiles_n"]
        assert second.grid == (tiles * words["tiles_m"], 1, 2)
        # A block of the expansion is a tile of one channel.
        assert first.grid[0] == min(tiles * 6, patches.BLOCKS_EACH * H200.multiprocessors)
        found = [window_of(partition, threads, tile, i, lines, width) for tile in range(tiles) for i in range(threads)]
        assert sorted(window for window in found if window >= 0) == list(range(lines * width))


def test_partitions_of_a_volume_and_a_line() -> None:
    for text, lines, width in (("im2col c2 d5 h6 w19 t2 r3 s3", 16, 17), ("im2col c2 w50 s5", 1, 46)):
        problem = registry.parse(text)
        algorithm = registry.get("cuda.grid_stride", "im2col")
        for config in algorithm.configs(problem, H200):
            if config.partition == "run":  # type: ignore[attr-defined]
                continue
            across, down = partitions.tile_shape(config.partition, config.threads)  # type: ignore[attr-defined]
            launch = algorithm.launch(problem, config, H200)  # type: ignore[attr-defined]
            assert launch.grid[0] == 2 * -(-width // across) * -(-lines // down)


def test_lists_of_taps() -> None:
    """Constants, places and weights, where the kernel reads them; and a separable filter's two launches."""
    problem = registry.parse("filter sobel h50 w33 u8 to:i16")
    host, second = filters.pack(problem, problem.weights())  # type: ignore[arg-type, attr-defined]
    assert second == 6 + 2 * 3 and len(host) == 2 * second
    constants = host[second : second + 6].view(np.float64)
    assert constants[5] == 2 and constants[3] == 0
    assert host[second + 6 : second + 8].tolist() == [0, 2]
    assert host[second + 9 : second + 11].view(np.float64).tolist() == [-1, 1]
    assert host[6:9].tolist() == [0, 1 << 20, 2 << 20]
    algorithm = registry.get("cuda.sliding_window", "filter")
    launches = [algorithm.launch(problem, algorithm.configs(problem, H200)[0], part, H200) for part in (0, 1)]  # type: ignore[attr-defined]
    words = [dict(zip(launch.names, launch.words, strict=True)) for launch in launches]
    assert [(one["size1"], one["size2"], one["taps"], one["before1"], one["before2"]) for one in words] == [
        (3, 1, 3, 1, 0), (1, 3, 3, 0, 1),
    ]  # fmt: skip
    window = np.zeros((3, 5, 7))
    window[2, 4, 6] = 5.0
    dense = registry.parse("filter correlate d9 h20 w20 t3 r5 s7")
    host, second = filters.pack(dense, window)  # type: ignore[arg-type]
    assert second == 0 and host[6] == (2 << 40 | 4 << 20 | 6)
    assert "f16" in (algorithm.refusal(registry.parse("filter sobel h9 w9 f16"), H200) or "")


def test_direct_refuses_what_it_does_not_take() -> None:
    for text, says in (
        ("c4 h9 w9 k4 r3 s3 dilation2", "dilation"),
        ("c4 h19 w19 k4 r9 s9", "taps"),
        ("c4 h19 w19 k4 r3 s3 stride5", "strides"),
    ):
        assert says in (Direct().refusal(ConvProblem.parse(text), H200) or "")
    assert "GPU" in (Direct().refusal(ConvProblem.parse(PROBLEMS[0]), Device("cpu", "a CPU", 2)) or "")


def test_choice_needs_no_gpu() -> None:
    problem = ConvProblem.parse("c6 h768 w512 k6 r6 s6")
    choice = dispatch.choose(problem, H200)
    assert choice.algorithm == "cuda.direct"
    assert dispatch.choose(problem.replace(dilation=(2, 2)), H200).algorithm != "cuda.direct"
    assert {one.algorithm for one in dispatch.explain(problem, H200)} == {
        one.id for one in registry.of_backend("cuda", "conv")
    }


def test_a_quick_call_brings_the_workspace_along() -> None:
    import torch

    problem, seen = ConvProblem.parse("c4 h5 w5 k4 r3 s3"), []

    class Fake(plan.CudaPlan):
        def __init__(self, size: int) -> None:
            self.workspace_bytes = size

        def enqueue(self, addresses: object, stream: int) -> None:
            seen.append((addresses, stream))

    filters, packed = SimpleNamespace(index=0, owner=torch.zeros(1)), SimpleNamespace(ptr=7, synchronized=True)
    x = torch.zeros(problem.x_shape)
    for size in (0, 16):
        call = TorchCall(problem, Fake(size), packed, None, filters)
        call._stream = lambda index: 5
        y = call(x)
        addresses, stream = seen[-1]
        assert (addresses["x"], addresses["y"], addresses["w"], stream) == (x.data_ptr(), y.data_ptr(), 7, 5)
        assert addresses["weights_ready"] == 1
        assert ("workspace" in addresses) == (size > 0)
        assert y.shape == problem.y_shape


def test_plans_that_only_launch_say_so() -> None:
    """A plan with a way of its own to run is not called by addresses."""

    def kinds(kind: type[plan.CudaPlan]) -> Iterator[type[plan.CudaPlan]]:
        yield kind
        for more in kind.__subclasses__():
            yield from kinds(more)

    found = list(kinds(plan.CudaPlan))
    for kind in found:
        assert kind.launch_only == (kind.run is plan.CudaPlan.run), kind
    assert {kind.launch_only for kind in found if kind.__module__.startswith("tapwise.")} == {False, True}


@pytest.mark.parametrize("layout", ["nchw", "nhwc"])
def test_a_quick_call_takes_a_residual_that_needs_no_conversion(layout: str) -> None:
    import torch

    problem = ConvProblem.parse(f"n2 c4 h5 w6 k3 r3 s3 residual {layout}")

    class Fake(plan.CudaPlan):
        workspace_bytes = 0

        def __init__(self) -> None:
            self.seen: dict[str, int] = {}

        def enqueue(self, addresses: object, stream: int) -> None:
            self.seen = addresses  # type: ignore[assignment]

    made = Fake()
    # Tensors of the host are numbered -1.
    filters, packed = SimpleNamespace(index=-1, owner=torch.zeros(1)), SimpleNamespace(ptr=7, synchronized=False)
    call = TorchCall(problem, made, packed, None, filters)
    call._stream = lambda index: 5
    order, other = torch.channels_last, torch.contiguous_format
    if layout == "nchw":
        order, other = other, order
    x = torch.zeros(problem.x_shape).contiguous(memory_format=order)
    residual = torch.zeros(problem.y_shape).contiguous(memory_format=order)
    assert call.takes(x, residual)
    y = call(x, residual)
    assert made.seen["residual"] == residual.data_ptr() and made.seen["x"] == x.data_ptr()
    assert made.seen["y"] == y.data_ptr() and y.is_contiguous(memory_format=order)
    for wrong in (
        None, residual.contiguous(memory_format=other), residual[:1], residual.double(), np.zeros(problem.y_shape),
        torch.zeros(residual.numel() + 1)[1:].reshape(residual.shape), residual.clone().requires_grad_(),
    ):  # fmt: skip
        assert not call.takes(x, wrong)
    assert not call.takes(x.contiguous(memory_format=other), residual)
    quick = TorchCall(problem.replace(residual=False), made, packed, None, filters)
    assert quick.takes(x) and not quick.takes(x, residual)


@pytest.mark.skipif(why_none() is None, reason="there is a GPU")
def test_without_a_gpu_the_call_says_so() -> None:
    x, w = np.zeros((1, 3, 8, 8), np.float32), np.zeros((2, 3, 3, 3), np.float32)
    for call in (
        lambda: tapwise.conv2d(x, w, device="cuda"),
        lambda: tapwise.prepare("c3 h8 w8 k2 r3 s3", w, device="cuda"),
        lambda: tapwise.im2col(x, 3, device="cuda"),
    ):
        with pytest.raises(DeviceUnavailable, match="device='cuda'"):
            call()
    with pytest.raises(InvalidProblem, match="device='gpu'"):
        tapwise.conv2d(x, w, device="gpu")


@pytest.mark.skipif(why_none() is None, reason="there is a GPU")
def test_info_says_why() -> None:
    from typer.testing import CliRunner

    from tapwise.cli import app

    text = " ".join(CliRunner().invoke(app, ["info"]).output.split())
    assert "gpu none: no NVIDIA driver" in text


def test_architectures() -> None:
    found = [architecture_of(*capability) for capability in ((8, 0), (8, 6), (9, 0), (10, 0))]
    assert found == ["sm_80", "sm_86", "sm_90a", "sm_100a"]


# The cache of cubins


@pytest.fixture
def fresh(tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> Iterator[Path]:
    monkeypatch.setenv("TAPWISE_CACHE_DIR", str(tmp_path))
    yield tmp_path / "cuda"


def test_cubins_are_kept(fresh: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    source = copy.source(4)
    code = compiler.cubin(source, "sm_80")
    (path,) = fresh.glob("copy-sm_80-*.cubin")
    monkeypatch.setattr(compiler, "_compile", lambda *_: pytest.fail("compiled again"))
    assert compiler.cubin(source, "sm_80") == code
    path.write_bytes(path.read_bytes()[:-1])
    with pytest.warns(RuntimeWarning, match="damaged"), pytest.raises(pytest.fail.Exception):
        compiler.cubin(source, "sm_80")


def test_a_changed_include_is_another_cubin(fresh: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    source, read = reference.source("f32"), compiler._read
    compiler.cubin(source, "sm_90a")
    monkeypatch.setattr(compiler, "_read", lambda name: read(name) + "// more\n" * (name == "types.cuh"))
    compiler.cubin(source, "sm_90a")
    assert len(list(fresh.glob("*.cubin"))) == 2


def test_headers_of_another_version_are_no_trouble(fresh: Path) -> None:
    """Versions lie beside each other; and a folder that cannot be written is passed over."""
    source = reference.source("f16")
    compiler._headers.cache_clear()
    assert compiler.cubin(source, "sm_90a")
    assert [path.name for path in fresh.glob("headers-*")] == [f"headers-{compiler.nvrtc_version()}"]
    in_the_way = fresh / "file"
    in_the_way.write_text("")
    assert (compiler._headers(in_the_way) / "cuda_fp16.h").is_file()
    compiler._headers.cache_clear()


def test_bad_code_is_a_compile_error(fresh: Path) -> None:
    with pytest.raises(CompileError, match="nonsense"):
        compiler.compile_now(Source("bad", "nonsense here"), "sm_90a")
    with pytest.raises(CompileError, match=r"missing\.cuh"):
        compiler.cubin(Source("bad", '#include "missing.cuh"\n'), "sm_90a")


# Views of device memory, against NumPy's


def mirrored(array: np.ndarray) -> DeviceArray:
    """A DeviceArray with an array's address, shape and strides: nothing reads its memory."""
    return DeviceArray(array.ctypes.data, array.shape, array.strides, array.dtype, 0, "other", array)


@pytest.mark.parametrize(
    "key", [None, np.s_[None, :], np.s_[:, :, None], np.s_[:, :, 0], np.s_[1], np.s_[1, :, None, 2], np.s_[:, None, 3]]
)
def test_views(key: object) -> None:
    array = np.zeros((3, 5, 7), np.float32)[::-1, :, ::2]
    view, wanted = mirrored(array)[key], array[key]  # type: ignore[index]
    assert (view.ptr, view.shape, view.ndim, view.size) == (wanted.ctypes.data, wanted.shape, wanted.ndim, wanted.size)
    kept = [axis for axis, size in enumerate(wanted.shape) if size > 1]
    assert [view.strides[axis] for axis in kept] == [wanted.strides[axis] for axis in kept]


def test_transposed_dense_and_spans() -> None:
    array = np.zeros((2, 3, 4, 5), np.float32)
    for candidate in (array, array[:, :, ::2], array[::-1], array[:, :1], array[:0], array.transpose(0, 2, 3, 1)):
        view = mirrored(candidate)
        assert view.dense_as(tuple(range(4))) == candidate.flags.c_contiguous
        assert view.spans() == np.lib.array_utils.byte_bounds(candidate) or candidate.size == 0
        assert view.transpose(0, 2, 3, 1).shape == candidate.transpose(0, 2, 3, 1).shape
    assert mirrored(array.transpose(0, 3, 1, 2)).transpose(0, 2, 3, 1).dense_as((0, 1, 2, 3))
    with pytest.raises(TypeError, match="index"):
        mirrored(array)[::2]


def test_where_arrays_lie() -> None:
    import torch

    assert not device_arrays.is_device(np.zeros(3)) and not device_arrays.is_device(torch.zeros(3))
    assert device_arrays.is_device(mirrored(np.zeros(3)))
    assert mirrored(np.zeros((2, 3), np.float32)).__cuda_array_interface__["typestr"] == "<f4"


def test_cuda_core_is_imported_by_one_thread_at_a_time(monkeypatch: pytest.MonkeyPatch) -> None:
    """A second thread would find its module half made."""
    inside, most = [0], [0]
    real = builtins.__import__

    def slow(name: str, *more: Any, **named: Any) -> Any:
        if name != "cuda":
            return real(name, *more, **named)
        inside[0] += 1
        most[0] = max(most[0], inside[0])
        time.sleep(0.05)
        inside[0] -= 1
        return SimpleNamespace(core="whole")

    devices.cuda_core.cache_clear()
    monkeypatch.setattr(builtins, "__import__", slow)
    with ThreadPoolExecutor(4) as pool:
        found = list(pool.map(lambda _: devices.cuda_core(), range(4)))
    monkeypatch.undo()
    devices.cuda_core.cache_clear()
    assert found == ["whole"] * 4
    assert most == [1]
