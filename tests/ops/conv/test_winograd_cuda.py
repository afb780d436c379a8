"""cuda.winograd without a GPU: its kernels by emulation and as compiled, its parts and its choice."""

from __future__ import annotations

import numpy as np
import pytest
from compiled_kernels import Share, compiled

import emulated
from emulated.verify import check
from tapwise import dispatch, registry
from tapwise.cuda.jit import compile as compiler
from tapwise.cuda.jit.device import H200
from tapwise.ops.conv.cuda import winograd
from tapwise.ops.conv.cuda.winograd import Winograd
from tapwise.ops.conv.problem import ConvProblem

ALGORITHM = Winograd()
# Both memory orders, tiles that leave the image on every side, stride 2, one axis alone, rows written four, two and one
# at a time, both dtypes.
EMULATED = [
    "n2 c5 h11 w13 k6 r3 s3 pad1 bias relu",
    "n3 c6 h8 w8 k4 r3 s3 pad1 groups2 nhwc gelu bias residual",
    "n2 c6 h17 w18 k4 r3 s3 pad1:0x2:3 stride2 groups2 nhwc residual",
    "n2 c4 h9 w14 k5 r3 s3 pad1 bias residual leaky_relu0.2",
    "n2 c3 h12 w8 k2 r3 s3 pad1 residual silu",
    "n1 c20 h8 w6 k18 r5 s3 pad0x2 f64 bias",
    "n1 c3 h19 w20 k5 r5 s5 stride2 pad2",
    "n1 c3 h2 w9 k3 r1 s7 pad3 nhwc",
    "n1 c3 h20 w3 k3 r3 s1 pad1x0",
    "n1 c4 h2 w2 k3 r2 s2 pad1 f64 nhwc",
]
COMPILED = [
    "n32 c64 h56 w56 k64 r3 s3 pad1",
    "n32 c256 h14 w14 k256 r3 s3 pad1 bias relu residual",
    "n4 c96 h28 w28 k96 r3 s3 stride2 pad1 nhwc bias gelu residual",
    "n2 c33 h20 w20 k37 r5 s5 pad2 tanh",
    "n2 c64 h20 w20 k64 r3 s3 pad1 f64 bias silu residual",
    "n2 c64 h17 w17 k64 r7 s7 stride2 pad3 f64 nhwc",
]


@pytest.mark.skipif(not emulated.available(), reason="needs g++")
@pytest.mark.parametrize("text", EMULATED)
def test_kernels_by_emulation(text: str) -> None:
    problem = ConvProblem.parse(text)
    config = ALGORITHM.configs(problem, H200)[-1]
    verdict = check(problem, ALGORITHM, config, backwards=len(text) % 2 == 0)
    assert verdict.verified, verdict.message


@pytest.mark.skipif(not emulated.available(), reason="needs g++")
def test_images_go_in_parts_where_memory_is_little(monkeypatch: pytest.MonkeyPatch) -> None:
    problem = ConvProblem.parse("n5 c5 h17 w18 k6 r3 s3 pad1 bias residual")
    monkeypatch.setattr(winograd, "WORKSPACE_BYTES", 3 * winograd.part_of(problem, 1).parts_at)
    config = ALGORITHM.configs(problem, H200)[-1]
    assert [part.images for part in winograd.parts_of(problem, config)] == [3, 2]
    verdict = check(problem, ALGORITHM, config)
    assert verdict.verified, verdict.message


