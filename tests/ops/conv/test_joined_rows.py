"""dx put together from phases on a CPU: rows interleaved, zeros where no tap meets, patches by one 1x1 convolution."""

from __future__ import annotations

import pytest

from tapwise import registry
from tapwise.cpu.device import host
from tapwise.errors import NotApplicable
from tapwise.ops.conv.problem import ConvProblem
from tapwise.verify import check

PATCHES = [
    "n2 c3 h12 w35 k5 r3 s5 stride3x5 bias tanh dgrad", "c32 h14 w18 k17 r2 s2 stride2 dgrad",
    "n2 c6 h20 w20 k4 r4 s4 stride4 groups2 f64 bias dgrad", "n2 c5 h12 w10 k6 r3 s2 stride3x2 bias nhwc dgrad",
    "c8 h36 w20 k16 r4 s4 stride4 f16 nhwc dgrad", "n3 c16 h14 w132 k32 r2 s4 stride2x4 dgrad",
]  # fmt: skip
REFUSED = [
    "c4 h9 w8 k4 r2 s2 stride2 dgrad", "c4 h8 w8 k4 r2 s2 stride2 pad1 dgrad", "c4 h8 w8 k4 r3 s3 stride2 dgrad",
    "c4 h8 w8 k4 r1 s1 dgrad", "c4 h8 w8 k4 r2 s2 stride2 groups2 nhwc dgrad",
]  # fmt: skip


@pytest.mark.many
@pytest.mark.parametrize("text", PATCHES)
def test_patches(text: str) -> None:
    problem, device = ConvProblem.parse(text), host(2)
    for config in registry.get("cpu.pixel_shuffle", "dgrad").configs(problem, device):
        assert (verdict := check(problem, "cpu.pixel_shuffle", config, device=device)), (config, verdict.message)


@pytest.mark.parametrize("text", REFUSED)
def test_what_patches_are_not(text: str) -> None:
    with pytest.raises(NotApplicable, match="takes"):
        check(ConvProblem.parse(text), "cpu.pixel_shuffle", device=host(2))


@pytest.mark.parametrize("words", ["", "bias", "sigmoid", "bias tanh", "nhwc", "nhwc sigmoid"])
@pytest.mark.parametrize(
    "text", ["n2 c3 h9 w37 k5 r1 s1 stride2", "c3 h7 w20 k4 r2 s1 stride3x4", "c2 h8 w3 k2 r1 s3 stride4"]
)
def test_elements_that_no_tap_meets(text: str, words: str) -> None:
    """Whole rows of them, and columns between others: zero, or what the epilogue makes of that."""
    problem = ConvProblem.parse(f"{text} {words} dgrad")
    assert (verdict := check(problem, "cpu.fprop_phases", device=host(2))), verdict.message


def test_one_thread_and_many_rows() -> None:
    """Rows that a team shares, and few that one thread joins."""
    for threads, text in (
        (1, "c40 h30 w41 k3 r3 s3 stride2 pad1 dgrad"),
        (2, "c40 h31 w42 k3 r3 s3 stride2 pad1 dgrad"),
    ):
        assert check(ConvProblem.parse(text), "cpu.fprop_phases", device=host(threads))
