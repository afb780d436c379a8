"""cpu.direct of dgrad: all phases of a stride in one launch, against float64."""

from __future__ import annotations

import numpy as np
import pytest

from tapwise import registry
from tapwise.cpu.device import host
from tapwise.ops.conv.cpu.dgrad_direct import DgradDirect, Geometry
from tapwise.ops.conv.problem import ConvProblem
from tapwise.verify import check

PROBLEMS = [
    "n2 c5 h9 w37 k5 r3 s3 stride2 pad1 groups5 dgrad",
    "n2 c6 h10 w12 k4 r5 s3 stride2 pad2x1 groups2 bias sigmoid dgrad",
    "c12 h13 w70 k18 r3 s3 stride2 pad1 groups3 f64 dgrad", "c7 h12 w31 k3 r4 s7 stride3x4 pad1x2 dgrad",
    "c5 h12 w31 k3 r3 s2 stride2x1 dilation1x2 pad1 bias dgrad", "c2 h3 w2 k2 r5 s5 stride2 pad4 dgrad",
    "n2 c5 h9 w44 k5 r3 s3 stride2 pad1 groups5 dgrad", "c4 h9 w76 k3 r4 s7 stride3x4 pad1x2 dgrad",
    "c5 h12 w45 k3 r3 s2 stride2x1 pad1 dgrad", "c5 h9 w44 k5 r5 s5 stride2 pad2 groups5 relu dgrad",
    "c3 h8 w9 k4 r3 s3 stride4x2 pad0:2x1:0 dilation2x1 dgrad", "n2 c3 h5 w5 k2 r1 s1 stride2 tanh dgrad",
]  # fmt: skip


@pytest.mark.parametrize("text", PROBLEMS)
def test_is_the_gradient(text: str) -> None:
    """By the fastest config, and one of another tile and other blocks."""
    problem, device = ConvProblem.parse(text), host(2)
    algorithm = registry.get("cpu.direct", "dgrad")
    configs = algorithm.configs(problem, device)
    best = min(configs, key=lambda one: algorithm.predict_us(problem, one, device))
    for config in dict.fromkeys((best, configs[-1])):
        assert (verdict := check(problem, "cpu.direct", config, device=device)), (config, verdict.message)
    assert check(problem, "cpu.direct", best, device=device, integers=True)


def test_each_term_belongs_to_one_phase() -> None:
    """Every filter and tap once; places within the window of the packed tile."""
    problem = ConvProblem.parse("c6 h20 w21 k10 r5 s3 stride3x2 pad2x1 groups2 dgrad")
    config = DgradDirect().configs(problem, host(2))[0]
    geometry = Geometry(problem, config, host(2))
    starts, offsets, taps = geometry.tables()
    assert starts[0] == 0 and starts[-1] == len(offsets) == geometry.terms == 75 and len(starts) == 3 * 2 + 1
    assert len({tuple(one) for one in taps.reshape(-1, 3)}) == 75
    assert np.all(offsets >= 0) and offsets.max() < problem.group_k * geometry.packed.plane


@pytest.mark.parametrize(
    ("text", "why"),
    [
        ("c8 h8 w8 k8 r3 s3 pad1 dgrad", "stride"), ("c8 h9 w9 k8 r3 s3 stride3 dgrad", "stride"),
        ("c8 h9 w9 k300 r3 s3 stride2 dgrad", "terms"), ("c8 h9 w9 k8 r3 s3 stride2 nhwc dgrad", "NCHW"),
        ("c8 h9 w9 k8 r3 s3 stride2 f16 dgrad", "f16"),
    ],
)  # fmt: skip
def test_what_it_refuses(text: str, why: str) -> None:
    assert why in str(DgradDirect().refusal(ConvProblem.parse(text), host(2)))
