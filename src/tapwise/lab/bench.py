"""Verify, then time: ours and the peers in turns, one record a problem."""

from __future__ import annotations

from collections.abc import Callable, Sequence
from concurrent.futures import ThreadPoolExecutor
from contextlib import suppress
from dataclasses import dataclass
from time import monotonic, sleep
from typing import Any

import numpy as np

import tapwise
from tapwise import arrays, dispatch, registry, verify
from tapwise.algorithm import Buffers, Choice, Device
from tapwise.arrays.workspaces import aligned, scratch
from tapwise.baselines import Peer, Prepared
from tapwise.errors import InvalidProblem, NotApplicable, PeerUnavailable, TapwiseError
from tapwise.lab import gpu, records, roofline, timing
from tapwise.lab.gpu import Call
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
# How often problems are timed again whose threads' cores were far from each other; how long a run waits for near ones.
AGAIN, MOST_WAIT_S = 3, 120.0
# The same problem in float32 by ours, beside one in 16 bits on a CPU.
IN_FLOAT32 = "in float32"


@dataclass(frozen=True)
class Options:
    """`algorithms`: "auto", "all", or ids with commas. `seconds`, `repeats`: budget of one problem. `prepared`: whether
    convolutions are, or called as a function, as PyTorch's are."""

    algorithms: str = "auto"
    peers: tuple[Peer, ...] = ()
    threads: int | None = None
    seconds: float = 2.0
    repeats: int = 15
    command: str = ""
    device: str = "cpu"
    prepared: bool = True


def run(
    cases: Sequence[Case], options: Options, done: Callable[[Record], None],
    again: Callable[[int], None] = lambda count: None,
) -> None:  # fmt: skip
    """Measure every case and hand each record over when it is ready. A case that fails is a record with its reason.

    On a CPU those that were timed while two threads' cores were far from each other are timed once more, up to AGAIN
    times: `again` is told how many, and their records become those of the later time if the cores are near then.
    """
    check_ids(options.algorithms, cases)
    device = device_of(options.device, options.threads)
    shared = {"versions": records.versions(), "commit": records.commit(), "command": options.command}
    if device.kind == "cuda":
        _compile(cases, options, device)
    made = []
    for case in cases:
        made.append(_record(case, options, device, shared))
        done(made[-1])
    waited_s = 0.0
    for _ in range(AGAIN):
        far = {id(record) for record in records.far(made)}
        if not far:
            break
        again(len(far))
        for case, record in zip(cases, made, strict=True):
            if id(record) not in far:
                continue
            began = monotonic()
            if not _wait_until_near(device, records.near_ns(made), MOST_WAIT_S - waited_s):
                return
            waited_s += monotonic() - began
            newer = _record(case, options, device, shared)
            if newer.line_ns and max(newer.line_ns) <= records.FAR * records.near_ns(made):
                vars(record).update(vars(newer))


def _compile(cases: Sequence[Case], options: Options, device: Device) -> None:
    """A GPU's kernels, to the cache on disk, on all cores. What fails does so again where it is timed."""

    def one(problem: Problem, identifier: str) -> None:
        choice = _choice(problem, device, options.prepared, identifier)
        algorithm: Any = registry.get(choice.algorithm, problem.operator)
        algorithm.compile(problem, choice.config, device)

    with ThreadPoolExecutor() as pool:
        for case in cases:
            problem = case.problem.canonical()
            with suppress(TapwiseError):
                for identifier in _ids(options.algorithms, problem, device, options.prepared):
                    pool.submit(one, problem, identifier)


def _record(case: Case, options: Options, device: Device, shared: dict[str, Any]) -> Record:
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
        prepared=options.prepared,
        **shared,
    )
    try:
        _measure(problem.canonical(), options, device, record)
    except (TapwiseError, MemoryError) as error:
        record.reason = str(error) or type(error).__name__
    return record


