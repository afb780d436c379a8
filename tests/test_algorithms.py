"""Every algorithm of the registry against float64, over problems that are odd in all the ways that layers are."""

from __future__ import annotations

from collections import Counter
from collections.abc import Iterable
from dataclasses import replace
from math import prod

import numpy as np
import pytest

from tapwise import dispatch, registry, verify
from tapwise.algorithm import Buffers, Device
from tapwise.arrays.workspaces import aligned
from tapwise.cpu.device import host
from tapwise.lab import suites
from tapwise.ops.conv.problem import ConvProblem

PROBLEMS = [
    "c5 h9 w11 k7 r3 s3 pad1",
    "n3 c13 h7 w7 k17 r3 s3 pad1",
    "c11 h6 w5 k3 r6 s5",  # one output pixel
    "c3 h4 w3 k5 r3 s3 pad3x4",  # padding beyond the kernel
    "c4 h9 w9 k6 r3 s3 dilation4 pad4",
    "n2 c6 h10 w9 k4 r3 s2 stride2x1 pad0:1x2:0 dilation1x2 groups2",
    "c3 h23 w26 k9 r4 s4 stride4",
    "c7 h11 w13 k10 r5 s3 stride3x2 pad2x1",
    "c7 h15 w9 k10 r1 s1",
    "c64 h7 w7 k96 r1 s1",
    "n2 c7 h15 w9 k10 r1 s1 stride2",
    "c40 h20 w20 k24 r3 s3 pad1",
    "c12 h8 w3 k24 r3 s3 pad1 groups12",  # two outputs a channel
    "n2 c19 h14 w13 k19 r5 s5 stride2 pad2 groups19",
    "c33 h5 w5 k33 r9 s9 pad4 groups33",
    "c15 h1 w40 k10 r1 s7 pad0x3 groups5",
    "c2 h40 w70 k2 r3 s3 pad1",
    "c9 h31 w29 k11 r5 s5 stride2 pad2",
    "c6 h17 w17 k7 r7 s1 pad3x0",
    "n2 c8 h19 w23 k8 r3 s3 stride2 pad2 dilation2x3 groups2",
]
IDENTIFIERS = [name for name in registry.ALGORITHMS["conv"] if name.startswith("cpu.")]
EPILOGUES = ["bias", "residual relu", "bias residual relu6", "silu", "bias gelu", "sigmoid", "bias tanh"]
# Written as those are, so that one problem will do.
MORE_EPILOGUES = [
    "bias hardswish", "residual hardsigmoid", "bias gelu_tanh", "leaky_relu", "bias residual leaky_relu-2.5"
]  # fmt: skip


def applying(texts: Iterable[str], identifiers: Iterable[str] = IDENTIFIERS) -> list[tuple[str, str]]:
    """(algorithm, problem) for each algorithm that applies; test_takes_what_it_is_for counts them."""
    return [
        (identifier, text)
        for text in texts
        for identifier in identifiers
        if registry.get(identifier).refusal(ConvProblem.parse(text), host()) is None
    ]


IN_BOTH_ORDERS = [f"{text} {layout}" for text in PROBLEMS for layout in ("nchw", "nhwc")]
IN_ALL_DTYPES = [
    f"{text} {dtype}"
    for text in (PROBLEMS[1], PROBLEMS[5], PROBLEMS[8], PROBLEMS[13], f"{PROBLEMS[0]} nhwc")
    for dtype in ("f64", "f16", "bf16")
]
FUSED = [f"c5 h9 w11 k7 r3 s3 pad1 {epilogue}" for epilogue in EPILOGUES + MORE_EPILOGUES]
# What algorithms of their own take: the others compute a few of them.
FUSED_ELSEWHERE = [
    f"{text} {epilogue}"
    for text in ("c7 h5 w6 k9 r1 s1 nhwc", "c6 h9 w9 k6 r3 s3 groups6")
    for epilogue in [*EPILOGUES, MORE_EPILOGUES[-1]]
]
FEW = [text for text in FUSED_ELSEWHERE if "relu6" in text or "gelu" in text]
OWN = ["cpu.pointwise", "cpu.depthwise"]


