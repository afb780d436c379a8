"""Kernels of cuda.implicit_gemm and cuda.implicit_gemm_mma as compiled: registers, spills and machine instructions."""

from __future__ import annotations

import re
import subprocess
from collections import Counter
from importlib import metadata
from pathlib import Path

import pytest
from compiled_kernels import Share, compiled
from tensor_core_cases import COMPILED, some

from tapwise.cuda.jit import compile as compiler
from tapwise.cuda.jit.compile import Source
from tapwise.cuda.jit.device import H200
from tapwise.ops.conv.cuda.implicit_gemm.config import Config
from tapwise.ops.conv.cuda.implicit_gemm.epilogue import Epilogue
from tapwise.ops.conv.cuda.implicit_gemm.implicit_gemm import ImplicitGemm
from tapwise.ops.conv.cuda.implicit_gemm.view import View
from tapwise.ops.conv.cuda.implicit_gemm_mma import ImplicitGemmMma
from tapwise.ops.conv.problem import ConvProblem


@pytest.mark.many
@pytest.mark.parametrize("text", COMPILED)
def test_wgmma_kernels_compile_without_spills_or_waits(text: str, share: Share) -> None:
    algorithm, problem = ImplicitGemm(), ConvProblem.parse(text)
    kinds = some(problem)
    # The best ones, one that writes from registers and one whose gemm_k is split.
    ordered = [one for one in kinds[3:] if Epilogue(View.of(problem, one)).permuted_n][:1]
    chosen = kinds[:3] + ordered + [one for one in kinds[3:] if one.split_k > 1][:1]
    pairs = [(source, config) for config in chosen for source in algorithm.sources(problem, config)]
    for source, config in share(pairs):
        assert_compiles(source, config)


def assert_compiles(source: Source, config: Config) -> None:
    """Without spills, and without what ptxas says of products that wait for each other."""
    code, used, log = compiled(source, "sm_90a")
    assert code[:4] == b"\x7fELF"
    assert (used.stack_bytes, used.spill_bytes) == (0, 0), f"{config}: {used}"
    # C7510 and its kin: products that do not run beside others, or registers that are not handed over.
    assert not re.search(r"C75\d\d", log), f"{config}: {log}"


@pytest.mark.many
@pytest.mark.parametrize(
    "text",
    [
        "n32 c96 h32 w32 k96 r3 s3 pad1 f16 nhwc bias silu",
        "n8 c40 h56 w56 k240 r1 s1 bf16 nhwc bias silu",
        "n32 c384 h14 w14 k1536 r1 s1 f16 nhwc bias gelu",
        "n16 c64 h60 w60 k160 r3 s3 pad1 bf16 nhwc bias sigmoid",
        "n8 c64 h40 w40 k96 r3 s3 pad1 f16 nchw bias gelu",
        "n32 c96 h32 w32 k96 r3 s3 pad1 f16 nhwc bias gelu_tanh",
        "n8 c40 h56 w56 k240 r1 s1 bf16 nhwc bias hardswish",
        "n32 c96 h32 w32 k96 r3 s3 pad1 tf32 nhwc bias hardsigmoid",
        "n8 c64 h40 w40 k96 r3 s3 pad1 f16 nhwc leaky_relu0.2",
    ],
)
def test_activations_of_many_sums_compile_without_spills_or_waits(text: str, share: Share) -> None:
    """Of each kernel the tiles with the most sums a thread: ptxas likes to begin with more activations than fit."""
    algorithm, problem = ImplicitGemm(), ConvProblem.parse(text)

    def sums(config: Config) -> int:
        return config.tile_pixels * config.tile_filters // (1 if config.ping_pong else config.warpgroups)

    kinds: dict[tuple[object, ...], Config] = {}
    for config in sorted(algorithm.configs(problem, H200), key=sums, reverse=True):
        kinds.setdefault((config.kernel, config.swap_ab, config.ping_pong, config.tile_pixels > 256), config)
    for config in share(sorted(kinds.values(), key=sums, reverse=True)[:5]):
        assert_compiles(algorithm.source(problem, config), config)


