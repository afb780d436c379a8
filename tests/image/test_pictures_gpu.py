"""On a GPU: filters against float64, and pictures against those of the CPU."""

from __future__ import annotations

from collections.abc import Callable
from typing import Any

import numpy as np
import pytest

from tapwise import registry, verify
from tapwise.cuda.jit.device import gpu
from tapwise.errors import InvalidProblem

pytestmark = pytest.mark.cuda

FILTERS = [
    "filter gaussian sigma1 h99 w77",
    "filter gaussian sigma5 h130 w61 c3 u8 wrap",
    "filter gaussian sigma2 h20 w20 c4 to:u8",
    "filter box size15 h50 w60 c3 u8",
    "filter box size4 h33 w1100 i8 constant",
    "filter sobel h50 w33 u8 to:i16 constant",
    "filter laplace h30 w3 i16 to:i32",
    "filter correlate h99 w77 c3 r7 s5 mirror",
    "filter correlate d5 h9 w8 t3 r3 s3 f64 constant",
    "filter correlate h1 w1000 s31 u16",
    "filter correlate h700 w9 r8 to:f64 nearest",
    "filter maximum size5 h99 w77 u8",
    "filter maximum size4 h31 w50 c2 i64 constant",
    "filter minimum size15 h9 w7 nearest",
    "filter gaussian sigma2 h300 w501 u8",
    "filter correlate h200 w400 c3 r9 s3 f16",
    # So tall that blocks go down their strips in several steps.
    "filter gaussian sigma2 h60000 w20 u8",
    "filter correlate h60000 w20 r3 s5",
]


@pytest.mark.parametrize("text", FILTERS)
def test_filters(text: str) -> None:
    problem, device = registry.parse(text), gpu()
    for algorithm in registry.of_backend("cuda", "filter"):
        for config in algorithm.configs(problem, device) if algorithm.refusal(problem, device) is None else ():
            verdict = verify.check(problem, algorithm.id, config, device=device)
            assert verdict, f"{algorithm.id} {config}: {verdict.message}"


def test_pictures_on_the_gpu_are_those_of_the_cpu() -> None:
    import torch

    from tapwise import image

    rng = np.random.default_rng(0)
    for kind in (np.uint8, np.int16, np.float32, np.float64):
        x = rng.integers(0, 120, (40, 33, 3)).astype(kind)
        t = torch.from_numpy(x).cuda()
        calls: tuple[tuple[str, dict[str, Any]], ...] = (
            ("gaussian_filter", {"sigma": 2, "channel_axis": -1}),
            ("gaussian_filter", {"sigma": 1, "mode": "wrap"}),
            ("sobel", {"axis": 0, "output": np.float64}),
            ("prewitt", {}),
            ("laplace", {"channel_axis": 2}),
            ("uniform_filter", {"size": 5, "axes": (0, 2)}),
            ("maximum_filter", {"size": 3}),
            ("minimum_filter", {"footprint": np.eye(3), "axes": (0, 1)}),
            ("correlate", {"weights": rng.integers(-2, 3, (3, 4)) * 1.0, "axes": (1, 0), "output": np.float64}),
            ("correlate1d", {"weights": [1, 2, 3], "axis": 0}),
            ("gaussian_laplace", {"sigma": 1, "output": np.float64}),
        )
        for name, options in calls:
            want = getattr(image, name)(x, **options)
            y = getattr(image, name)(t, **options)
            assert isinstance(y, torch.Tensor) and y.is_cuda
            off = np.abs(y.cpu().numpy().astype(np.float64) - want.astype(np.float64)).max()
            assert off <= (1 if want.dtype.kind in "iu" else 2e-4), (name, kind, off)
        # In place, and transposed.
        before = image.gaussian_filter(np.ascontiguousarray(x.transpose(1, 0, 2)), 1)
        view = t.transpose(0, 1)
        assert image.gaussian_filter(view, 1, output=view) is view
        assert np.abs(view.cpu().numpy().astype(float) - before.astype(float)).max() <= (
            1 if kind == np.uint8 else 1e-3
        )
    # Cut after each axis, in the order of the axes.
    floats = np.round(rng.standard_normal((30, 41)) * 80) / 8
    for name in ("sobel", "prewitt"):
        for axis in (0, 1):
            want = getattr(image, name)(floats, axis=axis, output=np.int32)
            y = getattr(image, name)(torch.from_numpy(floats).cuda(), axis=axis, output=np.int32)
            np.testing.assert_array_equal(y.cpu().numpy(), want)
    words = rng.integers(-1000, 1000, (30, 41)).astype(np.int16)
    y = image.maximum_filter(torch.from_numpy(words).cuda(), 3, output=np.uint8)
    np.testing.assert_array_equal(y.cpu().numpy(), image.maximum_filter(words, 3, output=np.uint8))
    wrong: tuple[Callable[[], Any], ...] = (
        lambda: image.laplace(torch.zeros(2, 3, 4, 5, device="cuda")),
        lambda: image.sobel(t > 3),
        lambda: image.gaussian_filter(t.to(torch.complex64), 1),
        lambda: image.sobel(t, output=np.zeros(t.shape)),
        lambda: image.sobel(np.zeros((3, 3)), output=torch.zeros(3, 3, device="cuda")),
    )
    for call in wrong:
        with pytest.raises(InvalidProblem):
            call()


@pytest.mark.parametrize("words", ["gaussian sigma=2", "sobel", "bank"])
def test_named_filters_are_those_of_the_cpu(words: str) -> None:
    from tapwise.image import bank
    from tapwise.image.work import Work

    x = np.random.default_rng(0).integers(0, 256, (61, 47, 3)).astype(np.uint8)
    for options in ({}, {"stride": 2, "mode": "wrap"}, {"size": (40, 50)}):
        named = bank.parse(words)
        here, there = Work(named, **options)(x), Work(named, device="cuda", **options)(x)
        assert here.shape == there.shape
        assert np.abs(here.astype(int) - there.astype(int)).max() <= 1
