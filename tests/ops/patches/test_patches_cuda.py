"""Kernels of patches without a GPU: partitions, and configs by emulation."""

from __future__ import annotations

from dataclasses import replace

import numpy as np
import pytest

import emulated
from tapwise import dispatch, registry
from tapwise.cuda import partition as partitions
from tapwise.cuda.jit import compile as compiler
from tapwise.cuda.jit.device import H200
from tapwise.ops.patches import cuda, cuda_shared_lines
from tapwise.verify import compare


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


# Lines that end among a thread's windows, or never; taps that share what they read, or do not; few taps and many.
WINDOWS = [
    "n2 c3 h9 w12 r3 s3", "c2 h13 w16 r3 s3 pad1", "c2 h11 w12 r3 s3 stride2 pad1", "c3 h9 w10 r3 s3 pad2 dilation2",
    "c2 h14 w9 r2 s3 stride1x3 pad1x2", "c2 d5 h6 w10 t2 r3 s3 stride1x2x2 pad1 dilation2x1x1",
    "n2 c3 w24 s5 stride2 pad3:1", "c1 h24 w26 r5 s5 pad2", "c3 h5 w4 r3 s3 pad4",
    "c2 h8 w8 r4 s4 stride2 pad1 dilation1x3",
]  # fmt: skip


@pytest.mark.skipif(not emulated.available(), reason="no compiler to emulate with")
@pytest.mark.parametrize("text", WINDOWS)
@pytest.mark.parametrize("operator", ["im2col", "col2im"])
def test_every_config_by_emulation(monkeypatch: pytest.MonkeyPatch, operator: str, text: str) -> None:
    """Elements of 16 and 32 bits; columns that stay in the cache and such that do not."""
    for dtype, most in (("f32", 0), ("bf16", cuda.STREAM_BYTES)):
        monkeypatch.setattr(cuda, "STREAM_BYTES", most)
        problem = registry.parse(f"{operator} {text} {dtype}")
        algorithm = registry.get("cuda.grid_stride", operator)
        inputs = problem.sample(np.random.default_rng(0), False)
        expected, bound = problem.reference(inputs, algorithm)
        for config in algorithm.configs(problem, H200):
            if config.threads != 128 and not config.spread:  # type: ignore[attr-defined]
                continue
            y = np.full(problem.y_shape, np.nan, problem.y_dtype)
            emulated.run(algorithm.launch(problem, config, H200), {"x": inputs.x, "y": y})  # type: ignore[attr-defined]
            assert (verdict := compare(y, expected, bound, problem.y_dtype)), (config, verdict.message)


# Of 16 bits, lines that begin at any element, and many windows of a channel: blocks of all lines and of some, strides
# down that part the lines of the image, one axis.
LONG_LINES = [
    "n2 c3 h30 w27 r3 s3 pad1", "n2 c1 h90 w59 r3 s5 stride2 pad2", "c2 h90 w53 r2 s3 stride3x1 dilation2x3",
    "c2 w3001 s5", "c2 h30 w1205 r3 s3 pad1", "n2 c2 h80 w81 r3 s3 stride2 dilation2 pad2",
]  # fmt: skip


@pytest.mark.skipif(not emulated.available(), reason="no compiler to emulate with")
@pytest.mark.parametrize("dtype", ["f16", "bf16"])
@pytest.mark.parametrize("text", LONG_LINES)
@pytest.mark.parametrize("windows", [700, 256])
def test_shared_lines_by_emulation(monkeypatch: pytest.MonkeyPatch, text: str, dtype: str, windows: int) -> None:
    monkeypatch.setattr(cuda_shared_lines, "WINDOWS", windows)
    problem, algorithm = registry.parse(f"im2col {text} {dtype}"), registry.get("cuda.shared_lines", "im2col")
    assert algorithm.refusal(problem, H200) is None
    inputs = problem.sample(np.random.default_rng(0), False)
    expected, bound = problem.reference(inputs, algorithm)
    (config,) = algorithm.configs(problem, H200)
    y = np.full(problem.y_shape, np.nan, problem.y_dtype)
    launch = algorithm.launch(problem, config, H200)  # type: ignore[attr-defined]
    emulated.run(launch, {"x": inputs.x, "y": y}, backwards=windows < 512)
    assert (verdict := compare(y, expected, bound, problem.y_dtype)), (config, verdict.message)


