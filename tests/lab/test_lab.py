"""Timing, ceilings, records, tables: arithmetic on made-up contestants, and one tiny measurement end to end."""

from __future__ import annotations

import io
import json
import math
import os
import threading
from dataclasses import replace
from pathlib import Path
from typing import Any

import numpy as np
import pytest
from rich.console import Console

from tapwise import dispatch, registry, settings
from tapwise.baselines import Prepared
from tapwise.cuda.jit import compile as compiler
from tapwise.cuda.jit.compile import Source
from tapwise.cuda.jit.device import H200
from tapwise.errors import CompileError, InvalidProblem, PeerUnavailable
from tapwise.lab import bench, records, report, roofline, timing
from tapwise.lab.records import Record
from tapwise.lab.suites import Case
from tapwise.ops.conv.problem import ConvProblem

PROBLEM = ConvProblem.parse("c3 h9 w7 k5 r3 s3 pad1")


class Clock:
    """A clock that only moves when somebody works."""

    def __init__(self) -> None:
        self.now = 0

    def __call__(self) -> int:
        return self.now

    def worker(self, name: str, nanoseconds: list[int]) -> timing.Contestant:
        """Takes the given times in turn, the last one for ever."""
        calls = iter(nanoseconds)
        last = nanoseconds[-1]

        def run() -> None:
            self.now += next(calls, last)

        return timing.Contestant(name, run)


def test_medians_and_ratios() -> None:
    clock = Clock()
    ours, peer = clock.worker("ours", [50_000_000]), clock.worker("peer", [125_000_000])
    times = timing.measure([ours, peer], seconds=100, repeats=7, clock=clock, sleep=lambda _: None)
    assert times["ours"].time_us == 50_000
    assert times["peer"].over(times["ours"]) == (2.5, 0.0)
    assert len(times["ours"].rounds_us) == 7
    assert not times["ours"].unstable


def test_ratio_is_taken_round_by_round() -> None:
    """A clock that slows down by three hits both; the ratio stays."""
    ours, peer = timing.Timing((1.0, 1.0, 3.0, 3.0)), timing.Timing((2.0, 2.0, 6.0, 6.0))
    assert peer.over(ours) == (2.0, 0.0)
    assert ours.unstable


def test_short_calls_are_timed_in_blocks() -> None:
    clock = Clock()
    count = 0

    def run() -> None:
        nonlocal count
        count += 1
        clock.now += 10_000

    result = timing.measure([timing.Contestant("a", run)], seconds=1, repeats=3, clock=clock, sleep=lambda _: None)
    assert result["a"].time_us == 10
    assert count >= 3 * timing.BLOCK_S / 10e-6


@pytest.mark.skipif(not hasattr(os, "sched_setaffinity"), reason="no affinities")
def test_other_threads_are_kept_off_the_callers_core() -> None:
    """And may be where they were before afterwards; a thread that has one core stays there."""
    cores, ended = os.sched_getaffinity(0), threading.Event()
    if len(cores) == 1:
        pytest.skip("one core")
    free, bound = (threading.Thread(target=ended.wait) for _ in range(2))
    try:
        for thread in (free, bound):
            thread.start()
        os.sched_setaffinity(bound.native_id or 0, {min(cores)})
        threads, environment = settings.threads(), dict(os.environ)
        with timing.apart():
            (mine,) = os.sched_getaffinity(0)
            assert settings.threads() == threads
            assert os.sched_getaffinity(free.native_id or 0) == cores - {mine}
            assert os.sched_getaffinity(bound.native_id or 0) == {min(cores)}
        assert os.sched_getaffinity(0) == os.sched_getaffinity(free.native_id or 0) == cores
        assert os.environ == environment
        assert os.sched_getaffinity(bound.native_id or 0) == {min(cores)}
    finally:
        ended.set()
        for thread in (free, bound):
            thread.join()


def test_budget_ends_rounds() -> None:
    clock = Clock()
    slow = clock.worker("slow", [500_000_000])
    result = timing.measure([slow], seconds=1, repeats=50, clock=clock, sleep=lambda _: None)
    assert len(result["slow"].rounds_us) == timing.LEAST_ROUNDS


