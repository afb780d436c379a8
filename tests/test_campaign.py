"""Some seconds of the campaign, and that the campaign finds what is wrong."""

from __future__ import annotations

import json
import os
import re
import subprocess
import sys
import time
from pathlib import Path
from typing import Any

import numpy as np
import pytest

import campaign
from campaign_cases import filters

TOOLS = Path(__file__).parents[1] / "tools"
# Seconds of each family.
SHARES = {"problems": 2, "calls": 2, "gradients": 1.5, "filters": 1.5, "arguments": 1.5, "faults": 1}


def run(*words: str, **variables: str) -> subprocess.CompletedProcess[str]:
    command = [sys.executable, str(TOOLS / "campaign.py"), *words]
    return subprocess.run(command, env={**os.environ, **variables}, capture_output=True, text=True, timeout=300)


def restored(monkeypatch: pytest.MonkeyPatch) -> None:
    """Cases set the environment for all later calls of their process: here until the test's end."""
    for name, value in {"TAPWISE_CPU_TARGET": "host", "TAPWISE_NUM_THREADS": "2"}.items():
        monkeypatch.setenv(name, value)


@pytest.mark.parametrize("family", SHARES)
def test_seconds_of_it(family: str, monkeypatch: pytest.MonkeyPatch) -> None:
    """Another seed each day: what fails is printed with the words that repeat it."""
    restored(monkeypatch)
    end, seed, number = time.monotonic() + SHARES[family], int(time.time()) // 86400, 0
    while time.monotonic() < end:
        case = campaign.drawn(family, "cpu", seed, 0, number)
        status, text = campaign.outcome(case)
        assert status != "failed", f"{text}\n    tools/campaign.py --case '{json.dumps(case)}'"
        number += 1


def test_its_processes_tell_what_they_did() -> None:
    found = run("--minutes", "0.05", "--jobs", "1", "--only", "arguments", "--seed", "1")
    assert found.returncode == 0, found.stdout + found.stderr
    (passed,) = re.findall(r"^\| arguments \| ([0-9,]+) \|", found.stdout, re.MULTILINE)
    assert int(passed.replace(",", "")) > 0


@pytest.mark.cuda
@pytest.mark.parametrize("family", ["problems", "calls", "gradients"])
def test_on_a_gpu(family: str) -> None:
    found = run("--minutes", "0.25", "--jobs", "1", "--only", family, "--seed", "1", "--device", "cuda")
    assert found.returncode == 0, found.stdout + found.stderr


def test_a_wrong_result_is_found_and_made_simple(monkeypatch: pytest.MonkeyPatch) -> None:
    """As in a process of the campaign, with a filter that is wrong where an array has a row of nine or more."""
    restored(monkeypatch)
    from tapwise import image

    right = image.uniform_filter

    def wrong(x: Any, *args: Any, **options: Any) -> Any:
        y = right(x, *args, **options)
        if y.shape[-1] >= 9:
            y[..., 8] += 1
        return y

    monkeypatch.setattr(image, "uniform_filter", wrong)
    case = {
        "family": "filters", "name": "uniform_filter", "shape": [7, 31], "dtype": "float32", "output": "",
        "mode": "wrap", "options": {"cval": 1.5, "size": 3, "origin": 1}, "kind": "normal", "form": "reversed",
        "seed": 11, "backend": "cpu", "target": "host", "threads": 2,
    }  # fmt: skip
    status, text = campaign.outcome(case)
    assert status == "failed" and text.startswith("wrong")
    simple, text = campaign.shrunk(case, text, campaign.outcome, 20.0)
    assert simple["shape"] == [1, 9] and simple["form"] == "c" and simple["mode"] == "reflect" and simple["seed"] == 0
    assert simple["options"] == {"cval": 0.0, "size": 3}
    assert text.startswith("wrong")


def test_crash_and_hang_are_failures(tmp_path: Path) -> None:
    """In a copy of the campaign whose cases end the process, or never end."""
    for word, body in {"crash": "import os; os.abort()", "hang": "import time; time.sleep(99)"}.items():
        folder = tmp_path / word
        (folder / "campaign_cases").mkdir(parents=True)
        for path in [TOOLS / "campaign.py", *(TOOLS / "campaign_cases").glob("*.py")]:
            text = path.read_text(encoding="utf-8").replace(
                "_SHRINK_SECONDS: Final = 20.0", "_SHRINK_SECONDS: Final = 0.0"
            )
            if path.name == "arguments.py":
                text = text.replace("patience=10.0", "patience=3.0").replace(
                    "    enter(case)\n    name, arg", f"    {body}\n    name, arg"
                )
            (folder / path.relative_to(TOOLS)).write_text(text, encoding="utf-8")
        words = [sys.executable, str(folder / "campaign.py"), "--minutes", "0.02", "--jobs", "1", "--only", "arguments"]
        found = subprocess.run(words, capture_output=True, text=True, timeout=120)
        assert found.returncode == 1
        assert word in found.stdout and "--case '{" in found.stdout


def test_one_case_is_run_again() -> None:
    rng = np.random.default_rng(5)
    case = {"family": "filters", **filters.draw(rng, "cpu")}
    found = run("--case", json.dumps(case))
    assert found.returncode == 0 and found.stdout.startswith("passed")
    assert case == {"family": "filters", **filters.draw(np.random.default_rng(5), "cpu")}