@pytest.mark.skipif(not emulated.available(), reason="no compiler to emulate with")
@pytest.mark.parametrize("text", ["n2 c3 h30 w27 r3 s3 pad1", "c2 d3 h30 w27 t2 r3 s3 pad1", "n3 c2 w301 s5 pad2 f64"])
def test_runs_past_the_ends_of_lines_by_emulation(text: str) -> None:
    """The last run of a channel brings the first windows of the next tap's row; of all, nothing is behind it."""
    problem, algorithm = registry.parse(f"im2col {text}"), registry.get("cuda.grid_stride", "im2col")
    inputs = problem.sample(np.random.default_rng(0), False)
    expected, bound = problem.reference(inputs, algorithm)
    (config,) = (one for one in algorithm.configs(problem, H200) if one.past)  # type: ignore[attr-defined]
    y = np.full(problem.y_shape, np.nan, problem.y_dtype)
    emulated.run(algorithm.launch(problem, config, H200), {"x": inputs.x, "y": y})  # type: ignore[attr-defined]
    assert (verdict := compare(y, expected, bound, problem.y_dtype)), verdict.message


def test_what_shared_lines_refuse() -> None:
    algorithm, old = registry.get("cuda.shared_lines", "im2col"), replace(H200, shared_bytes=48 << 10)
    for text in (
        "c3 h64 w63 r3 s3", "c3 h66 w66 r3 s3 f16", "c3 h16 w15 r3 s3 f16", "c2 d3 h30 w27 t2 r3 s3 f16",
        "c2 w3001 s17 f16", "c2 w30001 s3 stride17 f16", "c1 h3 w30001 r3 s3 f16",
    ):  # fmt: skip
        assert algorithm.refusal(registry.parse(f"im2col {text}"), H200) is not None, text
    wide = registry.parse("im2col c1 h9 w3000 r3 s4 f16")
    assert algorithm.refusal(wide, H200) is None and algorithm.refusal(wide, old) is not None
    lines = [algorithm.configs(registry.parse("im2col c1 h99 w2001 r3 s3 f16"), one)[0] for one in (H200, old)]
    assert [one.lines for one in lines] == [3, 2]  # type: ignore[attr-defined]


def test_choice_of_im2col() -> None:
    """Of lines that end between what a thread stores: pairs by way of shared memory, 16 bytes past their ends."""
    for text, algorithm, past in (
        ("n16 c64 h75 w75 r3 s3 pad1 f16", "cuda.shared_lines", None),
        ("n16 c64 h75 w75 r3 s3 pad1", "cuda.grid_stride", True),
        ("n16 c64 h56 w56 r3 s3 pad1 f16", "cuda.grid_stride", False),
        ("n64 c64 h7 w7 r3 s3 pad1 f16", "cuda.grid_stride", False),
        ("c2 h13 w13 r3 s3 pad1", "cuda.grid_stride", False),
    ):
        chosen = dispatch.choose(registry.parse(f"im2col {text}"), H200)
        assert chosen.algorithm == algorithm and getattr(chosen.config, "past", None) == past, text


@pytest.mark.many
@pytest.mark.parametrize("architecture", ["sm_80", "sm_90a", "sm_100a"])
@pytest.mark.parametrize(
    "text", ["c3 h64 w63 r3 s3 f16", "c3 h64 w64 r3 s3 f16", "c3 h64 w63 r3 s3 stride2 pad1", "c3 h64 w64 r7 s7 bf16"]
)
def test_kernels_compile_without_spills(architecture: str, text: str) -> None:
    for operator, identifier in (
        ("im2col", "cuda.grid_stride"), ("col2im", "cuda.grid_stride"), ("im2col", "cuda.shared_lines"),
    ):  # fmt: skip
        problem, algorithm = registry.parse(f"{operator} {text}"), registry.get(identifier, operator)
        for config in algorithm.configs(problem, H200) if algorithm.refusal(problem, H200) is None else ():
            _, used = compiler.compile_now(algorithm.source(problem, config), architecture)  # type: ignore[attr-defined]
            assert (used.stack_bytes, used.spill_bytes) == (0, 0)
