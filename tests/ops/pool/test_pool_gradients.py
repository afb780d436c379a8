"""Gradients of pooling: every algorithm against PyTorch and float64, on a GPU's kernels by emulation."""

from __future__ import annotations

from dataclasses import replace
from typing import Any

import numpy as np
import pytest

import emulated
import tapwise
from tapwise import arrays, registry, verify
from tapwise.cpu.device import host
from tapwise.cuda.jit import compile as compiler
from tapwise.cuda.jit.device import H200
from tapwise.cuda.types import WIDE
from tapwise.errors import InvalidProblem
from tapwise.ops.pool import reference
from tapwise.ops.pool.problem import PoolProblem

OPERATOR = "pool_dgrad"
PROBLEMS = [
    "maxpool n2 c3 h13 w17 r3 s3 stride2 pad1",
    "maxpool n2 c5 h9 w9 r2 s2 ceil",
    "maxpool c6 h20 w33 r3 s2 stride1x4 pad1x0",
    "maxpool c2 h15 w40 r3 s3 stride3x2 dilation1x2 pad0:1x2:0",
    "maxpool c4 h7 w31 r2 s3 stride3x2 pad0x1 dilation2x1 ceil",
    "maxpool c8 h11 w10 r5 s5 stride1 pad2",
    "maxpool c1 h9 w9 r1 s1 stride2",
    "avgpool n2 c3 h13 w17 r3 s3 stride2 pad1",
    "avgpool n2 c8 h14 w17 r3 s3 stride2 pad1 ceil exclude_pad",
    "avgpool c3 h14 w17 r3 s3 stride2 pad1 ceil",
    "avgpool c9 h7 w7 r7 s7",
    "avgpool c4 h11 w12 r2 s3 stride1 dilation2 pad1 exclude_pad",
    "avgpool c2 h19 w40 r4 s4 stride2x3 pad1:2x0:3 divisor7",
    "avgpool c6 h9 w40 r3 s3 stride1 pad1",
]


# A kernel is compiled for each, which takes a second.
EMULATED = [
    ("cuda.tiles", "maxpool n2 c8 h13 w17 r3 s3 stride2 pad1 f16 nhwc dgrad"),
    ("cuda.tiles", "avgpool c6 h14 w18 r3 s2 stride1 pad1:0x0:1 ceil exclude_pad bf16 dgrad"),
    ("cuda.grid_stride", "maxpool c4 h7 w31 r2 s3 stride3x2 pad0x1 dilation2x3 ceil nhwc f64 dgrad"),
    ("cuda.grid_stride", "avgpool c2 h11 w12 r2 s3 stride1x2 dilation2 pad1 exclude_pad dgrad"),
]


def taking() -> list[tuple[str, str]]:
    """(algorithm, problem) where it applies, in one dtype and order or another."""
    found = []
    for algorithm in registry.of_backend("cpu", OPERATOR):
        for number, text in enumerate(PROBLEMS):
            for layout in ("nchw", "nhwc"):
                dtype = ("f32", "bf16", "f64", "f16")[(number + 2 * (layout == "nhwc")) % 4]
                name = f"{text} {dtype} {layout} dgrad"
                if algorithm.refusal(PoolProblem.parse(name), host()) is None:
                    found.append((algorithm.id, name))
    return found


@pytest.mark.many
@pytest.mark.parametrize(("identifier", "text"), taking())
def test_against_float64(identifier: str, text: str) -> None:
    problem = PoolProblem.parse(text)
    for config in registry.get(identifier, OPERATOR).configs(problem, host()):
        verdict = verify.check(problem, identifier, config)
        assert verdict, verdict.message
    if problem.op == "max":
        assert verify.check(problem, identifier, integers=True)


def laid(problem: PoolProblem, array: np.ndarray) -> np.ndarray:
    return np.ascontiguousarray(np.moveaxis(array, 1, -1) if problem.layout == "nhwc" else array)


