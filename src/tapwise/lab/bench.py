"""Verify, then time: ours and the peers in turns, one record a problem."""

from __future__ import annotations

from collections.abc import Callable, Sequence
from dataclasses import dataclass
from typing import Any

import numpy as np

import tapwise
from tapwise import arrays, dispatch, registry, verify
from tapwise.algorithm import Buffers, Choice, Device
from tapwise.arrays.workspaces import scratch
from tapwise.baselines import Peer, Prepared
from tapwise.errors import InvalidProblem, NotApplicable, PeerUnavailable, TapwiseError
from tapwise.lab import gpu, records, roofline, timing
from tapwise.lab.records import Record
from tapwise.lab.suites import Case
from tapwise.problem import Inputs, Problem

# Peers compute in the same precision; a result further off than this is wrong, not rounded.
# Of small integers, libraries round what others cut off.
PEER_TOLERANCE = {"f32": 1e-2, "f64": 1e-8, "f16": 5e-2, "bf16": 5e-2, "u8": 4e-2, "i8": 4e-2}
# An algorithm predicted to be so many times slower than the chosen one is not worth its time in a run of all.
HOPELESS = 8.0
# Before the name of whoever computes the convolution alone, without what is fused to it.
PLAIN = "plain "


@dataclass(frozen=True)
class Options:
    """`algorithms`: "auto", "all", or ids with commas. `seconds` and `repeats`: budget of one problem."""

    algorithms: str = "auto"
    peers: tuple[Peer, ...] = ()
    threads: int | None = None
    seconds: float = 2.0
    repeats: int = 15
    command: str = ""
    device: str = "cpu"


def run(cases: Sequence[Case], options: Options, done: Callable[[Record], None]) -> None:
    """Measure every case and hand each record over when it is ready. A case that fails is a record with its reason."""
    _check_algorithms(options.algorithms)
    device = device_of(options.device, options.threads)
    shared = {"versions": records.versions(), "commit": records.commit(), "command": options.command}
    for case in cases:
        problem = case.problem
        record = Record(
            problem=str(problem),
            suite=case.suite,
            category=case.category,
            uses=case.uses,
            direction=problem.direction,
            dtype=problem.dtype,
            math=problem.math,
            layout=problem.layout,
            device=device.name,
            threads=device.threads or device.multiprocessors,
            **shared,  # type: ignore[arg-type]
        )
        try:
            if device.kind == "cuda":
                _measure_cuda(case, options, device, record)
            else:
                _measure(case, options, device, record)
        except (TapwiseError, MemoryError) as error:
            record.reason = str(error) or type(error).__name__
        done(record)


def device_of(word: str, threads: int | None = None) -> Device:
    """ "cpu", "cuda" or "cuda:1" as a Device. Raises InvalidProblem, DeviceUnavailable."""
    if word == "cpu":
        from tapwise.cpu.device import host

        return host(threads)
    kind, _, number = word.partition(":")
    if kind != "cuda" or not (number.isdigit() or not number):
        raise InvalidProblem(f"device={word!r}: 'cpu', 'cuda' or 'cuda:<number>'")
    from tapwise.cuda.jit.device import gpu

    return gpu(int(number or 0))


def _check_algorithms(words: str) -> None:
    if words not in ("auto", "all"):
        for identifier in words.split(","):
            registry.get(identifier)


def _ids(words: str, case: Case, device: Device) -> list[str]:
    """The algorithms to time: the chosen one first."""
    if words not in ("auto", "all"):
        ids = words.split(",")
        if len(ids) == 1:
            return ids
        offers = {c.algorithm: c for c in dispatch.explain(case.problem, device) if c.reason is None}
        applying = [identifier for identifier in ids if identifier in offers]
        if not applying:
            raise NotApplicable(f"none of {words} applies to '{case.problem}'")
        return sorted(applying, key=lambda identifier: offers[identifier].predicted_us or 0.0)
    choice = dispatch.choose(case.problem, device)
    chosen = choice.algorithm
    if words == "auto":
        return [chosen]
    others = [
        candidate.algorithm
        for candidate in dispatch.explain(case.problem, device)
        if candidate.reason is None and (candidate.predicted_us or 0.0) < HOPELESS * choice.predicted_us
    ]
    return [chosen, *(identifier for identifier in others if identifier != chosen)]


