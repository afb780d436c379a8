"""Kernels of CUDA C++ without a GPU: they compile for every architecture without spills, and cubins are kept."""

from __future__ import annotations

import re
from collections.abc import Callable, Iterable, Iterator
from functools import cache
from pathlib import Path
from typing import Any

import pytest

from tapwise import registry
from tapwise.algorithm import Config
from tapwise.cuda import copy
from tapwise.cuda.jit import compile as compiler
from tapwise.cuda.jit.compile import Source
from tapwise.cuda.jit.device import H200
from tapwise.cuda.plan import CudaAlgorithm
from tapwise.errors import CompileError
from tapwise.ops.conv.cuda import reference
from tapwise.ops.conv.cuda.direct import STEPS, Direct
from tapwise.ops.conv.cuda.im2col_gemm import Im2colGemm
from tapwise.ops.conv.cuda.sliding_window import SlidingWindow
from tapwise.ops.conv.problem import DIRECTIONS, ConvProblem
from tapwise.ops.patches import cuda as patches
from tapwise.ops.reduce.problem import REDUCTIONS

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
    "squeeze_excitation c1152 h7 w7 m48 silu f16 nhwc",
    "squeeze_excitation n32 c32 h112 w112 m8 hardswish hardsigmoid bf16 nhwc",
    "squeeze_excitation n3 c37 h9 w11 m5 gelu",
    "squeeze_excitation c40000 h1 w3 m2 f64 nhwc",
    "batch_norm n64 c64 h56 w56 f16 nhwc",
    "batch_norm n64 c64 h56 w56 dgrad gelu f16 nhwc",
    "batch_norm n64 c240 h28 w28 dgrad silu bf16 nhwc",
    "batch_norm n64 c240 h28 w28 dgrad gelu_tanh f16",
    "batch_norm n2 c37 h9 w11 dgrad tanh f64",
    "batch_norm n2 c37 h9 w11",
    "bias_activation n64 c256 h56 w56 dgrad relu f16 nhwc",
    "bias_activation n64 c240 h28 w28 dgrad gelu bf16",
    "bias_activation n2 c37 h9 w11 dgrad f64",
]


# Compiled in each dtype that an algorithm takes.
IN_EACH_DTYPE = [
    "c5 h12 w16 k13 r3 s3 pad1 silu",
    "c9 h13 w15 k9 r3 s3 pad1 groups9 bias residual nhwc",
    "im2col n2 c3 h20 w22 r3 s3 pad1",
    "im2col c2 h9 w9 r6 s5",
    "col2im n2 c3 h20 w22 r3 s3 pad1 accumulate",
    "col2im c3 h20 w21 r2 s3 stride3x2",
    "maxpool n2 c3 h20 w22 r3 s3 pad1 indices",
    "avgpool c3 h20 w20 r3 s3 nhwc",
    *(f"reduce {op} 30x70" for op in ("mean", "max", "argmin", "prod", "norm2", "logsumexp")),
    "reduce sum 1000000",
    "softmax 30x70",
    "log_softmax 1000000",
]


def algorithms(operator: str) -> list[CudaAlgorithm[Any]]:
    """Those of plain arithmetic; tensor cores have tests of their own (test_implicit_gemm.py and others)."""
    found = registry.of_backend("cuda", operator)
    assert all(isinstance(one, CudaAlgorithm) for one in found)
    return [one for one in found if not one.tensor_cores]  # type: ignore[misc]


def chosen(algorithm: CudaAlgorithm[Any], text: str) -> list[Config]:
    """What is compiled of an algorithm for a problem: the model's best config, and the next one of a convolution."""
    problem = registry.parse(text)
    configs = algorithm.configs(problem, H200)
    count = 2 if problem.operator == "conv" else 1
    return sorted(configs, key=lambda config: algorithm.predict_us(problem, config, H200))[:count]


@cache
def sources() -> dict[str, Source]:
    dtypes = "f32", "f64", "f16", "bf16"
    found = {f"reference {dtype} {one}": reference.source(dtype, one) for dtype in dtypes for one in DIRECTIONS}
    found |= {f"copy {size}": copy.source(size) for size in (1, 2, 4, 8)}
    for text in (*PROBLEMS, *PLAIN):
        problem = registry.parse(text)
        for algorithm in algorithms(problem.operator):
            if algorithm.refusal(problem, H200):
                continue
            for config in chosen(algorithm, text):
                for number, source in enumerate(algorithm.sources(problem, config)):
                    found[f"{text}, {algorithm.id} {config} {number}"] = source
    # Every rung of the ladder, and every choice of the RGB report's sliding window.
    direct, window = Direct(), SlidingWindow()
    problem = ConvProblem.parse("c6 h768 w512 k6 r6 s6")
    for step in STEPS:
        config = next(one for one in direct.configs(problem, H200) if one.step == step)
        found[f"direct {step}"] = direct.source(problem, config)
        found[f"direct {step} bf16"] = direct.source(problem.replace(dtype="bf16"), config)
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
@pytest.mark.parametrize("part", range(4))
def test_every_kernel_compiles_without_spills(
    part: int, architecture: str, share: Callable[[Iterable[Source]], list[Source]]
) -> None:
    """In parts, which processes share."""
    assert len(sources()) > 70
    distinct = {source: name for name, source in sources().items()}
    for source in share(list(distinct)[part::4]):
        name = distinct[source]
        if architecture == "sm_80" and "__cluster_dims__" in source.text:
            continue
        code, used = compiler.compile_now(source, architecture)
        assert code[:4] == b"\x7fELF", name
        assert used.registers > 0
        assert (used.stack_bytes, used.spill_bytes) == (0, 0), f"{name}: {used}"


@pytest.mark.many
@pytest.mark.parametrize("text", IN_EACH_DTYPE)
def test_every_dtype_compiles(text: str, share: Callable[[Iterable[Source]], list[Source]]) -> None:
    operator, elsewhere = registry.parse(text).operator, set(sources().values())
    found: dict[Source, str] = {}
    for algorithm in algorithms(operator):
        for dtype in algorithm.dtypes or ():
            problem = registry.parse(f"{text} {dtype}")
            if algorithm.refusal(problem, H200):
                continue
            configs = chosen(algorithm, f"{text} {dtype}")
            each = (source for config in configs for source in algorithm.sources(problem, config))
            found |= {source: f"{text} {dtype}, {algorithm.id}" for source in each if source not in elsewhere}
    for source in share(found):
        code, _ = compiler.compile_now(source, "sm_90a")
        assert code[:4] == b"\x7fELF", found[source]


def test_a_spill_is_seen() -> None:
    text = re.sub(r"__launch_bounds__\(128, \d\)", "__launch_bounds__(128, 12)", sources()["direct outputs"].text)
    _, used = compiler.compile_now(Source("direct", text), "sm_90a")
    assert used.spill_bytes > 0


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