def _wait_until_near(device: Device, near_ns: float, most_s: float) -> bool:
    """Whether two threads' cores are near each other, after so long at most."""
    end = monotonic() + most_s
    while max(_line_ns(device), default=0.0) > records.FAR * near_ns:
        if monotonic() > end:
            return False
        sleep(1.0)
    return True


def check_ids(words: str, cases: Sequence[Case]) -> None:
    """Raises InvalidProblem for an algorithm that no case's operator has."""
    operators = {case.problem.operator: None for case in cases}
    known = list(dict.fromkeys(name for operator in operators for name in registry.ALGORITHMS[operator]))
    for name in [] if words in ("auto", "all") else words.split(","):
        if name not in known:
            raise InvalidProblem(f"algorithms={name!r}: auto, all or of {', '.join(known)}")


def device_of(word: str, threads: int | None = None) -> Device:
    """ "cpu", "cuda" or "cuda:1" as a Device. Raises InvalidProblem, DeviceUnavailable."""
    if word == "cpu":
        from tapwise.cpu.device import host

        return host(threads)
    number = arrays.gpu_number(word)
    from tapwise.cuda.jit.device import gpu

    return gpu(number or 0)


def _ids(words: str, problem: Problem, device: Device, prepared: bool) -> list[str]:
    """The algorithms to time: the chosen one first."""
    ids = [name for name in words.split(",") if name in registry.ALGORITHMS[problem.operator]]
    if words not in ("auto", "all") and words == "".join(ids):
        return ids
    choice = _choice(problem, device, prepared)
    if words == "auto":
        return [choice.algorithm]
    offers = {one.algorithm: one.predicted_us or 0.0 for one in dispatch.explain(problem, device) if one.reason is None}
    if words == "all":
        others = [name for name, us in offers.items() if us < HOPELESS * choice.predicted_us]
        return [choice.algorithm, *(name for name in others if name != choice.algorithm)]
    applying = [identifier for identifier in ids if identifier in offers]
    if not applying:
        raise NotApplicable(f"none of {words} applies to '{problem}'")
    return sorted(applying, key=offers.__getitem__)


def _measure(problem: Problem, options: Options, device: Device, record: Record) -> None:
    """Verified by float64, then timed: on a GPU in CUDA graphs, warm and cold, and eagerly."""
    on_gpu = device.kind == "cuda"
    ready = options.prepared
    ids = _ids(options.algorithms, problem, device, ready)
    inputs = _inputs_there(problem) if on_gpu else _inputs(problem)
    runs: dict[str, Call] = {}
    # What ours and the peers' calls are held against.
    beside: dict[str, Call] = {}
    pauses: dict[str, float] = {}
    for identifier in ids:
        choice, runs[identifier] = _ours(problem, inputs, identifier, device, ready)
        if not _verified(problem, choice, device, record, identifier == ids[0]):
            return
    if options.algorithms in ("auto", "all"):
        record.reason = _choice(problem, device, ready).reason
    bare, alone = problem.bare(), Inputs(inputs.x, inputs.w)
    fused = on_gpu and bare != problem
    if fused:
        choice, beside[PLAIN + ids[0]] = _ours(bare, alone, ids[0], device, ready)
        if not _verified(bare, choice, device, record, False):
            return
    if not on_gpu and problem.dtype in ("f16", "bf16"):
        wide = problem.replace(dtype="f32")
        choice, beside[IN_FLOAT32] = _ours(wide, _inputs(wide), "auto", device, ready)
        if not _verified(wide, choice, device, record, False):
            return
    expected = runs[ids[0]]()
    for peer in options.peers:
        if problem.operator not in peer.operators or peer.device != device.kind:
            continue
        try:
            prepared = peer.prepare(problem, inputs, device.threads)
            _check_peer(prepared, expected, problem.dtype)
            if fused:
                beside[PLAIN + peer.name] = peer.prepare(bare, alone, device.threads).run
        except (PeerUnavailable, RuntimeError) as error:
            record.peers_missing[peer.name] = str(error).splitlines()[0]
            continue
        runs[peer.name], pauses[peer.name] = prepared.run, prepared.pause_s
    if not on_gpu:
        calls = {**runs, **beside}.items()
        contestants = [timing.Contestant(name, run, pauses.get(name, timing.PAUSE_S)) for name, run in calls]
        before = _line_ns(device)
        times = timing.measure(contestants, seconds=options.seconds, repeats=options.repeats)
        record.line_ns = before + _line_ns(device)
        _fill(record, times, ids, options, problem, roofline.ceilings(device.threads, problem.dtype))
        return
    times = gpu.measure_steadily({**runs, **beside}, repeats=options.repeats)
    arithmetic = problem.dtype if problem.dtype in gpu.DTYPES else "f32"
    _fill(record, times, ids, options, problem, gpu.ceilings(device, arithmetic, problem.math))
    record.cold_us = {name: one.time_us for name, one in gpu.measure(runs, repeats=5, cold=True).items()}
    record.wall_us = {name: gpu.wall_us(run, times[name].time_us) for name, run in runs.items()}


