"""tools/turns.py without a GPU: which version runs when, and what is made of the times."""

from __future__ import annotations

import json
import sys
from pathlib import Path

import pytest

import turns


def test_versions_take_turns(
    monkeypatch: pytest.MonkeyPatch, capsys: pytest.CaptureFixture[str], tmp_path: Path
) -> None:
    runs: list[str] = []

    def in_process(version: Path, path: Path, words: str) -> dict[str, float]:
        runs.append(version.name)
        return {"a": 4.0, "b": 1.0} if version == tmp_path else {"a": 1.0 * len(runs), "b": 1.0}

    monkeypatch.setattr(turns, "in_process", in_process)
    kept = tmp_path / "times.json"
    monkeypatch.setattr(sys, "argv", ["turns.py", str(tmp_path), "layers.txt", "--json", str(kept)])
    turns.main()
    assert runs == [tmp_path.name, turns.HERE.name] * 2
    # 2 and 4 us for 4 and 4.
    lines = capsys.readouterr().out.splitlines()
    assert lines[0] == "a: 4.00 4.00 2.00 4.00 us, new / old 0.707"
    assert lines[-1] == "2 problems: new / old 0.841"
    assert json.loads(kept.read_text()) == {"old": {"a": [4, 4], "b": [1, 1]}, "new": {"a": [2, 4], "b": [1, 1]}}
