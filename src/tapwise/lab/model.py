"""A whole model: optimize against PyTorch and onnxruntime, verified against float32, then timed in turns."""

from __future__ import annotations

import copy
import math
import tempfile
import warnings
from collections.abc import Callable, Iterator
from dataclasses import asdict, dataclass
from functools import cached_property, partial
from importlib import util
from pathlib import Path
from typing import Any, Final

import numpy as np
import torch
from torch.utils import _pytree as pytree

import tapwise.torch
from tapwise.baselines import mlas
from tapwise.errors import InvalidProblem, PeerUnavailable
from tapwise.lab import bench, gpu, named_model, records, timing
from tapwise.lab.records import MODEL, ModelRecord
from tapwise.lab.suites import ALIASES
from tapwise.torch.graphs import capture
from tapwise.torch.timing import wall_us

DTYPES: Final = {"f32": torch.float32, "f16": torch.float16, "bf16": torch.bfloat16}
# Error of float32, as a part of the largest output; of 16 bits so many times that of PyTorch's own.
TOLERANCE: Final = 1e-3
FACTOR: Final = 2
# Images that are compared, at least one batch.
IMAGES: Final = {"cpu": 8, "cuda": 64}
# Who computes a variant.
OURS: Final = "tapwise"
PYTORCH: Final = "PyTorch"
ONNXRUNTIME: Final = "onnxruntime"
# What `measure` says before it takes the times.
TIMES: Final = "times"
CONTIGUOUS: Final = torch.contiguous_format
CHANNELS_LAST: Final = torch.channels_last


@dataclass(frozen=True)
class Options:
    """`name`: as named_model.load takes it. `seconds` and `repeats`: budget of the times, compilation aside."""

    name: str
    n: int = 1
    size: int = records.IMAGE_SIZE
    dtype: str = "f32"
    device: str = "cpu"
    max_autotune: bool = False
    seconds: float = 20.0
    repeats: int = 15
    command: str = ""


@dataclass(frozen=True)
class Ready:
    """`call` computes images that it is given, `run` the same ones each time: what is timed."""

    call: Callable[[torch.Tensor], Any]
    run: Callable[[], object]
    pause_s: float = timing.PAUSE_S


class Captured:
    """A function of images in a CUDA graph. It is kept: the graph reads memory that the function holds."""

    def __init__(self, function: Callable[[torch.Tensor], Any], x: torch.Tensor) -> None:
        self._function, self._x = function, x.clone()
        self._graph, self._y = capture(lambda: function(self._x))

    def run(self) -> None:
        self._graph.replay()

    def call(self, x: torch.Tensor) -> Any:
        """The result is overwritten by the next call."""
        self._x.copy_(x)
        self.run()
        return self._y


