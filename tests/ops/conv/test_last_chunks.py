"""cuda.implicit_gemm where a tap's last chunk of channels, or the only one, is not whole: TMA's boxes end with the
channels, without a GPU, by emulation, against float64."""

from __future__ import annotations

from typing import Any

import pytest
from emulated_plans import SMALL, emulation, needs_compiler, verdict_of

from tapwise.ops.conv.cuda.implicit_gemm.dgrad import ImplicitGemmDgrad
from tapwise.ops.conv.cuda.implicit_gemm.implicit_gemm import ImplicitGemm
from tapwise.ops.conv.cuda.implicit_gemm.tensor_maps import map_x
from tapwise.ops.conv.cuda.implicit_gemm.view import View
from tapwise.ops.conv.problem import ConvProblem

__all__ = ["emulation"]
FPROP, DGRAD = ImplicitGemm(), ImplicitGemmDgrad()


def of_each_kind(problem: ConvProblem) -> list[Any]:
    """The config with the smallest tile."""
    algorithm: Any = DGRAD if problem.direction == "dgrad" else FPROP
    found: dict[tuple[object, ...], Any] = {}
    for config in algorithm.configs(problem, SMALL):
        part = config.parts[0] if problem.direction == "dgrad" else config
        kind = (
            part.kernel, part.swap_ab, part.filter_stationary, part.ping_pong, part.split_k > 1, part.chunk_bytes,
            getattr(config, "order", ""), part.gather_bytes,
        )  # fmt: skip
        size = part.tile_pixels * part.tile_filters
        if kind not in found or size < found[kind][0]:
            found[kind] = size, config
    return [config for _, config in found.values()]


@pytest.mark.many
@needs_compiler
@pytest.mark.parametrize(
    "text",
    [
        # Several chunks: of 16, 48 and 32 channels the last; of 8, whose step has zeros of TMA's behind them.
        "n2 c80 h7 w9 k40 r3 s3 pad1 f16 nhwc", "n2 c112 h7 w9 k72 r1 s1 bf16 nhwc bias relu",
        "n2 c96 h7 w9 k40 r3 s3 stride2 pad1 f16 nhwc", "n2 c72 h7 w9 k24 r3 s3 pad1 f16 nhwc",
        # Packed first.
        "n1 c176 h6 w7 k24 r1 s3 pad0x1 f16",
        # One chunk, behind which shared memory has to be zeros.
        "n2 c24 h7 w9 k40 r3 s3 pad1 f16 nhwc", "n2 c40 h7 w9 k24 r3 s3 stride2 pad1 bf16 nhwc",
        "n2 c40 h7 w9 k80 r3 s3 pad1 f16 nhwc dgrad", "n2 c40 h7 w9 k112 r3 s3 stride2 pad1 f16 nhwc dgrad",
        "n2 c40 h7 w9 k24 r3 s3 stride2 pad1 f16 nhwc dgrad", "n2 c40 h7 w9 k72 r1 s3 pad0x1 f16 nhwc dgrad",
    ],
)  # fmt: skip
def test_boxes_end_with_the_channels(emulation: None, text: str) -> None:
    problem = ConvProblem.parse(text)
    algorithm: Any = DGRAD if problem.direction == "dgrad" else FPROP
    for config in of_each_kind(problem):
        verdict = verdict_of(algorithm, problem, config)
        assert verdict.verified, (str(config), verdict.message)


@pytest.mark.parametrize(
    ("text", "last"),
    [
        ("n2 c80 h7 w9 k40 r1 s1 f16 nhwc", 32), ("n2 c72 h7 w9 k40 r1 s1 f16 nhwc", 32),
        ("n2 c128 h7 w9 k40 r1 s1 f16 nhwc", 128), ("n2 c40 h7 w9 k40 r1 s1 f16 nhwc", 80),
        ("n2 c24 h7 w9 k40 r1 s1 bf16 nhwc", 48), ("n2 c40 h7 w9 k40 r1 s1 tf32 nhwc", 32),
        ("n2 c160 h7 w9 k40 r1 s1 groups2 f16 nhwc", 32), ("n2 c16 h7 w9 k40 r1 s1 f16 nhwc", 32),
    ],
)  # fmt: skip
def test_bytes_of_the_last_chunk(text: str, last: int) -> None:
    """Those that there are, in whole steps of the instruction where rows hold other chunks before."""
    problem = ConvProblem.parse(text)
    config = next(one for one in FPROP.configs(problem, SMALL) if one.kernel == "im2col" and not one.gather_bytes)
    view = View.of(problem, config)
    assert view.last_chunk_bytes == last and view.is_narrow == (last < view.chunk_bytes)
    assert map_x(view, last=True).box[0] * problem.itemsize == last
    assert map_x(view, last=True).swizzle_bytes == map_x(view).swizzle_bytes == view.chunk_bytes
