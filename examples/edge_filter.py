"""Edges of a picture: Sobel filters as one convolution with two output channels. Prints the picture as text."""

import numpy as np

import tapwise

# A picture made here: a bright disc on a shaded background.
height, width = 240, 400
rows, columns = np.mgrid[:height, :width].astype(np.float32)
picture = 0.3 * columns / width
picture[(rows - 120) ** 2 + (columns - 200) ** 2 < 80**2] = 1.0

horizontal = np.array([[-1, 0, 1], [-2, 0, 2], [-1, 0, 1]], np.float32)
filters = np.stack([horizontal, horizontal.T])[:, None]  # (2, 1, 3, 3): out, in, height, width

# An unbatched image (channels, height, width) in, the same out.
gradient = tapwise.conv2d(picture[None], filters, padding=1)
strength = np.hypot(gradient[0], gradient[1])
strength[[0, -1]] = strength[:, [0, -1]] = 0  # zero padding makes an edge of the border

left, middle, right = strength[120, 115:125], strength[120, 125:275], strength[120, 275:285]
assert middle.max() < 0.01 < 1 < min(left.max(), right.max())

shades = " .:-=+*#"
cells = strength.reshape(24, 10, 80, 5).max(axis=(1, 3))
for row in (cells / cells.max() * (len(shades) - 1)).astype(int):
    print("".join(shades[level] for level in row).rstrip())
