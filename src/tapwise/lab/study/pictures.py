"""The RGB report's experiments: convolution of RGB images by a sliding window.

On a GPU, the report's choices: sides x strides x threads x partition x memory x where the operands lie. On a CPU, its
own: sides x strides x method x threads x vector width x memory order.
"""

from __future__ import annotations

from collections.abc import Callable, Sequence
from functools import partial
from itertools import pairwise, product
from typing import Final

from tapwise.lab.study.findings import Chart, Choices, Columns, Conclusion, Findings, Table, Value, bars, judge, pivot
from tapwise.lab.study.laboratory import CpuLaboratory, CudaLaboratory, Progress, filters, images, pictures, target

STRIDES: Final = (1, 2, 3)
THREADS: Final = (64, 256, 1024)
PARTITIONS: Final = ("block", "row", "column")
MEMORIES: Final = ("global", "shared")
ORDERS: Final = ("nchw", "nhwc")
PLACES: Final = ("device", "pinned")
# How much of a time may be lost before "no slower" does not hold.
LEVEL: Final = 1.05


def cells(sides: tuple[int, ...]) -> list[Choices]:
    """The lines of tables over strides and sides."""
    return [{"stride": s, "side": n} for s in STRIDES for n in sides]


def growth(findings: Findings, sides: tuple[int, ...], text: str, **choices: Value) -> Conclusion:
    """Whether times grow in proportion to the pixels."""
    ratios = [
        ratio**0.5
        for small, large in pairwise(sides)
        for ratio in findings.ratios({**choices, "side": large}, {**choices, "side": small})
    ]
    what = "time of twice the side, square root (pixels: 2)"
    return judge("RGB report", text, ratios, what, lambda mean: mean > 1.7)


def sliding_window_cuda(lab: CudaLaboratory, sides: tuple[int, ...], progress: Progress) -> Findings:
    """One thread an output."""
    from tapwise.ops.conv.cuda.sliding_window import SHARED, Config, SlidingWindow

    findings = Findings("sliding-window", "Sliding window: one thread an output", lab.kind, lab.device.name)
    algorithm = SlidingWindow()
    for side, stride in product(sides, STRIDES):
        problem = pictures(side, stride)
        progress(f"side {side}, stride {stride}")
        for place in PLACES:
            pinned, base = place == "pinned", {"side": side, "stride": stride, "place": place}
            x, w = lab.tensor(images(problem), pinned), lab.tensor(filters(problem), pinned)
            y = lab.empty(problem.y_shape, pinned)
            addresses = {"x": x.data_ptr(), "w": w.data_ptr(), "y": y.data_ptr()}
            for threads, memory, partition in product(THREADS, MEMORIES, PARTITIONS):
                config = Config(memory, partition, threads)
                choices: dict[str, Value] = base | {"threads": threads, "memory": memory, "partition": partition}
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
                findings.add(choices, lab.time(partial(launch, addresses, lab.stream)) if good else None, good)
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
    lines: list[Choices] = [{**cell, "threads": t} for cell in cells(sides) for t in THREADS]
    return pivot(findings, title, lines, [(f"by {p}s", {**choices, "partition": p}) for p in PARTITIONS])


def splits_chart(findings: Findings, side: int, choices: Choices, memory: str = "memory") -> Chart:
    """Threads a block at stride 1; `memory` names the choice of global or shared."""
    at = {**choices, "side": side, "stride": 1}
    series: Columns = [
        (f"{source}, by {partition}s", {**at, memory: source, "partition": partition})
        for source, partition in product(MEMORIES, PARTITIONS)
    ]
    title = f"{side} x {side}, stride 1, {choices['place']} memory: threads a block"
    return bars(findings, title, series, "threads", THREADS)