class Measured:
    """A model, images, what float32 makes of them, and the ways to compute it."""

    def __init__(self, options: Options) -> None:
        self.dtype = ALIASES.get(options.dtype, options.dtype)
        if self.dtype not in DTYPES:
            raise InvalidProblem(f"dtype={options.dtype!r}: of a model {', '.join(DTYPES)} are allowed")
        if options.n < 1 or options.size < 1:
            raise InvalidProblem(f"n={options.n}, size={options.size}: whole numbers from 1 are allowed")
        self.options, self.device = options, bench.device_of(options.device)
        self.on_gpu = self.device.kind == "cuda"
        where = torch.device("cpu")
        if self.on_gpu:
            where = torch.device("cuda", self.device.index)
            gpu.torch().cuda.set_device(where)
            torch.backends.cudnn.benchmark = True
            # float32 is IEEE's, for all.
            torch.backends.cudnn.allow_tf32 = torch.backends.cuda.matmul.allow_tf32 = False
        else:
            torch.set_num_threads(self.device.threads)
        torch.manual_seed(0)
        self.model = named_model.load(options.name, options.size).requires_grad_(False).to(where)
        shape = (options.n, 3, options.size, options.size)
        batches = math.ceil(IMAGES[self.device.kind] / options.n)
        self.images = [torch.randn(shape).to(where, DTYPES[self.dtype]) for _ in range(batches)]
        try:
            self.expected = [_tensors(self.model(x.float())) for x in self.images]
        except Exception as error:
            text = f"does not take images of {shape}: {named_model.reason(error)}"
            raise InvalidProblem(f"model={options.name!r}: {text}") from error
        self.model.to(DTYPES[self.dtype])
        # Microseconds of PyTorch's eager calls by memory order.
        self._eager_us: dict[torch.memory_format, float] = {}

    def variants(self) -> Iterator[tuple[str, str, Callable[[], Ready]]]:
        """(name, who computes it, how it is made) of all, PyTorch's own eager calls first."""
        orders = (("", CONTIGUOUS), (", channels last", CHANNELS_LAST))
        for words, order in orders:
            yield f"eager{words}", PYTORCH, partial(self._eager, order, False)
        if self.on_gpu:
            for words, order in orders:
                yield f"eager{words}, graph", PYTORCH, partial(self._eager, order, True)
        graph = ", graph" if self.on_gpu else ""
        yield f"compile{graph}", PYTORCH, partial(self._compiled, False, False)
        yield f"compile, frozen{graph}", PYTORCH, partial(self._compiled, True, False)
        if self.options.max_autotune:
            yield f"compile, frozen, max-autotune{graph}", PYTORCH, partial(self._compiled, True, True)
        if not self.on_gpu:
            yield ONNXRUNTIME, ONNXRUNTIME, self._onnxruntime
        yield "optimize", OURS, partial(self._optimized, False, False)
        yield "optimize(graphs=True)", OURS, self._with_graphs
        if self.on_gpu:
            yield "optimize, graph", OURS, partial(self._optimized, False, True)
        yield f"optimize + compile{graph}", OURS, partial(self._optimized, True, self.on_gpu)

    def compare(self, call: Callable[[torch.Tensor], Any]) -> tuple[float, float | None]:
        """(largest error as a part of the largest output, part of the images, or of their pixels, that get the same
        class: the largest value along axis 1 of the first output)."""
        worst, alike = 0.0, []
        for x, expected in zip(self.images, self.expected, strict=True):
            found = _tensors(call(x))
            for y, wanted in zip(found, expected, strict=True):
                if y.shape != wanted.shape:
                    raise ValueError(f"gives {tuple(y.shape)} instead of {tuple(wanted.shape)}")
                error = float((y.float() - wanted).abs().max())
                scale = float(wanted.abs().max()) or 1.0
                # NaN stays.
                worst = worst if error / scale <= worst else error / scale
            if expected[0].ndim > 1:
                alike.append(float((found[0].argmax(1) == expected[0].argmax(1)).float().mean()))
        return worst, sum(alike) / len(alike) if alike else None

    def _ready(self, function: Callable[[torch.Tensor], Any], order: torch.memory_format, graph: bool) -> Ready:
        x = self.images[0].contiguous(memory_format=order)
        if graph:
            captured = Captured(function, x)
            return Ready(captured.call, captured.run)
        return Ready(lambda images: function(images.contiguous(memory_format=order)), lambda: function(x))

    def _eager(self, order: torch.memory_format, graph: bool) -> Ready:
        ready = self._ready(copy.deepcopy(self.model).to(memory_format=order), order, graph)
        self._eager_us[order] = wall_us(ready.run)
        return ready

    def _compiled(self, frozen: bool, max_autotune: bool) -> Ready:
        """In the memory order in which eager calls are faster. Each its own copy: compiled code is kept by module."""
        from torch._inductor import config as inductor

        order = min(self._eager_us, key=self._eager_us.__getitem__, default=CONTIGUOUS)
        words = {"freezing": frozen, "max_autotune": max_autotune, "coordinate_descent_tuning": max_autotune}
        model = copy.deepcopy(self.model).to(memory_format=order)
        compiled = torch.compile(model, dynamic=False, options=words)
        # Dynamo asks for it before Inductor has the options.
        with inductor.patch(freezing=frozen):
            compiled(self.images[0].contiguous(memory_format=order))
        return self._ready(compiled, order, self.on_gpu)

    def _onnxruntime(self) -> Ready:
        for name in ("onnx", "onnxruntime"):
            if util.find_spec(name) is None:
                raise PeerUnavailable(f"{name} is not installed")
        x = self.images[0]
        given = x.numpy().copy()
        with tempfile.TemporaryDirectory() as folder, warnings.catch_warnings():
            warnings.simplefilter("ignore")
            file = Path(folder) / "model.onnx"
            newer = util.find_spec("onnxscript") is not None
            torch.onnx.export(
                copy.deepcopy(self.model), (x,), file, input_names=["x"], output_names=["y"], dynamo=newer,
                external_data=False, verbose=False,
            )  # fmt: skip
            session = mlas.session_of(file.read_bytes(), {"x": given}, self.device.threads)

        def call(images: torch.Tensor) -> torch.Tensor:
            # The session reads the array where it lies.
            given[...] = images.numpy()
            return torch.from_numpy(np.array(session.result()))

        return Ready(call, session.run, session.pause_s)

    @cached_property
    def optimized(self) -> tapwise.torch.Optimized:
        return tapwise.torch.optimize(self.model, self.images[0])

    def _optimized(self, compiled: bool, graph: bool) -> Ready:
        made = self.optimized
        function = torch.compile(made, dynamic=False) if compiled else made
        return self._ready(function, _order(made), graph)

    def _with_graphs(self) -> Ready:
        made = tapwise.torch.optimize(self.model, self.images[0], graphs=True)
        ready = self._ready(made, _order(made), False)
        ready.run()
        if refused := made.__dict__["captured"].refused:
            raise RuntimeError(f"not captured: {refused}")
        return ready


def _order(made: tapwise.torch.Optimized) -> torch.memory_format:
    return CHANNELS_LAST if made.report.memory_format == "channels_last" else CONTIGUOUS


def _tensors(outputs: Any) -> list[torch.Tensor]:
    found = [one for one in pytree.tree_leaves(outputs) if isinstance(one, torch.Tensor)]
    if not found:
        raise ValueError(f"gives no tensor but a {type(outputs).__name__}")
    return found


