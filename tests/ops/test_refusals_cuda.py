"""What algorithms of plain arithmetic refuse on a GPU, and what they say."""

from __future__ import annotations

import re

import pytest

from tapwise import registry
from tapwise.algorithm import Algorithm, Config, Device
from tapwise.cuda.jit.device import H200
from tapwise.ops.conv.problem import ConvProblem


def algorithms(operator: str) -> list[Algorithm[Config]]:
    """Those of plain arithmetic; tensor cores have tests of their own (test_implicit_gemm.py and others)."""
    return [one for one in registry.of_backend("cuda", operator) if not one.tensor_cores]


@pytest.mark.parametrize(
    ("text", "says"),
    [
        ("c4 h5 w5 k4 r3 s3 dgrad", "computes conv, not dgrad"),
        ("c4 w5 k4 s3", "spatial"),
    ],
)
def test_refusals_say_why(text: str, says: str) -> None:
    for algorithm in algorithms("conv"):
        reason = algorithm.refusal(ConvProblem.parse(text), H200)  # type: ignore[arg-type]
        assert reason is not None
        assert re.search(says, reason), reason


@pytest.mark.parametrize(
    ("text", "says"),
    [
        ("maxpool c3 w9 s3", "spatial"),
        ("maxpool n0 c3 h9 w9 r3 s3", "nothing"),
        ("reduce sum 3x4x5 axis0,2", "neighbours"),
        ("reduce sum 0x4 axis1", "nothing"),
        ("softmax 0x4", "nothing"),
    ],
)
def test_plain_operators_refuse_too(text: str, says: str) -> None:
    problem = registry.parse(text)
    for algorithm in algorithms(problem.operator):
        assert re.search(says, algorithm.refusal(problem, H200) or "")
        assert "GPU" in (algorithm.refusal(problem, Device("cpu", "a CPU", 2)) or "")
