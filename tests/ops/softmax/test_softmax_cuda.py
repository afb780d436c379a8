"""cuda.ring and cuda.thread_per_run of softmax without a GPU."""

from __future__ import annotations

from dataclasses import replace
from typing import Any

import numpy as np
import pytest

import emulated
from tapwise import dispatch, registry
from tapwise.cuda.jit.compile import compile_now
from tapwise.cuda.jit.device import H200
from tapwise.ops.softmax import cuda_ring
from tapwise.problem import Inputs
from tapwise.verify import compare

# A GPU whose blocks have several runs each.
SMALL = replace(H200, multiprocessors=1)
PROBLEMS = {
    # Runs that begin between pieces of 16 bytes and such that do not; more than slots, one alone.
    "cuda.ring": [
        "softmax 9x8203 f16", "log_softmax 7x8200 bf16", "log_softmax 5x8193", "softmax 7x8196", "softmax 1x8209 bf16",
        "log_softmax 1x8195 f16",
    ],
    # A block's last run and behind it, blocks of few, one run alone; odd lengths and even ones.
    "cuda.thread_per_run": [
        "softmax 131x49 f16", "log_softmax 128x17 bf16", "softmax 260x90 bf16", "softmax 3x9 f16",
        "log_softmax 1x95 f16",
    ],
}  # fmt: skip
emulation = pytest.mark.skipif(not emulated.available(), reason="no compiler to emulate with")


def results(algorithm: Any, text: str, x: np.ndarray) -> Any:
    """(problem, config, y) of each config, its threads in either order."""
    problem: Any = registry.parse(text)
    assert algorithm.refusal(problem, SMALL) is None
    for number, config in enumerate(algorithm.configs(problem, SMALL)):
        y = np.full(problem.y_shape, 7, problem.y_dtype)
        emulated.run(algorithm.launch(problem, config, SMALL), {"x": x, "y": y}, backwards=number % 2 == 1)
        yield problem, config, y


@emulation
@pytest.mark.parametrize(("identifier", "text"), [(name, text) for name, texts in PROBLEMS.items() for text in texts])
def test_every_config(identifier: str, text: str) -> None:
    given: Any = registry.parse(text)
    inputs = given.sample(np.random.default_rng(0), False)
    expected = given.reference(inputs)
    for problem, config, y in results(registry.get(identifier, "softmax"), text, np.ascontiguousarray(inputs.x)):
        verdict = compare(y, expected[0], expected[1], problem.y_dtype)
        assert verdict, f"{config}: {verdict.message}"


@emulation
@pytest.mark.parametrize("log", [False, True])
@pytest.mark.parametrize(("identifier", "length"), [("cuda.ring", 8205), ("cuda.thread_per_run", 41)])
def test_what_is_no_number(identifier: str, length: int, log: bool) -> None:
    """As cuda.block_reduction: a NaN or +infinity makes NaN of its run, as does nothing but -infinity."""
    text = f"{'log_' * log}softmax 6x{length} f16"
    x = np.random.default_rng(0).standard_normal((6, length)).astype(np.float16)
    x[0, 3], x[1, -1], x[2], x[3, : length - 5] = np.nan, np.inf, -np.inf, -np.inf
    with np.errstate(all="ignore"):
        expected = registry.parse(text).reference(Inputs(x, None))[0]
        for _, config, y in results(registry.get(identifier, "softmax"), text, x):
            np.testing.assert_allclose(y.astype(np.float64), expected, rtol=4e-3, atol=1e-3, err_msg=str(config))


@pytest.mark.many
@pytest.mark.parametrize("architecture", ["sm_90a", "sm_100a"])
@pytest.mark.parametrize(
    ("identifier", "shape", "dtypes"),
    [("cuda.ring", "99x50001", ("f16", "bf16")), ("cuda.ring", "99x8200", ("f32", "bf16")),
     *(("cuda.thread_per_run", f"9x{length}", ("f16", "bf16")) for length in (9, 47, 63, 79, 95))],
)  # fmt: skip
def test_kernels_compile_without_spills(
    architecture: str, identifier: str, shape: str, dtypes: tuple[str, ...]
) -> None:
    algorithm: Any = registry.get(identifier, "softmax")
    for operator in ("softmax", "log_softmax"):
        for dtype in dtypes:
            problem = registry.parse(f"{operator} {shape} {dtype}")
            for config in algorithm.configs(problem, H200):
                _, used = compile_now(algorithm.source(problem, config), architecture)
                assert (used.stack_bytes, used.spill_bytes) == (0, 0), (problem, config)


@pytest.mark.parametrize("dtype", ["f32", "f16"])
def test_clusters_of_few_elements_compile_without_spills(dtype: str) -> None:
    """Of cuda.block_reduction: what blocks of a cluster exchange takes registers, too."""
    problem: Any = registry.parse(f"softmax 3x9001 {dtype}")
    algorithm: Any = registry.get("cuda.block_reduction", "softmax")
    clusters = [one for one in algorithm.configs(problem, H200) if one.cluster]
    assert clusters
    for config in clusters:
        for source in algorithm.sources(problem, config):
            _, used = compile_now(source, "sm_90a")
            assert (used.stack_bytes, used.spill_bytes) == (0, 0), config


def test_what_is_refused() -> None:
    ring, short = registry.get("cuda.ring", "softmax"), registry.get("cuda.thread_per_run", "softmax")
    old = replace(H200, architecture="sm_80")
    for algorithm, texts in (
        (ring, ("9x9000 f64", "9x8192", "9x60000", "9x9000x2 axis1", "9x120000 f16")),
        (short, ("99x49", "99x48 f16", "99x8 f16", "99x96 f16", "99x49x3 axis1 f16")),
    ):
        for text in texts:
            assert algorithm.refusal(registry.parse(f"softmax {text}"), H200) is not None, text
    assert "9.0" in str(ring.refusal(registry.parse("softmax 9x9000 f16"), old))
    assert "9.0" in str(short.refusal(registry.parse("softmax 9x49 f16"), old))


def test_shared_memory_is_what_a_gpu_has() -> None:
    """Of every config, and of all blocks that are counted on at a time."""
    algorithm = registry.get("cuda.ring", "softmax")
    for length in (8193, 20000, 40001, 57000):
        problem: Any = registry.parse(f"softmax 999x{length} f16")
        for config in algorithm.configs(problem, H200):
            blocks = cuda_ring.blocks_at_once(problem, config, H200)  # type: ignore[arg-type]
            shared = algorithm.launch(problem, config, H200).shared_bytes  # type: ignore[attr-defined]
            assert blocks * (shared + cuda_ring.RESERVED) <= H200.shared_bytes + cuda_ring.RESERVED


@pytest.mark.parametrize(
    ("text", "chosen"),
    [("softmax 200000x49 f16", "cuda.thread_per_run"), ("log_softmax 8192x30522 f16", "cuda.ring"),
     ("softmax 200000x48 f16", "cuda.block_reduction"), ("log_softmax 8192x4097 f16", "cuda.block_reduction"),
     ("softmax 16x40000 bf16", "cuda.block_reduction")],
)  # fmt: skip
def test_choice(text: str, chosen: str) -> None:
    """Runs that begin anywhere and long ones; of few long ones a cluster each."""
    assert dispatch.choose(registry.parse(text), H200).algorithm == chosen
