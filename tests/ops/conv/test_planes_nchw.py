"""cuda.implicit_gemm in NCHW without a GPU: planes read as they lie, outputs of halos as runs, pixels left out.
Plans run by emulation, against float64."""

from __future__ import annotations

from collections.abc import Callable
from itertools import cycle

import pytest
from compiled_kernels import Cover
from emulated_plans import SMALL, emulation, needs_compiler, verdict_of

import emulated
from tapwise.cuda.jit.launch import Launch
from tapwise.ops.conv.cuda import pack
from tapwise.ops.conv.cuda.implicit_gemm.config import Config, Im2colConfig
from tapwise.ops.conv.cuda.implicit_gemm.epilogue import Epilogue
from tapwise.ops.conv.cuda.implicit_gemm.implicit_gemm import ImplicitGemm
from tapwise.ops.conv.cuda.implicit_gemm.view import View, plane_pieces
from tapwise.ops.conv.problem import ConvProblem

__all__ = ["emulation"]
ALGORITHM = ImplicitGemm()


def some_of(problem: ConvProblem, wanted: Callable[[Config], bool]) -> dict[object, Config]:
    """Of each kind the configs with the largest tile, and with the smallest, of which a plane has several."""
    found: dict[tuple[object, ...], list[Config]] = {}
    for config in sorted(ALGORITHM.configs(problem, SMALL), key=lambda one: one.tile_pixels * one.tile_filters):
        if wanted(config):
            kind = type(config), config.swap_ab, config.ping_pong, config.split_k
            found.setdefault(kind, []).append(config)
    return {(kind, one is ones[0]): one for kind, ones in found.items() for one in (ones[0], ones[-1])}


PLANES = [
    "n2 c24 h8 w9 k40 r1 s1 f16 bias relu", "n3 c72 h8 w10 k37 r1 s1 bf16 residual", "n1 c80 h19 w8 k16 r1 s1 f16",
    # In pieces of 8 bytes, by a warpgroup.
    "n5 c88 h6 w6 k40 r1 s1 f16 bias relu", "n3 c72 h5 w12 k36 r1 s1 groups2 bf16 residual",
    "n3 c41 h7 w12 k40 r1 s1 f16 bias",
]  # fmt: skip


@needs_compiler
@pytest.mark.parametrize(("backwards", "text"), list(zip(cycle([False, True]), PLANES, strict=False)))
def test_planes_are_read_as_they_lie(
    emulation: None, monkeypatch: pytest.MonkeyPatch, cover: Cover, text: str, backwards: bool
) -> None:
    # Whichever tile is the last, none writes to the plane behind its own.
    monkeypatch.setattr(Launch, "__call__", lambda self, addresses, _: emulated.run_at(self, addresses, backwards))
    problem = ConvProblem.parse(text)
    some = cover(text, PLANES, lambda one: some_of(ConvProblem.parse(one), lambda one: one.transposed_pixels))
    assert some
    for config in some:
        assert ALGORITHM.workspace_bytes(problem, config, SMALL) == 0
        verdict = verdict_of(ALGORITHM, problem, config)
        assert verdict, f"{config}: {verdict.message}"


STORED = [
    "n2 c24 h12 w12 k40 r1 s1 f16 bias relu", "n3 c16 h8 w8 k72 r3 s3 pad1 bf16 residual",
    "n2 c32 h20 w20 k48 r1 s1 groups2 f16", "n3 c8 h8 w14 k40 r3 s3 pad1 f16 bias",
]  # fmt: skip


@needs_compiler
@pytest.mark.parametrize(("backwards", "text"), list(zip(cycle([False, True]), STORED, strict=False)))
def test_planes_are_stored_by_tma(emulation: None, monkeypatch: pytest.MonkeyPatch, text: str, backwards: bool) -> None:
    """In rows of 128 bytes, and where a tile's last row has fewer pixels."""
    monkeypatch.setattr(Launch, "__call__", lambda self, addresses, _: emulated.run_at(self, addresses, backwards))
    problem = ConvProblem.parse(text)

    def stored(config: Config) -> int:
        epilogue = Epilogue(View.of(problem, config))
        return epilogue.last_stored if epilogue.tma_store else -1

    some = some_of(problem, lambda one: stored(one) == 0) | {
        (place, "rest"): one for place, one in some_of(problem, lambda one: stored(one) > 0).items()
    }
    for config in some.values():
        verdict = verdict_of(ALGORITHM, problem, config)
        assert verdict, f"{config}: {verdict.message}"
    rests = {stored(config) for config in some.values()}
    assert any(rests) and (0 in rests or "w14" in text)


@pytest.mark.parametrize(
    ("text", "pixels", "stored"),
    [
        # Planes as they lie: any tile. Else rows of 128 bytes, or tiles, that end with an image.
        ("n2 c24 h12 w12 k40 r1 s1 f16", 80, True), ("n2 c24 h12 w12 k40 r3 s3 pad1 f16", 80, False),
        ("n2 c24 h12 w12 k40 r3 s3 pad1 f16", 72, True), ("n2 c24 h12 w12 k40 r3 s3 pad1 f16", 64, False),
        ("n2 c24 h16 w12 k40 r3 s3 pad1 f16", 128, True), ("n2 c24 h7 w12 k40 r1 s1 f16", 64, False),
    ],
)  # fmt: skip
def test_where_planes_are_stored_by_tma(text: str, pixels: int, stored: bool) -> None:
    problem = ConvProblem.parse(text)
    config = Im2colConfig(True, pixels, 64, stages=3, transposed_pixels="r1" in text)
    assert Epilogue(View.of(problem, config)).tma_store is stored


