"""The studies on the CPU with small pictures: verified rows, tables, conclusions from the figures, files."""

from __future__ import annotations

import io
from pathlib import Path

import numpy as np
import pytest
from rich.console import Console
from typer.testing import CliRunner

from tapwise.cli import app
from tapwise.errors import InvalidProblem
from tapwise.lab import study
from tapwise.lab.study import show
from tapwise.lab.study.findings import Chart, Conclusion, Findings, Table, judge, pivot, words_us
from tapwise.lab.study.laboratory import CpuLaboratory, images, pictures, within

runner = CliRunner()


@pytest.fixture(autouse=True)
def brief(monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setattr(
        CpuLaboratory,
        "times",
        lambda self, runs, pauses=None: {n: (float(run() is None) + 1, 0.1) for n, run in runs.items()},
    )
    monkeypatch.setattr("tapwise.lab.study.vendor._first_calls", lambda *_: None)
    monkeypatch.setattr("tapwise.lab.study.headline.LADDER", ("c3 h30 w40 k3 r3 s3",))
    monkeypatch.setattr("tapwise.lab.study.headline.HEADLINE", "c6 h30 w40 k6 r6 s6")
    monkeypatch.setattr("tapwise.lab.study.gemm.CPU_LAYERS", ("c8 h9 w9 k8 r3 s3 pad1",))


@pytest.mark.parametrize("name", study.STUDIES)
def test_studies_on_the_cpu(name: str, tmp_path: Path) -> None:
    findings = study.run(study.STUDIES[name], "cpu", (16, 32), command="here")
    assert findings.study == name and findings.kind == "cpu" and findings.command == "here"
    assert findings.rows and all(row.verified for row in findings.rows if row.time_us is not None)
    assert findings.tables and all(len(line) == len(table.head) for table in findings.tables for line in table.lines)
    assert findings.conclusions
    findings.save(tmp_path / "a.json")
    assert Findings.load(tmp_path / "a.json").rows == findings.rows


def test_pictures_pad_for_the_wanted_size() -> None:
    for side, stride in ((16, 1), (16, 2), (33, 3)):
        problem = pictures(side, stride)
        assert problem.output == (side - 2, side - 2)
        before, after = problem.padding[0]
        assert after - before in (0, 1)


def test_a_wrong_result_is_seen() -> None:
    problem = pictures(16, 1)
    y = np.zeros(problem.y_shape, np.float32)
    assert not within(problem, y)


def example() -> Findings:
    findings = Findings("x", "A <study>", "cpu", "a CPU")
    for side in (10, 20):
        for way, us in (("slow", 4.0 * side), ("fast", 2.0 * side)):
            findings.add({"side": side, "way": way}, (us, 0.5), True)
    findings.add({"side": 30, "way": "slow"}, None, False, "too large")
    return findings


def test_findings_and_judgements() -> None:
    findings = example()
    assert findings.us(side=20) == 40.0 and findings.us(side=30) is None
    assert findings.ratios({"way": "slow"}, {"way": "fast"}) == [2.0, 2.0]
    table = pivot(findings, "t", [{"side": 10}, {"side": 30}], [("slow", {"way": "slow"}), ("fast", {"way": "fast"})])
    assert table.lines == (("10", "40 us", "20 us"), ("30", "-", "-"))
    assert judge("S", "t", [2.0, 2.0], "slow / fast", lambda m: m > 1).holds is True
    assert judge("S", "t", [0.5], "slow / fast").holds is False
    assert judge("S", "t", [], "slow / fast").holds is None
    assert [words_us(us) for us in (None, 3.14159, 2500.0, 3.2e6)] == ["-", "3.14 us", "2.5 ms", "3.2 s"]


def test_a_page_needs_nothing_else(tmp_path: Path) -> None:
    findings = example()
    findings.charts.append(Chart("sides", "us", {"slow": {"10": 40.0, "20": 80.0}, "fast": {"10": 20.0}}))
    findings.tables.append(Table("times", ("side", "us"), (("10", "40"),)))
    findings.conclusions.append(Conclusion("S", "slow & steady", False, "2.0"))
    written = show.write(findings, tmp_path)
    assert [path.name for path in written] == ["x.json", "x.html", "x-1.png"]
    assert written[2].read_bytes()[:8] == b"\x89PNG\r\n\x1a\n"
    text = written[1].read_text()
    assert "data:image/png;base64," in text and "http" not in text and 'src="x' not in text
    assert "A &lt;study&gt;" in text and "slow &amp; steady" in text and "does not hold here" in text
    lines = show.markdown(findings).splitlines()
    assert lines[0] == "- S: slow & steady: **does not hold here**. 2.0" and lines[-2:] == [
        "| --- | --- |",
        "| 10 | 40 |",
    ]


@pytest.mark.parametrize(("width", "parts"), [(300, 1), (200, 2), (100, 4), (40, 10)])
def test_wide_tables_fall_into_parts(width: int, parts: int) -> None:
    """No figure and no word of a name is broken; the first column is in each part."""
    names = [f"name{number}ofsomelength and more" for number in range(10)]
    layer = "n32 c64 h56 w56 k64 r3 s3 pad1"
    findings = example()
    findings.tables.append(Table("times", ("layer", *names), ((layer, *(f"{n}23.4 us" for n in range(10))),)))
    console = Console(width=width, record=True, file=io.StringIO())
    show.print_findings(console, findings)
    text = console.export_text()
    assert text.count("times") == text.count("layer") == parts and text.count("continued") == parts - 1
    for number in range(10):
        assert f"name{number}ofsomelength" in text and f"{number}23.4 us" in text


def test_documents_take_tables_of_studies(tmp_path: Path) -> None:
    from tapwise.lab import report

    findings = example()
    findings.tables.append(Table("times", ("side", "us"), (("10", "40"),)))
    findings.save(tmp_path / "gpu" / "study" / "x.json")
    text = "a\n<!-- study:gpu/x -->\nold\n<!-- /study -->\nb\n"
    known = report.studies(tmp_path)
    new = report.rewrite(text, {}, known)
    assert "old" not in new and "| 10 | 40 |" in new and new.startswith("a\n") and new.endswith("<!-- /study -->\nb\n")
    assert report.rewrite(new, {}, known) == new
    with pytest.raises(KeyError, match="study:gpu/x"):
        report.rewrite(text, {}, {})


def test_the_command(tmp_path: Path) -> None:
    listed = runner.invoke(app, ["study", "list"])
    assert all(name in listed.output for name in study.STUDIES)
    out = str(tmp_path / "out")
    done = runner.invoke(app, ["study", "im2col", "--device", "cpu", "--sides", "16,32", "--output", out])
    assert done.exit_code == 0, done.output
    assert "holds here" in done.output or "does not hold here" in done.output
    assert max(map(len, done.output.splitlines())) <= 100 or "wrote" in done.output
    again = runner.invoke(app, ["study", "--from", f"{out}/im2col.json", "--output", str(tmp_path / "again")])
    assert again.exit_code == 0 and (tmp_path / "again" / "im2col.html").is_file()
    for words, says in (
        (["nonsense"], "sliding-window"),
        (["direct", "--sides", "x"], "sides='x'"),
        (["direct", "--sides", "2", "--device", "cpu"], "at least 4"),
    ):
        failed = runner.invoke(app, ["study", *words])
        assert failed.exit_code == 2 and says in failed.output
    (tmp_path / "bad.json").write_text("[]")
    for name in ("bad.json", "none.json"):
        failed = runner.invoke(app, ["study", "--from", str(tmp_path / name), "--output", out])
        assert failed.exit_code == 1 and name in failed.output


def test_a_wrong_row_fails_the_command(tmp_path: Path) -> None:
    findings = example()
    findings.add({"side": 40, "way": "fast"}, (1.0, 0.0), False)
    findings.save(tmp_path / "x.json")
    failed = runner.invoke(app, ["study", "--from", str(tmp_path / "x.json"), "--output", str(tmp_path)])
    assert failed.exit_code == 1 and "NOT verified" in failed.output


def test_unknown_studies_and_sides() -> None:
    with pytest.raises(InvalidProblem, match="ladder"):
        study.select(["leiter"])
    assert len(study.select(["all"])) == len(study.STUDIES)
    with pytest.raises(InvalidProblem, match="sides"):
        study.run(study.STUDIES["ladder"], "cpu", ())
    assert images(pictures(16, 1)).shape == (1, 3, 16, 16)