@pytest.mark.skipif(not emulated.available(), reason="needs g++")
def test_absolute_sums_by_emulation() -> None:
    """What verification on a GPU takes for the size of the sums is what the contract says it is."""
    problem = ConvProblem.parse("n2 c4 h9 w10 k5 r3 s3 pad1 groups1")
    x, w, *_ = problem.sample(np.random.default_rng(0), False)
    wide = problem.replace(dtype="f64")
    config = ALGORITHM.configs(wide, H200)[0]
    memory = np.full(ALGORITHM.workspace_bytes(wide, config, H200), 0xFF, np.uint8)
    packed = np.full(winograd.packed_bytes(wide, config) // 8, np.nan)
    steps = tuple(step // w.itemsize for step in w.strides)
    emulated.run(winograd.pack_launch(wide, config, H200, "f32", steps), {"w": w, "y": packed})
    y = np.full(problem.y_shape, np.nan)
    for part, before, product, after in winograd.steps_of(wide, config, H200, "f32"):
        tiles, sums = memory[: part.products_at], memory[part.products_at : part.parts_at]
        emulated.run(before, {"x": x, "transformed": tiles})
        for launch in product:
            emulated.run(launch, {"x": tiles, "w": packed, "y": sums, "workspace": memory[part.parts_at :]})
        emulated.run(after, {"y": y, "products": sums})
    np.testing.assert_allclose(y, ALGORITHM.magnitude(problem, x, w), rtol=1e-12)


@pytest.mark.parametrize("architecture", ["sm_80", "sm_90a", "sm_100a"])
@pytest.mark.parametrize("text", COMPILED)
def test_kernels_compile_without_spills(text: str, architecture: str, share: Share) -> None:
    problem = ConvProblem.parse(text)
    config = ALGORITHM.configs(problem, H200)[0]
    own = [winograd.images_source, winograd.outputs_source, winograd.pack_source]
    for source in share(make(problem, config) for make in own):
        used = compiled(source, architecture).resources
        assert (used.stack_bytes, used.spill_bytes) == (0, 0), f"{source.text}: {used}"


@pytest.mark.parametrize(
    ("text", "reason"),
    [
        ("c8 h9 w9 k8 r3 s3 stride3", "takes stride 1 or 2 and no dilation"),
        ("c8 h9 w9 k8 r3 s3 dilation2", "takes stride 1 or 2 and no dilation"),
        ("c8 h9 w9 k8 r3 s3 groups8", "takes two channels and filters a group"),
        ("c8 h9 w9 k4 r3 s3 groups4", "takes two channels and filters a group"),
        ("c8 h9 w9 k8 r1 s1", "tiles save products"),
        ("c8 h9 w9 k8 r7 s7", "tiles save products"),
        ("c8 h9 w9 k8 r2 s2 stride2", "tiles save products"),
        ("c4096 h2000 w2000 k2 r3 s3", "tiles fit into 2 GiB"),
        ("c8 h9 w9 k8 r3 s3 f16", "takes f32 and f64"),
    ],
)
def test_rejects(text: str, reason: str) -> None:
    assert reason in str(ALGORITHM.refusal(ConvProblem.parse(text), H200))


def test_chosen_for_float32_alone_and_without_parts_that_memory_has_room_for() -> None:
    text = "n32 c128 h40 w40 k128 r3 s3 pad1"
    for layout in ("nchw", "nhwc"):
        choice = dispatch.choose(ConvProblem.parse(f"{text} {layout}"), H200)
        assert choice.algorithm == "cuda.winograd" and choice.config.images == 32  # type: ignore[attr-defined]
    assert dispatch.choose(ConvProblem.parse(f"{text} f64"), H200).algorithm == "cuda.implicit_gemm_simt"
    assert registry.get("cuda.winograd").exact is False
    # Few products a tile: the transforms are not paid back.
    assert dispatch.choose(ConvProblem.parse("n32 c3 h224 w224 k32 r3 s3 pad1"), H200).algorithm != "cuda.winograd"


def test_a_product_of_few_pixels_compiles() -> None:
    """Four pixels a copy are too many for a tile of eight and 64 threads."""
    algorithm = registry.get("cuda.implicit_gemm_simt")
    problem = ConvProblem.parse("n1 c512 h4 w4 k512 r1 s1")
    (config,) = [one for one in algorithm.configs(problem, H200) if one.pixels == 8 and one.split_k == 1]
    compiler.compile_now(algorithm.source(problem, config), "sm_90a")  # type: ignore[attr-defined]