def _line_ns(device: Device) -> list[float]:
    """Of two threads' cores, where there are two."""
    from tapwise.cpu.ceilings import line_ns

    if device.threads < 2:
        return []
    # Threads that begin while the caller is kept on its core would stay there.
    line_ns()
    with timing.apart():
        found = line_ns()
    return [] if found is None else [found]


def _inputs(problem: Problem) -> Inputs:
    """Images begin with a cache line, as PyTorch's tensors do."""

    def laid(array: np.ndarray | None) -> np.ndarray | None:
        if array is None:
            return None
        last = problem.layout == "nhwc" and array.ndim > 1
        source = arrays.channels_last(array) if last else array
        image = aligned(array.nbytes).view(array.dtype).reshape(source.shape)
        image[...] = source
        return arrays.channels_first(image) if last else image

    inputs = problem.sample(np.random.default_rng(0))
    w = laid(inputs.w) if problem.w_is_image else inputs.w
    return inputs._replace(x=laid(inputs.x), w=w, residual=laid(inputs.residual))


def _inputs_there(problem: Problem) -> Inputs:
    """Normal data as PyTorch's tensors on a GPU; of integers the problem's own."""
    torch = gpu.torch()
    maker, rng = torch.Generator("cuda").manual_seed(0), np.random.default_rng(0)

    def random(shape: tuple[int, ...]) -> Any:
        if problem.dtype not in gpu.DTYPES:
            return torch.from_numpy(problem.random(rng, shape)).cuda()
        tensor = torch.randn(shape, generator=maker, device="cuda").to(getattr(torch, gpu.DTYPES[problem.dtype]))
        images = problem.layout == "nhwc" and shape in (problem.x_shape, problem.y_shape)
        return tensor.contiguous(memory_format=torch.channels_last) if images else tensor

    inputs = problem.inputs(random)
    positions = problem.random_positions(rng)
    return inputs if positions is None else inputs._replace(w=_positions_there(positions, problem.layout))


def _positions_there(positions: np.ndarray, layout: str) -> Any:
    tensor = gpu.torch().from_numpy(positions).cuda()
    return tensor.contiguous(memory_format=gpu.torch().channels_last) if layout == "nhwc" else tensor


def _verified(problem: Problem, choice: Choice, device: Device, record: Record, first: bool) -> bool:
    """Whether a choice computes the problem; the first one, or one that does not, fills the record in."""
    # One verification a problem and algorithm: the reference is the costly part.
    verdict = verify.check(problem, choice.algorithm, choice.config, device=device)
    if first:
        record.algorithm, record.config, record.reason = choice.algorithm, str(choice.config), choice.reason
        record.predicted_us, record.workspace_bytes = choice.predicted_us, choice.workspace_bytes
        record.error, record.bound, record.verified = verdict.error, verdict.bound, verdict.verified
    if not verdict.verified:
        record.verified, record.reason = False, f"{choice.algorithm}: {verdict.message}"
    return verdict.verified


