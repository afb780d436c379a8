"""cuda.grid_stride without a GPU: its partitions, and its configs by emulation."""

from __future__ import annotations

import numpy as np
import pytest

import emulated
from tapwise import registry
from tapwise.cuda import partition as partitions
from tapwise.cuda.jit import compile as compiler
from tapwise.cuda.jit.device import H200
from tapwise.ops.patches import cuda
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


@pytest.mark.parametrize("architecture", ["sm_80", "sm_90a", "sm_100a"])
@pytest.mark.parametrize("text", ["c3 h64 w64 r3 s3 f16", "c3 h64 w63 r3 s3 stride2 pad1", "c3 h64 w64 r7 s7 bf16"])
def test_kernels_compile_without_spills(architecture: str, text: str) -> None:
    for operator in ("im2col", "col2im"):
        problem, algorithm = registry.parse(f"{operator} {text}"), registry.get("cuda.grid_stride", operator)
        for config in algorithm.configs(problem, H200):
            _, used = compiler.compile_now(algorithm.source(problem, config), architecture)  # type: ignore[attr-defined]
            assert (used.stack_bytes, used.spill_bytes) == (0, 0)
