"""Times on a GPU that something disturbed are taken again."""

from __future__ import annotations

import pytest

from tapwise.lab import gpu
from tapwise.lab.timing import Timing

CALM, ROUGH, ROUGHER = (Timing((10.0, 10.0 + more, 10.0 + 2 * more)) for more in (0.1, 2.0, 4.0))


@pytest.mark.parametrize(
    ("rounds", "kept", "taken"),
    [
        ([(CALM, CALM), (ROUGH, CALM)], (CALM, CALM), 1),
        ([(CALM, ROUGH), (CALM, CALM), (ROUGH, ROUGH)], (CALM, CALM), 2),
        ([(ROUGHER, CALM), (ROUGH, ROUGH), (ROUGHER, ROUGHER), (CALM, CALM)], (ROUGH, ROUGH), 3),
    ],
)
def test_the_steadiest_is_kept(
    monkeypatch: pytest.MonkeyPatch,
    rounds: list[tuple[Timing, Timing]],
    kept: tuple[Timing, Timing],
    taken: int,
) -> None:
    """The contestants of one measurement stay together: ratios are of one run."""
    left = [dict(zip(("ours", "cudnn"), one, strict=True)) for one in rounds]
    before = len(left)
    monkeypatch.setattr(gpu, "measure", lambda runs, repeats: left.pop(0))
    assert gpu.measure_steadily({}) == dict(zip(("ours", "cudnn"), kept, strict=True))
    assert before - len(left) == taken