@pytest.mark.parametrize(
    "text",
    [
        "n8 c104 h20 w20 k72 r5 s5 pad2 f16 nhwc bias gelu residual",
        "n16 c320 h32 w32 k320 r3 s3 pad1 bf16 nhwc bias silu residual",
        "n8 c256 h16 w16 k328 r3 s3 pad1 tf32 nhwc bias silu residual",
        "n16 c320 h32 w32 k320 r3 s3 pad1 bf16 nhwc bias gelu_tanh residual",
    ],
)
def test_residuals_compile_without_spills_or_waits(text: str, share: Share) -> None:
    """Brought by TMA, of each kind the largest tile; and where many sums begin with them."""
    algorithm, problem = ImplicitGemm(), ConvProblem.parse(text)
    kinds: dict[tuple[object, ...], Config] = {}
    for config in sorted(algorithm.configs(problem, H200), key=lambda one: one.tile_pixels * one.tile_filters):
        if config.ping_pong and Epilogue(View.of(problem, config)).permuted_n:
            kinds["starts from residual", config.kernel] = config
        if Epilogue(View.of(problem, config)).tma_residual:
            kinds[config.kernel, config.swap_ab, config.ping_pong] = config
    assert {kind[1] for kind in kinds if len(kind) == 3} == {False, True}
    for config in share(kinds.values()):
        assert_compiles(algorithm.source(problem, config), config)


@pytest.mark.parametrize("architecture", ["sm_80", "sm_90a", "sm_100a"])
def test_mma_kernels_compile_without_spills(architecture: str, share: Share) -> None:
    algorithm = ImplicitGemmMma()
    sources: dict[Source, str] = {}
    for text in (COMPILED[1], COMPILED[4], COMPILED[5], COMPILED[6], COMPILED[8]):
        problem = ConvProblem.parse(text)
        configs = sorted(algorithm.configs(problem, H200), key=lambda one: algorithm.predict_us(problem, one, H200))
        for config in (configs[0], next(one for one in configs if one.split_k > 1))[: 2 if "bias" in text else 1]:
            sources |= dict.fromkeys(algorithm.sources(problem, config), f"{text}, {config}")
    for source in share(sources):
        used = compiled(source, architecture).resources
        assert (used.stack_bytes, used.spill_bytes) == (0, 0), f"{sources[source]}: {used}"


def instructions(source: compiler.Source, architecture: str, folder: Path) -> Counter[str]:
    """The machine instructions of a kernel: names without modifiers, and units of functions with theirs (MUFU.EX2)."""
    (program,) = [file for file in metadata.files("nvidia-cuda-nvdisasm") or () if file.name.startswith("nvdisasm")]
    path = folder / "kernel.cubin"
    path.write_bytes(compiler.cubin(source, architecture))
    text = subprocess.run(
        [str(program.locate()), "-c", str(path)], capture_output=True, text=True, check=True, timeout=60
    ).stdout
    return Counter(re.findall(r"\b(MUFU\.[A-Z0-9]+|[A-Z][A-Z0-9]+)[. ]", text))


def test_machine_code_has_the_matrix_instructions(tmp_path: Path) -> None:
    problem = ConvProblem.parse(COMPILED[0])
    engine, threads = ImplicitGemm(), ImplicitGemmMma()
    for config in some(problem)[:4]:
        found = instructions(engine.source(problem, config), "sm_90a", tmp_path)
        assert {"HGMMA", "UTMALDG"} <= set(found), config
        assert not set(found) & {"HMMA", "LDL", "STL"}
    for architecture in ("sm_80", "sm_90a"):
        found = instructions(threads.source(problem, threads.configs(problem, H200)[0]), architecture, tmp_path)
        assert {"HMMA", "LDSM", "LDGSTS"} <= set(found)
        assert not set(found) & {"HGMMA", "LDL", "STL"}


@pytest.mark.parametrize(
    "text",
    [
        "n6 c32 h40 w40 k200 r3 s3 pad1 tf32 nhwc bias sigmoid residual",
        "n6 c64 h40 w40 k72 r3 s3 pad1 bf16 nhwc bias sigmoid residual",
    ],
)
def test_columns_beyond_a_tile_are_left_alone(text: str, tmp_path: Path) -> None:
    """Sums go to y sixteen columns at a time. Of a tile that ends with eight, the bias of the next eight is the other
    warpgroup's, which may be writing it."""
    algorithm, problem = ImplicitGemm(), ConvProblem.parse(text)
    config = next(
        one
        for one in algorithm.configs(problem, H200)
        if (one.kernel, one.swap_ab, one.tile_pixels, one.tile_filters, one.ping_pong)
        == ("im2col", False, 64, 24, True)
    )
    found = instructions(algorithm.source(problem, config), "sm_90a", tmp_path)
    # A thread has twelve of the 64 x 24 sums of a warpgroup.
    assert found["MUFU.EX2"] == 12
