"""Pooling: every algorithm against PyTorch and float64, and what users may hand over."""

from __future__ import annotations

from typing import Any

import numpy as np
import pytest

import tapwise
from tapwise import arrays, registry, verify
from tapwise.cpu import jit
from tapwise.cpu.device import host
from tapwise.cpu.simd import target
from tapwise.errors import InvalidProblem
from tapwise.ops.pool import cpu as pool_cpu
from tapwise.ops.pool import cpu_kernel as pool_kernel
from tapwise.ops.pool import reference
from tapwise.ops.pool.problem import PoolProblem
from tapwise.problem import Inputs

IDENTIFIERS = [name for name in registry.ALGORITHMS["pool"] if name.startswith("cpu.")]
PROBLEMS = [
    "maxpool n2 c3 h13 w17 r3 s3 stride2 pad1",
    "maxpool c5 h9 w9 r2 s2 ceil",
    "maxpool n2 c5 h20 w33 r3 s2 stride1x4 pad1x0",
    "maxpool c2 h15 w40 r3 s3 stride3x2 dilation1x2 pad0:1x2:0",
    "maxpool c7 h30 w31 r2 s3 stride3x2 pad0x1 dilation2x1 ceil",
    "maxpool c3 h64 w70 r7 s5 stride4 pad3x2",
    "maxpool c1 h1 w40 r1 s5 stride1x3 pad0x4:1 ceil",
    "avgpool n2 c3 h13 w17 r3 s3 stride2 pad1",
    "avgpool c3 h14 w17 r3 s3 stride2 pad1 ceil exclude_pad",
    "avgpool c3 h14 w17 r3 s3 stride2 pad1 ceil",
    "avgpool c9 h7 w7 r7 s7",
    "avgpool c4 h11 w12 r2 s3 stride1 dilation2 pad1 exclude_pad",
    "avgpool c2 h19 w23 r4 s4 stride2x3 pad1:2x0:3 divisor7",
]


# 16 bits in turn.
CASES = [
    f"{text} {dtype} {layout}"
    for number, text in enumerate(PROBLEMS)
    for layout in ("nchw", "nhwc")
    for dtype in ("f32", "f64", ("f16", "bf16")[(number + (layout == "nhwc")) % 2])
]


@pytest.mark.many
@pytest.mark.parametrize("text", CASES)
@pytest.mark.parametrize("identifier", IDENTIFIERS)
def test_against_float64(identifier: str, text: str) -> None:
    problem = PoolProblem.parse(text)
    assert registry.get(identifier, "pool").refusal(problem, host()) is None
    verdict = verify.check(problem, identifier)
    assert verdict, verdict.message


@pytest.mark.parametrize("ceil", [False, True])
@pytest.mark.parametrize(
    ("shape", "kernel", "stride", "padding", "dilation"),
    [
        ((2, 3, 13, 17), 3, 2, 1, 1),
        ((1, 4, 9, 9), 2, None, 0, 1),
        ((3, 20, 33), (3, 2), (1, 4), 1, 1),
        ((1, 2, 15, 40), 3, 3, 1, 2),
        ((3, 1, 8, 8), 5, 1, 2, 1),
        ((1, 1, 64, 70), 7, 4, 3, 1),
    ],
)
@pytest.mark.parametrize("identifier", IDENTIFIERS)
def test_against_torch(
    identifier: str, shape: tuple[int, ...], kernel: Any, stride: Any, padding: Any, dilation: int, ceil: bool
) -> None:
    torch = pytest.importorskip("torch")
    functional = torch.nn.functional
    x = torch.randn(shape, generator=torch.Generator().manual_seed(0))
    wanted = functional.max_pool2d(x, kernel, stride, padding, dilation, ceil)
    torch.testing.assert_close(
        tapwise.max_pool2d(x, kernel, stride, padding, dilation, ceil, algorithm=identifier), wanted, rtol=0, atol=0
    )
    if dilation == 1:
        for include in (True, False):
            for divisor in (None, 3):
                y = tapwise.avg_pool2d(x, kernel, stride, padding, ceil, include, divisor, algorithm=identifier)
                torch.testing.assert_close(y, functional.avg_pool2d(x, kernel, stride, padding, ceil, include, divisor))


def test_positions_are_torchs() -> None:
    torch = pytest.importorskip("torch")
    x = torch.randint(0, 4, (2, 3, 13, 18)).float()
    x[0, 0, 4, 4], x[0, 1], x[0, 2, 3, 5] = float("nan"), -float("inf"), float("inf")
    # Of several NaN in a window the last is the one.
    x[1, 1, 5:8, 3:9] = float("nan")
    for window in ((3, 2, 1, 1), (2, 2, 0, 1), (3, 1, 1, 2)):
        wanted = torch.nn.functional.max_pool2d(x, *window, return_indices=True)
        found = tapwise.max_pool2d(x, *window, return_indices=True)
        for one, other in zip(found, wanted, strict=True):
            torch.testing.assert_close(one, other, rtol=0, atol=0, equal_nan=True)
        kernel, stride, padding, dilation = window
        steps = (kernel,) * 2, (stride,) * 2, ((padding, padding),) * 2, (dilation,) * 2
        output = tuple(wanted[1].shape[2:])
        assert np.array_equal(reference.indices(x.numpy(), output, *steps), wanted[1].numpy())


