"""The commands as a person types them: output, exit status, and one clear line for a mistake."""

from __future__ import annotations

import json
import re
import sys
from pathlib import Path

import pytest
from typer.testing import CliRunner

from tapwise import registry
from tapwise.cli import app
from tapwise.cli.common import typed_command
from tapwise.lab import bench, records
from tapwise.lab.records import Record

runner = CliRunner()
RECORDS = Path(__file__).parents[2] / "benchmarks" / "results"
TINY = "c3 h9 w7 k5 r3 s3 pad1"


@pytest.fixture(autouse=True)
def quick_ceilings(monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setattr("tapwise.cpu.ceilings.fma_gflops", lambda threads, dtype: 100.0)
    monkeypatch.setattr("tapwise.cpu.ceilings.copy_gbps", lambda threads: 10.0)


def test_bench_writes_a_table_and_json(tmp_path: Path) -> None:
    words = [
        "bench",
        TINY,
        "--peers",
        "none",
        "--seconds",
        "0.01",
        "--repeats",
        "2",
        "--json",
        str(tmp_path / "a.json"),
    ]
    result = runner.invoke(app, words, env={"COLUMNS": "100"})
    assert result.exit_code == 0, result.output
    assert "1 of 1 verified" in result.output
    assert max(len(line) for line in result.stdout.splitlines() if "a.json" not in line) <= 100
    (row,) = json.loads((tmp_path / "a.json").read_text())
    assert row["problem"] == TINY and row["verified"] and row["peers"] == {}


def test_bench_of_calls_that_are_not_prepared(tmp_path: Path) -> None:
    """Into a file of their own, with the algorithm that such a call takes; of a residual and an activation too."""
    words = ["--unprepared", "--peers", "none", "--seconds", "0.01", "--repeats", "2", "--json", str(tmp_path)]
    problems = ["c8 h9 w9 k16 r1 s1 residual relu", "c8 h7 w7 k8 r3 s3 pad1:0x0:2 bias"]
    result = runner.invoke(app, ["bench", *problems, *words])
    assert result.exit_code == 0, result.output
    (path,) = tmp_path.glob("**/*.json")
    assert path.name == "problems-fprop-f32-unprepared-n1.json"
    rows = json.loads(path.read_text())
    assert [row["prepared"] for row in rows] == [False, False]
    assert all(row["verified"] and row["time_us"] > 0 for row in rows)


def test_bench_exits_1_when_something_is_not_verified(monkeypatch: pytest.MonkeyPatch) -> None:
    def run(cases: object, options: object, done: object, again: object) -> None:
        row = Record(
            TINY, "s", "c", 1, "fprop", "f32", "ieee", "nchw", "d", 2, algorithm="cpu.direct", reason="all wrong"
        )
        done(row)  # type: ignore[operator]

    monkeypatch.setattr(bench, "run", run)
    result = runner.invoke(app, ["bench", TINY])
    assert result.exit_code == 1
    assert "all wrong" in result.output and "0 of 1 verified" in result.output


def test_bench_stopped_by_the_user_shows_what_is_done(monkeypatch: pytest.MonkeyPatch) -> None:
    def run(cases: object, options: object, done: object, again: object) -> None:
        row = Record(TINY, "s", "c", 1, "fprop", "f32", "ieee", "nchw", "d", 2, verified=True, time_us=5.0, gflops=1.0)
        done(row)  # type: ignore[operator]
        raise KeyboardInterrupt

    monkeypatch.setattr(bench, "run", run)
    result = runner.invoke(app, ["bench", TINY, "c4 h9 w7 k5 r3 s3"])
    assert result.exit_code == 130
    assert "stopped after 1 of 2" in result.output


@pytest.mark.parametrize(
    ("words", "says"),
    [
        (["bench", "c3 h9 q7"], "q7"),
        (["bench", "no_such_suite"], "neither a suite"),
        (["bench", TINY, "--algorithms", "cpu.none"], "cpu.none"),
        (["bench", TINY, "--peers", "blas"], "blas"),
        (["bench", TINY, "--dtype", "f8"], "f8"),
        (["explain", "c3 h1 w1 k5 r3 s3"], "larger than the padded input"),
        (["verify", TINY, "--algorithms", "cpu.none"], "cpu.none"),
    ],
)
def test_mistakes_are_one_line_and_status_2(words: list[str], says: str) -> None:
    result = runner.invoke(app, words)
    assert result.exit_code == 2
    assert says in result.output and "Traceback" not in result.output
    assert len(result.output.strip().splitlines()) == 1


def test_explain_shows_every_algorithm() -> None:
    result = runner.invoke(app, ["explain", TINY])
    assert result.exit_code == 0
    for algorithm in registry.of_backend("cpu"):
        assert algorithm.id in result.output
    assert "prepared: " in result.output and "takes 1x1 filters" in " ".join(result.output.split())


def test_verify_all_algorithms_and_integers() -> None:
    for words in ([], ["--integers"], ["--dtype", "f64", "--layout", "nhwc"]):
        result = runner.invoke(app, ["verify", TINY, *words])
        assert result.exit_code == 0, result.output
        assert "WRONG" not in result.output and "verified" in result.output


def test_verify_exits_1_on_a_wrong_result(monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setattr(type(registry.get("cpu.direct")), "error_factor", lambda self, problem: 0.0)
    result = runner.invoke(app, ["verify", "c64 h20 w20 k5 r3 s3", "--algorithms", "cpu.direct"])
    assert result.exit_code == 1
    assert "WRONG" in result.output


def test_info_and_version() -> None:
    result = runner.invoke(app, ["info"])
    assert result.exit_code == 0
    for word in ("cpu", "features", "caches", "threads", "versions", "numpy"):
        assert word in result.output
    assert runner.invoke(app, ["--version"]).output.startswith("tapwise ")


def test_report_check(tmp_path: Path) -> None:
    document = tmp_path / "page.md"
    document.write_text("<!-- results:summary -->\nold\n<!-- /results -->\n")
    words = ["report", str(document), "--results", str(tmp_path)]
    assert runner.invoke(app, [*words, "--check"]).exit_code == 1
    assert runner.invoke(app, words).exit_code == 0
    assert runner.invoke(app, [*words, "--check"]).exit_code == 0


@pytest.mark.parametrize(("new_us", "status", "says"), [(100.0, 0, "1 SAME"), (500.0, 1, "1 SLOWER")])
def test_two_runs_are_compared(
    new_us: float, status: int, says: str, tmp_path: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    def row(time_us: float) -> Record:
        return Record(
            TINY, "s", "c", 1, "fprop", "f32", "ieee", "nchw", "d", 2, algorithm="cpu.direct", verified=True,
            time_us=time_us, spread_us=1.0, gflops=1.0, ratios={"p": 200.0 / time_us},
        )  # fmt: skip

    old, new = str(tmp_path / "old.json"), str(tmp_path / "new.json")
    for path, time_us in ((old, 100.0), (new, new_us)):
        records.write([row(time_us)], Path(path), "d", None)
    monkeypatch.setattr(bench, "run", lambda cases, options, done, again: done(row(new_us)))
    for words in (["report", "--compare", old, new], ["bench", TINY, "--compare", old, "--json", old]):
        result = runner.invoke(app, words)
        assert result.exit_code == status, result.output
        assert says in result.output


def test_a_missing_run_to_compare_with_is_said_before_anything_is_measured() -> None:
    result = runner.invoke(app, ["bench", TINY, "--compare", "no_such.json"])
    assert result.exit_code == 2 and "no_such.json" in result.output and "verified" not in result.output


def test_a_record_names_no_path_of_its_machine(monkeypatch: pytest.MonkeyPatch) -> None:
    words = ["bench", "c5 h7 w7 k3 r3 s3", "/home/me/layers.txt", "--json=/home/me/results", "results/here"]
    monkeypatch.setattr(sys, "argv", ["/usr/bin/tapwise", *words])
    assert typed_command() == "tapwise bench 'c5 h7 w7 k3 r3 s3' layers.txt --json=results results/here"
    for record in RECORDS.rglob("*.json"):
        assert not re.search(r'"command": "[^"]*[ =]/', record.read_text()), record