def test_roof_is_the_larger_of_arithmetic_and_memory() -> None:
    slow_memory = roofline.Ceilings(gflops=1e9, gbps=2.0)
    slow_arithmetic = roofline.Ceilings(gflops=3.0, gbps=1e9)
    assert roofline.roof_us(PROBLEM, slow_memory) == pytest.approx(PROBLEM.bytes / 2e3)
    assert roofline.roof_us(PROBLEM, slow_arithmetic) == pytest.approx(PROBLEM.flops / 3e3)


@pytest.fixture
def ceilings(monkeypatch: pytest.MonkeyPatch, tmp_path: Path) -> list[int]:
    """Ceilings without measuring, in a cache folder of the test's own; counts the measurements."""
    calls = [0]

    def fma(threads: int, dtype: str) -> float:
        calls[0] += 1
        return 100.0

    monkeypatch.setenv("TAPWISE_CACHE_DIR", str(tmp_path / "cache"))
    monkeypatch.setattr("tapwise.cpu.ceilings.fma_gflops", fma)
    monkeypatch.setattr("tapwise.cpu.ceilings.copy_gbps", lambda threads: 10.0)
    return calls


def test_ceilings_are_measured_once_and_kept(ceilings: list[int], tmp_path: Path) -> None:
    assert roofline.known(2) is None
    first = roofline.ceilings(2)
    assert roofline.ceilings(2, "f16") == first == roofline.Ceilings(100.0, 10.0)
    assert ceilings == [1]
    roofline.ceilings(2, "f64")
    roofline.ceilings(3)
    assert ceilings == [3]
    (tmp_path / "cache" / "ceilings.json").write_text("{ half a fi")
    with pytest.warns(RuntimeWarning, match="damaged"):
        roofline.ceilings(2)
    assert ceilings == [4]


def test_the_highest_ceilings_are_kept(ceilings: list[int], monkeypatch: pytest.MonkeyPatch) -> None:
    """Of processes, which measure anew: one that was disturbed neither stays nor takes away."""
    monkeypatch.setattr("tapwise.cpu.ceilings.copy_gbps", lambda threads: 3.0)
    assert roofline.ceilings(2) == roofline.Ceilings(100.0, 3.0)
    for memory, highest in ((12.0, 12.0), (4.0, 12.0)):
        monkeypatch.setattr(roofline, "_measured_here", set())
        monkeypatch.setattr("tapwise.cpu.ceilings.copy_gbps", lambda threads, memory=memory: memory)
        assert roofline.ceilings(2) == roofline.known(2) == roofline.Ceilings(100.0, highest)
    assert ceilings == [3]


def measure(options: bench.Options, *problems: str) -> list[Record]:
    rows: list[Record] = []
    bench.run([Case(ConvProblem.parse(text)) for text in problems], options, rows.append)
    return rows


def test_kernels_of_a_gpu_are_compiled_before(monkeypatch: pytest.MonkeyPatch) -> None:
    """Those of every problem's choice, also beside one whose kernel does not compile."""
    compiled: list[Source] = []

    def cubin(source: Source, architecture: str) -> bytes:
        compiled.append(source)
        if "depthwise" in source.text:
            raise CompileError("no")
        return b""

    monkeypatch.setattr(compiler, "cubin", cubin)
    texts = ("n2 c64 h9 w9 k64 r1 s1 f16 nhwc", "n2 c8 h9 w9 k8 r3 s3 pad1 groups8 f16 nhwc", "c3 h20 w20 k8 r3 s3")
    problems = [ConvProblem.parse(text) for text in texts]
    bench._compile([Case(problem) for problem in problems], bench.Options(device="cuda"), H200)
    for problem in problems:
        choice = dispatch.choose(problem, H200)
        algorithm: Any = registry.get(choice.algorithm, problem.operator)
        assert algorithm.sources(problem, choice.config)[0] in compiled
    compiled.clear()
    bench._compile([Case(problems[0])], bench.Options("cuda.depthwise", device="cuda"), H200)
    assert not compiled


