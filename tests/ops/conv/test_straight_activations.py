"""cpu.direct and cpu.pointwise, straight from registers to y: each activation that stands in a tile."""

from __future__ import annotations

import pytest

from tapwise import registry
from tapwise.activation import ACTIVATIONS
from tapwise.cpu.device import host
from tapwise.ops.conv.problem import ConvProblem
from tapwise.verify import check

PROBLEMS = ["cpu.direct: c5 h9 w37 k13 r3 s2 pad1 stride2x1 bias residual", "cpu.pointwise: c33 h5 w13 k20 r1 s1 bias"]
EACH = [*ACTIVATIONS, "leaky_relu-1.5"]


@pytest.mark.parametrize("activation", EACH)
@pytest.mark.parametrize("text", PROBLEMS)
def test_results(text: str, activation: str) -> None:
    """Each in some tiles, and each tile with some."""
    name, words = text.split(": ")
    problem, algorithm, device = ConvProblem.parse(f"{words} {activation}"), registry.get(name), host(2)
    configs = {(one.route, one.m): one for one in algorithm.configs(problem, device) if one.route != "sums"}
    some = list(configs.values())[EACH.index(activation) % 3 :: 3]
    assert some
    for config in some:
        assert (verdict := check(problem, name, config, device=device)), (config, verdict.message)