@pytest.mark.skipif(not emulated.available(), reason="no compiler to emulate with")
@pytest.mark.parametrize(("identifier", "text"), EMULATED)
def test_kernels_by_emulation(identifier: str, text: str) -> None:
    """The chosen config; places are counted in 64 bits where elements have as many."""
    problem, algorithm = PoolProblem.parse(text), registry.get(identifier, OPERATOR)
    config = min(algorithm.configs(problem, H200), key=lambda one: algorithm.predict_us(problem, one, H200))
    inputs = problem.sample(np.random.default_rng(0))
    launch = algorithm.launch(problem, config, H200)  # type: ignore[attr-defined]
    if problem.dtype == "f64":
        launch.source = replace(launch.source, text=WIDE + launch.source.text)
    y = laid(problem, np.full(problem.x_shape, np.nan, problem.x_dtype))
    given = {"x": laid(problem, inputs.x), "y": y}
    emulated.run(launch, given if inputs.w is None else {**given, "w": laid(problem, inputs.w)})
    dx = np.moveaxis(y, -1, 1) if problem.layout == "nhwc" else y
    verdict = verify.compare(dx, *problem.reference(inputs), problem.x_dtype)
    assert verdict, f"{config}: {verdict.message}"


@pytest.mark.parametrize("text", [text for name, text in EMULATED if name == "cuda.tiles"])
def test_tiles_stay_in_registers(text: str) -> None:
    problem, algorithm = PoolProblem.parse(text), registry.get("cuda.tiles", OPERATOR)
    config = min(algorithm.configs(problem, H200), key=lambda one: algorithm.predict_us(problem, one, H200))
    _, used = compiler.compile_now(algorithm.source(problem, config), "sm_90a")  # type: ignore[attr-defined]
    assert used.spill_bytes == 0


@pytest.mark.parametrize("order", ["nchw", "nhwc"])
@pytest.mark.parametrize("identifier", [name for name in registry.ALGORITHMS[OPERATOR] if name.startswith("cpu.")])
def test_against_torch(identifier: str, order: str) -> None:
    """By the positions that were found, of equals and NaN too; calls with and without a batch, and into an array."""
    torch = pytest.importorskip("torch")
    functional = torch.nn.functional
    x = torch.randint(-2, 3, (2, 6, 13, 18), generator=torch.Generator().manual_seed(0)).float()
    x[0, 0, 3, 4], x[1, 2, 9:12] = float("nan"), float("-inf")
    x = x.contiguous(memory_format=torch.channels_last) if order == "nhwc" else x
    x.requires_grad_()
    window: Any
    for window in ((3, 2, 1, 1, False), (2, None, 0, 1, True), ((3, 2), (1, 3), (1, 0), (2, 1), True)):
        y, places = functional.max_pool2d(x, *window, return_indices=True)
        dy = torch.randn(y.shape).contiguous(memory_format=torch.preserve_format)
        dy = dy.to(memory_format=torch.channels_last) if order == "nhwc" else dy
        dy[0, 1, 1, 2] = float("nan")
        (expected,) = torch.autograd.grad(y, x, dy)
        found = tapwise.max_pool2d_backward(dy, places, x.shape, *window, algorithm=identifier)
        torch.testing.assert_close(found, expected, equal_nan=True)
        assert found.is_contiguous(memory_format=torch.channels_last if order == "nhwc" else torch.contiguous_format)
        one = tapwise.max_pool2d_backward(dy[1], places[1], x.shape[1:], *window, algorithm=identifier)
        torch.testing.assert_close(one, expected[1])
    for window in ((3, 2, 1, True, False), (2, None, 0, True), ((3, 2), (1, 3), (1, 0), False, True, 5)):
        y = functional.avg_pool2d(x, *window)
        dy = torch.randn(y.shape).to(memory_format=torch.channels_last if order == "nhwc" else torch.contiguous_format)
        dy[0, 1, 1, 2] = float("nan")
        (expected,) = torch.autograd.grad(y, x, dy)
        out = torch.empty_like(dy, dtype=torch.float32).new_empty(x.shape)
        assert tapwise.avg_pool2d_backward(dy, x.shape, *window, algorithm=identifier, out=out) is out
        torch.testing.assert_close(out, expected, equal_nan=True)