def test_record_of_a_tiny_problem(ceilings: list[int], tmp_path: Path) -> None:
    options = bench.Options(algorithms="all", seconds=0.01, repeats=2, threads=1, command="tapwise bench x")
    (row,) = measure(options, str(PROBLEM))
    # Those that are predicted to take many times as long are left out, which they are depends on the CPU.
    assert row.verified and row.algorithm in row.algorithms and len(row.algorithms) >= 2
    assert row.time_us is not None and row.time_us > 0
    assert row.roof_us == pytest.approx(roofline.roof_us(PROBLEM, roofline.Ceilings(100.0, 10.0)))
    assert row.error is not None and row.bound is not None and row.error <= row.bound
    (path,) = records.write([row], tmp_path / "out", "cpu-x", None)
    assert path == tmp_path / "out" / "cpu-x" / "problems-fprop-f32-threads1-n1.json"
    (stored,) = json.loads(path.read_text())
    wanted = (
        "problem class uses direction dtype math layout device algorithm config time_us spread_us roof_us peers ratio "
        "error bound verified workspace_bytes versions commit command"
    )
    assert set(wanted.split()) <= set(stored)
    assert stored["problem"] == str(PROBLEM) and stored["command"] == "tapwise bench x"


def test_files_are_named_by_the_batch_of_most_problems(tmp_path: Path) -> None:
    rows = [
        record(1.0, problem=f"n{n} c3 h8 w8 k4 r3 s3 {dtype}", dtype=dtype, suite="problems")
        for n in (4, 1, 4)
        for dtype in ("f32", "f64")
    ]
    names = [path.name for path in records.write(rows, tmp_path, "cpu-x", None)]
    assert names == ["problems-fprop-f32-n4.json", "problems-fprop-f64-n4.json"]
    assert records.write(rows[:1], tmp_path, "cpu-x", 7)[0].name == "problems-fprop-f32-n7.json"
    alone = replace(rows[0], threads=1)
    assert records.write([alone], tmp_path, "cpu-x", None)[0].name == "problems-fprop-f32-threads1-n4.json"


def test_failures_are_rows_and_others_go_on(ceilings: list[int]) -> None:
    options = bench.Options(algorithms="cpu.direct", seconds=0.01, repeats=1, threads=1)
    first, second = measure(options, "c3 d5 h9 w7 k5 t3 r3 s3", str(PROBLEM))
    assert first.time_us is None and "2 spatial axes" in first.reason and not first.verified
    assert second.verified
    with pytest.raises(InvalidProblem, match=r"cpu\.nothing"):
        measure(bench.Options(algorithms="cpu.nothing"), str(PROBLEM))


def test_wrong_result_gets_no_time(ceilings: list[int], monkeypatch: pytest.MonkeyPatch) -> None:
    right = ConvProblem.reference

    def wrong(*arguments: Any) -> tuple[np.ndarray, np.ndarray]:
        y, bound = right(*arguments)
        y[0, 0, 0, 0] += 1
        return y, bound

    monkeypatch.setattr(ConvProblem, "reference", wrong)
    (row,) = measure(bench.Options(seconds=0.01, repeats=1, threads=1), str(PROBLEM))
    assert not row.verified and row.time_us is None and "wrong" in row.reason


def record(ratio: float, category: str = "3x3", **changes: Any) -> Record:
    fields: dict[str, Any] = {
        "problem": str(PROBLEM), "suite": "s", "category": category, "uses": 1, "direction": "fprop", "dtype": "f32",
        "math": "ieee", "layout": "nchw", "device": "d", "threads": 2, "algorithm": "cpu.direct", "time_us": 100.0,
        "roof_us": 50.0, "gflops": 1.0, "peers": {"p": 100.0 * ratio}, "ratio": ratio, "verified": True,
    }  # fmt: skip
    return Record(**(fields | changes))