@pytest.mark.many
@pytest.mark.parametrize(("identifier", "text"), applying(IN_BOTH_ORDERS))
def test_best_and_other_configs(identifier: str, text: str, every: bool, request: pytest.FixtureRequest) -> None:
    # Kernels as users have them in one memory order of each problem, in the other as they are generated.
    if IN_BOTH_ORDERS.index(text) % 4 in (1, 2):
        request.getfixturevalue("quick_code")
    problem = ConvProblem.parse(text)
    configs = list(registry.get(identifier).configs(problem, host()))
    best = dispatch.choose(problem, host(), identifier).config
    # Beside the best, in one memory order the default, in the other one from the middle.
    others = [configs[0], configs[len(configs) // 2]]
    turn = IN_BOTH_ORDERS.index(text) % 2
    for config in dict.fromkeys([best, *(others if every else others[turn : turn + 1])]):
        verdict = verify.check(problem, identifier, config)
        assert verdict, f"{config}: {verdict.message}"
    exact = verify.check(problem, identifier, best, integers=True, seed=3)
    assert exact, exact.message


ROUTES = [
    "n2 c5 h9 w40 k7 r3 s3 bias relu",
    "c13 h11 w17 k23 r1 s1 residual relu6",
    "n2 c10 h30 w21 k14 r3 s5 stride1x2 pad1 groups2 bias residual",
    "c9 h6 w50 k8 r2 s3 dilation2",
    "c3 h1 w2100 k5 r1 s3",
    "c7 h14 w14 k9 r1 s1 f16 bias",
    "c6 h12 w11 k5 r3 s3 f64",
    "n2 c14 h30 w21 k10 r3 s3 stride2 pad1 groups2 bf16 residual relu",
    "c41 h9 w13 k17 r1 s1 bf16 bias",
    "n2 c24 h8 w9 k34 r3 s2 pad1x0 groups2 bf16 nhwc bias",
]


@pytest.mark.many
@pytest.mark.parametrize(
    ("number", "identifier", "text"),
    [(number, *pair) for number, pair in enumerate(applying(ROUTES, ["cpu.direct", "cpu.pointwise"]))],
)
def test_every_route_and_tile(number: int, identifier: str, text: str, request: pytest.FixtureRequest) -> None:
    """Each way from input to output, with every third register tile: lines end in all its narrower forms. Kernels as
    users have them in every other problem."""
    if number % 2:
        request.getfixturevalue("quick_code")
    problem = ConvProblem.parse(text)
    ways = {(one.route, one.lanes, one.m, one.n): one for one in registry.get(identifier).configs(problem, host())}
    taken = sorted(ways)[number % min(3, len(ways)) :: 3]
    for way in taken:
        verdict = verify.check(problem, identifier, ways[way])
        assert verdict, f"{ways[way]}: {verdict.message}"
    assert {"sums", "straight", "in place"} & {way[0] for way in taken}


@pytest.mark.many
@pytest.mark.usefixtures("quick_code")
@pytest.mark.parametrize(
    ("identifier", "text"), dict.fromkeys([*applying([*IN_ALL_DTYPES, *FUSED, *FEW]), *applying(FUSED_ELSEWHERE, OWN)])
)
def test_dtypes_and_epilogues(identifier: str, text: str) -> None:
    verdict = verify.check(ConvProblem.parse(text), identifier)
    assert verdict, verdict.message


def test_takes_what_it_is_for() -> None:
    """A table full of refusals would pass every test above. A new algorithm takes one problem at least."""
    every = ("cpu.direct", "cpu.im2col_gemm", "cpu.serial")
    some = ("cpu.winograd", "cpu.strassen", "cpu.depthwise", "cpu.pointwise")

    def counts(texts: Iterable[str], identifiers: Iterable[str] = (*every, *some)) -> Counter[str]:
        return Counter(identifier for identifier, _ in applying(texts, identifiers))

    # What needs a processor that has it.
    elsewhere = set() if host().amx else {"cpu.amx"}
    assert set(counts([*IN_BOTH_ORDERS, *IN_ALL_DTYPES], IDENTIFIERS)) == set(IDENTIFIERS) - elsewhere
    assert counts(IN_BOTH_ORDERS) == {
        **dict.fromkeys(every, 40),
        "cpu.winograd": 22,
        "cpu.depthwise": 5,
        "cpu.pointwise": 6,
        "cpu.strassen": 2,
    }
    assert counts(IN_ALL_DTYPES) == {
        **dict.fromkeys(every, 15),
        "cpu.winograd": 9,
        "cpu.depthwise": 3,
        "cpu.pointwise": 3,
    }
    assert counts(FUSED) == {**dict.fromkeys(every, 12), "cpu.winograd": 12}
    assert counts(FEW) == {**dict.fromkeys(every, 4), "cpu.depthwise": 2, "cpu.pointwise": 2}
    assert counts(FUSED_ELSEWHERE, OWN) == {"cpu.depthwise": 8, "cpu.pointwise": 8}
    assert counts(ROUTES, ["cpu.direct", "cpu.pointwise"]) == {"cpu.direct": 10, "cpu.pointwise": 3}


@pytest.mark.parametrize("identifier", IDENTIFIERS)
def test_refusals_say_why(identifier: str) -> None:
    algorithm = registry.get(identifier)
    base = ConvProblem.parse("c6 h9 w9 k6 r3 s3 pad1")
    reason = algorithm.refusal(base.replace(direction="wgrad"), host())
    assert reason and ("wgrad" in reason or "takes" in reason)
    assert algorithm.refusal(base, Device("cuda", "some GPU", 132))


def test_nan_and_infinity_stay_where_they_are_read() -> None:
    problem = ConvProblem.parse("c3 h9 w9 k4 r3 s3 pad1")
    rng = np.random.default_rng(0)
    w = rng.standard_normal(problem.w_shape, dtype=np.float32)
    for value in (np.nan, np.inf):
        x = rng.standard_normal(problem.x_shape, dtype=np.float32)
        x[0, 1, 4, 5] = value
        for identifier in ("cpu.direct", "cpu.serial"):
            plan = dispatch.plan_for(problem, dispatch.choose(problem, host(), identifier), host())
            y = np.zeros(problem.y_shape, np.float32)
            plan.run(Buffers(x, plan.pack(w), y, aligned(plan.workspace_bytes)))
            assert not np.isfinite(y[:, :, 3:6, 4:7]).any()
            y[:, :, 3:6, 4:7] = 0
            assert np.isfinite(y).all()


@pytest.mark.parametrize("text", [PROBLEMS[0], PROBLEMS[4], *PROBLEMS[-3:]])
def test_winograd_bound_is_no_licence(text: str) -> None:
    """What Winograd sums is more than |w| * |x|, but by a factor that its tiles explain, everywhere."""
    problem = ConvProblem.parse(text)
    rng = np.random.default_rng(0)
    x, w = rng.standard_normal(problem.x_shape), rng.standard_normal(problem.w_shape)
    plain = problem.convolve(np.abs(x), np.abs(w))
    summed = registry.get("cpu.winograd").magnitude(problem, x, w)
    assert summed.shape == plain.shape
    assert (summed >= plain * (1 - 1e-12)).all()
    assert np.median(summed / plain) < 100


def test_same_bits_run_after_run() -> None:
    problem = ConvProblem.parse("c40 h30 w30 k24 r3 s3 pad1")
    rng = np.random.default_rng(0)
    x = rng.standard_normal(problem.x_shape, dtype=np.float32)
    w = rng.standard_normal(problem.w_shape, dtype=np.float32)
    for identifier in ("cpu.direct", "cpu.winograd"):
        plan = dispatch.plan_for(problem, dispatch.choose(problem, host(2), identifier), host(2))
        packed, workspace = plan.pack(w), aligned(plan.workspace_bytes)
        first, again = np.zeros(problem.y_shape, np.float32), np.zeros(problem.y_shape, np.float32)
        plan.run(Buffers(x, packed, first, workspace))
        for _ in range(20):
            plan.run(Buffers(x, packed, again, workspace))
            assert np.array_equal(first.view(np.int32), again.view(np.int32))


@pytest.mark.parametrize("suite", ["real_layers", "generative"])
def test_scratch_keeps_its_promise(suite: str) -> None:
    """Direct, pointwise, depthwise: 4 MB a thread. Winograd: twice the input, or 1 MB a thread where that is less."""
    device, seen = host(2), set()
    for case in suites.load(suite)[::3]:
        problem = case.problem
        for identifier in ("cpu.direct", "cpu.pointwise", "cpu.depthwise", "cpu.winograd"):
            algorithm = registry.get(identifier)
            if algorithm.refusal(problem, device) is not None:
                continue
            seen.add(identifier)
            config = dispatch.choose(problem, device, identifier).config
            needed = algorithm.workspace_bytes(problem, config, device)
            twice = max((1 << 20) * device.threads, 2 * 4 * prod(problem.x_shape))
            limit = twice if identifier == "cpu.winograd" else (4 << 20) * device.threads
            assert needed <= limit, f"{identifier} on {problem}: {needed} bytes, {limit} allowed"
    assert {"cpu.direct", "cpu.depthwise", "cpu.winograd"} <= seen


@pytest.mark.parametrize("identifier", IDENTIFIERS)
def test_predictions_are_times(identifier: str) -> None:
    """Between the machine's roof and a multiple of it, and in proportion to the number of images."""
    algorithm, here = registry.get(identifier), host(2)
    # Bounds are of one clock and large caches, whatever processor this is.
    caches = {"l1_bytes": 48 << 10, "l2_bytes": 2 << 20, "l3_bytes": 300 << 20}
    device = replace(here, amx=True, gflops=2.7 * here.vector_bytes, vector_cycles=1.0, gbps=25.0, **caches)
    dtype = "f32" if "f32" in (algorithm.dtypes or ("f32",)) else "bf16"
    # Winograd saves products; a product of matrices a group, and scalars in a loop nest, are far from the roof. Tile
    # registers are as far above that of vectors.
    least = 1 / 16 if identifier == "cpu.amx" else 1.0 if algorithm.exact else 1 / 4
    most = {"cpu.im2col_gemm": 200.0, "cpu.serial": 2000.0}.get(identifier, 50.0)
    seen = 0
    # Few of them are for Strassen.
    for case in suites.load("real_layers")[:: 2 if identifier == "cpu.strassen" else 7]:
        assert isinstance(case.problem, ConvProblem)
        problem = case.problem.replace(dtype=dtype)
        if algorithm.refusal(problem, device) is not None:
            continue
        choice = dispatch.choose(problem, device, identifier)
        arithmetic, memory = problem.flops / (device.gflops * device.threads) * 1e-3, problem.bytes / device.gbps * 1e-3
        # What a cache holds need not come from memory.
        roof = max(arithmetic, memory if problem.bytes > device.l3_bytes else 0.0)
        assert least * roof <= choice.predicted_us <= most * max(arithmetic, memory), problem
        four = algorithm.predict_us(problem.replace(n=4 * problem.n), choice.config, device)
        # More than four times as long where four images leave a cache that one fits.
        assert 2.0 <= four / choice.predicted_us <= 6.0, problem
        # At most half a microsecond an element of the filters.
        assert 0 <= algorithm.pack_us(problem, choice.config, device) <= 20 + 0.5 * prod(problem.w_shape)
        seen += 1
    assert seen >= 2
