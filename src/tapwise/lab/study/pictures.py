"""The RGB report's experiments: convolution of RGB images by a sliding window.

On a GPU, the report's choices: sides x strides x threads x partition x memory x where the operands lie. On a CPU, its
own: sides x strides x method x threads x vector width x memory order.
"""

from __future__ import annotations

from collections.abc import Callable
from itertools import pairwise, product
from typing import Final

from tapwise.lab.study.findings import Chart, Choices, Conclusion, Findings, Table, Value, judge, pivot
from tapwise.lab.study.laboratory import (
    CpuLaboratory,
    CudaLaboratory,
    filters,
    images,
    pictures,
    prepared,
    target,
    within,
)

STRIDES: Final = (1, 2, 3)
THREADS: Final = (64, 256, 1024)
PARTITIONS: Final = ("block", "row", "column")
MEMORIES: Final = ("global", "shared")
PLACES: Final = ("device", "pinned")
# How much of a time may be lost before "no slower" does not hold.
LEVEL: Final = 1.05

Progress = Callable[[str], None]


def growth(findings: Findings, sides: tuple[int, ...], text: str, **choices: Value) -> Conclusion:
    """Whether times grow in proportion to the pixels."""
    ratios = [
        ratio**0.5
        for small, large in pairwise(sides)
        for ratio in findings.ratios({**choices, "side": large}, {**choices, "side": small})
    ]
    return judge("RGB report", text, ratios, lambda mean: mean > 1.7, "time of twice the side, square root (pixels: 2)")


def sliding_window_cuda(lab: CudaLaboratory, sides: tuple[int, ...], progress: Progress) -> Findings:
    """One thread an output."""
    from tapwise.ops.conv.cuda.sliding_window import SHARED, Config, SlidingWindow

    findings = Findings("sliding-window", "Sliding window: one thread an output", lab.kind, lab.device.name)
    algorithm = SlidingWindow()
    for side, stride in product(sides, STRIDES):
        problem = pictures(side, stride)
        progress(f"side {side}, stride {stride}")
        for place in PLACES:
            pinned = place == "pinned"
            x, w = lab.tensor(images(problem), pinned), lab.tensor(filters(problem), pinned)
            y = lab.empty(problem.y_shape, pinned)
            addresses = {"x": x.data_ptr(), "w": w.data_ptr(), "y": y.data_ptr()}
            for threads, memory, partition in product(THREADS, MEMORIES, PARTITIONS):
                config = Config(memory, partition, threads)
                choices: dict[str, Value] = {
                    "side": side,
                    "stride": stride,
                    "place": place,
                    "threads": threads,
                    "memory": memory,
                    "partition": partition,
                }
                if memory == "shared" and algorithm.shared_bytes(problem, config) > SHARED:
                    findings.add(choices, None, False, "the tile is larger than a block's shared memory")
                    continue
                launch = algorithm.launch(problem, config)
                launch.load(lab.device.architecture, lab.device.index)
                y.fill_(float("nan"))
                lab.torch.cuda.synchronize()
                launch(addresses, lab.stream)
                lab.torch.cuda.synchronize()
                good = lab.within(problem, y)
                time = lab.time(lambda launch=launch, at=addresses: launch(at, lab.stream)) if good else None  # type: ignore[misc]
                findings.add(choices, time, good)
        rivals(lab, findings, side, stride)
    for place, memory in product(PLACES, MEMORIES):
        title = f"Sliding window from {memory} memory, operands in {place} memory"
        findings.tables.append(splits_table(findings, title, sides, {"place": place, "memory": memory}))
    for place in PLACES:
        findings.charts.append(splits_chart(findings, sides[-1], {"place": place}))
    for place in PLACES:
        where, choices = f"[{place} memory] ", {"place": place}
        findings.conclusions.append(growth(findings, sides, f"{where}time grows with the pixels", place=place))
        findings.conclusions += splits(findings, where, choices)
    return findings


def splits_table(findings: Findings, title: str, sides: tuple[int, ...], choices: Choices) -> Table:
    """The report's arrangement: a line for stride, side and threads; blocks, rows and columns beside each other."""
    lines: list[dict[str, Value]] = [
        {"stride": s, "side": n, "threads": t} for s in STRIDES for n in sides for t in THREADS
    ]
    return pivot(findings, title, lines, [(f"by {p}s", {**choices, "partition": p}) for p in PARTITIONS])


def splits_chart(findings: Findings, side: int, choices: Choices, memory: str = "memory") -> Chart:
    """Threads a block at stride 1; `memory` names the choice of global or shared."""
    series = {}
    for source, partition in product(MEMORIES, PARTITIONS):
        one: dict[str, Value] = {**choices, "side": side, "stride": 1, memory: source, "partition": partition}
        series[f"{source}, by {partition}s"] = {
            str(t): us for t in THREADS if (us := findings.us(**{**one, "threads": t}))
        }
    return Chart(f"{side} x {side}, stride 1, {choices['place']} memory: threads a block", "us", series)


