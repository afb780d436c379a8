"""The vector layer on this machine: rows of every length, shuffles, and the functions behind activations."""

from __future__ import annotations

import math
from collections.abc import Callable
from typing import Any

import ml_dtypes
import numpy as np
import pytest

from tapwise.activation import ACTIVATIONS
from tapwise.cpu import activations, jit
from tapwise.cpu.copies import deinterleave, emit_strided_copy, interleave
from tapwise.cpu.epilogue import Epilogue
from tapwise.cpu.simd import INT, Int, Kernel, Ptr, runnable, target
from tapwise.cpu.transposes import emit_to_pixels, emit_to_planes
from tapwise.errors import InvalidProblem
from tapwise.integers import ceil_div
from tapwise.ops.conv.problem import ConvProblem
from tapwise.ops.conv.winograd.tiles import axis_of, tilings
from tapwise.ops.conv.winograd.transforms import POINTS, Axis, transform, transposed, transposed_phases

KIND: dict[str, Any] = {"f32": np.float32, "f64": np.float64}


def build(
    dtype: str,
    body: Callable[[Kernel, Ptr, Ptr, Int], None],
    name: str = "host",
    before: Callable[[Kernel], None] = lambda k: None,
) -> Callable[[np.ndarray, np.ndarray, int], None]:
    """A kernel body(k, x, y, n) as a function of arrays x and y, for a target; what it calls comes `before`."""
    k = Kernel(target(name), dtype)
    before(k)
    with k.function("task", public=True, args="i64", worker=INT) as (args, _):
        x, y = (k.pointer(k.load_int(args + i), dtype) for i in (0, 1))
        body(k, x, y, k.load_int(args + 2))
    module, machine = jit.lower(k)
    library = jit.Library(bytes(machine.emit_object(module)), target(name))
    function = library.function("task")

    def call(x: np.ndarray, y: np.ndarray, n: int, keep: Any = library) -> None:
        arguments = np.array([x.ctypes.data, y.ctypes.data, n], np.int64)
        function(arguments.ctypes.data, 0)

    return call


def elementwise(dtype: str, function: Callable[[Kernel, Any], Any]) -> Callable[[np.ndarray], np.ndarray]:
    call = build(
        dtype, lambda k, x, y, n: k.rows(n, lambda i, lanes: k.store(y + i, function(k, k.load(x + i, lanes))))
    )

    def apply(x: np.ndarray) -> np.ndarray:
        y = np.full_like(x, np.nan)
        call(x, y, x.size)
        return y

    return apply


@pytest.mark.parametrize("together", [1, 4])
@pytest.mark.parametrize("dtype", ["f32", "f64"])
def test_rows_touch_every_element_and_no_other(dtype: str, together: int) -> None:
    def copied(k: Kernel, x: Ptr, y: Ptr, n: Int) -> None:
        k.rows(n, lambda i, lanes: k.store(y + i, k.load(x + i, lanes)), together=together)

    call = build(dtype, copied)
    for n in range(150):
        x, y = np.arange(160, dtype=KIND[dtype]), np.full(160, -1, KIND[dtype])
        call(x, y, n)
        assert np.array_equal(y[:n], x[:n]) and (y[n:] == -1).all()


def narrowed(name: str, exact: bool, x: np.ndarray) -> np.ndarray:
    """float32 stored as bfloat16, in whole vectors and one by one."""
    found = []
    for widths in (None, [1]):

        def body(k: Kernel, x: Ptr, y: Ptr, n: Int, widths: Any = widths) -> None:
            k.rows(n, lambda i, lanes: k.store(y.to("bf16") + i, k.load(x + i, lanes), exact=exact), widths)

        y = np.zeros(len(x), ml_dtypes.bfloat16)
        build("f32", body, name)(x, y, len(x))
        found.append(y)
    assert np.array_equal(*(y.view(np.uint16) for y in found))
    return found[0]


