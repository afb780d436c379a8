"""cuda.implicit_gemm whose CTAs of a cluster share filters, without a GPU: by emulation, against float64."""

from __future__ import annotations

import re
from typing import Any

import pytest
from compiled_kernels import Share, compiled
from emulated_plans import SMALL, emulation, needs_compiler, verdict_of

from tapwise.algorithm import Device
from tapwise.cuda.jit.device import H200
from tapwise.ops.conv.cuda.implicit_gemm import configs
from tapwise.ops.conv.cuda.implicit_gemm.dgrad import ImplicitGemmDgrad
from tapwise.ops.conv.cuda.implicit_gemm.implicit_gemm import ImplicitGemm
from tapwise.ops.conv.cuda.implicit_gemm.view import View
from tapwise.ops.conv.problem import ConvProblem

__all__ = ["emulation"]
FPROP, DGRAD = ImplicitGemm(), ImplicitGemmDgrad()


def sharing(problem: ConvProblem, device: Device) -> list[Any]:
    """Of each kind the config with the smallest tile, as the algorithm takes it."""
    algorithm: Any = DGRAD if problem.direction == "dgrad" else FPROP
    found: dict[tuple[object, ...], Any] = {}
    for config in algorithm.configs(problem, device):
        part = config.parts[0] if problem.direction == "dgrad" else config
        if part.share_filters > 1:
            kind, size = (part.share_filters, part.ping_pong, part.swap_ab), part.tile_pixels * part.tile_filters
            if kind not in found or size < found[kind][0]:
                found[kind] = size, config
    assert len(found) >= 4
    return [config for _, config in found.values()]


@needs_compiler
@pytest.mark.parametrize(
    "text",
    [
        # The last CTAs have no pixels.
        "n1 c136 h13 w13 k130 r1 s1 f16 nhwc bias relu", "n3 c72 h9 w11 k72 r3 s2 pad1x0 stride2x1 bf16 nhwc residual",
        "n1 c72 h11 w17 k200 r1 s1 f16 nhwc dgrad", "n2 c136 h9 w9 k40 r3 s1 pad1x0 bf16 nhwc dgrad",
    ],
)  # fmt: skip
def test_filters_are_shared(emulation: None, monkeypatch: pytest.MonkeyPatch, text: str) -> None:
    monkeypatch.setattr(configs, "LEAST_SHARING", 64 * 64)
    problem = ConvProblem.parse(text)
    algorithm: Any = DGRAD if problem.direction == "dgrad" else FPROP
    for config in sharing(problem, SMALL):
        assert verdict_of(algorithm, problem, config).verified, str(config)


def test_only_what_a_copy_can_share_is_shared() -> None:
    plain = "n32 c256 h28 w28 k256 r1 s1 f16 nhwc"
    assert any(one.share_filters > 1 for one in FPROP.configs(ConvProblem.parse(plain), H200))
    for text in (
        plain.replace("nhwc", "nchw"), plain + " groups2", plain.replace("f16", "3xtf32"), plain.replace("n32", "n1"),
        plain + " stride2 dgrad",
    ):  # fmt: skip
        problem = ConvProblem.parse(text)
        if problem.direction == "dgrad":
            found = [part for one in DGRAD.configs(problem, H200) for part in one.parts]
        else:
            found = list(FPROP.configs(problem, H200))
        assert found and all(one.share_filters == 1 for one in found), text


def test_clusters_are_whole_and_all_tiles_are_theirs() -> None:
    problem = ConvProblem.parse("n32 c256 h27 w29 k256 r1 s1 f16 nhwc")
    for config in FPROP.configs(problem, H200):
        if config.share_filters > 1:
            view = View.of(problem, config)
            blocks = view.blocks(H200)
            assert blocks % config.cluster == 0 and 0 < blocks <= H200.multiprocessors
            assert view.units * config.share_filters >= view.tiles
            assert FPROP.launch(problem, config, H200).grid[0] == blocks
            assert f"__cluster_dims__({config.share_filters})" in FPROP.source(problem, config).text


def test_sharing_is_chosen_where_filters_lie_ragged() -> None:
    """Taps of 352 bytes, and of 256."""
    for channels, shares in ((176, True), (128, False)):
        problem = ConvProblem.parse(f"n32 c{channels} h60 w60 k1056 r1 s1 f16 nhwc dgrad")
        chosen = min(DGRAD.configs(problem, H200), key=lambda one: DGRAD.predict_us(problem, one, H200))
        assert (chosen.parts[0].share_filters > 1) == shares


@pytest.mark.parametrize(
    "text", ["n32 c176 h60 w60 k1056 r1 s1 f16 nhwc", "n32 c176 h60 w60 k1056 r1 s1 bf16 nhwc dgrad"]
)
def test_kernels_compile_without_spills_or_waits(text: str, share: Share) -> None:
    problem = ConvProblem.parse(text)
    algorithm: Any = DGRAD if problem.direction == "dgrad" else FPROP
    for source in share([algorithm.sources(problem, config)[-1] for config in sharing(problem, H200)]):
        _, used, log = compiled(source, "sm_90a")
        assert (used.stack_bytes, used.spill_bytes) == (0, 0), (source.text, used)
        assert not re.search(r"C75\d\d", log), (source.text, log)