def _choice(problem: Problem, device: Device, prepared: bool, algorithm: str = "auto") -> Choice:
    """As it is timed: filters of a gradient are packed in each call, as training has others at each step."""
    return dispatch.choose(problem, device, algorithm, prepared=prepared and problem.direction == "fprop")


def _ours(
    problem: Problem, inputs: Inputs, identifier: str, device: Device, prepared: bool
) -> tuple[Choice, Call]:  # fmt: skip
    """(choice, one call): of an operator that is prepared with its filters, or else into an array that is there; of
    conv2d as a function."""
    if "prepare" in registry.FUNCTIONS[problem.operator]:
        if not prepared:
            return _choice(problem, device, False, identifier), _plain_call(problem, inputs, identifier)
        threads = device.threads or None
        operator = tapwise.prepare(str(problem), inputs.w, inputs.bias, algorithm=identifier, threads=threads)
        return operator.choice, lambda: operator(inputs.x, inputs.residual)
    choice = _choice(problem, device, prepared, identifier)
    plan = dispatch.plan_for(problem, choice, device)
    index = device.index if device.kind == "cuda" else None
    x = arrays.anywhere(inputs.x, "x", index)
    y = arrays.empty(problem.result_shape, problem.y_dtype, problem.layout, x)
    result = arrays.like(y, inputs.x)
    if (more := problem.second) is not None:
        y = y, arrays.empty(more.shape, more.dtype, problem.layout, x)
    others = {"w": inputs.w, "bias": inputs.bias}
    # On a GPU the weights of filters on pictures stay on the host, which packs them.
    stay = {name for name, one in others.items() if one is None or (index is not None and isinstance(one, np.ndarray))}
    w, bias = (one if name in stay else arrays.anywhere(one, name, index) for name, one in others.items())
    if problem.direction == "dgrad":
        # As the model keeps them.
        w = None if w is None else arrays.dense(w, problem.layout)
    buffers = Buffers(x, plan.pack(w), y, scratch(plan.workspace_bytes, x), bias)
    again, memory = problem.operator == "dgrad", scratch(plan.packed_bytes, x)

    def run() -> object:
        plan.run(buffers._replace(w=plan.pack_into(w, memory)) if again else buffers)
        return result

    return choice, run


def _plain_call(problem: Any, inputs: Inputs, identifier: str) -> Call:
    """conv2d of a problem that has two spatial axes."""
    words = {name: getattr(problem, name) for name in ("stride", "padding", "dilation", "groups", "activation", "math")}
    w = arrays.dense(inputs.w, problem.layout)
    return lambda: tapwise.conv2d(inputs.x, w, inputs.bias, residual=inputs.residual, algorithm=identifier, **words)


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
    if IN_FLOAT32 in times:
        record.f32_ratio = times[IN_FLOAT32].over(ours)[0]
    if record.ratios:
        record.ratio = min(record.ratios.values())


def _check_peer(prepared: Prepared, expected: Any, dtype: str) -> None:
    """A peer that computes something else than a verified result is reported, not timed."""
    result = prepared.result()
    if tuple(result.shape) != tuple(expected.shape):
        raise PeerUnavailable(f"gives shape {tuple(result.shape)} instead of {tuple(expected.shape)}")
    if isinstance(result, np.ndarray):
        with np.errstate(all="ignore"):
            difference = float(np.abs(result.astype(np.float64) - expected).max(initial=0.0))
        scale = float(np.abs(expected).max(initial=0.0))
    else:
        difference, scale = gpu.difference(result, expected)
    if not difference <= PEER_TOLERANCE.get(dtype, PEER_TOLERANCE["f32"]) * (scale or 1.0):
        raise PeerUnavailable(f"differs by {difference:.2g} from a verified result")


def select_best(rows: Sequence[Record]) -> tuple[int, int]:
    """(layers on which the chosen algorithm is within 15 % of the best of ours, layers with a choice)."""
    compared = [row for row in rows if len(row.algorithms) > 1 and row.time_us is not None]
    close = [row for row in compared if (row.time_us or 0.0) <= 1.15 * min(row.algorithms.values())]
    return len(close), len(compared)
