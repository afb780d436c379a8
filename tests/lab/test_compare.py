"""Verdicts on made-up pairs of records: each of the four, on a CPU with and without peers, and on a GPU."""

from __future__ import annotations

import io
import json
from pathlib import Path
from typing import Any

import pytest
from rich.console import Console

from tapwise.errors import InvalidProblem
from tapwise.lab import records
from tapwise.lab.compare import Verdict, compare, compare_runs, print_comparisons
from tapwise.lab.records import Record

PROBLEM = "c3 h9 w7 k5 r3 s3 pad1"


def record(time_us: float | None, algorithm: str = "cpu.direct", **changes: Any) -> Record:
    fields: dict[str, Any] = {
        "problem": PROBLEM,
        "suite": "s",
        "category": "c",
        "uses": 1,
        "direction": "fprop",
        "dtype": "f32",
        "math": "ieee",
        "layout": "nchw",
        "device": "d",
        "threads": 2,
        "algorithm": algorithm,
        "time_us": time_us,
        "spread_us": 0.01 * (time_us or 0.0),
        "verified": True,
    }
    return Record(**(fields | changes))


def verdict(old: Record, new: Record) -> Verdict:
    return compare(old, new).verdict


@pytest.mark.parametrize(
    ("new_us", "ratio", "wanted"),
    [
        # The machine is half as fast, and so is the peer.
        (200.0, 2.0, Verdict.SAME),
        (100.0, 1.9, Verdict.SAME),
        (100.0, 1.5, Verdict.SLOWER),
        (150.0, 2.6, Verdict.FASTER),
    ],
)
def test_a_cpu_is_judged_against_the_peer_of_both_runs(new_us: float, ratio: float, wanted: Verdict) -> None:
    row = compare(record(100.0, ratios={"p": 2.0, "q": 9.0}), record(new_us, ratios={"p": ratio}))
    assert row.verdict is wanted
    assert row.change == pytest.approx(2.0 / ratio) and row.against == ("p",)


def test_a_wide_spread_or_peers_that_disagree_leave_doubt() -> None:
    steady = {"p": 2.0}
    assert verdict(record(100.0, ratios=steady), record(100.0, ratios={"p": 1.7})) is Verdict.SLOWER
    assert verdict(record(100.0, ratios=steady), record(100.0, ratios={"p": 1.7}, spread_us=15.0)) is Verdict.UNSURE
    assert verdict(record(100.0, ratios=steady, spread_us=15.0), record(100.0, ratios=steady)) is Verdict.UNSURE
    two = {"p": 2.0, "q": 2.0}
    assert verdict(record(100.0, ratios=two), record(100.0, ratios={"p": 1.65, "q": 1.75})) is Verdict.SLOWER
    assert verdict(record(100.0, ratios=two), record(100.0, ratios={"p": 1.2, "q": 2.2})) is Verdict.UNSURE


def test_a_cpu_without_peers_is_only_judged_on_changes_beyond_its_drift() -> None:
    assert verdict(record(100.0), record(100.0)) is Verdict.UNSURE
    assert verdict(record(100.0), record(140.0)) is Verdict.UNSURE
    assert verdict(record(100.0), record(160.0)) is Verdict.SLOWER
    assert verdict(record(100.0), record(60.0)) is Verdict.FASTER


def test_a_gpu_counts_the_change_nearer_to_none() -> None:
    def gpu(time_us: float, **changes: Any) -> Record:
        return record(time_us, "cuda.direct", **changes)

    assert verdict(gpu(100.0), gpu(102.0)) is Verdict.SAME
    assert verdict(gpu(100.0), gpu(104.0)) is Verdict.SLOWER
    assert verdict(gpu(100.0), gpu(96.0)) is Verdict.FASTER
    # Its clock is slower, and the peer shows it; the peer has another kernel, and our time shows it.
    assert verdict(gpu(100.0, ratios={"p": 2.0}), gpu(105.0, ratios={"p": 2.0})) is Verdict.SAME
    assert verdict(gpu(100.0, ratios={"p": 2.0}), gpu(100.0, ratios={"p": 1.5})) is Verdict.SAME
    assert verdict(gpu(100.0, ratios={"p": 2.0}), gpu(110.0, ratios={"p": 1.8})) is Verdict.SLOWER
    # Faster by the clock and slower against the peer: neither.
    assert verdict(gpu(100.0, ratios={"p": 2.0}), gpu(94.0, ratios={"p": 1.9})) is Verdict.SAME
    assert verdict(gpu(100.0), gpu(104.0, spread_us=4.0)) is Verdict.UNSURE


def test_rows_that_cannot_be_compared_say_why() -> None:
    old = record(100.0)
    lost, missing = compare(old, record(None, verified=False, reason="all wrong")), compare(None, old)
    assert lost.verdict is Verdict.SLOWER and "all wrong" in lost.reason
    assert missing.verdict is Verdict.UNSURE and "not in the old run" in missing.reason
    for other in (record(100.0, threads=1), record(100.0, device="e"), record(100.0, verified=False), record(None)):
        row = compare(other, old)
        assert row.verdict is Verdict.UNSURE and row.reason


def test_rows_are_found_by_problem_however_it_is_written() -> None:
    old = [record(100.0, problem="pad1 s3 r3 k5 w7 h9 c3"), record(1.0, problem="c4 h9 w7 k5 r3 s3 pad1")]
    (row,) = compare_runs(old, [record(100.0)])
    assert row.old_us == 100.0
    # Of several devices that of the same one.
    (row,) = compare_runs([record(7.0, device="e"), *old], [record(100.0)])
    assert row.old_us == 100.0


def test_table_and_status() -> None:
    console = Console(width=100, record=True, file=io.StringIO())
    rows = [compare(record(100.0, ratios={"p": 2.0}), record(100.0, ratios={"p": ratio})) for ratio in (2.0, 3.0)]
    assert not print_comparisons(console, rows)
    assert print_comparisons(console, [*rows, compare(record(100.0), record(500.0))])
    text = console.export_text()
    assert "1 FASTER, 0 SLOWER, 1 SAME, 0 UNSURE" in text and "1 FASTER, 1 SLOWER, 1 SAME, 0 UNSURE" in text
    assert "-33.3 %" in text and "time over that of p" in text


def test_records_are_read_back(tmp_path: Path) -> None:
    rows = [record(100.0, ratios={"p": 2.0}), record(None, problem="c4 h9 w7 k5 r3 s3 pad1")]
    (path,) = records.write(rows, tmp_path / "a.json", "d", None)
    assert records.read(path) == records.read(tmp_path) == rows
    # As `bench --json FOLDER` writes them: a folder a device.
    records.write(rows, tmp_path / "runs" / "d" / "a.json", "d", None)
    assert records.read(tmp_path / "runs") == rows
    path.write_text(json.dumps([rows[0].as_json() | {"of a later version": 1}]))
    assert records.read(path) == rows[:1]
    for text in ("", "{}", "[]", "[1]", '[{"problem": "x"}]'):
        path.write_text(text)
        with pytest.raises(InvalidProblem, match=str(tmp_path)):
            records.read(path)
    with pytest.raises(InvalidProblem, match=r"none\.json"):
        records.read(tmp_path / "none.json")