def splits(findings: Findings, where: str, choices: Choices, memory: str = "memory") -> list[Conclusion]:
    """The report's conclusions about memory, splits and threads; `memory` names the choice of global or shared."""

    def pairs(over: Choices, under: Choices) -> list[float]:
        return findings.ratios({**choices, **over}, {**choices, **under})

    larger = [
        r
        for p in ("row", "block")
        for few, many in pairwise(THREADS)
        for r in pairs({"partition": p, "threads": few}, {"partition": p, "threads": many})
    ]
    columns = [
        r
        for few, many in pairwise(THREADS)
        for r in pairs({"partition": "column", "threads": many}, {"partition": "column", "threads": few})
    ]
    return [
        judge("RGB report", f"{where}shared memory is no slower than global memory (split by blocks)",
              pairs({memory: "shared", "partition": "block"}, {memory: "global", "partition": "block"}),
              lambda m: m <= LEVEL, "shared / global"),
        judge("RGB report", f"{where}a split by rows beats one by blocks",
              pairs({"partition": "row"}, {"partition": "block"}), lambda m: m < 1, "rows / blocks"),
        judge("RGB report", f"{where}a split by blocks beats one by columns",
              pairs({"partition": "block"}, {"partition": "column"}), lambda m: m < 1, "blocks / columns"),
        judge("RGB report", f"{where}larger blocks of threads are faster (rows, blocks)", larger, lambda m: m > 1,
              "fewer / four times the threads"),
        judge("RGB report", f"{where}larger blocks of threads are slower by columns", columns, lambda m: m > 1,
              "four times the threads / fewer"),
    ]  # fmt: skip


def rivals(lab: CudaLaboratory, findings: Findings, side: int, stride: int) -> None:
    """cuda.direct and cuDNN on the same problem, for comparison."""
    import tapwise

    problem = pictures(side, stride)
    x, w = lab.tensor(images(problem)), lab.tensor(filters(problem))
    operator = tapwise.prepare(problem, w, algorithm="cuda.direct")
    cudnn, last = lab.convolution(problem, x, w), lab.convolution(problem, x, w, True)
    good = lab.within(problem, operator(x))
    times = lab.times({"cuda.direct": lambda: operator(x), "cudnn": cudnn, "cudnn-cl": last})
    for name, time in times.items():
        findings.add({"side": side, "stride": stride, "method": name}, time, good or name != "cuda.direct")


def sliding_window_cpu(lab: CpuLaboratory, sides: tuple[int, ...], progress: Progress) -> Findings:
    """cpu.serial's plain loops, and cpu.direct's register tile by threads, vector width and memory order."""
    findings = Findings("sliding-window", "Sliding window on the CPU", lab.kind, lab.device.name)
    counts = sorted({1, lab.device.threads})
    for side, stride in product(sides, STRIDES):
        progress(f"side {side}, stride {stride}")
        problem = pictures(side, stride)
        w, x = filters(problem), images(problem)
        plain = prepared(problem, w, "cpu.serial", 1)
        good = within(problem, plain(x))
        base: dict[str, Value] = {"side": side, "stride": stride}
        choices: dict[str, Value] = {"threads": 1, "vector": 0, "order": "nchw", "method": "plain loops"}
        findings.add(base | choices, lab.time(lambda op=plain, x=x: op(x)), good)  # type: ignore[misc]
        for order, (name, width), threads in product(("nchw", "nhwc"), lab.widths(), counts):
            ordered = pictures(side, stride, order)
            x = images(ordered)
            with target(name):
                operator = prepared(ordered, w, "cpu.direct", threads)
            choices = {"threads": threads, "vector": width, "order": order, "method": "register tile"}
            good = within(ordered, operator(x))
            findings.add(base | choices, lab.time(lambda op=operator, x=x: op(x)) if good else None, good)  # type: ignore[misc]
    widths = [width for _, width in lab.widths()]
    ways = list(product(("nchw", "nhwc"), widths, counts))
    lines: list[dict[str, Value]] = [{"stride": s, "side": n} for s in STRIDES for n in sides]
    for order in ("nchw", "nhwc"):
        columns: list[tuple[str, Choices]] = [("plain loops", {"method": "plain loops", "order": order})]
        for v, t in product(widths, counts):
            choices = {"order": order, "vector": v, "threads": t, "method": "register tile"}
            columns.append((f"{v}-byte, {t} thread{'s' * (t > 1)}", choices))
        findings.tables.append(pivot(findings, f"Sliding window, {order}", lines, columns))
    series = {
        f"{o}, {v}-byte vectors, {t} threads": {
            str(n): us
            for n in sides
            if (us := findings.us(side=n, stride=1, order=o, vector=v, threads=t, method="register tile"))
        }
        for o, v, t in ways
    }
    loops = {str(n): us for n in sides if (us := findings.us(side=n, stride=1, method="plain loops"))}
    findings.charts.append(Chart("stride 1: sides", "us", {"plain loops": loops} | series))
    tile: dict[str, Value] = {"method": "register tile"}
    findings.conclusions = [
        growth(findings, sides, "time grows with the pixels", **tile),
        judge("board report", "vector code is faster than plain loops (one thread, nchw)",
              [r for n in sides for r in findings.ratios(
                  {"side": n, "method": "plain loops", "vector": 0},
                  {"side": n, "method": "register tile", "vector": widths[-1]})],
              lambda m: m > 1, "plain loops / register tile"),
        judge("ours", "wider vectors are faster",
              findings.ratios(tile | {"vector": widths[0]}, tile | {"vector": widths[-1]}) if len(widths) > 1 else [],
              lambda m: m > 1, "16 bytes / full width"),
        judge("ours", "more threads are faster",
              findings.ratios(tile | {"threads": 1}, tile | {"threads": counts[-1]}) if len(counts) > 1 else [],
              lambda m: m > 1, f"1 thread / {counts[-1]} threads"),
        judge("ours", "planes are faster than interleaved colours",
              findings.ratios(tile | {"order": "nhwc"}, tile | {"order": "nchw"}), lambda m: m > 1, "nhwc / nchw"),
    ]  # fmt: skip
    return findings
