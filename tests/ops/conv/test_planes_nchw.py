"""cuda.implicit_gemm in NCHW without a GPU: planes read as they lie, outputs of halos as runs, pixels left out.
Plans run by emulation, against float64."""

from __future__ import annotations

from dataclasses import replace

import numpy as np
import pytest
from emulated_plans import SMALL, emulation, lent, memory_of, needs_compiler

from tapwise.algorithm import Buffers
from tapwise.ops.conv.cuda.implicit_gemm.config import Config, Im2colConfig
from tapwise.ops.conv.cuda.implicit_gemm.epilogue import Epilogue
from tapwise.ops.conv.cuda.implicit_gemm.implicit_gemm import ImplicitGemm
from tapwise.ops.conv.cuda.implicit_gemm.view import View, lies_ready
from tapwise.ops.conv.problem import ConvProblem
from tapwise.verify import Verdict, compare

__all__ = ["emulation"]
ALGORITHM = ImplicitGemm()


def verdict_of(problem: ConvProblem, config: Config) -> Verdict:
    inputs = problem.sample(np.random.default_rng(0), False)
    plan = ALGORITHM.plan(problem, config, SMALL)
    y = lent(np.full(problem.y_shape, np.nan, problem.y_dtype))
    size = plan.workspace_bytes
    workspace = lent(np.full(size, 0xFF, np.uint8)) if size else None
    bias, residual = (None if one is None else lent(one) for one in (inputs.bias, inputs.residual))
    plan.run(Buffers(lent(inputs.x), plan.pack(lent(inputs.w)), y, workspace, bias, residual, 0))
    return compare(memory_of(y), *problem.reference(inputs, ALGORITHM), problem.y_dtype)


def kinds_of(problem: ConvProblem) -> dict[tuple[object, ...], Config]:
    """A config of each kind: the one with the largest tile."""
    found: dict[tuple[object, ...], Config] = {}
    for config in sorted(ALGORITHM.configs(problem, SMALL), key=lambda one: one.tile_pixels * one.tile_filters):
        runs = Epilogue(View.of(problem, config)).run_vector
        found[type(config), config.swap_ab, config.ping_pong, config.split_k, config.transposed_pixels, runs] = config
    return found


@needs_compiler
@pytest.mark.parametrize(
    "text",
    ["n2 c24 h8 w9 k40 r1 s1 f16 bias relu", "n3 c72 h8 w10 k37 r1 s1 bf16 residual", "n1 c80 h19 w8 k16 r1 s1 f16"],
)
def test_planes_are_read_as_they_lie(emulation: None, text: str) -> None:
    problem = ConvProblem.parse(text)
    kinds = {kind: one for kind, one in kinds_of(problem).items() if one.transposed_pixels}
    assert kinds
    for config in kinds.values():
        assert ALGORITHM.workspace_bytes(problem, config, SMALL) == 0
        verdict = verdict_of(problem, config)
        assert verdict, f"{config}: {verdict.message}"


@needs_compiler
@pytest.mark.parametrize(
    "text",
    [
        "n3 c16 h5 w7 k20 r3 s3 pad1 f16 bias relu", "n5 c16 h3 w5 k32 r2 s2 pad1 bf16 residual",
        "n1 c16 h19 w23 k12 r5 s5 pad2 f16", "n2 c32 h6 w8 k16 r3 s3 pad1 f16", "n2 c24 h9 w6 k6 r3 s3 pad1 f16",
    ],
)  # fmt: skip
def test_outputs_of_halos_are_runs(emulation: None, text: str) -> None:
    problem = ConvProblem.parse(text)
    kinds = {kind: one for kind, one in kinds_of(problem).items() if kind[-1]}
    assert kinds and not any(isinstance(one, Im2colConfig) for one in kinds.values())
    for config in kinds.values():
        verdict = verdict_of(problem, config)
        assert verdict, f"{config}: {verdict.message}"


@needs_compiler
@pytest.mark.parametrize("text", ["n2 c24 h9 w11 k40 r1 s1 stride2 f16", "n3 c72 h8 w10 k20 r1 s1 stride2x1 f16 bias"])
def test_pixels_that_no_window_meets_are_left_out(emulation: None, text: str) -> None:
    problem = ConvProblem.parse(text)
    config = Im2colConfig(True, 64, 64, stages=3)
    whole = problem.replace(stride=(1, 1))
    assert ALGORITHM.workspace_bytes(problem, config, SMALL) < ALGORITHM.workspace_bytes(whole, config, SMALL)
    verdict = verdict_of(problem, config)
    assert verdict, verdict.message
    # As many problems as there are: the same words again are another object.
    again = replace(ConvProblem.parse(text))
    assert ALGORITHM.sources(again, config) == ALGORITHM.sources(problem, config)


@pytest.mark.parametrize(
    ("text", "ready"),
    [
        ("n2 c24 h8 w9 k40 r1 s1 f16", True), ("n2 c24 h7 w9 k40 r1 s1 f16", False),
        ("n2 c24 h8 w9 k40 r1 s1 tf32", False), ("n2 c24 h8 w8 k40 r1 s1 stride2 f16", False),
        ("n2 c24 h8 w9 k40 r1 s1 f16 nhwc", False), ("n2 c24 h8 w9 k40 r1 s1 pad1 f16", False),
    ],
)  # fmt: skip
def test_which_planes_are_read_as_they_lie(text: str, ready: bool) -> None:
    assert lies_ready(ConvProblem.parse(text)) is ready
