"""cuda.implicit_gemm in NCHW on a GPU: planes that come to halo tiles as they lie."""

from __future__ import annotations

from typing import Any

import pytest

from tapwise import registry, verify
from tapwise.cuda.jit.device import gpu
from tapwise.ops.conv.cuda.implicit_gemm.view import View
from tapwise.ops.conv.problem import ConvProblem

pytestmark = pytest.mark.cuda


@pytest.mark.parametrize(
    "text",
    [
        "n24 c96 h40 w48 k72 r3 s3 pad1 f16 bias", "n32 c64 h21 w19 k64 r3 s3 pad1 bf16 relu",
        "n32 c160 h40 w48 k72 r3 s3 stride2 pad1 f16", "n64 c64 h33 w30 k64 r3 s3 stride2 pad1 bf16 bias relu residual",
        "n64 c200 h40 w64 k136 r1 s1 stride2 f16", "n64 c64 h40 w64 k40 r1 s1 stride2 f16 bias silu",
        "n32 c128 h40 w48 k96 r2 s2 stride2 bf16", "n32 c32 h64 w64 k192 r4 s4 stride4 f16 residual",
        "n16 c64 h40 w48 k128 r3 s3 stride2x1 pad1 groups4 f16", "n32 c40 h40 w48 k48 r3 s3 stride2 dilation2 pad2 f16",
    ],
)  # fmt: skip
def test_planes_that_are_transposed(text: str) -> None:
    """Many tiles a block, so that strips, halos and the phases of their barriers come round."""
    problem, device = ConvProblem.parse(text), gpu()
    kinds: dict[Any, Any] = {}
    for config in registry.get("cuda.implicit_gemm").configs(problem, device):
        if config.staged_strips:
            flat = View.of(problem, config).flat_planes
            kind = flat, config.staged_strips, config.swap_ab, config.halo_buffers, config.chunk_bytes
            kinds.setdefault(kind, config)
    assert len(kinds) >= 2
    for config in kinds.values():
        verdict = verify.check(problem, "cuda.implicit_gemm", config, device=device)
        assert verdict, f"{config}: {verdict.message}"