def _measure(case: Case, options: Options, device: Device, record: Record) -> None:
    problem = case.problem
    ids = _ids(options.algorithms, case, device)
    inputs = problem.sample(np.random.default_rng(0))
    inputs = inputs._replace(x=arrays.dense(inputs.x, problem.layout))
    if inputs.residual is not None:
        inputs = inputs._replace(residual=arrays.dense(inputs.residual, problem.layout))
    prepare = _prepared if "prepare" in registry.FUNCTIONS[problem.operator] else _planned
    contestants = []
    for identifier in ids:
        # One verification a problem and algorithm: the reference is the costly part.
        choice, workspace_bytes, run, verdict = prepare(problem, inputs, identifier, device)
        if identifier == ids[0]:
            record.algorithm, record.config = identifier, str(choice.config)
            record.predicted_us, record.workspace_bytes = choice.predicted_us, workspace_bytes
            chosen = options.algorithms in ("auto", "all")
            record.reason = (dispatch.choose(problem, device) if chosen else choice).reason
            record.error, record.bound, record.verified = verdict.error, verdict.bound, verdict.verified
            if not verdict.verified:
                record.reason = verdict.message
                return
        elif not verdict.verified:
            record.verified, record.reason = False, f"{identifier}: {verdict.message}"
            return
        contestants.append(timing.Contestant(identifier, run))

    expected = np.asarray(contestants[0].run())
    for peer in options.peers:
        if problem.operator not in peer.operators:
            continue
        try:
            prepared = peer.prepare(problem, inputs, device.threads)
            _check_peer(prepared, expected, problem.dtype)
        except PeerUnavailable as error:
            record.peers_missing[peer.name] = str(error)
            continue
        contestants.append(timing.Contestant(peer.name, prepared.run, prepared.pause_s))
    del expected
    _time(contestants, ids, options, device, case, record)


def _prepared(
    problem: Problem, inputs: Inputs, identifier: str, device: Device
) -> tuple[Choice, int, Callable[[], object], verify.Verdict]:
    """(choice, workspace in bytes, one call, verdict) of an operator that is prepared with its filters."""
    operator = tapwise.prepare(str(problem), inputs.w, inputs.bias, algorithm=identifier, threads=device.threads)
    verdict = verify.check_operator(operator, inputs.w, inputs.bias)
    return operator.choice, operator.plan.workspace_bytes, lambda: operator(inputs.x, inputs.residual), verdict


def _planned(
    problem: Problem, inputs: Inputs, identifier: str, device: Device
) -> tuple[Choice, int, Callable[[], object], verify.Verdict]:
    """The same of an operator that is called as it is: into an array that is there already."""
    choice = dispatch.choose(problem, device, identifier)
    plan = dispatch.plan_for(problem, choice, device)
    y: np.ndarray = arrays.empty(problem.y_shape, problem.y_dtype, problem.layout)
    buffers = Buffers(inputs.x, plan.pack(inputs.w), y, scratch(plan.workspace_bytes, y))

    def run() -> np.ndarray:
        plan.run(buffers)
        return y

    return choice, choice.workspace_bytes, run, verify.compare(run(), *problem.reference(inputs), problem.y_dtype)


def _time(
    contestants: Sequence[timing.Contestant],
    ids: Sequence[str],
    options: Options,
    device: Device,
    case: Case,
    record: Record,
) -> None:
    """Time the contestants in turns and fill the record in."""
    times = timing.measure(contestants, seconds=options.seconds, repeats=options.repeats)
    _fill(record, times, ids, options, case.problem, roofline.ceilings(device.threads, case.problem.dtype))


def _fill(
    record: Record,
    times: dict[str, timing.Timing],
    ids: Sequence[str],
    options: Options,
    problem: Problem,
    roof: roofline.Ceilings,
) -> None:
    ours = times[ids[0]]
    record.time_us, record.spread_us = ours.time_us, ours.spread_us
    record.gflops = problem.flops / ours.time_us / 1e3
    record.roof_us = roofline.roof_us(problem, roof)
    if len(ids) > 1:
        record.algorithms = {identifier: times[identifier].time_us for identifier in ids}
    for peer in options.peers:
        if peer.name in times:
            record.peers[peer.name] = times[peer.name].time_us
            record.ratios[peer.name] = times[peer.name].over(ours)[0]
    for name, time in times.items():
        if PLAIN + name in times:
            record.over_plain[name] = time.over(times[PLAIN + name])[0]
    if record.ratios:
        record.ratio = min(record.ratios.values())


