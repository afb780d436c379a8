"""What is said of this CPU."""

from __future__ import annotations

import platform
from pathlib import Path

import pytest

from tapwise.cpu import device


@pytest.mark.parametrize(
    ("line", "plain"),
    [("model name\t: AMD EPYC", False), ("model name : Intel(R) Xeon(R) Gold 6338 CPU @ 2.00GHz", True), ("", False)],
)
def test_a_name_without_a_number_gets_that_of_its_cores(
    line: str, plain: bool, monkeypatch: pytest.MonkeyPatch, tmp_path: Path
) -> None:
    monkeypatch.setattr(platform, "processor", lambda: "arm")
    (tmp_path / "cpuinfo").write_text(f"processor : 0\n{line}\n")
    monkeypatch.setattr(device, "Path", lambda _: tmp_path / "cpuinfo")
    found = device.name.__wrapped__()
    wanted = line.partition(": ")[2] or "arm"
    assert found == wanted if plain else found.startswith(f"{wanted} ") and found != wanted
