"""Gradients of softmax and log_softmax: every algorithm against float64, a GPU's kernels by emulation, and calls."""

from __future__ import annotations

from typing import Any

import numpy as np
import pytest

import emulated
import tapwise
from tapwise import registry, verify
from tapwise.cuda.block_reduction import Config
from tapwise.cuda.jit.device import H200
from tapwise.errors import InvalidProblem
from tapwise.ops.softmax.problem import SoftmaxProblem

OPERATOR = "softmax_dgrad"
PROBLEMS = [
    "softmax 7", "softmax 33x19", "log_softmax 3x5x7x11", "softmax 2x40000", "log_softmax 1500x3", "softmax 4x1x1",
    "log_softmax 70001", "softmax 70001", "softmax 6x600x37 axis1", "log_softmax 5x9x130 axis0",
]  # fmt: skip
# Loads of eight, rows of odd lengths, rows that registers do not hold, parts, columns; with the first config, or this.
EMULATED = [
    ("softmax 5x1000 f16", None), ("softmax 3x4104 bf16", Config(1, 64, 4, 1, vector=8)),
    ("log_softmax 1x9004 f16", None), ("softmax 3x40x33 axis1 f64", None), ("softmax 9x197 f16", None),
    ("log_softmax 5x43", None),
]  # fmt: skip
CPU = [name for name in registry.ALGORITHMS[OPERATOR] if name.startswith("cpu.")]


@pytest.mark.many
@pytest.mark.parametrize("dtype", ["f32", "f64", "bf16"])
@pytest.mark.parametrize("text", PROBLEMS)
@pytest.mark.parametrize("identifier", CPU)
def test_against_float64(identifier: str, text: str, dtype: str) -> None:
    verdict = verify.check(SoftmaxProblem.parse(f"{text} {dtype} dgrad"), identifier)
    assert verdict, verdict.message


@pytest.mark.skipif(not emulated.available(), reason="no compiler to emulate with")
@pytest.mark.parametrize(("text", "other"), EMULATED)
def test_kernels_by_emulation(text: str, other: Config | None) -> None:
    problem = SoftmaxProblem.parse(f"{text} dgrad")
    algorithm: Any = registry.get("cuda.block_reduction", OPERATOR)
    config = other or algorithm.configs(problem, H200)[0]
    assert config.vector == {1000: 8, 4104: 8, 9004: 4, 40: 1, 197: 8, 43: 4}[problem.length]
    inputs, workspace = problem.sample(np.random.default_rng(0)), np.full(1 << 14, 0xFF, np.uint8)
    dx = np.full(problem.shape, np.nan, problem.x_dtype)
    assert algorithm.workspace_bytes(problem, config, H200) <= len(workspace)
    for launch in algorithm.launches(problem, config):
        emulated.run(launch, {"x": inputs.x, "w": inputs.w, "y": dx, "workspace": workspace})
    verdict = verify.compare(dx, *problem.reference(inputs), problem.x_dtype)
    assert verdict, f"{config}: {verdict.message}"


@pytest.mark.parametrize("log", [False, True])
@pytest.mark.parametrize("identifier", CPU)
def test_against_torch(identifier: str, log: bool) -> None:
    """Every axis and order of memory, with NaN and infinities."""
    torch = pytest.importorskip("torch")
    forward = torch.log_softmax if log else torch.softmax
    backward: Any = tapwise.log_softmax_backward if log else tapwise.softmax_backward
    x = torch.randn(6, 5, 9, generator=torch.Generator().manual_seed(0))
    x[0, 1, 2], x[2, 3, 4], x[4] = float("nan"), float("inf"), float("-inf")
    dy = torch.randn(6, 5, 9)
    dy[3, 2, 1] = float("nan")
    for axis in (-1, 0, 1):
        leaf = x.clone().requires_grad_()
        y = forward(leaf, axis)
        (expected,) = torch.autograd.grad(y, leaf, dy)
        y = y.detach()
        for one, other in ((dy, y), (dy.permute(2, 0, 1).contiguous().permute(1, 2, 0), y)):
            found = backward(one, other, axis, algorithm=identifier)
            torch.testing.assert_close(found, expected, equal_nan=True)
            assert found.stride() == one.stride()
        out = torch.empty_like(dy)
        assert backward(dy, y, dim=axis, algorithm=identifier, out=out) is out
        torch.testing.assert_close(out, expected, equal_nan=True)


def test_same_bits_for_any_number_of_threads(monkeypatch: pytest.MonkeyPatch) -> None:
    rng = np.random.default_rng(0)
    dy, y = (rng.standard_normal((3, 123_457), dtype=np.float32) for _ in "ab")
    found = []
    for threads in ("1", "2", "3"):
        monkeypatch.setenv("TAPWISE_NUM_THREADS", threads)
        found.append(tapwise.softmax_backward(dy, y))
    assert np.array_equal(found[0], found[1]) and np.array_equal(found[0], found[2])


def test_scalars_and_nothing() -> None:
    one = np.full((), 3.0, np.float32)
    assert tapwise.softmax_backward(one, np.ones((), np.float32)) == 0
    nothing = np.zeros((3, 0, 2), np.float32)
    assert tapwise.log_softmax_backward(nothing, nothing, 1).shape == nothing.shape


@pytest.mark.parametrize(
    ("change", "word"),
    [
        ({"y": np.ones((3, 5), np.float32)}, "y has shape"),
        ({"y": np.ones((3, 4))}, "y has dtype float64"),
        ({"dy": np.ones((3, 4), int)}, "dy has dtype int64"),
        ({"axis": 2}, "axis=2"),
        ({"axis": None}, "axis=None"),
        ({"algorithm": "cpu.fast"}, "cpu.fast"),
    ],
)
def test_bad_arguments_are_named(change: dict[str, Any], word: str) -> None:
    given: dict[str, Any] = {"dy": np.ones((3, 4), np.float32), "y": np.ones((3, 4), np.float32), **change}
    with pytest.raises(InvalidProblem, match=word):
        tapwise.softmax_backward(**given)


def test_out_overlaps_no_input() -> None:
    dy, y = np.ones((3, 4), np.float32), np.ones((3, 4), np.float32)
    for name, wrong in (("dy", dy), ("y", y)):
        with pytest.raises(InvalidProblem, match=f"out overlaps {name}"):
            tapwise.softmax_backward(dy, y, out=wrong)


@pytest.mark.parametrize("text", ["softmax 1024x1000 dgrad", "log_softmax 8x64x49 axis1 f64 dgrad"])
def test_strings(text: str) -> None:
    problem = SoftmaxProblem.parse(text)
    assert str(problem) == text and problem.direction == "dgrad"
    assert problem.bytes == 3 * problem.itemsize * problem.x_shape[0] * int(np.prod(problem.x_shape[1:]))
