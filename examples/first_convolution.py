"""A first convolution: NumPy in, NumPy out, checked against the definition in float64."""

import numpy as np

import tapwise

rng = np.random.default_rng(0)
x = rng.standard_normal((2, 16, 30, 41), dtype=np.float32)
w = rng.standard_normal((24, 16, 3, 3), dtype=np.float32)
bias = rng.standard_normal(24, dtype=np.float32)

y = tapwise.conv2d(x, w, bias, padding="same", activation="relu")
print(f"x {x.shape}, w {w.shape} -> y {y.shape} {y.dtype}")

# The definition: every output is the sum over channels and taps of what lies under the filter.
padded = np.pad(x.astype(np.float64), ((0, 0), (0, 0), (1, 1), (1, 1)))
windows = np.lib.stride_tricks.sliding_window_view(padded, (3, 3), axis=(2, 3))
expected = np.maximum(np.einsum("nchwrs,kcrs->nkhw", windows, w.astype(np.float64)) + bias[:, None, None], 0)

difference = float(np.abs(y - expected).max())
print(f"largest difference from float64: {difference:.1e}")
assert difference < 1e-3