@pytest.mark.parametrize("layout", ["nchw", "nhwc"])
@pytest.mark.parametrize("identifier", IDENTIFIERS)
def test_nan_and_infinity(identifier: str, layout: str) -> None:
    x = np.random.default_rng(0).standard_normal((1, 9, 12, 23), dtype=np.float32)
    x[0, 1, 5, 7], x[0, 2], x[0, 3, 2, 2] = np.nan, -np.inf, np.inf
    x = arrays.dense(x, "nhwc") if layout == "nhwc" else x
    for op, call in (("max", tapwise.max_pool2d), ("avg", tapwise.avg_pool2d)):
        problem = PoolProblem.parse(f"{op}pool c9 h12 w23 r3 s3 stride2 pad1")
        wanted, bound = problem.reference(Inputs(x))
        assert verify.compare(call(x, 3, 2, 1, algorithm=identifier), wanted, bound)


def test_what_users_hand_over() -> None:
    x = np.random.default_rng(0).standard_normal((2, 6, 11, 14), dtype=np.float32)
    wanted = tapwise.max_pool2d(x, 3, 2, 1)
    frozen = x.copy()
    frozen.flags.writeable = False
    for other in (frozen, x[::-1].copy()[::-1], x.astype(">f4"), np.asfortranarray(x)):
        assert np.array_equal(tapwise.max_pool2d(other, 3, 2, 1), wanted)
    last = tapwise.max_pool2d(arrays.dense(x, "nhwc"), 3, 2, 1)
    assert arrays.layout_of(last) == "nhwc" and np.array_equal(last, wanted)
    assert np.array_equal(tapwise.max_pool2d(x[0], 3, 2, 1), wanted[0])
    out = np.empty(wanted.shape, np.float32)
    assert tapwise.max_pool2d(x, 3, 2, 1, out=out) is out and np.array_equal(out, wanted)
    assert tapwise.avg_pool2d(x[:0], 2).shape == (0, 6, 5, 7)
    assert tapwise.max_pool2d(x[:, :0], 2).shape == (2, 0, 5, 7)
    assert np.array_equal(tapwise.max_pool2d(x, 3, 1, ((1, 0), (0, 2)))[:, :, 1:, :-2], tapwise.max_pool2d(x, 3, 1))
    row = x[:, :, 0]
    assert np.array_equal(
        tapwise.max_pool1d(row, 3, 2, 1), tapwise.max_pool2d(x[:, :, :1], (1, 3), (1, 2), (0, 1))[:, :, 0]
    )
    assert np.allclose(tapwise.avg_pool1d(row[0], 2), (row[0, :, ::2] + row[0, :, 1::2]) / 2)


@pytest.mark.parametrize(
    ("options", "word"),
    [
        ({"kernel_size": 0}, "kernel_size"),
        ({"kernel_size": 3, "stride": 0}, "stride"),
        ({"kernel_size": 3, "padding": 3}, "padding"),
        ({"kernel_size": 3, "padding": ((0, 0), (0, 5)), "dilation": 2}, "padding"),
        ({"kernel_size": 9}, "larger than the padded input"),
        ({"kernel_size": (2, 2, 2)}, "kernel_size"),
        ({"kernel_size": 2, "out": np.empty((1, 2, 3, 3))}, "out has dtype"),
        ({"kernel_size": 2, "algorithm": "cpu.fast"}, "cpu.fast"),
    ],
)
def test_bad_arguments_are_named(options: dict[str, Any], word: str) -> None:
    with pytest.raises(InvalidProblem, match=word):
        tapwise.max_pool2d(np.ones((1, 2, 6, 6), np.float32), **options)
    with pytest.raises(InvalidProblem, match="divisor_override"):
        tapwise.avg_pool2d(np.ones((1, 2, 6, 6), np.float32), 2, divisor_override=0)


@pytest.mark.parametrize("text", [*PROBLEMS, "maxpool n3 c4 w20 s3 stride2 indices f16 nhwc"])
def test_strings(text: str) -> None:
    problem = PoolProblem.parse(text)
    assert PoolProblem.parse(str(problem)) == problem
    assert registry.parse(str(problem)) == problem


@pytest.mark.parametrize("text", ["maxpool c3 h4", "maxpool c3 h4 w4 r2 s2 k3", "avgpool c3 h4 w4 r0 s2"])
def test_bad_strings(text: str) -> None:
    with pytest.raises(InvalidProblem, match="problem"):
        PoolProblem.parse(text)


