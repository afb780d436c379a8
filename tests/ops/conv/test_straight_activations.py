"""cpu.direct and cpu.pointwise, straight from registers to y: each activation that stands in a tile."""

from __future__ import annotations

from collections.abc import Callable
from itertools import product

import pytest

from tapwise import registry
from tapwise.activation import ACTIVATIONS
from tapwise.algorithm import Config
from tapwise.cpu.device import host
from tapwise.ops.conv.problem import ConvProblem
from tapwise.verify import check

PROBLEMS = ["cpu.direct: c5 h9 w37 k13 r3 s2 pad1 stride2x1 bias residual", "cpu.pointwise: c33 h5 w13 k20 r1 s1 bias"]
EACH = [*ACTIVATIONS, "leaky_relu-1.5"]


@pytest.mark.many
@pytest.mark.parametrize("activation", EACH)
@pytest.mark.parametrize("text", PROBLEMS)
def test_results(text: str, activation: str, cover: Callable[..., list[Config]]) -> None:
    """Each in some tiles, and each tile with some."""
    name, words = text.split(": ")
    problem, device = ConvProblem.parse(f"{words} {activation}"), host(2)

    def tiles(case: tuple[str, str]) -> dict[object, Config]:
        name, words = case[0].split(": ")
        configs = registry.get(name).configs(ConvProblem.parse(f"{words} {case[1]}"), device)
        tiles = {(name, one.route, one.m): one for one in configs if one.route != "sums"}
        return {tile: tiles[tile] for tile in list(tiles)[EACH.index(case[1]) % 3 :: 3]}

    some = cover((text, activation), list(product(PROBLEMS, EACH)), tiles)
    assert some
    for config in some:
        assert (verdict := check(problem, name, config, device=device)), (config, verdict.message)
