"""Kernels of pooling without a GPU: by emulation against float64, compiled, refusals, and the model's choice."""

from __future__ import annotations

from collections.abc import Callable, Iterable
from typing import Any

import numpy as np
import pytest

import emulated
from tapwise import dispatch, registry
from tapwise.cuda.jit.compile import compile_now
from tapwise.cuda.jit.device import H200
from tapwise.verify import Verdict, compare

TILE: Any = registry.get("cuda.register_tile", "pool")
WINDOW: Any = registry.get("cuda.separable_window", "pool")
WHOLE: Any = registry.get("cuda.block_reduction", "pool")
PROBLEMS = [
    "maxpool n2 c3 h13 w17 r3 s3 stride2 pad1",
    "avgpool n2 c3 h13 w17 r3 s3 stride2 pad1 ceil",
    "avgpool c4 h9 w11 r3 s2 stride1 pad1:0x1:1 exclude_pad f16",
    "avgpool n3 c8 h8 w9 r5 s5 pad2 divisor7 nhwc",
    "avgpool c2 h40 w41 r7 s7 stride3 f64",
    "maxpool n2 c24 h13 w17 r3 s3 stride2 pad1 nhwc f16",
    "avgpool n2 c6 h9 w8 r3 s3 stride1 pad1 exclude_pad nhwc bf16",
    "avgpool c8 h9 w9 r7 s6 stride1 nhwc",
    "maxpool n2 c5 h11 w30 r2 s2 stride3x2 f16",
    "maxpool c2 h150 w200 r3 s3 stride1 pad1 bf16",
    "maxpool n2 c7 h30 w31 r13 s13 stride1 pad6 f16",
    "maxpool c3 h20 w20 r2 s4 stride5x1 ceil nhwc",
    "maxpool n2 c3 h12 w14 r3 s3 stride2 pad1 indices f16",
    "maxpool n2 c3 h13 w17 r3 s2 stride1x2 pad1 ceil indices",
    "maxpool n2 c5 h3 w3 r3 s3 stride2 pad1 f16",
    "maxpool n2 c5 h12 w16 r2 s2 indices bf16",
    "maxpool n3 c2 h9 w10 r3 s3 stride1 pad1 f64",
    "avgpool n3 c1 h1 w5 r1 s2 bf16",
    "avgpool c2 h200 w16 r3 s3 stride3 f16",
    "maxpool c2 h20 w21 r15 s15 stride1 pad7 indices f64",
    "avgpool c2 h30 w33 r15 s15 stride8 pad7 exclude_pad bf16",
    "avgpool c1 h4 w4500 r3 s3 stride1",
]
GLOBAL = [
    "avgpool n2 c3 h7 w7 r7 s7 f16", "maxpool n2 c16 h7 w7 r7 s7 nhwc f16", "avgpool c5 h9 w3 r9 s3 bf16 nhwc",
    "maxpool n3 c2 h40 w40 r40 s40", "avgpool c3 h5 w6 r5 s6 divisor30 exclude_pad",
]  # fmt: skip
needs_compiler = pytest.mark.skipif(not emulated.available(), reason="no compiler to emulate with")


def of(problem: Any) -> Any:
    """The algorithm of windows in its memory order."""
    return WINDOW if problem.layout == "nhwc" else TILE


def verdict_of(text: str, algorithm: Any, config: Any, backwards: bool, x: np.ndarray | None = None) -> Verdict:
    problem: Any = registry.parse(text)
    inputs = problem.sample(np.random.default_rng(0), False)
    if x is not None:
        inputs = inputs._replace(x=x)
    last = problem.layout == "nhwc"

    def laid(array: np.ndarray) -> np.ndarray:
        return np.ascontiguousarray(np.moveaxis(array, 1, -1) if last else array)

    arrays = {"x": laid(inputs.x), "y": laid(np.full(problem.y_shape, np.nan, problem.y_dtype))}
    if size := algorithm.workspace_bytes(problem, config, H200):
        arrays["workspace"] = np.full(size, 0xFF, np.uint8)
    if problem.indices:
        arrays["places"] = np.full(problem.y_shape, -2, np.int64)
    for launch in algorithm.launches(problem, config, H200):
        emulated.run(launch, arrays, backwards)
    if problem.indices:
        np.testing.assert_array_equal(arrays["places"], problem.second_reference(inputs)[0])
    y = np.moveaxis(arrays["y"], -1, 1) if last else arrays["y"]
    expected, bound = problem.reference(inputs, algorithm)
    return compare(y, expected, bound, problem.y_dtype)