@pytest.mark.parametrize("name", runnable())
def test_bfloat16_in_memory(name: str) -> None:
    """Every bfloat16 widened and back; float32 rounded to nearest even."""
    every = np.arange(1 << 16, dtype=np.uint16)

    def widen(k: Kernel, x: Ptr, y: Ptr, n: Int) -> None:
        k.rows(n, lambda i, lanes: k.store(y + i, k.load(x.to("bf16") + i, lanes)))

    wide = np.zeros(len(every), np.float32)
    build("f32", widen, name)(every, wide, len(every))
    assert np.array_equal(wide.view(np.uint32), every.astype(np.uint32) << 16)
    assert np.array_equal(narrowed(name, True, wide).view(np.uint16), every)
    # Ties, what is beside them, what becomes infinite; NaN of the lower half alone.
    rest = np.array([0, 1, 0x7FFF, 0x8000, 0x8001, 0xFFFF], np.uint32)
    x = (every.astype(np.uint32)[::3, None] << 16 | rest).ravel().view(np.float32)
    with np.errstate(all="ignore"):
        expected, tiny = x.astype(ml_dtypes.bfloat16), np.abs(x) < np.finfo(np.float32).smallest_normal
    y = narrowed(name, False, x)
    assert np.array_equal(np.isnan(y), np.isnan(x)) and np.isnan(x).any()
    same = (y == expected) | np.isnan(x)
    assert same[~tiny].all()
    # The instruction of AVX-512 makes zeros of subnormal numbers.
    assert (same | (y == 0))[tiny].all() if target(name).rounds_bf16 else same.all()


@pytest.mark.parametrize("ways", [2, 4])
def test_deinterleave_and_back(ways: int) -> None:
    lanes = target().lanes("f32")

    def split(k: Kernel, x: Ptr, y: Ptr, n: Int) -> None:
        for index, part in enumerate(deinterleave(k, x, ways, ways, lanes)):
            k.store(y + index * lanes, part)

    def there_and_back(k: Kernel, x: Ptr, y: Ptr, n: Int) -> None:
        for index, part in enumerate(interleave(k, deinterleave(k, x, ways, ways, lanes))):
            k.store(y + index * lanes, part)

    x, y = np.arange(ways * lanes, dtype=np.float32), np.zeros(ways * lanes, np.float32)
    build("f32", split)(x, y, 0)
    assert np.array_equal(y.reshape(ways, lanes), x.reshape(lanes, ways).T)
    build("f32", there_and_back)(x, y, 0)
    assert np.array_equal(y, x)


@pytest.mark.parametrize("stride", [1, 2, 3, 4, 5])
def test_strided_copy_stays_inside(stride: int) -> None:
    call = build("f32", lambda k, x, y, n: emit_strided_copy(k, x, y, n, k.integer(0) + Int(k, n.ir) * 0 + stride))
    for n in range(1, 40):
        # The last element is the last of its array: a read beyond it would show under a checker, a wrong one here.
        x, y = np.arange((n - 1) * stride + 1, dtype=np.float32), np.full(n + 1, -1, np.float32)
        call(x, y, n)
        assert np.array_equal(y[:n], x[::stride]) and y[n] == -1


def points(dtype: str, low: float, high: float) -> np.ndarray:
    return np.linspace(low, high, 200_003).astype(KIND[dtype])


@pytest.mark.parametrize(("dtype", "low", "high"), [("f32", -87.0, 88.7), ("f64", -708.0, 709.7)])
def test_exp_within_2_ulp(dtype: str, low: float, high: float) -> None:
    x = points(dtype, low, high)
    exact = np.exp(x.astype(np.longdouble))
    ulp = np.spacing(exact.astype(KIND[dtype])).astype(np.longdouble)
    assert float(np.max(np.abs(elementwise(dtype, activations.exp)(x) - exact) / ulp)) <= 2.0


@pytest.mark.parametrize("dtype", ["f32", "f64"])
def test_exp_at_the_ends(dtype: str) -> None:
    tiny, huge = {"f32": (-100.0, 100.0), "f64": (-740.0, 800.0)}[dtype]
    x = np.array([0.0, -0.0, np.nan, np.inf, -np.inf, huge, 10 * tiny, tiny], KIND[dtype])
    with np.errstate(all="ignore"):
        y = elementwise(dtype, activations.exp)(x)
        wanted = np.exp(x.astype(np.longdouble)).astype(KIND[dtype])
    assert np.array_equal(y[:7], wanted[:7], equal_nan=True)
    assert abs(y[7] - wanted[7]) <= 2 * np.finfo(KIND[dtype]).smallest_subnormal and y[7] > 0  # a subnormal number


