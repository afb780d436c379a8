"""Filters on pictures and other arrays, with scipy.ndimage's arguments and meanings."""

from tapwise.image.filters import (
    convolve,
    convolve1d,
    correlate,
    correlate1d,
    gaussian_filter,
    gaussian_filter1d,
    gaussian_laplace,
    laplace,
    maximum_filter,
    maximum_filter1d,
    minimum_filter,
    minimum_filter1d,
    prewitt,
    sobel,
    uniform_filter,
    uniform_filter1d,
)

__all__ = [
    "convolve",
    "convolve1d",
    "correlate",
    "correlate1d",
    "gaussian_filter",
    "gaussian_filter1d",
    "gaussian_laplace",
    "laplace",
    "maximum_filter",
    "maximum_filter1d",
    "minimum_filter",
    "minimum_filter1d",
    "prewitt",
    "sobel",
    "uniform_filter",
    "uniform_filter1d",
]
