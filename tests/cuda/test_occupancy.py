"""Blocks that are balanced, without a GPU: what is asked for, and when."""

from __future__ import annotations

from contextlib import nullcontext
from math import prod
from types import SimpleNamespace
from typing import Any

import pytest

from tapwise import dispatch, registry, verify
from tapwise.cuda.jit import launch as launches
from tapwise.cuda.jit import occupancy
from tapwise.cuda.jit.compile import Source
from tapwise.cuda.jit.device import H200, gpu
from tapwise.cuda.jit.launch import Launch

PLACES = H200.multiprocessors


@pytest.mark.parametrize("blocks", [1, PLACES, PLACES + 1, 384, 7 * PLACES, 1392, 32 * PLACES])
@pytest.mark.parametrize("asked", [0, 5000])
def test_as_many_find_room_as_have_to(blocks: int, asked: int) -> None:
    share = -(-blocks // PLACES)
    wide = occupancy.balanced_bytes(H200, asked, blocks)
    assert asked <= wide <= H200.shared_bytes
    assert occupancy.beside_of(H200, wide) == share
    assert occupancy.beside_of(H200, occupancy.room_of(H200, share)) == share


def loaded(
    monkeypatch: pytest.MonkeyPatch, blocks: int, held: int, architecture: str = "sm_90a", text: str = "", **words: Any
) -> Launch:  # fmt: skip
    """A launch of so many blocks, that is loaded where so many fit on a multiprocessor."""
    monkeypatch.setattr(launches, "_kernel", lambda *given: SimpleNamespace(function=given[-1]))
    monkeypatch.setattr(launches, "count", lambda: 1)
    monkeypatch.setattr(launches, "_entry", lambda: lambda *_: 0)
    monkeypatch.setattr(launches, "gpu", lambda index: H200)
    monkeypatch.setattr(launches, "on_gpu", lambda index: nullcontext())
    monkeypatch.setattr(occupancy, "held", lambda _, threads, shared: min(held, occupancy.beside_of(H200, shared)))
    source = Source("any", "struct Args { const void *x; };\nvoid kernel(const __grid_constant__ Args p)" + text)
    launch = Launch(source, {}, (blocks, 1, 1), 128, 1000, **{"dependent": True, "balance": 2} | words)
    launch.load(architecture, 0)
    return launch


@pytest.mark.parametrize(
    ("blocks", "held", "words", "share"),
    [
        (384, 4, {}, 3),
        (1392, 20, {}, 11),
        (2 * PLACES, 3, {}, 2),
        # As many as fit; one each, which a launch has to ask for; launches that ask for more, for nothing or do not
        # begin before the last one ends.
        (384, 3, {}, 0),
        (4000, 4, {}, 0),
        (PLACES, 4, {}, 0),
        (PLACES, 4, {"balance": 1}, 1),
        (2 * PLACES, 4, {"balance": 3}, 0),
        (384, 4, {"balance": 0}, 0),
        (384, 4, {"dependent": False}, 0),
        (384, 4, {"architecture": "sm_80"}, 0),
    ],
)
def test_which_are_balanced(
    blocks: int, held: int, words: dict[str, Any], share: int, monkeypatch: pytest.MonkeyPatch
) -> None:
    launch = loaded(monkeypatch, blocks, held, **words)
    assert launch.shared_bytes == launch._function
    assert launches._Head.from_buffer(launch.arguments()[0]).shared_bytes == launch.shared_bytes
    if share:
        assert occupancy.beside_of(H200, launch.shared_bytes) == share
    else:
        assert launch.shared_bytes == 1000


@pytest.mark.parametrize(
    ("blocks", "cluster", "balance"),
    [(392, 1, True), (392, 4, False), (384, 4, True), (784, 8, False), (784, 2, True), (256, 8, False), (240, 8, True)],
)
def test_clusters_have_to_find_places(
    blocks: int, cluster: int, balance: bool, monkeypatch: pytest.MonkeyPatch
) -> None:
    """On rows of 18, 16 and 10 multiprocessors."""
    launch = loaded(monkeypatch, blocks, 8, text=f"void __cluster_dims__({cluster}) kernel" * (cluster > 1))
    assert (launch.shared_bytes > 1000) == balance


@pytest.mark.parametrize(
    ("text", "algorithm", "balance"),
    [
        ("n32 c512 h12 w12 k512 r3 s3 pad1 groups512 f16", "cuda.depthwise", 2),
        ("n32 c16 h96 w96 k16 r3 s3 pad1 f16 nhwc", "cuda.implicit_gemm_rows", 2),
        ("n1 c1216 h14 w14 k128 r1 s1", "cuda.implicit_gemm_simt", 0),
        ("n32 c300 h7 w7 k300 r7 s7 pad3 groups300 f16 nhwc", "cuda.depthwise", 0),
        ("n32 c512 h12 w12 k1024 r1 s1 f16 nhwc wgrad", "cuda.implicit_gemm", 1),
        ("maxpool n32 c512 h14 w14 r3 s3 stride1 pad1 f16 nhwc", "cuda.separable_window", 2),
        ("softmax 1024x1000", "cuda.block_reduction", 3),
    ],
)
def test_who_asks_for_it(text: str, algorithm: str, balance: int, monkeypatch: pytest.MonkeyPatch) -> None:
    """Kernels that bring x to shared memory; others, where it was measured to be faster."""
    monkeypatch.setattr(Launch, "load", lambda *_: None)
    problem = registry.parse(text)
    choice = dispatch.choose(problem, H200, algorithm)
    plan: Any = registry.get(algorithm, problem.operator).plan(problem, choice.config, H200)
    assert max(launch.balance for launch in plan.launches) == balance


@pytest.mark.parametrize(("words", "asks"), [({}, True), ({"balance": 0}, False), ({"dependent": False}, False)])
def test_shared_memory_as_large_as_it_may_be(
    words: dict[str, Any], asks: bool, monkeypatch: pytest.MonkeyPatch
) -> None:
    """Asked for in addition, balanced or not; the launch is the same but for its kernel."""
    for blocks in (384, 4000):
        launch = loaded(monkeypatch, blocks, 4, **words)
        before = launch.shared_bytes
        launch.prefer_shared("sm_90a")
        assert (launch._function is True) == asks and launch.shared_bytes == before


@pytest.mark.parametrize(
    ("words", "asked"),
    [("stride2 groups192 nhwc", 4), ("groups192 nhwc", 0), ("stride2 groups192", 0), ("stride2 groups96 nhwc", 0)],
)
def test_depthwise_phases_have_the_same_shared_memory(words: str, asked: int, monkeypatch: pytest.MonkeyPatch) -> None:
    seen: list[Launch] = []
    monkeypatch.setattr(Launch, "load", lambda *_: None)
    monkeypatch.setattr(Launch, "prefer_shared", lambda launch, architecture: seen.append(launch))
    problem = registry.parse(f"n32 c192 h28 w28 k192 r3 s3 pad1 f16 {words} dgrad")
    choice = dispatch.choose(problem, H200, "cuda.fprop_phases")
    registry.get("cuda.fprop_phases", "dgrad").plan(problem, choice.config, H200)
    assert len(seen) == asked


@pytest.mark.cuda
@pytest.mark.parametrize(
    ("text", "algorithm", "balance"),
    [
        ("n32 c512 h14 w14 k512 r3 s3 pad1 groups512 f16 nhwc", "cuda.depthwise", True),
        ("n32 c512 h12 w12 k512 r3 s3 pad1 groups512 f16", "cuda.depthwise", True),
        ("n32 c256 h7 w7 k512 r3 s3 pad2 dilation2", "cuda.implicit_gemm_simt", True),
        ("maxpool n32 c512 h14 w14 r3 s3 stride1 pad1 f16 nhwc", "cuda.separable_window", True),
        ("log_softmax 32x32000 f16", "cuda.block_reduction", False),
    ],
)
def test_what_is_balanced_has_places_at_once(text: str, algorithm: str, balance: bool) -> None:
    problem, device = registry.parse(text), gpu()
    choice = dispatch.choose(problem, device, algorithm)
    plan: Any = registry.get(algorithm, problem.operator).plan(problem, choice.config, device)
    launch = max(plan.launches, key=lambda one: prod(one.grid))
    wide = occupancy.balanced_bytes(device, 0, prod(launch.grid))
    assert (launch.shared_bytes == wide) == balance
    with launches.on_gpu(device.index):
        held = occupancy.held(launch._function, launch.block[0], launch.shared_bytes)
    assert held == -(-prod(launch.grid) // device.multiprocessors) or not balance
    assert verify.check(problem, algorithm, choice.config, device=device)