def _measure_cuda(case: Case, options: Options, device: Device, record: Record) -> None:
    """On a GPU: verified by float64, timed in CUDA graphs, warm and cold, and eagerly."""
    problem = case.problem
    torch = gpu.torch()
    kinds = {"f32": torch.float32, "f64": torch.float64, "f16": torch.float16, "bf16": torch.bfloat16}
    maker = torch.Generator("cuda").manual_seed(0)

    rng = np.random.default_rng(0)

    def random(shape: tuple[int, ...]) -> Any:
        if problem.dtype not in kinds:
            return torch.from_numpy(problem.random(rng, shape)).cuda()
        tensor = torch.randn(shape, generator=maker, device="cuda").to(kinds[problem.dtype])
        images = problem.layout == "nhwc" and shape in (problem.x_shape, problem.y_shape)
        return tensor.contiguous(memory_format=torch.channels_last) if images else tensor

    ids = _ids(options.algorithms, case, device)
    inputs = problem.inputs(random)
    prepare = _prepared_there if "prepare" in registry.FUNCTIONS[problem.operator] else _planned_there
    runs: dict[str, Callable[[], object]] = {}
    for identifier in ids:
        choice, runs[identifier] = prepare(problem, inputs, identifier, device)
        if not _verified_there(problem, choice, device, record, identifier == ids[0]):
            return
    bare, plains = problem.bare(), dict[str, Callable[[], object]]()
    if bare != problem:
        choice, plains[PLAIN + ids[0]] = prepare(bare, Inputs(inputs.x, inputs.w), ids[0], device)
        if not _verified_there(bare, choice, device, record, False):
            return
    expected: Any = runs[ids[0]]()
    for peer in options.peers:
        if problem.operator not in peer.operators or peer.device != "cuda":
            continue
        try:
            prepared = peer.prepare(problem, inputs, device.threads)
            _check_peer(prepared, gpu.on_host(expected), problem.dtype)
            if plains:
                alone = peer.prepare(bare, Inputs(inputs.x, inputs.w), device.threads)
                plains[PLAIN + peer.name] = alone.run
        except (PeerUnavailable, RuntimeError) as error:
            record.peers_missing[peer.name] = str(error).splitlines()[0]
            continue
        runs[peer.name] = prepared.run
    times = gpu.measure({**runs, **plains}, repeats=options.repeats)
    arithmetic = problem.dtype if problem.dtype in kinds else "f32"
    roof = gpu.ceilings(device, arithmetic, problem.math)
    _fill(record, times, ids, options, problem, roof)
    record.cold_us = {name: one.time_us for name, one in gpu.measure(runs, repeats=5, cold=True).items()}
    record.wall_us = {name: gpu.wall_us(run) for name, run in runs.items()}


def _verified_there(problem: Problem, choice: Choice, device: Device, record: Record, first: bool) -> bool:
    """Whether a choice computes the problem on a GPU; the first one, or one that does not, fills the record in."""
    verdict = verify.check(problem, choice.algorithm, choice.config, device=device)
    if first:
        record.algorithm, record.config, record.reason = choice.algorithm, str(choice.config), choice.reason
        record.predicted_us, record.workspace_bytes = choice.predicted_us, choice.workspace_bytes
        record.error, record.bound, record.verified = verdict.error, verdict.bound, verdict.verified
    if not verdict.verified:
        record.verified, record.reason = False, f"{choice.algorithm}: {verdict.message}"
    return verdict.verified


def _prepared_there(
    problem: Problem, inputs: Inputs, identifier: str, device: Device
) -> tuple[Choice, Callable[[], object]]:
    """(choice, one call) of an operator that is prepared with its filters, on a GPU."""
    operator = tapwise.prepare(str(problem), inputs.w, inputs.bias, algorithm=identifier)
    return operator.choice, lambda: operator(inputs.x, inputs.residual)


def _planned_there(
    problem: Problem, inputs: Inputs, identifier: str, device: Device
) -> tuple[Choice, Callable[[], object]]:
    """The same of an operator that is called as it is: into a tensor that is there already."""
    choice = dispatch.choose(problem, device, identifier)
    plan = dispatch.plan_for(problem, choice, device)
    source = arrays.anywhere(inputs.x, "x", inputs.x.get_device())
    y = arrays.empty(problem.y_shape, problem.y_dtype, problem.layout, source)
    tensor = arrays.like(y, inputs.x)
    buffers = Buffers(source, plan.pack(inputs.w), y, scratch(plan.workspace_bytes, source))

    def run() -> object:
        plan.run(buffers)
        return tensor

    return choice, run


def _check_peer(prepared: Prepared, expected: np.ndarray, dtype: str) -> None:
    """A peer that computes something else is reported, not timed."""
    result = prepared.result()
    if result.shape != expected.shape:
        raise PeerUnavailable(f"gives shape {result.shape} instead of {expected.shape}")
    scale = float(np.abs(expected).max(initial=0.0)) or 1.0
    with np.errstate(all="ignore"):
        difference = float(np.abs(result.astype(np.float64) - expected).max(initial=0.0))
    if not difference <= PEER_TOLERANCE.get(dtype, PEER_TOLERANCE["f32"]) * scale:
        raise PeerUnavailable(f"differs by {difference:.2g} from a verified result")


def select_best(rows: Sequence[Record]) -> tuple[int, int]:
    """(layers on which the chosen algorithm is within 15 % of the best of ours, layers with a choice)."""
    compared = [row for row in rows if len(row.algorithms) > 1 and row.time_us is not None]
    close = [row for row in compared if (row.time_us or 0.0) <= 1.15 * min(row.algorithms.values())]
    return len(close), len(compared)
