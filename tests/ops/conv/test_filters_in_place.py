"""CPU kernels that read filters where they lie: any strides, both ways of lanes, every route."""

from __future__ import annotations

from dataclasses import replace
from typing import Any

import numpy as np
import pytest

from tapwise import arrays, registry
from tapwise.algorithm import Buffers, Device
from tapwise.arrays.workspaces import scratch
from tapwise.cpu.device import host
from tapwise.ops.conv.cpu.direct.blocking import Config
from tapwise.ops.conv.cpu.fprop_phases import in_place
from tapwise.ops.conv.phases import phases_of
from tapwise.ops.conv.problem import ConvProblem
from tapwise.verify import check

PROBLEMS = [
    "cpu.direct: c5 h7 w37 k19 r3 s2 pad1 stride2x1 bias relu", "cpu.direct: c6 h5 w70 k34 r1 s3 groups2 f64",
    "cpu.direct: n2 c9 h5 w5 k64 r3 s3 pad1 dilation2 nhwc", "cpu.pointwise: n2 c33 h9 w17 k21 r1 s1 residual",
]  # fmt: skip


def kinds(algorithm: Any, problem: ConvProblem, device: Device) -> list[Config]:
    """A config of each route and way of lanes."""
    found = algorithm.in_place(problem, device, True)
    return list({(one.route, one.lanes): one for one in found}.values())


def orders(w: np.ndarray) -> list[np.ndarray]:
    """The same filters in memory in other orders, at odd addresses, in another byte order, read-only."""
    shifted = np.zeros(w.nbytes + 1, np.uint8)[1:].view(w.dtype).reshape(w.shape)
    shifted[...] = w
    fixed = w.copy()
    fixed.flags.writeable = False
    swapped = np.ascontiguousarray(w.swapaxes(0, 1)).swapaxes(0, 1)
    backwards = np.ascontiguousarray(w[::-1, :, ::-1, ::-1])[::-1, :, ::-1, ::-1]
    beside = np.moveaxis(np.ascontiguousarray(np.moveaxis(w, 0, -1)), -1, 0)
    return [swapped, backwards, beside, w.astype(w.dtype.newbyteorder()), shifted, fixed]


@pytest.mark.parametrize("text", PROBLEMS)
def test_filters_of_any_order_give_the_same(text: str) -> None:
    """The reference's result for dense filters, and its very bits for the same ones in other orders."""
    name, _, words = text.partition(": ")
    problem, algorithm, device = ConvProblem.parse(words), registry.get(name), host(2)
    inputs = problem.sample(np.random.default_rng(0))
    configs = kinds(algorithm, problem, device)
    assert {one.lanes for one in configs} <= {"pixels", "channels"} and configs
    for config in configs:
        assert check(problem, name, config, device=device), config
    config = configs[0]
    plan = algorithm.plan(problem, config, device)
    results = []
    for w in (inputs.w, *orders(inputs.w)):
        x = arrays.dense(inputs.x, problem.layout)
        y = arrays.empty(problem.y_shape, problem.y_dtype, problem.layout)
        y.fill(np.nan)
        plan.run(Buffers(x, plan.pack(w), y, scratch(plan.workspace_bytes, x), inputs.bias, inputs.residual))
        results.append(y)
    for y in results[1:]:
        np.testing.assert_array_equal(y, results[0])


def test_prepared_operators_and_converted_filters_have_panels() -> None:
    """What was prepared does not see filters that the user overwrites; float16 is converted while it is packed."""
    device = host(2)
    for words in ("c64 h14 w14 k64 r1 s1", "c64 h7 w7 k128 r3 s3 pad1"):
        problem = ConvProblem.parse(words)
        algorithm: Any = registry.get("cpu.direct")
        times = {one: algorithm.predict_us(problem, one, device) for one in algorithm.configs(problem, device)}
        assert min(times, key=times.__getitem__).panels
        assert algorithm.in_place(ConvProblem.parse(f"{words} f16"), device, True) == []


@pytest.mark.parametrize("words", ["c64 h14 w14 k96 r1 s1 dgrad", "c32 h16 w16 k24 r3 s3 stride2 pad1 nhwc dgrad"])
def test_dgrad_reads_filters_where_they_lie(words: str) -> None:
    """Lanes over channels among them, where they lie side by side; and no call packs."""
    problem, device = ConvProblem.parse(words), host(2)
    algorithm = registry.get("cpu.fprop_phases", "dgrad")
    config = algorithm.configs(problem, device)[-1]
    assert all(not part.panels for _, part in config.parts)
    w = arrays.dense(problem.sample(np.random.default_rng(0)).w, problem.layout)
    packed = algorithm.plan(problem, config, device).pack(w)
    assert all(np.shares_memory(one, w) for one in packed)
    assert check(problem, "cpu.fprop_phases", config, device=device)


@pytest.mark.parametrize("vector_cycles", [1.0, 2.0])
def test_planes_of_whole_pages_are_dear_to_read_in_place(vector_cycles: float) -> None:
    """All their channels want the same sets of a cache, which units half as wide as vectors do not feel."""
    device, algorithm = replace(host(2), vector_cycles=vector_cycles), registry.get("cpu.direct")

    def ns_a_pixel(height: int) -> float:
        problem = ConvProblem.parse(f"c96 h{height} w32 k96 r1 s1")
        found = [one for one in algorithm.configs(problem, device) if one.route == "in place"]
        return min(algorithm.predict_us(problem, one, device) for one in found) / height

    assert (ns_a_pixel(64) > 1.3 * ns_a_pixel(62)) == (vector_cycles == 1.0)


@pytest.mark.parametrize("lanes", ["pixels", "channels"])
def test_turned_filters_in_place_cost_a_run_more(lanes: str) -> None:
    """The more the further they lie apart, if tiles take them one by one; panels are read as ever."""
    problem, device = ConvProblem.parse("c64 h7 w7 k64 r2 s2 pad1"), host(2)
    algorithm = registry.get("cpu.direct")
    for config in algorithm.configs(problem, device):
        if config.lanes == lanes and not config.panels:
            near, far = (algorithm.turned_us(problem, config, device, apart) for apart in (1, 9))
            assert far > near > 0 if lanes == "pixels" else far == near > 0
        elif config.lanes == lanes:
            assert algorithm.turned_us(problem, config, device, 1) == 0


def test_vectors_of_filters_need_neighbours() -> None:
    """An image of a few pixels has lanes over channels where they may be."""
    phases = phases_of(ConvProblem.parse("c64 h2 w2 k96 r1 s1 dgrad"))
    assert phases is not None
    fprop = phases[0].problem
    assert fprop is not None
    for apart, lanes in ((1, "channels"), (9, "pixels")):
        found = in_place(fprop, host(2), apart)
        assert found is not None
        assert f"lanes={lanes}" in str(found[1])