@torch.no_grad()
def measure(options: Options, said: Callable[[str], None] = lambda text: None) -> tuple[ModelRecord, str]:
    """(record, optimize's report). What fails is a variant with its reason; `said` hears what is done now.

    Raises InvalidProblem for a model that cannot be had or run, DeviceUnavailable and PeerUnavailable without a GPU.
    """
    measured = Measured(options)
    rows: list[dict[str, Any]] = []
    ready: dict[str, Ready] = {}
    for name, by, make in measured.variants():
        said(name)
        row: dict[str, Any] = {"name": name, "by": by, "reason": ""}
        rows.append(row)
        try:
            made = make()
            row["error"], row["top1"] = measured.compare(made.call)
            ready[name] = made
        except Exception as error:
            row["reason"] = named_model.reason(error)
    bound = _bound(measured.dtype, rows)
    for row in rows:
        if row["name"] in ready and not row["error"] <= bound:
            row["reason"] = f"error {row['error']:.2g} of the largest output, {bound:.2g} is allowed"
            del ready[row["name"]]
    said(TIMES)
    times = _times(measured, ready)
    for row in rows:
        if row["name"] in times:
            row["time_us"], row["spread_us"] = times[row["name"]].time_us, times[row["name"]].spread_us
    record = _record(measured, rows, times, bound)
    done = measured.__dict__.get("optimized")
    if done is not None:
        record.layers = [asdict(layer) for layer in done.report.layers]
    return record, "" if done is None else str(done.report)


def _bound(dtype: str, rows: list[dict[str, Any]]) -> float:
    """Of float32 a constant; of 16 bits a multiple of PyTorch's own error, at least of the output's rounding."""
    if dtype == "f32":
        return TOLERANCE
    eager = [row for row in rows if row["by"] == PYTORCH and row["name"].startswith("eager")]
    errors = [row["error"] for row in eager if math.isfinite(row.get("error", math.nan))]
    if not errors:
        raise InvalidProblem(f"dtype={dtype!r}: PyTorch itself gives nothing finite: {eager[0]['reason'] or 'NaN'}")
    return FACTOR * float(max(*errors, torch.finfo(DTYPES[dtype]).eps / 2))


def _times(measured: Measured, ready: dict[str, Ready]) -> dict[str, timing.Timing]:
    options = measured.options
    if not ready:
        return {}
    if measured.on_gpu:
        runs = {name: one.run for name, one in ready.items()}
        return gpu.measure_queued(runs, seconds=options.seconds, repeats=options.repeats)
    contestants = [timing.Contestant(name, one.run, one.pause_s) for name, one in ready.items()]
    return timing.measure(contestants, seconds=options.seconds, repeats=options.repeats)


def _record(
    measured: Measured, rows: list[dict[str, Any]], times: dict[str, timing.Timing], bound: float
) -> ModelRecord:
    options, device = measured.options, measured.device
    name = named_model.label(options.name)
    made = measured.__dict__.get("optimized")
    record = ModelRecord(
        problem=f"{name} n{options.n} size{options.size} {measured.dtype}",
        suite=MODEL,
        category=MODEL,
        uses=1,
        direction="fprop",
        dtype=measured.dtype,
        math="ieee",
        layout="nhwc" if made is not None and _order(made) is CHANNELS_LAST else "nchw",
        device=device.name,
        threads=device.threads or device.multiprocessors,
        bound=bound,
        versions=records.versions(),
        commit=records.commit(),
        command=options.command,
        name=name,
        n=options.n,
        size=options.size,
        images=len(measured.images) * options.n,
        variants=rows,
    )
    taken = {row["name"]: row["time_us"] for row in rows if "time_us" in row}
    theirs = [row["name"] for row in rows if row["by"] == PYTORCH and row["name"] in taken]
    record.fastest = min(theirs, key=taken.__getitem__, default="")
    for row in rows:
        if row["name"] in taken and record.fastest:
            row["ratio"] = times[record.fastest].over(times[row["name"]])[0]
    ours = [row for row in rows if row["by"] == OURS]
    record.algorithms = {row["name"]: taken[row["name"]] for row in ours if row["name"] in taken}
    record.peers = {row["name"]: taken[row["name"]] for row in rows if row["by"] != OURS and row["name"] in taken}
    record.peers_missing = {row["name"]: row["reason"] for row in rows if row["by"] != OURS and row["reason"]}
    errors = [row["error"] for row in ours if "error" in row]
    # NaN is worse than any.
    record.error = max(errors, key=lambda error: math.inf if math.isnan(error) else error, default=None)
    # One that could not be made, without a compiler for instance, is not wrong.
    record.verified = bool(record.algorithms) and all(error <= bound for error in errors)
    if not record.algorithms:
        record.reason = "; ".join(row["reason"] for row in ours[:1])
        return record
    best = min(record.algorithms, key=record.algorithms.__getitem__)
    record.algorithm, record.time_us, record.spread_us = f"{device.kind}.{best}", taken[best], times[best].spread_us
    record.ratios = {peer: times[peer].over(times[best])[0] for peer in record.peers}
    record.ratio = min(record.ratios.values(), default=None)
    return record