@needs_compiler
@pytest.mark.parametrize("text", PROBLEMS)
def test_windows(text: str, every: bool) -> None:
    """In the quick run two tiles of each problem, others of the next."""
    algorithm, at = of(registry.parse(text)), PROBLEMS.index(text)
    configs = algorithm.configs(registry.parse(text), H200)
    four = configs[:: max(1, len(configs) // 4)]
    for number, config in enumerate(four if every else four[at % 2 :: 2] or four):
        verdict = verdict_of(text, algorithm, config, backwards=number % 2 == 1)
        assert verdict, (config, verdict.message)


@needs_compiler
@pytest.mark.parametrize("text", GLOBAL)
def test_global_pooling(text: str) -> None:
    for config in WHOLE.configs(registry.parse(text), H200)[:3]:
        assert (verdict := verdict_of(text, WHOLE, config, False)), (config, verdict.message)


@needs_compiler
@pytest.mark.parametrize("words", ["", "f16", "bf16", "indices", "indices f16", "nhwc"])
def test_nan_and_infinity(words: str) -> None:
    problem = registry.parse(f"maxpool n2 c8 h9 w11 r3 s3 stride1 pad1 {words}")
    x = np.random.default_rng(1).standard_normal((2, 8, 9, 11)).astype(problem.x_dtype)
    x[0, 1, 4, 5], x[1, 2], x[0, 3, 0, 0], x[1, 7, 8, 10] = np.nan, -np.inf, np.inf, np.nan
    # Of several NaN the last one, of equals the first one has the position.
    x[0, 2, 3, 3:6], x[1, 5] = np.nan, 2.0
    for config in of(problem).configs(problem, H200)[:2]:
        assert (verdict := verdict_of(str(problem), of(problem), config, False, x)), verdict.message


@pytest.mark.parametrize("architecture", ["sm_80", "sm_90a", "sm_100a"])
def test_kernels_compile_without_spills(architecture: str, share: Callable[[Iterable[Any]], list[Any]]) -> None:
    problems = [registry.parse(text) for text in PROBLEMS]
    pairs = [(problem, config) for problem in problems for config in of(problem).configs(problem, H200)]
    for source in share(source for problem, config in pairs for source in of(problem).sources(problem, config)):
        _, used = compile_now(source, architecture)
        assert (used.stack_bytes, used.spill_bytes) == (0, 0), (source.text, used)


@pytest.mark.parametrize(
    ("text", "why"),
    [
        ("maxpool c3 h9 w9 r2 s2 indices nhwc", "positions"), ("maxpool c3 h9 w9 r3 s3 dilation2", "without dilation"),
        ("maxpool c3 h9 w9 r3 s3 dilation2 nhwc", "without dilation"), ("maxpool c3 h40 w40 r16 s3", "up to 15 x 15"),
        ("avgpool c3 h40 w40 r3 s3 stride9 nhwc", "strides down of up to 8"),
        ("avgpool c3 h40 w40 r3 s3 stride1x9", "strides of up to 8"),
        ("maxpool n32 c64 h1024 w512 r3 s3", "fewer than 2^30"), ("maxpool c1 h3 w200000 r3 s3", "no room"),
    ],
)  # fmt: skip
def test_what_windows_do_not_take(text: str, why: str) -> None:
    problem = registry.parse(text)
    assert why in str(of(problem).refusal(problem, H200))


@pytest.mark.parametrize("text", PROBLEMS)
def test_memory_order_decides(text: str) -> None:
    problem = registry.parse(text)
    (other,) = {TILE, WINDOW} - {of(problem)}
    assert "takes" in str(other.refusal(problem, H200))


@pytest.mark.parametrize("words", ["r7 s6", "r7 s7 divisor3", "r7 s7 indices", "r7 s7 pad1"])
def test_what_is_no_global_pooling(words: str) -> None:
    name = "maxpool" if "indices" in words else "avgpool"
    assert WHOLE.refusal(registry.parse(f"{name} n2 c8 h7 w7 {words}"), H200)


@pytest.mark.parametrize("layout", ["nchw", "nhwc"])
def test_choice(layout: str) -> None:
    for text, chosen in (
        ("maxpool n32 c64 h112 w112 r3 s3 stride2 pad1", WINDOW if layout == "nhwc" else TILE),
        ("avgpool n32 c1024 h7 w7 r7 s7", WHOLE),
    ):
        problem = registry.parse(f"{text} {layout} f16")
        assert dispatch.choose(problem, H200).algorithm == chosen.id
