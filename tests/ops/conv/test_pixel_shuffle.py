"""cuda.pixel_shuffle without a GPU: its kernels compile, and plans compute dgrad by emulation, against float64."""

from __future__ import annotations

import pytest
from compiled_kernels import compiled
from emulated_plans import SMALL, needs_compiler, verdict_of

from tapwise.cuda.jit.device import H200
from tapwise.ops.conv.cuda.pixel_shuffle import Config, PixelShuffle
from tapwise.ops.conv.phases import joint
from tapwise.ops.conv.problem import ConvProblem

ALGORITHM = PixelShuffle()


@needs_compiler
@pytest.mark.parametrize(
    "text",
    [
        "n2 c3 h13 w15 k24 r7 s7 stride4 pad3 f16 nhwc dgrad",
        "n2 c3 h12 w14 k16 r3 s3 stride2 pad1 bias tanh bf16 nhwc dgrad",
        "n2 c5 h9 w11 k6 r4 s2 stride2x3 pad2:0x0:1 dilation1x2 f16 nchw dgrad",
        "n1 c2 h2 w9 k3 r1 s2 stride3x4 pad0x1 bias nhwc dgrad",
        "n2 c4 h9 w7 k5 r5 s3 stride2x1 pad0x2 dilation2x1 f64 dgrad",
    ],
)
def test_is_the_gradient(emulation: None, text: str) -> None:
    """By the first algorithm that is not fed by tensor maps of five axes."""
    problem = ConvProblem.parse(text)
    assert ALGORITHM.rejects(problem, SMALL) is None
    configs = ALGORITHM.configs(problem, SMALL)
    config = next(one for one in configs if one.algorithm in ("cuda.implicit_gemm_mma", "cuda.implicit_gemm_simt"))
    assert (verdict := verdict_of(ALGORITHM, problem, config)), verdict.message


def test_windows_reach_what_any_phase_sees() -> None:
    """4x4 filters of stride 2 and padding 1 see three places along each axis, patches one."""
    one = joint(ConvProblem.parse("c3 h64 w64 k48 r4 s4 stride2 pad1 dgrad"))
    assert (one.fprop.kernel, one.fprop.k, one.fprop.padding, one.phases) == ((3, 3), 12, ((1, 1), (1, 1)), (2, 2))
    one = joint(ConvProblem.parse("c3 h224 w224 k768 r16 s16 stride16 dgrad"))
    assert (one.fprop.kernel, one.fprop.k, one.fprop.output) == ((1, 1), 768, (14, 14))


@pytest.mark.parametrize("architecture", ["sm_80", "sm_90a", "sm_100a"])
def test_kernels_compile_without_spills(architecture: str) -> None:
    for text in ("c3 h12 w12 k8 r3 s3 stride2 bias f16 nhwc dgrad", "c3 h12 w12 k8 r3 s3 stride2 bias f64 dgrad"):
        problem = ConvProblem.parse(text)
        own = [one for one in ALGORITHM.sources(problem, Config(*_first(problem))) if "pixel_shuffle" in one.name]
        assert len(own) == 3
        for source in own:
            used = compiled(source, architecture).resources
            assert (used.stack_bytes, used.spill_bytes) == (0, 0)


def _first(problem: ConvProblem) -> tuple[str, object]:
    config = ALGORITHM.configs(problem, H200)[0]
    return config.algorithm, config.part


@pytest.mark.parametrize("text", ["c4 k4 h9 w9 r3 s3 stride2 groups2 dgrad", "c4 k4 h9 w9 r3 s3 pad1 dgrad"])
def test_refuses_groups_and_no_stride(text: str) -> None:
    assert ALGORITHM.rejects(ConvProblem.parse(text), H200)