@pytest.mark.parametrize("dtype", ["f32", "f64"])
def test_activations_against_their_definitions(dtype: str) -> None:
    u = float(np.finfo(KIND[dtype]).eps) / 2
    x = np.concatenate([points(dtype, -30, 30)[::20], points(dtype, -1e-4, 1e-4)[::200]])
    exact = x.astype(np.float64) if dtype == "f32" else x.astype(np.longdouble)
    erf = np.array([math.erf(float(value) / math.sqrt(2)) for value in x])
    erfc = np.array([math.erfc(-float(value) / math.sqrt(2)) for value in x])
    hard = np.minimum(np.maximum(exact + 3, 0), 6) / 6
    cubic = math.sqrt(2 / math.pi) * (exact + 0.044715 * exact**3)
    definitions = {
        "sigmoid": (1 / (1 + np.exp(-exact)), 1.0),
        "silu": (exact / (1 + np.exp(-exact)), 1.0),
        "tanh": (np.tanh(exact), 1.0),
        "gelu": (exact * (erfc if dtype == "f64" else 1 + erf) / 2, 0.0),
        "relu": (np.maximum(exact, 0), 1.0),
        "relu6": (np.clip(exact, 0, 6), 1.0),
        "hardsigmoid": (hard, 1.0),
        "hardswish": (exact * hard, 1.0),
        "leaky_relu": (np.where(exact > 0, exact, exact * 0.01), 1.0),
        "leaky_relu-2.5": (np.where(exact > 0, exact, exact * -2.5), 1.0),
        "gelu_tanh": (exact * (1 + np.tanh(cubic)) / 2, 0.0),
    }
    for name, (wanted, relative) in definitions.items():
        y = elementwise(dtype, lambda k, v, name=name: activations.activate(k, name, v))(x)  # type: ignore[misc]
        # gelu's factor 1 + erf cancels for large negative x, so its error counts against x; the others' against y.
        size = np.abs(wanted) if relative else np.abs(exact)
        worst = float(np.max(np.abs(y - wanted) / (u * size + np.finfo(KIND[dtype]).smallest_subnormal)))
        assert worst <= 24, f"{name}: {worst} u"


@pytest.mark.parametrize("name", [*ACTIVATIONS, "leaky_relu0", "leaky_relu3"])
def test_activations_keep_nan(name: str) -> None:
    x = np.array([np.nan, 1.0] * 20, np.float32)
    y = elementwise("f32", lambda k, v: activations.activate(k, name, v))(x)
    assert np.isnan(y[::2]).all() and np.isfinite(y[1::2]).all()


@pytest.mark.parametrize("name", ["sigmoid", "silu", "gelu_tanh"])
def test_vectors_activated_together_are_as_each_alone(name: str) -> None:
    x = np.linspace(-20, 20, 40).astype(np.float32)
    alone = elementwise("f32", lambda k, v: activations.activate(k, name, k.add(v, v)))(x)
    for place in range(4):

        def one_of_four(k: Kernel, v: Any, place: int = place) -> Any:
            vectors = [k.add(v, v) if number == place else v for number in range(4)]
            return activations.activate_all(k, name, vectors)[place]

        assert np.array_equal(elementwise("f32", one_of_four)(x), alone)


@pytest.mark.parametrize("stride", [1, 2, 3])
@pytest.mark.parametrize("taps", [1, 2, 3, 4, 5, 7])
@pytest.mark.parametrize("outputs", [1, 2, 4])
def test_transforms_compute_a_correlation(outputs: int, taps: int, stride: int) -> None:
    if outputs + ceil_div(taps, stride) - 2 > len(POINTS):
        pytest.skip("more points than there are")
    part = transform(outputs, taps, stride)
    rng = np.random.default_rng(0)
    data, weights = rng.standard_normal((outputs - 1) * stride + taps), rng.standard_normal(taps)
    products = (np.array(part.g) @ weights) * (np.array(part.b_t) @ data)
    assert (part.outputs, part.span, part.step) == (outputs, len(data), outputs * stride)
    wanted = np.correlate(data, weights, "valid")[::stride]
    np.testing.assert_allclose(np.array(part.a_t) @ products, wanted, rtol=1e-11)


