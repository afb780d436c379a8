"""Algorithms of dgrad and wgrad against float64: all of the CPU's, and by emulation the GPU's plain ones."""

from __future__ import annotations

from itertools import cycle

import numpy as np
import pytest
from compiled_kernels import Share, compiled

import emulated
from emulated.verify import check as check_emulated
from tapwise import registry, verify
from tapwise.activation import ACTIVATIONS
from tapwise.algorithm import Config
from tapwise.cpu.device import host
from tapwise.cuda.jit.device import H200
from tapwise.ops.conv.cuda.fprop_phases import FpropPhases, turn_launch, turn_source
from tapwise.ops.conv.cuda.gradients import GridStrideDgrad, GridStrideWgrad
from tapwise.ops.conv.phases import filters_of, phases_of
from tapwise.ops.conv.problem import ConvProblem
from tapwise.verify import compare

GEOMETRIES = [
    "n2 c6 h11 w9 k4 r3 s2 stride2x3 pad1:2x0:1 dilation2x1 groups2",
    "n2 c5 h7 w9 k4 r3 s3 pad1 f16 nhwc",
    "n3 c2 h4 w5 k3 r3 s3 pad3 nhwc f64",
    "c16 h13 w13 k24 r1 s1 stride2 nhwc",
    "n2 c8 h9 w2 k8 r3 s3 stride3 pad2 groups8",
    "n2 c12 h14 w15 k16 r4 s4 stride2 pad1",
    "n2 c33 h14 w14 k32 r3 s3 pad1",
    "n2 c32 h12 w14 k32 r3 s3 pad1 nhwc f64",
    "c8 h9 w9 k8 r3 s3 stride4 pad2 dilation2 nhwc",
    "n2 c12 h14 w14 k24 r5 s3 groups12 stride2 pad2x1 nhwc",
    "c3 h9 w17 k8 r7 s7 stride2 pad3 bf16",
    "n2 c4 h1 w1 k4 r3 s3 stride4 pad1",
]
CASES = [f"{text} {words}" for text in GEOMETRIES for words in ("dgrad", "dgrad bias silu", "wgrad")]
DEVICE = host(2)


def taken() -> list[tuple[str, str]]:
    found = []
    for text in CASES:
        problem = ConvProblem.parse(text)
        for algorithm in registry.of_backend("cpu", problem.operator):
            if algorithm.refusal(problem, DEVICE) is None:
                found.append((text, algorithm.id))
    return found


@pytest.mark.many
@pytest.mark.parametrize(("text", "identifier"), taken())
def test_cpu_algorithms(text: str, identifier: str, request: pytest.FixtureRequest) -> None:
    """Kernels as users have them of every other case."""
    if CASES.index(text) % 2:
        request.getfixturevalue("quick_code")
    problem = ConvProblem.parse(text)
    configs = list(registry.get(identifier, problem.operator).configs(problem, DEVICE))
    for config in configs[:3]:
        for integers in (False, True):
            verdict = verify.check(problem, identifier, config, device=DEVICE, integers=integers)
            assert verdict, f"{config}: {verdict.message}"


def test_every_case_has_more_than_the_plain_loops() -> None:
    by_text: dict[str, list[str]] = {}
    for text, identifier in taken():
        by_text.setdefault(text, []).append(identifier)
    alone = {text for text, found in by_text.items() if found == ["cpu.serial"]}
    cut = {text for text in CASES if "dgrad" in text and phases_of(ConvProblem.parse(text)) is None}
    assert alone == cut and cut


SMALL = [text for text in CASES if "f64" not in text and " bias" not in text and ConvProblem.parse(text).flops < 4e5]


@pytest.mark.parametrize(("backwards", "text"), list(zip(cycle([False, False, True, True]), SMALL, strict=False)))
def test_plain_kernels(text: str, backwards: bool) -> None:
    """Threads take turns in either order, for two problems each, which are a dgrad and a wgrad."""
    problem = ConvProblem.parse(text)
    algorithm = GridStrideWgrad() if problem.direction == "wgrad" else GridStrideDgrad()
    assert (verdict := check_emulated(problem, algorithm, Config(), backwards=backwards)), verdict.message


# Phases that no tap meets are the bias alone; in the last one no element of dx is met at all.
EPILOGUES = [
    "n2 c6 h8 w7 k4 r1 s1 stride3x2",
    "n2 c6 h5 w9 k8 r3 s2 stride2 pad1 groups2 nhwc f16",
    "n2 c6 h1 w1 k4 r1 s1 stride3 pad1",
]


