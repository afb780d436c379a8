"""Strassen's seven products of matrices of two by two parts.

Source: V. Strassen, "Gaussian Elimination is not Optimal", 1969.
"""

from __future__ import annotations

from typing import Final, NamedTuple

# Factors of the parts 11, 12, 21 and 22 of a matrix.
Parts = tuple[int, int, int, int]


class Product(NamedTuple):
    """(sum of parts of w) * (sum of parts of x), with what factor it is added to each part of y = w * x."""

    w: Parts
    x: Parts
    y: Parts


PRODUCTS: Final = (
    Product((1, 0, 0, 1), (1, 0, 0, 1), (1, 0, 0, 1)),
    Product((0, 0, 1, 1), (1, 0, 0, 0), (0, 0, 1, -1)),
    Product((1, 0, 0, 0), (0, 1, 0, -1), (0, 1, 0, 1)),
    Product((0, 0, 0, 1), (-1, 0, 1, 0), (1, 0, 1, 0)),
    Product((1, 1, 0, 0), (0, 0, 0, 1), (-1, 1, 0, 0)),
    Product((-1, 0, 1, 0), (1, 1, 0, 0), (0, 0, 0, 1)),
    Product((0, 1, 0, -1), (0, 0, 1, 1), (1, 0, 0, 0)),
)