def test_same_bits_for_any_number_of_threads(monkeypatch: pytest.MonkeyPatch) -> None:
    problem = PoolProblem.parse("maxpool c8 h70 w64 r3 s3 stride1 pad1 dgrad")
    dy, places, _, _, _ = problem.sample(np.random.default_rng(0))
    found = []
    for threads in ("1", "2", "3"):
        monkeypatch.setenv("TAPWISE_NUM_THREADS", threads)
        largest = tapwise.max_pool2d_backward(dy, places, problem.x_shape, 3, 1, 1)
        found.append((largest, tapwise.avg_pool2d_backward(dy, problem.x_shape, 3, 1, 1)))
    for other in found[1:]:
        assert all(np.array_equal(one, two) for one, two in zip(found[0], other, strict=True))


def test_positions_that_no_window_has_write_nothing() -> None:
    dy, places = np.ones((1, 2, 2, 2), np.float32), np.full((1, 2, 2, 2), -1)
    places[0, 0, 0, 0], places[0, 1, 1, 1] = 2**62, 15
    for algorithm in ("auto", "cpu.serial"):
        dx = tapwise.max_pool2d_backward(dy, places, (1, 2, 4, 4), 2, algorithm=algorithm)
        assert dx[0, 1, 3, 3] == 1 and dx.sum() == 1
    empty = tapwise.max_pool2d_backward(dy[:0], places[:0], (0, 2, 4, 4), 2)
    assert empty.shape == (0, 2, 4, 4)


@pytest.mark.parametrize(
    ("change", "word"),
    [
        ({"indices": np.zeros((1, 2, 2, 2), np.int32)}, "indices has dtype int32"),
        ({"indices": np.zeros((1, 2, 2, 3), np.int64)}, "indices has shape"),
        ({"dy": np.ones((1, 2, 3, 2), np.float32)}, "dy has shape"),
        ({"dy": np.ones((2, 2), np.float32)}, "dy has shape"),
        ({"input_size": (2, 4, 4)}, "input_size"),
        ({"input_size": (1, 2, -4, 4)}, "input_size"),
        ({"input_size": (1, 2, 2**40, 2**40)}, "input_size"),
        ({"kernel_size": 9}, "kernel"),
    ],
)
def test_bad_arguments_are_named(change: dict[str, Any], word: str) -> None:
    good = {"dy": np.ones((1, 2, 2, 2), np.float32), "indices": np.zeros((1, 2, 2, 2), np.int64)}
    given: dict[str, Any] = {**good, "input_size": (1, 2, 4, 4), "kernel_size": 2, **change}
    with pytest.raises(InvalidProblem, match=word):
        tapwise.max_pool2d_backward(**given)


def test_random_positions_are_seen() -> None:
    problem = PoolProblem.parse("maxpool n2 c3 h9 w11 r3 s2 stride2 pad2x1 dilation3x2 dgrad")
    places = problem.random_positions(np.random.default_rng(0))
    plane = np.arange(99.0).reshape(1, 1, 9, 11)
    seen = reference.windows(plane, problem.output, *problem.window, -1.0)
    assert np.all((seen == places[..., None]).any(-1)) and len(np.unique(places)) > 20


def test_orders_of_arrays_are_those_of_dy() -> None:
    rng = np.random.default_rng(0)
    dy = rng.standard_normal((2, 6, 5, 4), dtype=np.float32)
    wanted = tapwise.avg_pool2d_backward(dy, (2, 6, 10, 9), 2)
    for other in (dy[::-1][::-1], arrays.dense(dy, "nhwc"), dy.astype(">f4"), np.asfortranarray(dy)):
        dx = tapwise.avg_pool2d_backward(other, (2, 6, 10, 9), 2)
        np.testing.assert_array_equal(dx, wanted)
    assert arrays.is_dense(tapwise.avg_pool2d_backward(arrays.dense(dy, "nhwc"), (2, 6, 10, 9), 2), "nhwc")