def test_geometric_mean_and_auto_quality() -> None:
    assert records.geometric_mean([2.0, 8.0]) == pytest.approx(4.0)
    assert records.geometric_mean([]) is None
    rows = [record(1, algorithms={"a": 100.0, "b": 90.0}), record(1, algorithms={"a": 100.0, "b": 80.0}), record(1)]
    assert bench.select_best(rows) == (1, 2)


def test_tables_say_where_cores_were_far_from_each_other() -> None:
    def said(*rows: Record) -> str:
        console = Console(file=io.StringIO(), width=200)
        report._print_means(console, rows, [])
        return console.file.getvalue()  # type: ignore[attr-defined]

    near, far = record(1.0, line_ns=[90.0, 100.0]), record(1.0, line_ns=[90.0, 365.0])
    assert "far from each other" not in said(record(1.0), near)
    assert "1 of 3 were timed while two threads' cores were far" in said(record(1.0), near, far)
    assert "365 ns, and 90 at best" in said(near, far)


def test_what_was_timed_far_from_each_other_is_timed_again(monkeypatch: pytest.MonkeyPatch) -> None:
    """Of three problems the second, until its threads' cores are near; the others keep their times."""
    texts = [f"c{c} h6 w7 k4 r3 s3" for c in (1, 2, 3)]
    # Of the first pass, then of the second problem: far once more, and near.
    lines, timed, told = [90.0, 365.0, 100.0, 400.0, 95.0], list[str](), list[int]()

    def measured(problem: ConvProblem, options: bench.Options, device: object, made: Record) -> None:
        timed.append(str(problem))
        made.time_us, made.line_ns = float(len(timed)), [lines[len(timed) - 1]]

    monkeypatch.setattr(bench, "_measure", measured)
    monkeypatch.setattr(bench, "_wait_until_near", lambda device, near, most: True)
    rows: list[Record] = []
    bench.run([Case(ConvProblem.parse(text)) for text in texts], bench.Options(), rows.append, told.append)
    assert timed == [*texts, texts[1], texts[1]] and told == [1, 1]
    assert [row.time_us for row in rows] == [1.0, 5.0, 3.0] and not records.far(rows)


def test_report_rewrites_between_markers_only(tmp_path: Path) -> None:
    records.write([record(2.0), record(0.5)], tmp_path, "cpu-x", None)
    results = report.load(tmp_path)
    text = "before\n<!-- results:summary -->\nold\n<!-- /results -->\nafter\n"
    new = report.rewrite(text, results)
    assert new.startswith("before\n") and new.endswith("after\n") and "old" not in new
    assert "| cpu-x | s-fprop-f32-n1 | 2 | 2 | **1.00** | 0.50 | 1 |" in new
    assert report.rewrite(new, results) == new
    table = report.rewrite(text.replace("summary", "cpu-x/s-fprop-f32-n1"), results)
    assert table.count("cpu.direct") == 2
    with pytest.raises(KeyError, match="nothing"):
        report.rewrite(text.replace("summary", "nothing"), results)


def test_what_fused_layers_cost_over_plain_ones(tmp_path: Path) -> None:
    """Ratios round by round of the layer over the plain one, ours and each peer's, in the record and its tables."""
    times = {
        "cpu.direct": timing.Timing((11.0, 22.0, 33.0)),
        "plain cpu.direct": timing.Timing((10.0, 20.0, 30.0)),
        "p": timing.Timing((30.0, 60.0, 90.0)),
        "plain p": timing.Timing((20.0, 40.0, 60.0)),
    }
    row, plain = record(1.0), record(1.0)
    bench._fill(row, times, ["cpu.direct"], bench.Options(), PROBLEM, roofline.Ceilings(100.0, 10.0))
    assert row.over_plain == {"cpu.direct": pytest.approx(1.1), "p": pytest.approx(1.5)}
    records.write([row, plain], tmp_path, "cpu-x", None)
    first, second = report.markdown("cpu-x/s-fprop-f32-n1", report.load(tmp_path)).splitlines()[2:]
    assert first.endswith("| +10.0 % | +50.0 % |") and second.endswith("| - | - |")
    console = Console(width=100, record=True, file=io.StringIO())
    report.print_bench(console, [row, plain])
    text = console.export_text()
    assert "plain" in text and "+10.0 %" in text
    report.print_bench(console, [plain])
    assert "plain" not in console.export_text()


