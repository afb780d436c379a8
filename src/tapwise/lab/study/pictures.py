"""S4's experiments: convolution of RGB images by a sliding window and by im2col.

On a GPU, the report's choices: sides x strides x threads x partition x memory x where the operands lie. On a CPU, its
own: sides x strides x method x threads x vector width x memory order.
"""

from __future__ import annotations

from collections.abc import Callable
from itertools import pairwise, product
from math import prod
from typing import Any, Final

from tapwise.lab.study.findings import Chart, Choices, Conclusion, Findings, Value, judge, pivot
from tapwise.lab.study.laboratory import (
    BLAS_PAUSE_S,
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


def _growth(findings: Findings, sides: tuple[int, ...], text: str, **choices: Value) -> Conclusion:
    """Whether times grow in proportion to the pixels."""
    ratios = [
        ratio**0.5
        for small, large in pairwise(sides)
        for ratio in findings.ratios({**choices, "side": large}, {**choices, "side": small})
    ]
    return judge("S4", text, ratios, lambda mean: mean > 1.7, "time of twice the side, square root (pixels: 2)")


# Sliding window


def sliding_window_cuda(lab: CudaLaboratory, sides: tuple[int, ...], progress: Progress) -> Findings:
    """One thread an output."""
    from tapwise.cuda.sliding_window import SHARED, Config, SlidingWindow

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
                    "side": side, "stride": stride, "place": place, "threads": threads, "memory": memory,
                    "partition": partition,
                }  # fmt: skip
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
        findings.tables.append(
            pivot(
                findings,
                f"Sliding window from {memory} memory, operands in {place} memory",
                [{"stride": s, "side": n, "threads": t} for s in STRIDES for n in sides for t in THREADS],
                [(f"by {p}s", {"place": place, "memory": memory, "partition": p}) for p in PARTITIONS],
            )
        )
    top = sides[-1]
    for place in PLACES:
        series = {
            f"{memory}, by {partition}s": {
                str(t): us
                for t in THREADS
                if (us := findings.us(side=top, stride=1, place=place, threads=t, memory=memory, partition=partition))
            }
            for memory, partition in product(MEMORIES, PARTITIONS)
        }
        findings.charts.append(Chart(f"{top} x {top}, stride 1, {place} memory: threads a block", "us", series))
    for place in PLACES:
        findings.conclusions += _s4(findings, sides, place)
    return findings