def splits(findings: Findings, where: str, choices: Choices, memory: str = "memory") -> list[Conclusion]:
    """The report's conclusions about memory, splits and threads; `memory` names the choice of global or shared."""

    def pairs(over: Choices, under: Choices) -> Sequence[float]:
        return findings.ratios({**choices, **over}, {**choices, **under})

    steps = [({"threads": few}, {"threads": many}) for few, many in pairwise(THREADS)]
    row, block, column = ({"partition": one} for one in ("row", "block", "column"))
    shared = pairs({memory: "shared", **block}, {memory: "global", **block})
    larger = [r for p in (row, block) for few, many in steps for r in pairs({**p, **few}, {**p, **many})]
    columns = [r for few, many in steps for r in pairs({**column, **many}, {**column, **few})]

    def report(text: str, ratios: Sequence[float], what: str, holds: Callable[[float], bool]) -> Conclusion:
        return judge("RGB report", where + text, ratios, what, holds)

    above, below = (lambda m: m > 1), (lambda m: m < 1)
    shared_text = "shared memory is no slower than global memory (split by blocks)"
    return [
        report(shared_text, shared, "shared / global", lambda m: m <= LEVEL),
        report("a split by rows beats one by blocks", pairs(row, block), "rows / blocks", below),
        report("a split by blocks beats one by columns", pairs(block, column), "blocks / columns", below),
        report("larger blocks of threads are faster (rows, blocks)", larger, "fewer / four times the threads", above),
        report("larger blocks of threads are slower by columns", columns, "four times the threads / fewer", above),
    ]


def rivals(lab: CudaLaboratory, findings: Findings, side: int, stride: int) -> None:
    """cuda.direct and cuDNN on the same problem, for comparison."""
    runs, good = lab.direct(pictures(side, stride))
    findings.add_all({"side": side, "stride": stride}, "method", lab.times(runs), {"cuda.direct": good})


def sliding_window_cpu(lab: CpuLaboratory, sides: tuple[int, ...], progress: Progress) -> Findings:
    """cpu.serial's plain loops, and cpu.direct's register tile by threads, vector width and memory order."""
    findings = Findings("sliding-window", "Sliding window on the CPU", lab.kind, lab.device.name)
    counts = sorted({1, lab.device.threads})
    plain: dict[str, Value] = {"method": "plain loops"}
    tile: dict[str, Value] = {"method": "register tile"}
    for side, stride in product(sides, STRIDES):
        progress(f"side {side}, stride {stride}")
        problem = pictures(side, stride)
        w, x = filters(problem), images(problem)
        base: dict[str, Value] = {"side": side, "stride": stride}
        run, good = lab.prepared(problem, x, w, "cpu.serial", 1)
        findings.add(base | plain | {"threads": 1, "vector": 0, "order": "nchw"}, lab.time(run), good)
        for order, (name, width), threads in product(ORDERS, lab.widths(), counts):
            ordered = pictures(side, stride, order)
            with target(name):
                run, good = lab.prepared(ordered, images(ordered), w, "cpu.direct", threads)
            choices = base | tile | {"threads": threads, "vector": width, "order": order}
            findings.add(choices, lab.time(run) if good else None, good)
    widths = [width for _, width in lab.widths()]
    series: list[tuple[str, Choices]] = [("plain loops", plain)]
    for order in ORDERS:
        columns: list[tuple[str, Choices]] = [("plain loops", {**plain, "order": order})]
        for v, t in product(widths, counts):
            choices = tile | {"order": order, "vector": v, "threads": t}
            columns.append((f"{v}-byte, {t} thread{'s' * (t > 1)}", choices))
            series.append((f"{order}, {v}-byte vectors, {t} threads", choices))
        findings.tables.append(pivot(findings, f"Sliding window, {order}", cells(sides), columns))
    at_one = [(name, {**choices, "stride": 1}) for name, choices in series]
    findings.charts.append(bars(findings, "stride 1: sides", at_one, "side", sides))

    def tiles(name: str, over: Value, under: Value) -> Sequence[float]:
        return findings.ratios(tile | {name: over}, tile | {name: under}) if over != under else []

    loops = [({"side": n, **plain, "vector": 0}, {"side": n, **tile, "vector": widths[-1]}) for n in sides]
    vectors = [ratio for over, under in loops for ratio in findings.ratios(over, under)]
    wider, more = tiles("vector", widths[0], widths[-1]), tiles("threads", 1, counts[-1])
    text = "vector code is faster than plain loops (one thread, nchw)"
    findings.conclusions = [
        growth(findings, sides, "time grows with the pixels", **tile),
        judge("board report", text, vectors, "plain loops / register tile"),
        judge("ours", "wider vectors are faster", wider, "16 bytes / full width"),
        judge("ours", "more threads are faster", more, f"1 thread / {counts[-1]} threads"),
        judge("ours", "planes are faster than interleaved colours", tiles("order", "nhwc", "nchw"), "nhwc / nchw"),
    ]
    return findings
