"""Filters that a CPU's kernels pack: of any strides, and those of the phases of dgrad."""

from __future__ import annotations

from typing import Any

import numpy as np
import pytest

from tapwise import registry
from tapwise.cpu.device import host
from tapwise.ops.conv.cpu.fprop_phases import own_filters
from tapwise.ops.conv.phases import filters_of, phases_of
from tapwise.ops.conv.prepared import again
from tapwise.ops.conv.problem import ConvProblem


@pytest.mark.parametrize(
    "text",
    [
        "c19 h9 w9 k6 r3 s3 pad1 dgrad", "c40 h9 w11 k36 r5 s4 stride2x3 pad2 dilation1x2 groups4 dgrad",
        "c33 h8 w8 k130 r1 s1 dgrad", "c4 h9 w9 k6 r3 s2 stride2 groups2 f16 nhwc dgrad",
    ],
)  # fmt: skip
def test_a_phase_s_filters_are_packed_as_they_lie(text: str) -> None:
    """By every kernel the same as of a dense copy, of w in any order of memory, byte order and alignment."""
    problem, rng = ConvProblem.parse(text), np.random.default_rng(0)
    dense = rng.standard_normal(problem.w_shape).astype(problem.x_dtype)
    last = np.ascontiguousarray(dense.transpose(0, 2, 3, 1)).transpose(0, 3, 1, 2)
    backwards = np.ascontiguousarray(dense[::-1, :, ::-1])[::-1, :, ::-1]
    shifted = np.zeros(dense.nbytes + 1, np.uint8)[1:].view(dense.dtype).reshape(dense.shape)
    shifted[...] = dense
    for phase in phases_of(problem) or ():
        for algorithm in registry.of_backend("cpu") if (inner := phase.problem) is not None else ():
            if algorithm.refusal(inner, host(2)) or algorithm.id in ("cpu.serial", "cpu.im2col_gemm"):
                continue
            plan = algorithm.plan(inner, algorithm.configs(inner, host(2))[0], host(2))
            expected = plan.pack(filters_of(problem, phase, dense))
            for w in (dense, last, backwards, dense.astype(dense.dtype.newbyteorder()), shifted):
                np.testing.assert_array_equal(plan.pack(own_filters(problem, phase, w)), expected)


@pytest.mark.usefixtures("quick_code")
@pytest.mark.parametrize(
    "text",
    [
        "c40 h9 w12 k36 r3 s3 stride2 pad1 dgrad", "c33 h8 w8 k30 r1 s1 dgrad", "c24 h8 w8 k48 r2 s2 stride2 dgrad",
        "c20 h9 w11 k36 r3 s3 pad1 groups2 nhwc dgrad",
    ],
)  # fmt: skip
def test_filters_are_packed_into_memory_that_is_given(text: str) -> None:
    """The same filters, nothing behind their end; where algorithms of dgrad are made of others, too."""
    problem = ConvProblem.parse(text)
    w = np.random.default_rng(0).standard_normal(problem.w_shape).astype(problem.x_dtype)
    packing = set()
    for algorithm in registry.of_backend("cpu", problem.operator):
        if algorithm.refusal(problem, host(2)):
            continue
        for config in algorithm.configs(problem, host(2))[::19]:
            plan = algorithm.plan(problem, config, host(2))
            memory = np.full(plan.packed_bytes + 64, 7, np.uint8)
            packed, alone = plan.pack_into(w, memory), plan.pack(w)
            pairs = zip(packed, alone, strict=True) if isinstance(alone, list) else [(packed, alone)]
            for here, there in pairs:
                np.testing.assert_array_equal(here, there)
                if plan.packed_bytes and not np.shares_memory(here, w):
                    assert np.shares_memory(here, memory)
                    packing.add(algorithm.id)
            assert (memory[plan.packed_bytes :] == 7).all()
    assert len(packing) > ("stride" in text)


def test_repeated_calls_pack_into_the_same_memory() -> None:
    """Of conv2d and its gradient by x: where pages are there, from the second call on."""
    problem = ConvProblem.parse("c32 h12 w12 k40 r3 s3 stride2 pad1 dgrad")
    algorithm, rng = registry.get("cpu.winograd", "dgrad"), np.random.default_rng(0)
    plan = algorithm.plan(problem, algorithm.configs(problem, host(2))[0], host(2))
    places, pack = [], plan.pack_into

    def noted(w: np.ndarray, memory: np.ndarray | None) -> Any:
        places.append(None if memory is None else memory.ctypes.data)
        return pack(w, memory)

    plan.pack_into = noted  # type: ignore[method-assign]
    call = again(problem, False, plan)
    dy = rng.standard_normal(problem.y_shape, dtype=np.float32)
    for _ in range(3):
        w = rng.standard_normal(problem.w_shape, dtype=np.float32)
        np.testing.assert_allclose(call(dy, w), problem.convolve(dy, w), rtol=1e-3, atol=1e-3)
    assert places[0] is not None and len(set(places)) == 1


@pytest.mark.many
@pytest.mark.parametrize("identifier", ["cpu.direct", "cpu.pointwise", "cpu.winograd"])
@pytest.mark.parametrize("words", ["", "nhwc", "f64", "f16 nhwc"])
def test_filters_of_any_strides_are_packed_as_they_lie(identifier: str, words: str) -> None:
    """The same panels as of a dense copy: channels and filters swapped, flipped, channels last."""
    size = 1 if identifier == "cpu.pointwise" else 3
    problem = ConvProblem.parse(f"c19 h9 w11 k61 r{size} s{size} {words}")
    algorithm = registry.get(identifier)
    w = np.random.default_rng(0).standard_normal(problem.w_shape).astype(problem.x_dtype)
    swapped = np.ascontiguousarray(w.swapaxes(0, 1)).swapaxes(0, 1)
    flipped = np.ascontiguousarray(w[:, :, ::-1, ::-1])[:, :, ::-1, ::-1]
    last = np.ascontiguousarray(w.transpose(0, 2, 3, 1)).transpose(0, 3, 1, 2)
    kinds = {(getattr(one, "route", ""), one.m, one.n): one for one in algorithm.configs(problem, host(2))}
    for config in list(kinds.values())[::4]:
        plan = algorithm.plan(problem, config, host(2))
        for other in (swapped, flipped, last):
            np.testing.assert_array_equal(plan.pack(other), plan.pack(w))


@pytest.mark.parametrize("words", ["", "nhwc", "groups2"])
def test_threads_share_the_panels_of_a_block(words: str) -> None:
    """As many tasks as threads, and the panels that one thread packs."""
    problem, algorithm = ConvProblem.parse(f"c20 h9 w11 k126 r3 s3 {words}"), registry.get("cpu.direct")
    w = np.random.default_rng(0).standard_normal(problem.w_shape).astype(problem.x_dtype)
    configs = [one for one in algorithm.configs(problem, host(1)) if one.panels and one.filters == problem.group_k]
    for config in list({(one.lanes, one.m, one.n, one.pieces): one for one in configs}.values()):
        plans = [algorithm.plan(problem, config, host(threads)) for threads in (1, 2, 5)]
        expected, *others = [plan.pack(w) for plan in plans]
        for panels in others:
            np.testing.assert_array_equal(panels, expected)