def test_16_bits_are_held_against_float32_of_ours(tmp_path: Path) -> None:
    """In turns with it on a CPU, in the record and its tables; other dtypes have no such figure."""
    rows: list[records.Record] = []
    cases = [Case(ConvProblem.parse(f"c5 h6 w7 k4 r3 s3 {dtype}"), "s", "c", 1) for dtype in ("bf16", "f16", "f32")]
    bench.run(cases, bench.Options(seconds=0.01, repeats=3), rows.append)
    narrow, half, wide = rows
    assert all(row.verified and row.time_us for row in rows)
    assert narrow.f32_ratio and half.f32_ratio and wide.f32_ratio is None
    assert not (narrow.ratios or narrow.over_plain or narrow.algorithms)
    narrow.f32_ratio = 1.37
    records.write(rows, tmp_path, "cpu-x", None)
    lines = report.markdown("cpu-x/s-fprop-bf16-n1", report.load(tmp_path)).splitlines()
    assert lines[0].endswith("| fastest peer / ours | our float32 / ours |") and lines[2].endswith("| - | 1.37 |")
    assert report.markdown("cpu-x/s-fprop-f32-n1", report.load(tmp_path)).count("float32") == 0
    for width in (80, 120):
        console = Console(width=width, record=True, file=io.StringIO())
        report.print_bench(console, [narrow])
        text = console.export_text()
        assert text.count("1.37") == 3 and "geometric mean 1.37, least 1.37, 1 layers" in text


def test_a_gpu_table_of_fused_layers_fits_a_terminal() -> None:
    """Nothing of a row with two peers and large figures is cut off at 100 columns."""
    row = record(123456.0)
    row.problem, row.algorithm = "n32 c512 h30 w30 k1024 r3 s3 f16 nhwc bias relu residual", "cuda.implicit_gemm"
    row.gflops, row.workspace_bytes = 780459.1, 123456789
    row.ratios, row.over_plain = {"cudnn": 12.34, "cudnn-cl": 23.45}, {"cuda.implicit_gemm": 1.1234}
    console = Console(width=100, record=True, file=io.StringIO())
    report.print_bench(console, [row])
    lines = console.export_text().splitlines()
    wanted = ("implicit_gemm", report.microseconds(row.time_us), "780459", "12.34", "23.45", "+12.3 %")
    for word in (*wanted, report.size(row.workspace_bytes), "residual", "scratch"):
        assert any(word in line for line in lines), word


@pytest.mark.parametrize("wrong", [0.0, 0.5, math.nan])
def test_a_peer_that_computes_something_else_is_told(wrong: float) -> None:
    """In an array, and in tensors in other memory orders."""
    torch = pytest.importorskip("torch")
    expected = torch.randn(3, 5, 4, 7, generator=torch.Generator().manual_seed(0))
    result = expected.clone()
    result[2, 3, 1, 6] += wrong
    for found, wanted in (
        (result.numpy(), expected.numpy()),
        (result.contiguous(memory_format=torch.channels_last), expected),
        (result, expected.contiguous(memory_format=torch.channels_last)),
    ):
        prepared = Prepared(lambda: None, lambda found=found: found)  # type: ignore[misc]
        if wrong == 0.0:
            bench._check_peer(prepared, wanted, "f32")
        else:
            with pytest.raises(PeerUnavailable, match="differs by"):
                bench._check_peer(prepared, wanted, "f32")
    with pytest.raises(PeerUnavailable, match="shape"):
        bench._check_peer(Prepared(lambda: None, lambda: result[:2]), expected, "f32")
    empty = torch.zeros(0, 3)
    bench._check_peer(Prepared(lambda: None, lambda: empty), empty, "f32")
