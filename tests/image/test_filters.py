"""tapwise.image against scipy.ndimage, and what users hand over."""

from __future__ import annotations

import subprocess
import sys
from typing import Any

import numpy as np
import pytest
from hypothesis import given, settings
from hypothesis import strategies as st
from scipy import ndimage

import tapwise
from tapwise import image
from tapwise.errors import InvalidPicture
from tapwise.image import passes
from tapwise.image.weights import factors
from tapwise.ops.filter.problem import DTYPES, FilterProblem

INTEGERS = [np.uint8, np.int8, np.uint16, np.int16, np.uint32, np.int32, np.int64]
KINDS: list[Any] = [*INTEGERS, np.float32, np.float64]
SHAPES = [(37,), (20, 33), (7, 12, 9), (1, 5), (3, 1, 4)]
CALLS: list[tuple[str, dict[str, Any]]] = [
    ("gaussian_filter", {"sigma": 1.2}),
    ("gaussian_filter", {"sigma": 1.5, "order": 1}),
    ("gaussian_filter", {"sigma": 2, "radius": 3}),
    ("gaussian_filter1d", {"sigma": 1, "axis": 0, "order": 2}),
    ("uniform_filter", {"size": 3}),
    ("uniform_filter", {"size": 4, "origin": -1}),
    ("uniform_filter1d", {"size": 5, "axis": 0, "origin": 2}),
    ("sobel", {"axis": 0}),
    ("prewitt", {}),
    ("laplace", {}),
    ("gaussian_laplace", {"sigma": 1}),
    ("maximum_filter", {"size": 3}),
    ("minimum_filter", {"size": 4, "origin": 1}),
    ("maximum_filter1d", {"size": 6, "axis": 0, "origin": -3}),
    ("correlate1d", {"weights": [1, -2, 4, 0.5], "axis": 0}),
    ("convolve1d", {"weights": [1, -2, 4, 0.5], "axis": -1, "origin": 1}),
]


def data(kind: Any, shape: tuple[int, ...], seed: int = 0) -> np.ndarray:
    low = 0 if np.dtype(kind).kind == "u" else -60
    return np.random.default_rng(seed).integers(low, 120, shape).astype(kind)


def close(ours: np.ndarray, theirs: np.ndarray, exact: bool, terms: float = 0.0) -> None:
    """`terms`: the size of what is added up, where that cancels."""
    assert ours.dtype == theirs.dtype
    if theirs.dtype.kind in "fc":
        scale = max(float(np.abs(theirs).max(initial=0.0)), terms) + 1e-30
        tolerance = 2e-6 if theirs.dtype in (np.float32, np.complex64) else 1e-13
        np.testing.assert_allclose(ours, theirs, rtol=0, atol=tolerance * scale)
        return
    off = np.abs(ours.astype(np.float64) - theirs.astype(np.float64))
    assert off.max(initial=0.0) <= (0 if exact else 1)


@pytest.mark.many
@pytest.mark.parametrize("mode", ["reflect", "constant", "nearest", "mirror", "wrap", "grid-wrap"])
@pytest.mark.parametrize("kind", KINDS, ids=lambda kind: kind.__name__)
@pytest.mark.parametrize("call", CALLS, ids=lambda call: f"{call[0]}-{'-'.join(map(str, call[1].values()))}")
def test_as_scipy(call: tuple[str, dict[str, Any]], kind: Any, mode: str) -> None:
    name, options = call
    # What lies below 0 has no meaning in scipy for unsigned integers, unless weights are whole numbers.
    if np.dtype(kind).kind == "u" and (
        options.get("order") or name in ("gaussian_laplace", "correlate1d", "convolve1d")
    ):
        kind = np.float32
    for shape in SHAPES:
        for cval in (0.0, 3.0) if mode == "constant" else (0.0,):
            x = data(kind, shape)
            theirs = getattr(ndimage, name)(x, mode=mode, cval=cval, **options)
            exact = not name.startswith("gaussian") and kind not in (np.int8, np.uint8)
            close(getattr(image, name)(x, mode=mode, cval=cval, **options), theirs, exact, 120.0)


