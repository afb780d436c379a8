"""cuda.direct and cuda.sliding_window without a GPU: their geometry, and what they refuse."""

from __future__ import annotations

import numpy as np
import pytest

from tapwise.algorithm import Config, Device
from tapwise.cuda.jit.device import H200
from tapwise.ops.conv.cuda.direct import Direct
from tapwise.ops.conv.cuda.sliding_window import SlidingWindow
from tapwise.ops.conv.problem import ConvProblem


def covered(text: str, config: Config, algorithm: Direct | SlidingWindow) -> np.ndarray:
    """How often each output (n, k, p, q) is computed, from the geometry alone."""
    problem = ConvProblem.parse(text)
    launch = algorithm.launch(problem, config)  # type: ignore[arg-type]
    words = dict(zip(launch.names, launch.words, strict=True))
    count = np.zeros(problem.y_shape, int)
    if isinstance(config, type(Direct().configs(problem, H200)[0])):
        columns, rows, channels = config.across * config.px, config.down * config.ty * config.each, config.k
    else:
        (columns, rows), channels = config.shape, 1  # type: ignore[attr-defined]
    group_k = problem.k // problem.groups
    for block in range(launch.grid[0]):
        tile_q, rest = block % words["tiles_q"], block // words["tiles_q"]
        tile_p, rest = rest % words["tiles_p"], rest // words["tiles_p"]
        here = np.s_[tile_p * rows : (tile_p + 1) * rows, tile_q * columns : (tile_q + 1) * columns]
        if isinstance(algorithm, SlidingWindow):
            for plane in range(launch.grid[2]):
                count[plane // problem.k, plane % problem.k][here] += 1
            continue
        tile_k, n = rest % words["tiles_k"], rest // words["tiles_k"]
        group, tile = divmod(tile_k, words["tiles_k"] // problem.groups)
        first = group * group_k + tile * channels
        for k in range(first, min(first + channels, (group + 1) * group_k)):
            count[n, k][here] += 1
    return count


@pytest.mark.parametrize("text", ["n2 c5 h37 w41 k7 r3 s3 pad1", "c6 h20 w70 k18 r3 s3 groups2", "c2 h90 w9 k1 r3 s3"])
def test_every_output_is_computed_once(text: str) -> None:
    for algorithm in (Direct(), SlidingWindow()):
        for config in algorithm.configs(ConvProblem.parse(text), H200):
            # Runs of y are tested by emulation (test_answers_cuda.py).
            if getattr(config, "partition", "") == "run":
                continue
            assert (covered(text, config, algorithm) == 1).all(), config


@pytest.mark.parametrize("pad", range(5))
@pytest.mark.parametrize("dtype", ["f32", "f64", "f16"])
@pytest.mark.parametrize("width", [64, 66, 67])
def test_tiles_of_direct_begin_on_a_copy(width: int, dtype: str, pad: int) -> None:
    direct = Direct()
    problem = ConvProblem.parse(f"c3 h40 w{width} k4 r3 s3 pad{pad} {dtype}")
    for config in direct.configs(problem, H200):
        copy_bytes, shift = direct._copy_bytes(problem, config), direct._shift(problem, config)
        size = problem.itemsize
        assert shift >= 0
        if copy_bytes:
            assert width * size % copy_bytes == 0
            for tile in range(3):
                left = tile * config.across * config.px * problem.stride[1] - pad - shift
                assert left * size % copy_bytes == 0
        _, columns, _ = direct._tile(problem, config)
        assert columns * size % 16 == 0
        assert direct.shared_bytes(problem, config) <= H200.shared_bytes


def test_direct_refuses_what_it_does_not_take() -> None:
    for text, says in (
        ("c4 h9 w9 k4 r3 s3 dilation2", "dilation"),
        ("c4 h19 w19 k4 r9 s9", "taps"),
        ("c4 h19 w19 k4 r3 s3 stride5", "strides"),
    ):
        assert says in (Direct().refusal(ConvProblem.parse(text), H200) or "")
    assert "GPU" in (Direct().refusal(ConvProblem.parse("c6 h768 w512 k6 r6 s6"), Device("cpu", "a CPU", 2)) or "")
