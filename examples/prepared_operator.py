"""A prepared operator: filters are brought into the kernel's order once, then it is called from many threads."""

from concurrent.futures import ThreadPoolExecutor
from time import perf_counter

import numpy as np

import tapwise

rng = np.random.default_rng(0)
w = rng.standard_normal((128, 128, 3, 3), dtype=np.float32)
bias = rng.standard_normal(128, dtype=np.float32)
images = rng.standard_normal((8, 1, 128, 28, 28), dtype=np.float32)

layer = tapwise.prepare("c128 h28 w28 k128 r3 s3 pad1 bias relu", w, bias)
print(f"{layer.problem}\n{layer.choice.algorithm}: {layer.choice.reason}")


def best_us(call, repeats=20):
    """Shortest wall time of a call in microseconds."""
    times = []
    for _ in range(repeats):
        start = perf_counter()
        call()
        times.append(perf_counter() - start)
    return 1e6 * min(times)


def plain():
    """Packs the filters on each call: it cannot know whether they have changed."""
    return tapwise.conv2d(images[0], w, bias, padding=1, activation="relu")


plain(), layer(images[0])  # compile and start threads before timing
print(f"prepared {best_us(lambda: layer(images[0])):.0f} us, plain conv2d {best_us(plain):.0f} us")

# The operator keeps no state of a call, so threads share it; `out` saves the allocation.
results = np.empty((8, 1, 128, 28, 28), np.float32)
with ThreadPoolExecutor(4) as pool:
    list(pool.map(lambda image, out: layer(image, out=out), images, results))
assert all(np.array_equal(layer(image), result) for image, result in zip(images, results, strict=True))
print("four threads computed the same bits")
