"""Arrays copied to their places in others, against NumPy."""

from __future__ import annotations

import numpy as np
import pytest

from tapwise.cpu import driver, pieces
from tapwise.cpu.pieces import Piece, Pieces, Scale

# Channels of the pieces, rows, columns: short rows, many blocks, rows of more than a task.
SIZES = [((3, 2), 3, 5), ((9, 17, 31), 7, 7), ((2, 3), 130, 131), ((33, 64), 40, 41), ((11, 5000), 1, 9)]


def images(n: int, channels: int, rows: int, columns: int, last: bool) -> np.ndarray:
    if last:
        return np.random.default_rng(0).standard_normal((n, rows, columns, channels), np.float32).transpose(0, 3, 1, 2)
    return np.random.default_rng(0).standard_normal((n, channels, rows, columns), np.float32)


def placed(
    parts: list[np.ndarray], n: int, rows: int, columns: int, last: bool
) -> tuple[np.ndarray, list[Piece]]:  # fmt: skip
    firsts = np.cumsum([0, *(one.shape[1] for one in parts)])
    whole = np.full_like(images(n, int(firsts[-1]), rows, columns, last), np.nan)
    return whole, [
        Piece(one, whole[:, at : at + one.shape[1]], int(at)) for one, at in zip(parts, firsts, strict=False)
    ]


@pytest.mark.parametrize("n", [1, 2])
@pytest.mark.parametrize("last", [False, True])
@pytest.mark.parametrize("activation", ["none", "", "relu"])
@pytest.mark.parametrize(("channels", "rows", "columns"), SIZES)
def test_side_by_side(
    n: int, last: bool, activation: str, channels: tuple[int, ...], rows: int, columns: int
) -> None:  # fmt: skip
    parts = [images(n, 2 * one, rows, columns, last)[:, one:] for one in channels]
    whole, found = placed(parts, n, rows, columns, last)
    scaled = activation != "none"
    if not pieces.suited(found, scaled):
        assert min(channels) < pieces.ROW and last, "rows are long enough"
        return
    expected, scale = np.concatenate(parts, 1).astype(np.float64), None
    if scaled:
        factors, offsets = np.random.default_rng(1).standard_normal((2, sum(channels)), np.float32)
        scale = Scale(factors, offsets, activation or None)
        expected = expected * factors[:, None, None] + offsets[:, None, None]
        expected = np.maximum(expected, 0) if activation else expected
    for _ in range(2):
        whole[...] = np.nan
        driver.sequence(Pieces(found, scale).launches())()
        np.testing.assert_allclose(
            whole, expected, rtol=0 if scale is None else 1e-6, atol=0 if scale is None else 1e-6
        )


def test_transposed() -> None:
    """Planes in another order; one image for many."""
    x = images(3, 6, 5, 8, False)
    y = np.full((6, 2, 3, 5, 8), np.nan, np.float32)
    found = [Piece(x.swapaxes(0, 1), y[:, 0]), Piece(np.broadcast_to(x[:1], x.shape).swapaxes(0, 1), y[:, 1])]
    assert pieces.suited(found)
    driver.sequence(Pieces(found).launches())()
    assert np.array_equal(y[:, 0], x.swapaxes(0, 1))
    assert all(np.array_equal(y[:, 1, one], x[0]) for one in range(3))


def test_what_is_not_suited() -> None:
    x = images(1, 8, 4, 9, False)
    y = np.empty_like(x)
    assert pieces.suited([Piece(x, y)])
    assert not pieces.suited([])
    assert not pieces.suited([Piece(x.astype(np.float64), y)])
    assert not pieces.suited([Piece(x[..., ::2], y[..., :5])])
    assert not pieces.suited([Piece(x[:0], y[:0])])
    # One channel has no axis.
    assert not pieces.suited([Piece(x[:, :1], y[:, :1])], True)
