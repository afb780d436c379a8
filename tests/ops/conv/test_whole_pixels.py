"""cpu.direct, channels last, all channels at once: rows of whole pixels are copied, stride phases and all."""

from __future__ import annotations

import pytest

from tapwise import registry
from tapwise.cpu.device import host
from tapwise.ops.conv.cpu.direct.blocking import Geometry
from tapwise.ops.conv.problem import ConvProblem
from tapwise.verify import check

PROBLEMS = [
    "c3 h21 w19 k10 r3 s3 stride2 pad1 nhwc bias relu", "c3 h30 w33 k20 r7 s7 stride4 pad3 nhwc",
    "n2 c5 h20 w23 k9 r4 s4 stride4x3 nhwc", "c6 h17 w13 k9 r3 s5 pad7:2x0:4 dilation3x1 stride1x2 nhwc residual",
    "c4 h13 w14 k39 r3 s3 pad1 bf16 nhwc", "c7 h9 w2100 k5 r3 s3 stride2 pad3 nhwc",
    "c3 h5 w4 k4 r3 s3 stride3 pad7 nhwc",
]  # fmt: skip


@pytest.mark.many
@pytest.mark.parametrize("text", PROBLEMS)
def test_results(text: str) -> None:
    problem, algorithm, device = ConvProblem.parse(text), registry.get("cpu.direct"), host(2)
    # In pairs, where the processor has them, bfloat16 is of other channels.
    configs = [one for one in algorithm.configs(problem, device) if not one.pairs]
    whole = [one for one in configs if Geometry(problem, one, device).whole_pixels]
    assert whole or not configs
    for config in whole[:: max(1, len(whole) // 4)]:
        assert (verdict := check(problem, "cpu.direct", config, device=device)), (config, verdict.message)


def test_pixels_that_no_tap_reads_are_not_copied() -> None:
    problem, device = ConvProblem.parse("c8 h9 w9 k8 r1 s1 stride2 nhwc"), host(2)
    configs = registry.get("cpu.direct").configs(problem, device)
    assert configs and not any(Geometry(problem, one, device).whole_pixels for one in configs)