@pytest.mark.parametrize(("taps", "stride"), [(3, 2), (2, 2), (4, 2), (5, 2), (3, 3), (5, 3), (5, 4)])
@pytest.mark.parametrize("places", [1, 2, 4])
def test_transforms_compute_a_transposed_convolution(places: int, taps: int, stride: int) -> None:
    """Of any padding: all elements of dx beside each other, those of a tile from their own piece of dy."""
    rng = np.random.default_rng(0)
    dy, weights = rng.standard_normal(3 * places + taps), rng.standard_normal(taps)
    dx = np.zeros((len(dy) - 1) * stride + taps)
    for place, value in enumerate(dy):
        dx[place * stride : place * stride + taps] += value * weights
    for padding in range(stride + 1):
        part = transposed(places * stride, taps, stride, padding % stride)
        starts = [start for _, start in transposed_phases(taps, stride, padding % stride)]
        ahead = min(starts) + padding // stride
        tile = next(t for t in range(3) if t * part.step + ahead >= 0)
        data = dy[tile * part.step + ahead :][: part.span]
        products = (np.array(part.g) @ weights) * (np.array(part.b_t) @ data)
        wanted = dx[padding + tile * places * stride :][: places * stride]
        assert (part.outputs, part.step) == (places * stride, places)
        np.testing.assert_allclose(np.array(part.a_t) @ products, wanted, rtol=1e-11, atol=1e-13)


def test_transforms_save_what_they_are_known_for() -> None:
    assert [transform(m, 3, 1).products for m in (2, 4)] == [4, 6]
    assert [transposed(m, 3, 2, 1).products for m in (4, 8)] == [5, 9]
    assert tilings(ConvProblem.parse("c8 h9 w9 k8 r4 s4 stride2 pad1 dgrad")) == [(4, 4)]
    assert transform(4, 3, 2).products == 9 and transform(2, 7, 1).products == 8
    assert tilings(ConvProblem.parse("c8 h9 w9 k8 r3 s3")) == [(4, 4), (2, 2)]
    assert tilings(ConvProblem.parse("c8 h9 w9 k8 r1 s7")) == [(1, 2)]
    # The stride leaves every second input out, and with it the dilation.
    assert axis_of(ConvProblem.parse("c8 h9 w9 k8 r3 s3 stride2 dilation2"), 0) == Axis(3, 1, 2, 1)
    for text in ("c8 h9 w9 k8 r1 s1", "c8 h9 w9 k8 r2 s2 stride2", "c8 h19 w19 k8 r7 s7"):
        assert tilings(ConvProblem.parse(text)) == []


def test_unknown_target() -> None:
    with pytest.raises(InvalidProblem, match="avx1024"):
        target("avx1024")


# Whole vectors of pixels, some that overlap, and fewer, of each width.
PIXELS = [*range(1, 20), 28, 49, 64]


@pytest.mark.parametrize("name", runnable())
@pytest.mark.parametrize("dtype", ["f32", "f64"])
def test_planes_to_pixels(dtype: str, name: str) -> None:
    lanes = target(name).lanes(dtype)
    for channels in (lanes, 2 * lanes + 1):

        def body(k: Kernel, x: Ptr, y: Ptr, n: Int, channels: int = channels) -> None:
            k.call("to_pixels", x, n + 1, y, channels + 3, n, k.integer(channels))

        call = build(dtype, body, name, lambda k: emit_to_pixels(k, k.dtype))
        for pixels in PIXELS:
            x = np.arange(channels * (pixels + 1), dtype=KIND[dtype]).reshape(channels, -1)
            y = np.full((pixels, channels + 3), -1, KIND[dtype])
            call(x, y, pixels)
            assert np.array_equal(y[:, :channels], x[:, :-1].T) and (y[:, channels:] == -1).all(), pixels


@pytest.mark.parametrize("name", runnable())
@pytest.mark.parametrize("dtype", ["f32", "f64"])
def test_pixels_to_planes(dtype: str, name: str) -> None:
    lanes = target(name).lanes(dtype)
    for count in (1, lanes, 2 * lanes - 1):
        # Whole vectors of filters are read.
        step = 2 * lanes + 1

        def body(k: Kernel, x: Ptr, y: Ptr, n: Int, count: int = count, step: int = step) -> None:
            k.call("to_planes", x, k.integer(step), x, x, y, n + 1, n, k.integer(count))

        call = build(dtype, body, name, lambda k: emit_to_planes(Epilogue(k, k.dtype, True, False, False, None)))
        for pixels in PIXELS:
            x = np.arange(pixels * step, dtype=KIND[dtype]).reshape(pixels, step)
            y = np.full((count, pixels + 1), -1, KIND[dtype])
            call(x, y, pixels)
            assert np.array_equal(y[:, :-1], x[:, :count].T) and (y[:, -1] == -1).all(), (count, pixels)
