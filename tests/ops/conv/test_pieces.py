"""cpu.direct without the taps that see padding alone: which those are, the cut into pieces, and results."""

from __future__ import annotations

from dataclasses import replace
from itertools import product

import numpy as np
import pytest

from tapwise import registry
from tapwise.cpu.cost import Costs
from tapwise.cpu.device import host
from tapwise.ops.conv.cpu.direct.pieces import Pieces, cut, seen, share_seen
from tapwise.ops.conv.problem import ConvProblem
from tapwise.verify import check

PROBLEMS = [
    "c5 h7 w9 k9 r3 s3 pad1 nhwc bias relu", "n3 c42 h7 w7 k26 r5 s5 pad2 groups2 dilation2",
    "c8 h6 w6 k16 r3 s3 pad9 nhwc",
    "c5 h6 w4 k9 r3 s5 pad7:2x0:4 dilation3x1 stride1x2 nhwc residual", "c39 h30 w31 k20 r3 s3 pad12 dilation12 f64",
    "c20 h12 w9 k24 r3 s3 pad1 bf16 nhwc", "c31 h11 w8 k17 r7 s1 pad3x0 f16",
    "c7 h9 w9 k5 r5 s5 nhwc", "c3 h5 w5 k4 r4 s4 pad3 stride3",
]  # fmt: skip


@pytest.mark.parametrize("text", PROBLEMS)
def test_results(text: str) -> None:
    problem, algorithm, device = ConvProblem.parse(text), registry.get("cpu.direct"), host(2)
    configs = [config for config in algorithm.configs(problem, device) if config.pieces]
    assert configs
    for config in configs[:: max(1, len(configs) // 6)]:
        assert (verdict := check(problem, "cpu.direct", config, device=device)), (config, verdict.message)


@pytest.mark.parametrize("text", PROBLEMS)
def test_each_pixel_is_in_one_piece_with_all_taps_that_it_sees(text: str) -> None:
    """From the definition: output o sees tap t where o * stride + t * dilation - padding lies inside."""
    problem = ConvProblem.parse(text)
    (p, q), costs = problem.output, Costs(host(2), 4)

    def inside(axis: int, output: int, tap: int) -> bool:
        at = output * problem.stride[axis] + tap * problem.dilation[axis] - problem.padding[axis][0]
        return 0 <= at < problem.spatial[axis]

    needed = 0
    for rows, cols, pitch in ((p, q, q + 2), (max(1, p // 2), q, q), (1, max(1, q - 1), q)):
        places = [(p0, q0) for q0 in range(0, q, cols) for p0 in range(0, p, rows)]
        pieces = cut(problem, rows, cols, pitch, (4, 2), 3, costs)
        assert len(pieces.tasks) == len(places) and 0 < pieces.mean <= pieces.longest
        for (p0, q0), task in zip(places, pieces.tasks, strict=True):
            owners = np.zeros((min(rows, p - p0), pitch), int)
            for piece in task:
                for row, col in (divmod(at, pitch) for at in range(piece.at, piece.at + piece.count)):
                    owners[row, col] += 1
                    if q0 + col >= q or col >= cols:
                        continue
                    for r, s in product(range(problem.kernel[0]), range(problem.kernel[1])):
                        if inside(0, p0 + row, r) and inside(1, q0 + col, s):
                            assert piece.rows[0] <= r < piece.rows[1] and piece.cols[0] <= s < piece.cols[1]
                            needed += 1
            assert (owners[:, : min(cols, q - q0)] == 1).all()
    assert needed


def test_the_longest_of_a_workers_tasks_counts(monkeypatch: pytest.MonkeyPatch) -> None:
    """Of seven rows four are one task and three the other: both workers take as long as the one with four."""
    problem, algorithm, device = (
        ConvProblem.parse("c512 h14 w14 k512 r3 s3 stride2 pad1"), registry.get("cpu.direct"), host(2),
    )  # fmt: skip
    pieces = cut(problem, 4, 7, 9, (7, 3), 64, Costs(device, 4))
    assert pieces.cycles(1) == pieces.longest > pieces.mean
    assert pieces.cycles(3) == pytest.approx((2 * pieces.mean + pieces.longest) / 3)
    drawn: list[int] = []

    def cycles(self: Pieces, count: int) -> float:
        drawn.append(count)
        return self.mean

    monkeypatch.setattr(Pieces, "cycles", cycles)
    config = next(one for one in algorithm.configs(problem, device) if one.pieces)
    for rows, filters, tasks in ((7, 512, 1), (4, 512, 1), (4, 256, 2), (1, 512, 4)):
        algorithm.predict_us(problem, replace(config, rows=rows, cols=7, filters=filters), device)
        assert drawn.pop() == tasks and not drawn


def test_much_padding_is_left_out() -> None:
    """With dilation and padding of 12 one of three rows of taps sees nothing for 24 of 28 rows of y."""
    problem, algorithm, device = (
        ConvProblem.parse("c256 h28 w28 k64 r3 s3 pad12 dilation12"), registry.get("cpu.direct"), host(2),
    )  # fmt: skip
    assert [seen(problem, 0, first, count) for first, count in ((0, 12), (12, 4), (16, 12), (0, 28))] == [
        (1, 3), (0, 3), (0, 2), (0, 3),
    ]  # fmt: skip
    assert share_seen(problem) == pytest.approx((60 / 84) ** 2)
    costs = Costs(device, 4)
    plain = 28 * 28 * 9 / 6 * costs.tile(6, 2, 64) / 64
    assert cut(problem, 28, 28, 40, (6, 2), 64, costs).mean < 0.7 * plain
    configs = algorithm.configs(problem, device)
    assert min(configs, key=lambda one: algorithm.predict_us(problem, one, device)).pieces
    assert share_seen(ConvProblem.parse("c8 h200 w200 k8 r3 s3 pad1")) > 0.99
    # As counted one by one, and of a row of 2^31 outputs at once.
    p = ConvProblem.parse("c8 h9 w30 k8 r4 s5 stride2 pad2:5x4 dilation2x3")
    counted = [
        0 <= i * 2 - 2 + r * 2 < p.spatial[0] and 0 <= j * 2 - 4 + s * 3 < p.spatial[1]
        for i, j, r, s in product(*map(range, (*p.output, *p.kernel)))
    ]
    assert share_seen(p) == pytest.approx(sum(counted) / len(counted))
    assert share_seen(ConvProblem.parse(f"c8 h1 w20 k8 r1 s3 pad0x0:{2**31 - 30}")) < 1e-7


def test_long_rows_are_not_cut() -> None:
    """Which would go output by output."""
    problem = ConvProblem.parse("c8 h1 w20 k32 r1 s3 pad0x0:2000000 nhwc")
    configs = registry.get("cpu.direct").configs(problem, host(2))
    assert configs and not any(one.pieces for one in configs)
    assert any(
        one.pieces for one in registry.get("cpu.direct").configs(problem.replace(padding=((0, 0), (0, 99))), host(2))
    )