@pytest.mark.many
@pytest.mark.usefixtures("quick_code")
@pytest.mark.parametrize("activation", [*ACTIVATIONS, "leaky_relu-0.5"])
def test_bias_and_activation_on_the_cpu(activation: str) -> None:
    for text in EPILOGUES:
        problem = ConvProblem.parse(f"{text} bias {activation} dgrad")
        for identifier in ("cpu.serial", "cpu.fprop_phases"):
            if registry.get(identifier, "dgrad").refusal(problem, DEVICE) is None:
                verdict = verify.check(problem, identifier, device=DEVICE)
                assert verdict, f"{identifier}, {text}: {verdict.message}"


@pytest.mark.parametrize("text", [f"{EPILOGUES[0]} bias gelu dgrad", f"{EPILOGUES[1]} bias leaky_relu-0.5 dgrad"])
def test_bias_and_activation_of_the_plain_kernel(text: str) -> None:
    problem = ConvProblem.parse(text)
    assert (verdict := check_emulated(problem, GridStrideDgrad(), Config())), verdict.message


@pytest.mark.parametrize("text", [text for text in CASES if "dgrad" in text and "stride" in text])
def test_phases_are_put_together(text: str) -> None:
    problem, algorithm = ConvProblem.parse(text), FpropPhases()
    phases = phases_of(problem)
    if phases is None:
        return
    inputs = problem.sample(np.random.default_rng(1))
    bias = None if inputs.bias is None else inputs.bias.astype(np.float64)
    joined = [phase.problem is not None for phase in phases]
    parts = np.full((sum(joined), algorithm.slot_bytes(problem) // problem.itemsize), np.nan, problem.x_dtype)
    last = problem.layout == "nhwc"
    for part, phase in zip(parts, [phase for phase in phases if phase.problem is not None], strict=True):
        assert phase.problem is not None
        result = phase.problem.convolve(inputs.x, filters_of(problem, phase, inputs.w), bias)
        part[: result.size] = (np.moveaxis(result, 1, -1) if last else result).ravel()
    dx = np.full(problem.x_shape, np.nan, problem.x_dtype)
    memory = np.ascontiguousarray(np.moveaxis(dx, 1, -1) if last else dx)
    arrays = {"parts": parts, "y": memory} | ({} if inputs.bias is None else {"bias": inputs.bias})
    emulated.run(algorithm.join_launch(problem, [False] * sum(joined), H200), arrays)
    found = np.moveaxis(memory, -1, 1) if last else memory
    assert (verdict := compare(found, *problem.reference(inputs), problem.y_dtype)), verdict.message


@pytest.mark.parametrize("order", [(0, 1, 2, 3), (0, 2, 3, 1), (1, 0, 3, 2)])
@pytest.mark.parametrize("text", [text for text in CASES if text.endswith("dgrad")])
def test_filters_are_turned(text: str, order: tuple[int, ...]) -> None:
    """Of every phase by one launch, w in any order."""
    problem = ConvProblem.parse(text)
    phases = phases_of(problem)
    if phases is None:
        return
    w = np.arange(np.prod(problem.w_shape)).astype(problem.x_dtype).reshape(problem.w_shape)
    memory = w.transpose(order).copy()
    w = memory.transpose(np.argsort(order))
    y = np.full(w.size, -1, w.dtype)
    emulated.run(turn_launch(problem, tuple(step // w.itemsize for step in w.strides)), {"w": memory, "y": y})
    at = 0
    for phase in phases:
        if phase.problem is not None:
            expected = np.moveaxis(filters_of(problem, phase, w), 1, -1)
            np.testing.assert_array_equal(y[at : at + expected.size], expected.ravel())
            at += expected.size


@pytest.mark.parametrize("architecture", ["sm_80", "sm_90a", "sm_100a"])
@pytest.mark.parametrize("dtype", ["f32", "f64", "f16", "bf16"])
@pytest.mark.parametrize("layout", ["nchw", "nhwc"])
def test_kernels_compile_without_spills(dtype: str, layout: str, architecture: str, share: Share) -> None:
    problem = ConvProblem.parse(f"n2 c16 h13 w13 k24 r3 s3 stride2 pad1 {dtype} {layout} gelu dgrad")
    wgrad = problem.bare().replace(direction="wgrad")
    sources = [FpropPhases().join_source(problem), turn_source(problem, layout == "nhwc")]
    plain = GridStrideDgrad().source(problem, Config()), GridStrideWgrad().source(wgrad, Config())
    for source in share((*sources, *plain)):
        code, used, _ = compiled(source, architecture)
        assert code[:4] == b"\x7fELF"
        assert (used.stack_bytes, used.spill_bytes) == (0, 0), used