@pytest.mark.parametrize("name", ["avx512", "avx2", "neon"])
@pytest.mark.parametrize("layout", ["nchw", "nhwc"])
def test_every_target_gets_vector_code(name: str, layout: str) -> None:
    kernel = pool_kernel.generate(
        target(name), dtype="f32", storage="f32", layout=layout, op="max", r=3, s=3, stride=2, dilation=1
    )
    assert {"avx512": "%zmm", "avx2": "%ymm", "neon": ".4s"}[name] in jit.assembly(kernel)


def test_plans_do_not_grow_with_the_row() -> None:
    algorithm, device = registry.get("cpu.simd", "pool"), host()
    for text in ("maxpool c1 w268435456 s3 stride1 pad1", "avgpool c1 w268435456 s3 stride1 pad1 exclude_pad"):
        problem = PoolProblem.parse(text).canonical()
        plan = algorithm.plan(problem, algorithm.configs(problem, device)[0], device)
        assert 0 < sum(table.nbytes for table in vars(plan)["_tables"]) < 1e4
    rows, _, skip = pool_cpu._divisors(PoolProblem.parse("avgpool c1 h1 w2147483648 r1 s3 stride1 pad0x1"), 1)
    assert len(rows) < 100 and skip > 2**31 - 100


@pytest.mark.parametrize("layout", ["nchw", "nhwc"])
@pytest.mark.parametrize(
    "text",
    [
        "avgpool c3 h200 w300 r5 s5 stride1 pad2 exclude_pad",
        "avgpool c2 h190 w700 r3 s4 stride2x3 pad1:2x0:3 ceil",
        "avgpool c2 h3 w500 r3 s16 stride1 pad2x15 exclude_pad",
    ],
)
@pytest.mark.parametrize("identifier", IDENTIFIERS)
def test_divisors_of_long_rows(identifier: str, text: str, layout: str) -> None:
    verdict = verify.check(PoolProblem.parse(f"{text} {layout}"), identifier)
    assert verdict, verdict.message


@pytest.mark.parametrize("count_include_pad", [True, False])
def test_counts_are_what_windows_see(count_include_pad: bool) -> None:
    random = np.random.default_rng(0)
    for _ in range(200):
        size, kernel, stride, dilation = (int(random.integers(1, most)) for most in (12, 6, 5, 4))
        before, after = (int(random.integers(0, (kernel - 1) * dilation + 1)) for _ in range(2))
        words = f"avgpool c1 w{size} s{kernel} stride{stride} pad{before}:{after} dilation{dilation} ceil"
        try:
            problem = PoolProblem.parse(words + ("" if count_include_pad else " exclude_pad"))
        except InvalidProblem:
            continue
        low, high = (-before, size + after) if count_include_pad else (0, size)
        wanted = [
            sum(low <= p * stride - before + tap * dilation < high for tap in range(kernel))
            for p in range(problem.output[0])
        ]
        assert problem.counts(0).tolist() == wanted
        first, end = problem.whole(0)
        assert wanted[first:end] == [kernel] * (end - first)


def test_windows_far_larger_than_the_image() -> None:
    x = np.arange(16, dtype=np.float32).reshape(1, 1, 4, 4)
    most = 2**31 - 1
    padding = ((2**30, 2**30),) * 2
    values, places = tapwise.max_pool2d(x, 2**31 + 4, 1, padding, return_indices=True)
    assert values.tolist() == [[[[15.0]]]] and places.tolist() == [[[[15]]]]
    assert tapwise.max_pool2d(x, 2, 2**31 - 1, most, 2**31 - 1).shape == (1, 1, 2, 2)


def test_positions_of_windows_that_see_nothing() -> None:
    """PyTorch gives positions outside of the plane there."""
    values, places = tapwise.max_pool2d(np.ones((1, 1, 1, 1), np.float32), 2, 1, 1, 2, return_indices=True)
    assert values.tolist() == [[[[-np.inf]]]] and places.tolist() == [[[[-1]]]]


@pytest.mark.parametrize(
    ("size", "kernel", "stride", "padding"), [(2, 5, 2, 1), (2, 3, 2, 0), (1, 3, 5, 0), (1, 7, 6, 2)]
)
def test_ceil_mode_of_windows_larger_than_the_image(size: int, kernel: int, stride: int, padding: int) -> None:
    torch = pytest.importorskip("torch")
    x = np.arange(3 * size * size, dtype=np.float32).reshape(1, 3, size, size)
    for layout in ("nchw", "nhwc"):
        given = arrays.dense(x, layout)
        for identifier in IDENTIFIERS:
            for name in ("max_pool2d", "avg_pool2d"):
                wanted = getattr(torch.nn.functional, name)(
                    torch.from_numpy(x), kernel, stride, padding, ceil_mode=True
                ).numpy()
                found = getattr(tapwise, name)(given, kernel, stride, padding, ceil_mode=True, algorithm=identifier)
                np.testing.assert_allclose(found, wanted, rtol=1e-6)
    with pytest.raises(InvalidProblem, match="larger than the padded input"):
        tapwise.max_pool2d(x, kernel + stride + 2 * size, stride, padding, ceil_mode=True)
