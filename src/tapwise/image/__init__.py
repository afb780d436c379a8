"""Filters on arrays of any number of axes, with scipy.ndimage's arguments and meanings.

What all functions take, besides what is their own:

input: integers, floating point, or (sums only) complex; of NumPy, a PyTorch tensor, or another array in this
    machine's memory or, but for complex, on a GPU, which then computes. Not changed unless it is also the output.
output: an array to write to, or the result's dtype; the input's dtype by default. Sums that become integers are
    truncated towards zero and keep their low bits, after each axis, as in scipy; a sum that misses an integer by its
    roundings counts as it.
mode: what lies beyond the edges, one for all axes or one for each: reflect or grid-mirror (d c b a | a b c d | d c b
    a), constant or grid-constant (`cval`), nearest, mirror (d c b | a b c d | c b a), wrap or grid-wrap.
origin: how far the window is shifted to the left, 0 for one about the element.
axes: which are filtered, all by default. channel_axis: one that is not, whose elements are colours, say.

All raise InvalidPicture, with the argument's name, for what is not allowed. Sums of float32 are in float32, of float64
in float64; of integers in whichever makes integral weights exact. Source: scipy.ndimage, whose manual defines these
functions.
"""

from tapwise.image.correlation import convolve, convolve1d, correlate, correlate1d
from tapwise.image.derivatives import gaussian_laplace, laplace, prewitt, sobel
from tapwise.image.extremes import maximum_filter, maximum_filter1d, minimum_filter, minimum_filter1d
from tapwise.image.smoothing import gaussian_filter, gaussian_filter1d, uniform_filter, uniform_filter1d

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