@needs_compiler
@pytest.mark.parametrize("text", ["n2 c24 h6 w6 k40 r1 s1 f16", "n2 c8 h8 w5 k40 r1 s1 f16"])
def test_stages_begin_where_swizzled_patterns_do(emulation: None, text: str) -> None:
    """Whatever bytes the filters of a stage have, beside chunks of fewer than 128."""
    problem = ConvProblem.parse(text)
    for config in ALGORITHM.configs(problem, SMALL):
        wide = isinstance(config, Im2colConfig) and config.transposed_pixels and not config.ping_pong
        if wide and (config.tile_pixels, config.tile_filters) == (64, 24):
            verdict = verdict_of(ALGORITHM, problem, config)
            assert verdict, f"{config}: {verdict.message}"


@needs_compiler
@pytest.mark.parametrize(
    "text",
    [
        "n3 c16 h5 w7 k20 r3 s3 pad1 f16 bias relu", "n5 c16 h3 w5 k32 r2 s2 pad1 bf16 residual",
        "n1 c16 h19 w23 k12 r5 s5 pad2 f16", "n2 c32 h6 w8 k16 r3 s3 pad1 f16", "n2 c24 h9 w6 k6 r3 s3 pad1 f16",
    ],
)  # fmt: skip
def test_outputs_of_halos_are_runs(emulation: None, text: str) -> None:
    problem = ConvProblem.parse(text)
    some = some_of(problem, lambda one: Epilogue(View.of(problem, one)).run_vector > 0)
    assert some and not any(isinstance(one, Im2colConfig) for one in some.values())
    for config in some.values():
        verdict = verdict_of(ALGORITHM, problem, config)
        assert verdict, f"{config}: {verdict.message}"


@needs_compiler
@pytest.mark.parametrize("text", ["n2 c24 h9 w11 k40 r1 s1 stride2 f16", "n3 c72 h8 w10 k20 r1 s1 stride2x1 f16 bias"])
def test_pixels_that_no_window_meets_are_left_out(emulation: None, text: str) -> None:
    problem = ConvProblem.parse(text)
    config = Im2colConfig(True, 64, 64, stages=3)
    whole = problem.replace(stride=(1, 1))
    assert ALGORITHM.workspace_bytes(problem, config, SMALL) < ALGORITHM.workspace_bytes(whole, config, SMALL)
    verdict = verdict_of(ALGORITHM, problem, config)
    assert verdict, verdict.message


@pytest.mark.parametrize(
    ("text", "left_out"),
    [
        ("n2 c24 h9 w11 k40 r1 s1 stride2 f16", True), ("n2 c24 h9 w11 k40 r1 s1 f16", False),
        ("n2 c24 h9 w11 k40 r1 s1 stride2 pad1 f16", False), ("n2 c24 h9 w11 k40 r3 s3 stride2 f16", False),
        ("n2 c24 h9 w11 k40 r1 s1 stride2 f16 nhwc", False),
    ],
)  # fmt: skip
def test_which_pixels_are_left_out(text: str, left_out: bool) -> None:
    # Twice: what is asked again comes from a cache, made for another object of the same words.
    for problem in (ConvProblem.parse(text), ConvProblem.parse(text)):
        assert pack.is_thinned(problem) is left_out
        seen = View.of(problem, Im2colConfig(True, 64, 64)).seen
        assert seen.spatial == (problem.output if left_out else problem.spatial)
        if problem.layout == "nchw":
            packing = ALGORITHM.sources(problem, Im2colConfig(True, 64, 64, stages=3))[-1]
            assert ("true" in packing.text.split("pack_channels_first")[1]) is left_out


@pytest.mark.parametrize(
    ("text", "pieces"),
    [
        ("n2 c24 h8 w9 k40 r1 s1 f16", 0), ("n2 c24 h6 w10 k40 r1 s1 bf16", 8), ("n2 c25 h6 w10 k40 r1 s1 bf16", 8),
        ("n2 c24 h6 w9 k40 r1 s1 f16", 0), ("n2 c24 h7 w9 k40 r1 s1 f16", 0), ("n2 c20 h7 w9 k40 r1 s1 f16", None),
        ("n2 c24 h8 w8 k40 r1 s1 stride2 f16", None), ("n2 c24 h8 w9 k40 r1 s1 tf32", None),
        ("n2 c24 h8 w9 k40 r1 s1 f16 nhwc", None), ("n2 c24 h8 w9 k40 r1 s1 pad1 f16", None),
        ("n2 c24 h8 w9 k40 r1 s3 f16", None),
    ],
)  # fmt: skip
def test_which_planes_are_read_as_they_lie(text: str, pieces: int | None) -> None:
    assert plane_pieces(ConvProblem.parse(text)) == pieces
