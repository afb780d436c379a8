"""Kernels of depthwise that read fprop's filters as they lie for dgrad: every kind, by emulation, and compiled."""

from __future__ import annotations

from functools import cache
from typing import Any

import pytest
from compiled_kernels import Cover, Share, compiled
from emulated_plans import SMALL, needs_compiler, verdict_of

from tapwise import registry
from tapwise.cuda.jit.device import H200
from tapwise.ops.conv.cuda.depthwise.sparse import Sparse
from tapwise.ops.conv.cuda.fprop_phases import FpropPhases, fprop_filters
from tapwise.ops.conv.phases import Config, with_taps
from tapwise.ops.conv.problem import ConvProblem

ALGORITHM = FpropPhases()
# Every kind; odd channels; images of few columns; phases of a stride, of which each has other taps.
PROBLEMS = [
    "n2 c72 h9 w13 k72 r3 s3 pad1 groups72 f16 nhwc dgrad",
    "n2 c64 h7 w7 k64 r7 s7 pad3 groups64 bf16 nhwc dgrad",
    "n2 c33 h9 w10 k33 r3 s2 pad1:0x0:1 groups33 f16 nhwc dgrad",
    "n2 c16 h9 w13 k16 r5 s3 pad1 dilation2x1 groups16 nhwc dgrad",
    "n2 c40 h12 w11 k40 r3 s5 pad1x2 stride2 groups40 f16 nhwc dgrad",
]


@cache
def kinds(problem: ConvProblem) -> dict[tuple[Any, ...], Config]:
    """A config of each kind of kernel for all phases, of those that read filters as they lie."""
    found: dict[tuple[Any, ...], Config] = {}
    given = [
        (phase.problem, fprop_filters(problem, phase)) for phase in with_taps(problem) if phase.problem is not None
    ]
    phases = [phase for phase, _ in given]
    for identifier in ("cuda.depthwise", "cuda.implicit_gemm_rows"):
        one: Any = registry.get(identifier)
        if any(one.refusal(phase, SMALL) for phase in phases):
            continue
        others = [set(one.configs(phase, SMALL)) for phase in phases[1:]]
        for config in one.configs(phases[0], SMALL):
            key = identifier, type(config), *(getattr(config, word, None) for word in ("by", "kernel", "channels"))
            if key in found or any(config not in other for other in others):
                continue
            if all(one.reads_in_place(phase, config, filters) for phase, filters in given):
                found[key] = Config(((identifier, config),) * len(phases))
    return found


@needs_compiler
@pytest.mark.parametrize("text", PROBLEMS)
def test_they_compute_dgrad(emulation: None, cover: Cover, text: str) -> None:
    problem = ConvProblem.parse(text)
    configs = cover(text, PROBLEMS, lambda one: kinds(ConvProblem.parse(one)))
    assert configs
    for config in configs:
        assert all(ALGORITHM.read_in_place(problem, config))
        assert (verdict := verdict_of(ALGORITHM, problem, config)), (config, verdict.message)


@pytest.mark.parametrize("architecture", ["sm_80", "sm_90a", "sm_100a"])
def test_they_compile_without_spills(architecture: str, share: Share) -> None:
    sources: list[Any] = []
    for text in PROBLEMS:
        problem = ConvProblem.parse(text)
        for config in kinds(problem).values():
            kinds_of_parts = {type(part) for _, part in config.parts}
            if architecture != "sm_80" or not ("by=tma" in str(config) or Sparse in kinds_of_parts):
                sources += ALGORITHM.sources(problem, config)
    for source in share(dict.fromkeys(sources)):
        _, used, _ = compiled(source, architecture)
        assert (used.stack_bytes, used.spill_bytes) == (0, 0), (source.text, used)


def test_filters_that_are_read_are_packed_by_no_launch() -> None:
    problem = ConvProblem.parse("n32 c224 h14 w14 k224 r3 s3 pad1 groups224 f16 nhwc dgrad")
    config = min(ALGORITHM.configs(problem, H200), key=lambda one: ALGORITHM.predict_us(problem, one, H200))
    assert all(ALGORITHM.read_in_place(problem, config))
    assert ALGORITHM.pack_us(problem, config, H200) < 1


@pytest.mark.parametrize("text", ["c16 k32 groups16", "c32 k16 groups16", "c16 k16 groups4"])
def test_only_one_filter_of_one_channel_is_read(text: str) -> None:
    problem = ConvProblem.parse(f"n2 {text} h9 w13 r3 s3 pad1 f16 nhwc dgrad")
    for config in ALGORITHM.configs(problem, H200):
        assert not any(ALGORITHM.read_in_place(problem, config))