def _s4(findings: Findings, sides: tuple[int, ...], place: str) -> list[Conclusion]:
    """The report's conclusions about the sliding window, for operands in one place."""

    def pairs(over: Choices, under: Choices) -> list[float]:
        return findings.ratios({**over, "place": place}, {**under, "place": place})

    where = f"[{place} memory] "
    larger = [
        r for p in ("row", "block")
        for few, many in pairwise(THREADS)
        for r in pairs({"partition": p, "threads": few}, {"partition": p, "threads": many})
    ]  # fmt: skip
    columns = [
        r for few, many in pairwise(THREADS)
        for r in pairs({"partition": "column", "threads": many}, {"partition": "column", "threads": few})
    ]  # fmt: skip
    return [
        _growth(findings, sides, f"{where}time grows with the pixels", place=place),
        judge("S4", f"{where}shared memory is no slower than global memory (split by blocks)",
              pairs({"memory": "shared", "partition": "block"}, {"memory": "global", "partition": "block"}),
              lambda m: m <= LEVEL, "shared / global"),
        judge("S4", f"{where}a split by rows beats one by blocks",
              pairs({"partition": "row"}, {"partition": "block"}), lambda m: m < 1, "rows / blocks"),
        judge("S4", f"{where}a split by blocks beats one by columns",
              pairs({"partition": "block"}, {"partition": "column"}), lambda m: m < 1, "blocks / columns"),
        judge("S4", f"{where}larger blocks of threads are faster (rows, blocks)", larger, lambda m: m > 1,
              "fewer / four times the threads"),
        judge("S4", f"{where}larger blocks of threads are slower by columns", columns, lambda m: m > 1,
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
            str(n): us for n in sides
            if (us := findings.us(side=n, stride=1, order=o, vector=v, threads=t, method="register tile"))
        }
        for o, v, t in ways
    }  # fmt: skip
    loops = {str(n): us for n in sides if (us := findings.us(side=n, stride=1, method="plain loops"))}
    findings.charts.append(Chart("stride 1: sides", "us", {"plain loops": loops} | series))
    tile: dict[str, Value] = {"method": "register tile"}
    findings.conclusions = [
        _growth(findings, sides, "time grows with the pixels", **tile),
        judge("S3", "vector code is faster than plain loops (one thread, nchw)",
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


# im2col


def im2col_cuda(lab: CudaLaboratory, sides: tuple[int, ...], progress: Progress) -> Findings:
    """The columns in global memory, then a product; each half timed by itself too."""
    from tapwise.cuda.im2col_gemm import Im2colGemm
    from tapwise.cuda.sliding_window import SlidingWindow

    findings = Findings("im2col", "im2col + GEMM: expansion, product, both", lab.kind, lab.device.name)
    algorithm, window = Im2colGemm(), SlidingWindow()
    for side, stride, place in product(sides, STRIDES, PLACES):
        # Columns in pinned memory are 27 times the picture, over the bus and back: at one stride.
        if place == "pinned" and stride > 1:
            continue
        progress(f"side {side}, stride {stride}, {place} memory")
        problem, pinned = pictures(side, stride), place == "pinned"
        x, w = lab.tensor(images(problem), pinned), lab.tensor(filters(problem), pinned)
        y = lab.empty(problem.y_shape, pinned)
        base: dict[str, Value] = {"side": side, "stride": stride, "place": place}
        columns = lab.empty((27 * prod(problem.output),), pinned)
        seen = set()
        for config in algorithm.configs(problem, lab.device):
            if config.gemm in seen or (config.gemm == "library" and pinned):
                continue
            seen.add(config.gemm)
            first, second = algorithm.launches(problem, config, 1, lab.device)
            first.load(lab.device.architecture, lab.device.index)
            to = {"x": x.data_ptr(), "y": columns.data_ptr()}
            of = {"x": columns.data_ptr(), "w": w.data_ptr(), "y": y.data_ptr()}

            def expand(first: Any = first, to: dict[str, int] = to) -> None:
                first(to, lab.stream)

            if second is None:
                left, out = w.reshape(3, 27), y.reshape(3, -1)
                right = columns.reshape(27, -1)
                lab.torch.backends.cuda.matmul.allow_tf32 = False

                def multiply(left: Any = left, right: Any = right, out: Any = out) -> None:
                    lab.torch.matmul(left, right, out=out)
            else:
                second.load(lab.device.architecture, lab.device.index)

                def multiply(second: Any = second, of: dict[str, int] = of) -> None:  # type: ignore[misc]
                    second(of, lab.stream)

            def both(expand: Any = expand, multiply: Any = multiply) -> None:
                expand()
                multiply()

            y.fill_(float("nan"))
            lab.torch.cuda.synchronize()
            both()
            lab.torch.cuda.synchronize()
            good = lab.within(problem, y)
            for part, run in (("expansion", expand), ("product", multiply), ("both", both)):
                if part == "expansion" and len(seen) > 1:
                    continue
                choices: dict[str, Value] = {"gemm": "-" if part == "expansion" else config.gemm, "part": part}
                findings.add(base | choices, lab.time(run) if good else None, good)
        del columns
        best = min(window.configs(problem, lab.device), key=lambda c: window.predict_us(problem, c, lab.device))
        launch = window.launch(problem, best)
        launch.load(lab.device.architecture, lab.device.index)
        at = {"x": x.data_ptr(), "w": w.data_ptr(), "y": y.data_ptr()}
        launch(at, lab.stream)
        lab.torch.cuda.synchronize()
        good = lab.within(problem, y)
        findings.add(base | {"gemm": "-", "part": "window"}, lab.time(lambda: launch(at, lab.stream)), good)  # noqa: B023
    ways: list[tuple[str, Choices]] = [("expansion", {"part": "expansion"})]
    for part in ("product", "both"):
        ways += [(f"{part} {gemm}", {"part": part, "gemm": gemm}) for gemm in GEMMS]
    ways.append(("sliding window", {"part": "window"}))
    for place in PLACES:
        strides = STRIDES if place == "device" else (1,)
        lines: list[dict[str, Value]] = [{"stride": s, "side": n} for s in strides for n in sides]
        table = pivot(findings, f"Operands in {place} memory", lines, [(n, {**c, "place": place}) for n, c in ways])
        findings.tables.append(table)
    findings.charts.append(
        Chart(
            "stride 1, device memory", "us",
            {n: {str(s): us for s in sides if (us := findings.us(**{**c, "side": s, "stride": 1, "place": "device"}))}
             for n, c in ways},
        )
    )  # fmt: skip
    findings.conclusions = [
        one
        for place in PLACES
        for one in (
            _growth(findings, sides, f"[{place} memory] time grows with the pixels", place=place, part="both"),
            *_im2col_conclusions(findings, f"[{place} memory] ", {"place": place}, "shared"),
        )
    ]
    return findings


GEMMS: Final = ("global", "shared", "library")


def _im2col_conclusions(findings: Findings, where: str, choices: Choices, gemm: str) -> list[Conclusion]:
    window = {**choices, "part": "window", "gemm": "-"}
    return [
        judge("S4", f"{where}im2col is slower than the sliding window",
              findings.ratios({**choices, "part": "both", "gemm": gemm}, window), lambda m: m > 1,
              "expansion and product / window"),
        judge("S4", f"{where}that is because the expansion is timed too (without it, it is faster)",
              findings.ratios({**choices, "part": "product", "gemm": gemm}, window), lambda m: m < 1,
              "product alone / window"),
    ]  # fmt: skip


def im2col_cpu(lab: CpuLaboratory, sides: tuple[int, ...], progress: Progress) -> Findings:
    """cpu.im2col_gemm against cpu.direct; the expansion by itself is tapwise.im2col."""
    import tapwise

    findings = Findings("im2col", "im2col + GEMM on the CPU", lab.kind, lab.device.name)
    for side, stride in product(sides, STRIDES):
        progress(f"side {side}, stride {stride}")
        problem = pictures(side, stride)
        x, w = images(problem), filters(problem)
        base: dict[str, Value] = {"side": side, "stride": stride, "gemm": "-"}
        gemm, direct = (prepared(problem, w, name) for name in ("cpu.im2col_gemm", "cpu.direct"))
        out = tapwise.im2col(x, 3, padding=problem.padding, stride=stride)
        good = within(problem, gemm(x)), within(problem, direct(x))
        matrix, y = w.reshape(3, 27), out[0, :3].copy()

        def expand(x: Any = x, out: Any = out, problem: Any = problem, stride: int = stride) -> None:
            tapwise.im2col(x, 3, padding=problem.padding, stride=stride, out=out)

        def multiply(matrix: Any = matrix, out: Any = out, y: Any = y) -> None:
            matrix.dot(out[0], out=y)

        multiply()
        whole = within(problem, y.reshape(problem.y_shape))
        runs = {
            "expansion": expand, "product": multiply, "both": lambda op=gemm, x=x: op(x),
            "window": lambda op=direct, x=x: op(x),
        }  # fmt: skip
        pauses = {"product": BLAS_PAUSE_S, "both": BLAS_PAUSE_S}
        times = lab.times(runs, pauses)  # type: ignore[arg-type]
        for part, time in times.items():
            findings.add(base | {"part": part}, time, {"both": good[0], "window": good[1]}.get(part, whole))
    ways: list[tuple[str, Choices]] = [
        ("expansion alone", {"part": "expansion"}), ("product alone (BLAS)", {"part": "product"}),
        ("cpu.im2col_gemm (in chunks)", {"part": "both"}), ("cpu.direct", {"part": "window"}),
    ]  # fmt: skip
    lines: list[dict[str, Value]] = [{"stride": s, "side": n} for s in STRIDES for n in sides]
    findings.tables.append(pivot(findings, "im2col on the CPU", lines, ways))
    series = {n: {str(s): us for s in sides if (us := findings.us(**{**c, "side": s, "stride": 1}))} for n, c in ways}
    findings.charts.append(Chart("stride 1", "us", series))
    findings.conclusions = [
        _growth(findings, sides, "time grows with the pixels", part="both"),
        *_im2col_conclusions(findings, "", {}, "-"),
    ]
    return findings