@pytest.mark.many
@pytest.mark.parametrize("kind", [np.uint8, np.float32, np.float64, np.complex64])
@pytest.mark.parametrize("shape", SHAPES)
@pytest.mark.parametrize("mode", ["reflect", "constant", "wrap"])
def test_weights_and_footprints_as_scipy(mode: str, shape: tuple[int, ...], kind: Any) -> None:
    rng = np.random.default_rng(1)
    x = data(kind, shape)
    for size in (2, 3, 5):
        weights = rng.integers(0, 4, (size,) * len(shape)).astype(np.float64)
        for name in ("correlate", "convolve"):
            for origin in (0, -1):
                arguments: Any = {"mode": mode, "cval": 2.0, "origin": origin}
                close(
                    getattr(image, name)(x, weights, **arguments), getattr(ndimage, name)(x, weights, **arguments), True
                )
        if kind is not np.complex64:
            for name in ("maximum_filter", "minimum_filter"):
                arguments = {"footprint": weights > 1, "mode": mode, "cval": 2.0}
                close(getattr(image, name)(x, **arguments), getattr(ndimage, name)(x, **arguments), True)


@settings(max_examples=60, deadline=None)
@given(st.data())
def test_any_axes_origins_and_outputs(draw: st.DataObject) -> None:
    shape = tuple(draw.draw(st.lists(st.integers(1, 7), min_size=1, max_size=4)))
    axes = tuple(draw.draw(st.permutations(range(len(shape))))[: draw.draw(st.integers(1, len(shape)))])
    kind, to = draw.draw(st.sampled_from(KINDS)), draw.draw(st.sampled_from([np.int32, np.float64, None]))
    sizes = [draw.draw(st.integers(1, 5)) for _ in axes]
    origins = [draw.draw(st.integers(-(size // 2), (size - 1) // 2)) for size in sizes]
    modes = [draw.draw(st.sampled_from(["reflect", "constant", "nearest", "mirror", "wrap"])) for _ in axes]
    x = data(kind, shape, draw.draw(st.integers(0, 9)))
    options: Any = {"axes": axes, "origin": origins, "mode": modes, "cval": 1.0, "output": to}
    for name in ("maximum_filter", "minimum_filter", "uniform_filter"):
        exact = name != "uniform_filter" or kind not in (np.int8, np.uint8)
        close(getattr(image, name)(x, sizes, **options), getattr(ndimage, name)(x, sizes, **options), exact)
    weights = np.random.default_rng(3).integers(-2, 3, [sizes[list(axes).index(axis)] for axis in sorted(axes)])
    if len(axes) < 4:
        options = {"axes": axes, "mode": modes[0], "cval": 1.0, "output": np.float64}
        close(image.correlate(x, weights, **options), ndimage.correlate(x, weights, **options), True)


def test_channels_are_not_mixed() -> None:
    x = data(np.uint8, (20, 31, 3))
    channels = [x[..., c] for c in range(3)]
    calls: list[tuple[str, dict[str, Any]]] = [
        ("gaussian_filter", {"sigma": 2}),
        ("sobel", {}),
        ("prewitt", {"axis": 0}),
        ("laplace", {}),
        ("maximum_filter", {"size": 5}),
        ("gaussian_laplace", {"sigma": 1, "output": np.float64}),
        ("correlate", {"weights": np.arange(6).reshape(2, 3), "output": np.int32}),
        ("uniform_filter", {"size": 4}),
    ]
    for name, options in calls:
        function: Any = getattr(image, name)
        each = np.stack([function(channel, **options) for channel in channels], -1)
        np.testing.assert_array_equal(function(x, channel_axis=-1, **options), each)
        first = np.ascontiguousarray(np.moveaxis(x, -1, 0))
        moved = options | ({"axis": options["axis"] + 1} if "axis" in options else {})
        np.testing.assert_array_equal(function(first, channel_axis=0, **moved), np.moveaxis(each, -1, 0))


@pytest.mark.parametrize("kind", ["<f4", ">f4", ">u2"])
def test_any_array_in(kind: str) -> None:
    base = data(np.float32, (41, 37)).astype(kind)
    want = ndimage.gaussian_filter(base[::-2, 3::3].astype(base.dtype.newbyteorder("=")), 1.5)
    x = base[::-2, 3::3]
    x.flags.writeable = False
    kept = x.copy()
    np.testing.assert_allclose(image.gaussian_filter(x, 1.5), want, rtol=1e-5, atol=1 if kind == ">u2" else 1e-4)
    np.testing.assert_array_equal(x, kept)
    out = np.zeros((2, *x.shape), want.dtype)[:, ::-1]
    assert image.gaussian_filter(x, 1.5, output=out[1]).base is not None
    np.testing.assert_allclose(out[1], want, rtol=1e-5, atol=1 if kind == ">u2" else 1e-4)
    assert not out[0].any()


def test_in_place_and_overlapping() -> None:
    for name, options in (
        ("gaussian_filter", {"sigma": 2}),
        ("laplace", {}),
        ("maximum_filter", {"size": 3}),
        ("gaussian_laplace", {"sigma": 1}),
        ("correlate", {"weights": np.ones((9, 9))}),
    ):
        function: Any = getattr(image, name)
        x = data(np.float64, (33, 40))
        want = function(x, **options)
        memory = x.copy()
        assert function(memory, output=memory, **options) is memory
        np.testing.assert_array_equal(memory, want)
        memory = np.vstack([x, np.zeros((1, 40))])
        function(memory[:-1], output=memory[1:], **options)
        np.testing.assert_array_equal(memory[1:], want)


def test_tensors_give_tensors() -> None:
    torch = pytest.importorskip("torch")
    x = torch.rand(20, 30)
    y = image.gaussian_filter(x, 2)
    assert isinstance(y, torch.Tensor)
    np.testing.assert_allclose(y.numpy(), ndimage.gaussian_filter(x.numpy(), 2), atol=1e-6)
    out = torch.empty(20, 30)
    assert image.sobel(x, output=out) is out
    np.testing.assert_allclose(out.numpy(), ndimage.sobel(x.numpy()), atol=1e-5)


def test_lists_and_empty_arrays() -> None:
    assert image.correlate1d([2, 8, 0, 4, 1, 9, 9, 0], [1, 3]).tolist() == [8, 26, 8, 12, 7, 28, 36, 9]
    for shape in ((0,), (0, 5), (5, 0, 3)):
        assert image.gaussian_filter(np.zeros(shape), 2).shape == shape
        assert image.maximum_filter(np.zeros(shape), 3).shape == shape
    scalar = np.float64(3.0)
    assert image.gaussian_filter(scalar, []) == 3.0


def test_nan_and_infinity_stay_where_they_are_seen() -> None:
    x = np.zeros((40, 40), np.float32)
    x[20, 20], x[5, 5] = np.nan, np.inf
    y = image.uniform_filter(x, 5)
    assert np.isnan(y[18:23, 18:23]).all() and np.isinf(y[3:8, 3:8]).all()
    assert np.isfinite(y).sum() == 1600 - 50
    assert np.isfinite(image.correlate(x, [[1.0, 0, 0]])[5, 5])


@pytest.mark.parametrize("rank", [1, 2, 3])
def test_products_are_found(rank: int) -> None:
    rng = np.random.default_rng(0)
    weights = sum(np.outer(rng.standard_normal(31), rng.standard_normal(33)) for _ in range(rank))
    found = factors(np.asarray(weights), np.dtype(np.float64), "reflect", 0.0)
    assert found is not None and len(found) == rank
    x = rng.standard_normal((50, 60))
    np.testing.assert_allclose(image.correlate(x, weights), ndimage.correlate(x, weights), atol=1e-10)
    np.testing.assert_allclose(image.correlate(x.astype(np.float32), weights), ndimage.correlate(x, weights), atol=2e-3)
    assert factors(np.asarray(weights), np.dtype(np.int32), "reflect", 0.0) is None
    assert factors(np.asarray(weights), np.dtype(np.float64), "constant", 1.0) is None
    assert factors(rng.standard_normal((31, 33)), np.dtype(np.float64), "reflect", 0.0) is None


def test_whole_numbers_are_exact() -> None:
    """Sums that float32 does not hold go through float64; means of equal pixels are that pixel."""
    x = np.full((70, 70), 65535, np.uint16)
    weights = np.full((9, 9), 255.0)
    np.testing.assert_array_equal(image.correlate(x, weights, output=np.int64), np.full((70, 70), 65535 * 255 * 81))
    for value in (1, 200, 255):
        flat = np.full((70, 70), value, np.uint8)
        for sigma in (0.7, 1, 2, 5, 9):
            assert (image.gaussian_filter(flat, sigma) == value).all()
        assert (image.uniform_filter(flat, 15) == value).all()
    problem_of = FilterProblem("dense", (1, 9, 9), (1, 9, 9), (0, 4, 4), dtype="u16", to="i16")
    assert passes.needs_double(problem_of, weights) and not passes.needs_double(problem_of, np.ones((1, 9, 9)))


@pytest.mark.parametrize("cval", [-np.inf, np.inf, np.nan, 0.5, -1.0, 300.0])
def test_constants_that_an_integer_does_not_hold(cval: float) -> None:
    x = np.arange(12, dtype=np.uint8).reshape(3, 4)
    y = image.maximum_filter(x, 3, mode="constant", cval=cval)
    assert y[1, 1] == 10 and y.dtype == np.uint8
    if cval < 0:
        assert y[0, 0] == 5


def test_clip_rounds_and_holds() -> None:
    x = np.array([[0, 100, 200, 255]], np.uint8)
    y = np.empty_like(x)
    clipped = passes.Pass("dense", (1,), (1,), (0,), ("nearest",), weights=np.array([1.503]), clip=True)
    passes.apply(x, y, clipped)
    assert y.tolist() == [[0, 150, 255, 255]]
    passes.apply(x, y, passes.Pass("dense", (1,), (1,), (0,), ("nearest",), weights=np.array([-1.0]), clip=True))
    assert y.tolist() == [[0, 0, 0, 0]]


@pytest.mark.parametrize(
    ("call", "says"),
    [
        (lambda x: image.gaussian_filter(x, 1, mode="edge"), "mode='edge'"),
        (lambda x: image.gaussian_filter(x, (1, 2, 3)), "sigma="),
        (lambda x: image.gaussian_filter(x, 1, order=-1), "order=-1"),
        (lambda x: image.gaussian_filter(x, 1, radius=1.5), "radius"),
        (lambda x: image.gaussian_filter(x, 1, axes=(0, 2)), "out of range"),
        (lambda x: image.gaussian_filter(x, 1, axes=(0, 0)), "unique"),
        (lambda x: image.uniform_filter(x, 3, origin=2), "origin=2"),
        (lambda x: image.correlate(x, [1, 2]), "weights.ndim"),
        (lambda x: image.correlate(x, np.ones((0, 3))), "weights.ndim"),
        (lambda x: image.correlate1d(x, []), "weights"),
        (lambda x: image.correlate(x, np.ones((3, 3)), mode=["reflect", "wrap"]), "mode="),
        (lambda x: image.maximum_filter(x), "size or footprint"),
        (lambda x: image.maximum_filter(x, footprint=np.zeros((3, 3))), "footprint"),
        (lambda x: image.maximum_filter(x.astype(complex), 3), "order"),
        (lambda x: image.sobel(x, output=np.empty((3, 3))), "output"),
        (lambda x: image.sobel(x, axis=1, channel_axis=1), "channel_axis"),
        (lambda x: image.sobel(x.astype(np.float16)), "float16"),
        (lambda x: image.sobel(x.astype(">f2")), "float16"),
        (lambda x: image.sobel(x.astype("M8[s]")), "dtype"),
        (lambda x: image.correlate(x, np.ones((3, 3)), cval=1j), "cval"),
    ],
)
def test_bad_arguments_are_named(call: Any, says: str) -> None:
    with pytest.raises(InvalidPicture, match=says):
        call(np.zeros((5, 6)))


def test_read_only_output_is_refused() -> None:
    out = np.zeros((5, 6))
    out.flags.writeable = False
    with pytest.raises(InvalidPicture, match="read-only"):
        image.sobel(np.ones((5, 6)), output=out)


def test_the_package_finds_its_module() -> None:
    assert tapwise.image is image
    assert set(DTYPES) >= {"u8", "f32"}


_PEAK = """
import numpy as np
from tapwise import image
x = np.ones((4096, 4096), np.float32)
image.gaussian_filter(x[:64], 2)
def peak():
    return int(next(line.split()[1] for line in open("/proc/self/status") if line.startswith("VmHWM"))) << 10
before = peak() - x.nbytes
for call in (lambda: image.gaussian_filter(x, 2), lambda: image.sobel(x), lambda: image.correlate(x, np.ones((7, 7)))):
    call()
    assert peak() - before < 3 * x.nbytes, (peak() - before) / x.nbytes
"""


@pytest.mark.skipif(sys.platform != "linux", reason="reads /proc")
def test_less_than_three_pictures_of_memory() -> None:
    subprocess.run([sys.executable, "-c", _PEAK], check=True)
