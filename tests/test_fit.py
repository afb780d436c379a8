"""tools/draw.py and tools/fit.py: layers that are problems, constants that times of another model lead to."""

from __future__ import annotations

import json
import sys
from dataclasses import asdict
from pathlib import Path
from typing import Any

import pytest

import draw
import fit
from tapwise import registry
from tapwise.cuda.jit.device import H200
from tapwise.ops.pool import cuda_separable

MODULE = "tapwise.ops.pool.cuda_separable"


@pytest.mark.parametrize("depthwise", [False, True])
def test_drawn_layers_are_problems(depthwise: bool) -> None:
    """Different ones, the same of a seed, of the kind that was asked for."""
    found = draw.layers(3, 30, depthwise)
    assert found == draw.layers(3, 30, depthwise) and len(set(found)) == 30
    assert found != draw.layers(4, 30, depthwise)
    problems: list[Any] = [registry.parse(f"{text} f16 nhwc") for text in found]
    assert all(problem.depthwise == depthwise for problem in problems)
    assert max(problem.bytes for problem in problems) <= draw.MOST_BYTES


@pytest.fixture
def times(tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> Path:
    """Of a GPU on which a row waits for twice as long."""
    pool: Any = registry.get("cuda.separable_window", "pool")
    kept = []
    with monkeypatch.context() as patched:
        patched.setattr(cuda_separable, "ROW", 2 * cuda_separable.ROW)
        for n, c, size in ((1, 64, 28), (8, 64, 56), (32, 256, 14), (4, 96, 35), (1, 512, 20), (16, 32, 64)):
            problem = registry.parse(f"maxpool n{n} c{c} h{size} w{size} r3 s3 stride2 pad1 f16 nhwc")
            rows = [
                {"algorithm": pool.id, "kind": type(one).__name__, "config": asdict(one),
                 "time_us": pool.predict_us(problem, one, H200)}
                for one in pool.configs(problem, H200)
            ]  # fmt: skip
            kept.append({"problem": str(problem), "times": rows})
    path = tmp_path / "times.json"
    path.write_text(json.dumps(kept))
    return path


def test_every_config_is_found_again() -> None:
    """By the name of its class and its fields, of which what all of a class share is none."""
    problem = registry.parse("n8 c64 h14 w14 k64 r3 s3 pad1 f16 nhwc")
    algorithm: Any = registry.get("cuda.implicit_gemm")
    kinds = {type(one): one for one in algorithm.configs(problem, H200)}
    assert len(kinds) > 1
    for kind, one in kinds.items():
        assert fit.config_of(kind.__name__, asdict(one)) == one


def test_finds_what_times_were_made_with(
    times: Path, monkeypatch: pytest.MonkeyPatch, capsys: pytest.CaptureFixture[str]
) -> None:
    began = cuda_separable.ROW
    monkeypatch.setattr(cuda_separable, "ROW", began)
    words = [str(times), "--module", MODULE, "--constants", "ROW", "--tries", "60"]
    monkeypatch.setattr(sys, "argv", ["fit.py", *words])
    fit.main()
    assert pytest.approx(2 * began, rel=0.1) == cuda_separable.ROW
    lines = capsys.readouterr().out.splitlines()
    assert [line.partition(":")[0] for line in lines[:-1]] == [
        "half 0 before", "half 0, fitted to the other", "half 1 before", "half 1, fitted to the other", "all before",
        "all after",
    ]  # fmt: skip
    assert float(lines[-2].rpartition(" ")[2]) < 0.2 * float(lines[-3].rpartition(" ")[2])
    assert lines[-1] == f"ROW = {cuda_separable.ROW:.3g}"


def test_says_what_it_does_not_know(times: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    with pytest.raises(SystemExit, match="no algorithm has configs 'Nothing'"):
        fit.config_of("Nothing", {"rows": 1})
    with pytest.raises(SystemExit, match="a config of configs"):
        fit.config_of("Config", {"parts": [{}]})
    for name, why in (("NOTHING", "has no NOTHING"), ("ROWS", "ROWS is no number")):
        monkeypatch.setattr(sys, "argv", ["fit.py", str(times), "--module", MODULE, "--constants", name])
        with pytest.raises(SystemExit, match=why):
            fit.main()
