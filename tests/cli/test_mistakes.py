"""Every command with mistakes and in every width: the right exit status, one clear line, nothing cut."""

from __future__ import annotations

import json
import os
import subprocess
import sys
from pathlib import Path
from typing import Any

import pytest
from typer.testing import CliRunner

from tapwise.cli import app
from tapwise.cuda.jit.device import why_none
from tapwise.lab import timing
from tapwise.lab.records import Record
from tapwise.lab.report import print_bench
from tapwise.lab.study.findings import Findings, judge

runner = CliRunner()
BUSY_CORES = timing.busy_cores
TINY = "c3 h9 w7 k5 r3 s3 pad1"
QUICK = ["--peers", "none", "--seconds", "0.01", "--repeats", "1"]


@pytest.fixture(autouse=True)
def quick_ceilings(monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setattr("tapwise.cpu.ceilings.fma_gflops", lambda threads, dtype: 100.0)
    monkeypatch.setattr("tapwise.cpu.ceilings.copy_gbps", lambda threads: 10.0)
    monkeypatch.setattr(timing, "busy_cores", lambda: 0.0)


@pytest.mark.parametrize(
    ("words", "status", "said"),
    [
        (["verify", "c4 d5 h5 w5 k4 t3 r3 s3"], 1, "does not apply: it takes 2 spatial axes, not 3"),
        (["verify", "c4 d5 h5 w5 k4 t3 r3 s3 bf16"], 1, "no algorithm takes 1 of 1 problems"),
        (["verify", "c8 h9 w9 k8 r3 s3 groups8", "--algorithms", "cpu.winograd"], 1, "does not apply"),
        (["verify", TINY, "--algorithms", "cpu.simd"], 2, "algorithms='cpu.simd': auto, all or of cpu.winograd"),
        (["verify", TINY, "--dtype", "tf32"], 2, "dtype='tf32': arithmetic of a GPU's tensor cores"),
        (["bench", TINY, "--dtype", "f33"], 2, "dtype='f33': one of f32, f64, f16, bf16"),
        (["bench", TINY, "--algorithms", "cpu.nothing"], 2, "algorithms='cpu.nothing'"),
        (["bench", TINY, "--json", "/proc/nothing/a.json"], 2, "json='/proc/nothing/a.json'"),
        (["bench", TINY, "--json", "a.txt"], 2, "json='a.txt': a .json file, or a folder"),
        (["bench", "softmax 64x100 n64"], 2, "examples are 'softmax 64x1000 axis1 f16'"),
        (["bench", "filter box h9 w9 size3 n64"], 2, "an example is 'filter gaussian"),
        (["bench", "nothing"], 2, "'nothing' is neither a suite"),
        (["bench", TINY, "--peers", "nobody"], 2, "nobody"),
        (["bench", TINY, "--compare", "/nothing.json"], 2, "/nothing.json"),
        (["bench", TINY, "--device", "tpu"], 2, "device='tpu'"),
        (["bench"], 2, "Suites of the package:"),
        (["explain", "c3 h9"], 2, "no word gives"),
        (["study", "nothing"], 2, "study 'nothing'"),
        (["study", "direct", "--sides", "\u00b2"], 2, "sides="),
        (["study", "--from", "/nothing.json"], 1, "/nothing.json"),
        (["report", "/nothing.md"], 2, "/nothing.md"),
        (["report", "--results", "/nothing"], 2, "results='/nothing'"),
        (["report", "--compare", "/nothing", "/nothing"], 2, "/nothing"),
    ],
    ids=lambda value: " ".join(value) if isinstance(value, list) else "",
)
def test_mistakes(words: list[str], status: int, said: str, tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    if words[0] != "report":
        monkeypatch.chdir(tmp_path)
    if words[0] == "bench" and len(words) > 2:
        words = [*words, *(["--repeats", "1"] if "--peers" in words else QUICK)]
    result = runner.invoke(app, words)
    assert result.exit_code == status, result.output
    assert said in result.output
    assert result.exception is None or isinstance(result.exception, SystemExit)
    assert not list(tmp_path.glob("a.txt"))
    lines = [line for line in result.output.splitlines() if line.startswith("tapwise: ")]
    assert len(lines) == (status == 2 and words != ["bench"]) or status == 1


@pytest.mark.skipif(why_none() is None, reason="there is a GPU")
@pytest.mark.parametrize("command", ["bench", "verify", "explain"])
def test_no_gpu_is_one_line(command: str) -> None:
    result = runner.invoke(app, [command, TINY, "--device", "cuda"])
    assert result.exit_code == 2
    assert "tapwise: " in result.output and "Traceback" not in result.output


def test_report_outside_of_a_clone(tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.chdir(tmp_path)
    result = runner.invoke(app, ["report"])
    assert result.exit_code == 2
    assert "no documents: name some, or go to a clone" in result.output


@pytest.mark.parametrize(
    ("problem", "algorithm"),
    [
        ("softmax 64x100", "cpu.simd"),
        ("maxpool c3 w40 s3", "cpu.serial"),
        ("im2col c3 w40 s3", "cpu.simd"),
        ("filter box h20 w20 size3", "cpu.tiles"),
        ("c3 w40 k5 s3", "cpu.direct"),
        ("maxpool c3 h9 w9 r3 s3 indices", "cpu.serial"),
        ("maxpool c3 h9 w9 r3 s3 dgrad", "cpu.simd"),
        ("log_softmax 5x100 dgrad", "cpu.simd"),
    ],
)
def test_bench_of_every_operator_by_name(problem: str, algorithm: str) -> None:
    result = runner.invoke(app, ["bench", problem, "--algorithms", algorithm, *QUICK])
    assert result.exit_code == 0, result.output
    assert algorithm.removeprefix("cpu.") in result.output
    assert runner.invoke(app, ["verify", problem]).exit_code == 0
    assert runner.invoke(app, ["explain", problem]).exit_code == 0


def test_verify_takes_auto_as_all() -> None:
    result = runner.invoke(app, ["verify", TINY, "--algorithms", "auto"])
    assert result.exit_code == 0 and "cpu.serial" in result.output


def test_words_for_dtypes() -> None:
    for word in ("half", "float16", "fp16"):
        result = runner.invoke(app, ["verify", TINY, "--dtype", word])
        assert result.exit_code == 0 and "f16" in result.output


def rows() -> list[Record]:
    peers = ("onednn", "onednn-cl", "mlas", "torch", "numpy")
    plain = {"suite": "s", "category": "c", "uses": 1, "direction": "fprop", "dtype": "f32", "math": "ieee"}
    made = Record(
        "n2 c384 h28 w28 k384 r3 s3 stride2 pad1 bias relu", **plain, layout="nchw", device="d", threads=2,  # type: ignore[arg-type]
        algorithm="cpu.im2col_gemm", time_us=1234.5, spread_us=12.0, gflops=98.7, roof_us=600.0, verified=True,
        ratios=dict.fromkeys(peers, 1.25), ratio=1.21, workspace_bytes=123_456_789,
    )  # fmt: skip
    failed = Record("c1 h1 w1 k1 r1 s1", **plain, layout="nchw", device="d", threads=2, reason="no [brackets] eaten")  # type: ignore[arg-type]
    return [made, failed]


@pytest.mark.parametrize("columns", ["", "80", "100", "120", "200", "no number"])
def test_nothing_of_bench_is_cut(
    columns: str, monkeypatch: pytest.MonkeyPatch, capsys: pytest.CaptureFixture[str]
) -> None:
    from tapwise.cli.common import UNCUT, make_console

    monkeypatch.setenv("COLUMNS", columns)
    console = make_console()
    print_bench(console, rows())
    text = capsys.readouterr().out
    width = int(columns) if columns.isdigit() else UNCUT
    assert console.width == width
    table = text[: text.index("verified")]
    assert max(len(line) for line in table.splitlines() if "brackets" not in line) <= width
    for word in ("fastest", "1.21", "yes", "1.25", "117.7 M", "onednn-cl", "numpy", "no [brackets] eaten"):
        assert word in text, word
    assert "…" not in text
    assert (" GFLOP/s," in text) == (width < 130)


def test_names_in_brackets_are_not_eaten(monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setattr("tapwise.cuda.jit.device.described", lambda: "none (pip install 'tapwise[cuda]')")
    assert "'tapwise[cuda]'" in runner.invoke(app, ["info"]).output


def test_a_busy_machine_is_told_of(monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setattr(timing, "busy_cores", lambda: 1.7)
    result = runner.invoke(app, ["bench", TINY, *QUICK])
    assert result.exit_code == 0
    assert "1.7 of" in result.output and "times will be wide" in result.output


def test_busy_cores_are_counted() -> None:
    spin = [sys.executable, "-c", "while True: pass"]
    with subprocess.Popen(spin) as child:
        try:
            assert 0.2 < BUSY_CORES() <= (os.cpu_count() or 1) + 0.1
        finally:
            child.kill()


def test_studies_judge_nothing_within_the_spread() -> None:
    findings = Findings("s", "t", "cpu", "d")
    findings.add({"way": "old"}, (110.0, 11.0), True)
    findings.add({"way": "new"}, (100.0, 1.0), True)
    findings.add({"way": "best"}, (50.0, 1.0), True)

    def said(over: str, under: str) -> Any:
        return judge("x", "is faster", findings.ratios({"way": over}, {"way": under}), "ratio")

    assert said("old", "new").holds is None and "within the spread" in said("old", "new").figures
    assert "± 10 %" in said("old", "new").figures
    assert said("old", "best").holds is True
    assert said("best", "new").holds is False


def test_a_closed_pipe_is_no_traceback(tmp_path: Path) -> None:
    command = f"{sys.executable} -m tapwise study list | head -1"
    done = subprocess.run(["bash", "-c", command], capture_output=True, text=True, cwd=tmp_path, timeout=60)
    assert "sliding-window" in done.stdout
    assert "Traceback" not in done.stderr


def test_json_is_written_where_it_may_be(tmp_path: Path) -> None:
    target = tmp_path / "new" / "a.json"
    assert runner.invoke(app, ["bench", TINY, *QUICK, "--json", str(target)]).exit_code == 0
    assert len(json.loads(target.read_text())) == 1
