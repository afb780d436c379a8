"""Arrays of more than 2^31 elements: offsets inside kernels have 64 bits. The array is a sparse file; few pages are
read."""

from __future__ import annotations

from pathlib import Path

import numpy as np
import pytest

import tapwise


@pytest.mark.parametrize("algorithm", ["cpu.direct", "cpu.pointwise"])
def test_input_of_more_than_2_to_31_elements(tmp_path: Path, algorithm: str) -> None:
    height, width = 65_541, 32_769
    assert height * width > 2**31
    x = np.memmap(tmp_path / "x", np.float16, "w+", shape=(1, 1, height, width))
    if (tmp_path / "x").stat().st_blocks * 512 > 1 << 24:
        pytest.skip("this file system has no sparse files")
    x[0, 0, 0, 0], x[0, 0, 0, -1], x[0, 0, -1, 0], x[0, 0, -1, -1] = 1, 2, 3, 4
    problem = f"c1 h{height} w{width} k3 r1 s1 stride{height - 1}x{width - 1} f16"
    w = np.array([1, 10, -1], np.float16).reshape(3, 1, 1, 1)
    y = tapwise.prepare(problem, w, algorithm=algorithm)(x)
    corners = np.array([[1, 2], [3, 4]], np.float16)
    assert np.array_equal(y[0], np.stack([corners, 10 * corners, -corners]))
