"""What tests of pictures share: a picture, and the command line."""

from __future__ import annotations

from typing import Any

import numpy as np
from typer.testing import CliRunner

from tapwise.cli import app

RUNNER = CliRunner()


def photo(height: int = 41, width: int = 53, channels: int = 3, kind: Any = np.uint8) -> np.ndarray:
    """Something smooth with a little noise."""
    rng = np.random.default_rng(0)
    y, x = np.indices((height, width))
    top = 255 if kind == np.uint8 else 65535 if kind == np.uint16 else 1.0
    base = 0.5 + 0.3 * np.sin(x / 7)[..., None] * np.cos(y / 9)[..., None] + 0.1 * np.arange(channels)
    noisy = (base + 0.05 * rng.standard_normal((height, width, channels))).clip(0, 1) * top
    return noisy.astype(kind) if channels > 1 else noisy[..., 0].astype(kind)


def run(*words: Any, status: int = 0) -> str:
    result = RUNNER.invoke(app, ["filter", *map(str, words)])
    assert result.exit_code == status, result.output
    return result.output
