"""cuda.sliding_window of filters without a GPU: lists of taps."""

from __future__ import annotations

import numpy as np

from tapwise import registry
from tapwise.cuda.jit.device import H200
from tapwise.ops.filter import cuda as filters


def test_lists_of_taps() -> None:
    """Constants, places and weights, where the kernel reads them; and a separable filter's two launches."""
    problem = registry.parse("filter sobel h50 w33 u8 to:i16")
    host, second = filters.pack(problem, problem.weights())  # type: ignore[arg-type, attr-defined]
    assert second == 6 + 2 * 3 and len(host) == 2 * second
    constants = host[second : second + 6].view(np.float64)
    assert constants[5] == 2 and constants[3] == 0
    assert host[second + 6 : second + 8].tolist() == [0, 2]
    assert host[second + 9 : second + 11].view(np.float64).tolist() == [-1, 1]
    assert host[6:9].tolist() == [0, 1 << 20, 2 << 20]
    algorithm = registry.get("cuda.sliding_window", "filter")
    launches = [algorithm.launch(problem, algorithm.configs(problem, H200)[0], part, H200) for part in (0, 1)]  # type: ignore[attr-defined]
    words = [dict(zip(launch.names, launch.words, strict=True)) for launch in launches]
    assert [(one["size1"], one["size2"], one["taps"], one["before1"], one["before2"]) for one in words] == [
        (3, 1, 3, 1, 0),
        (1, 3, 3, 0, 1),
    ]
    window = np.zeros((3, 5, 7))
    window[2, 4, 6] = 5.0
    dense = registry.parse("filter correlate d9 h20 w20 t3 r5 s7")
    host, second = filters.pack(dense, window)  # type: ignore[arg-type]
    assert second == 0 and host[6] == (2 << 40 | 4 << 20 | 6)
