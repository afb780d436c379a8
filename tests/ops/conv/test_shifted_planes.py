"""cuda.implicit_gemm in NCHW of planes that begin within pieces of 16 bytes, which warps shift. Plans run by emulation,
against float64."""

from __future__ import annotations

from math import prod
from typing import Any

import numpy as np
import pytest
from compiled_kernels import Cover
from emulated_plans import SMALL, emulation, lent, memory_of, needs_compiler

import emulated
from tapwise.algorithm import Buffers
from tapwise.cuda.jit.device import H200
from tapwise.cuda.jit.launch import Launch
from tapwise.ops.conv.cuda.implicit_gemm import tensor_maps
from tapwise.ops.conv.cuda.implicit_gemm.config import Im2colConfig
from tapwise.ops.conv.cuda.implicit_gemm.implicit_gemm import ImplicitGemm
from tapwise.ops.conv.cuda.implicit_gemm.strips import plane_classes
from tapwise.ops.conv.cuda.implicit_gemm.view import View
from tapwise.ops.conv.problem import ConvProblem
from tapwise.verify import compare

__all__ = ["emulation"]
ALGORITHM = ImplicitGemm()


def some_of(problem: ConvProblem) -> dict[tuple[object, ...], Im2colConfig]:
    """The smallest tile of one kind, the largest of the next."""
    found: dict[tuple[object, ...], list[Im2colConfig]] = {}
    for one in sorted(ALGORITHM.configs(problem, SMALL), key=lambda one: one.tile_pixels * one.tile_filters):
        if isinstance(one, Im2colConfig) and one.transposed_pixels and not one.gather_bytes:
            shifted = View.of(problem, one).shifted
            how = shifted and (shifted.whole, shifted.warps)
            kind = one.swap_ab, one.warpgroups, one.split_k, how
            found.setdefault(kind, []).append(one)
    return {kind: ones[-(number % 2)] for number, (kind, ones) in enumerate(found.items())}


def outputs_of(problem: ConvProblem, config: Im2colConfig, inputs: Any) -> np.ndarray:
    plan = ALGORITHM.plan(problem, config, SMALL)
    assert plan.workspace_bytes == 0
    y = lent(np.full(problem.y_shape, np.nan, problem.y_dtype))
    bias, residual = (None if one is None else lent(one) for one in (inputs.bias, inputs.residual))
    plan.run(Buffers(lent(inputs.x), plan.pack(lent(inputs.w)), y, None, bias, residual, 0))
    return memory_of(y).copy()


PLANES = {
    # Eight planes are whole pieces; four.
    "n2 c64 h7 w7 k40 r1 s1 f16": True, "n3 c72 h9 w15 k37 r1 s1 bf16 bias relu": False,
    "n2 c8 h9 w11 k20 r1 s1 f16": True, "n2 c24 h13 w13 k24 r1 s1 f16 residual": False,
    "n5 c128 h3 w5 k16 r1 s1 f16": False, "n1 c200 h21 w17 k8 r1 s1 f16": True,
    "n3 c48 h7 w6 k40 r1 s1 bf16": True, "n2 c88 h6 w7 k40 r1 s1 f16 bias relu": False,
    "n2 c36 h14 w15 k16 r1 s1 f16": True, "n3 c144 h5 w7 k48 r1 s1 groups2 f16 bias silu residual": False,
    # Whole pieces.
    "n5 c72 h8 w8 k40 r1 s1 f16 bias": True, "n3 c64 h5 w8 k48 r1 s1 groups2 bf16 residual": False,
}  # fmt: skip


@needs_compiler
@pytest.mark.parametrize(("text", "backwards"), PLANES.items())
def test_any_plane_is_read_as_it_lies(
    emulation: None, monkeypatch: pytest.MonkeyPatch, cover: Cover, text: str, backwards: bool
) -> None:
    # Whichever tile is the last, none writes to the plane behind its own.
    monkeypatch.setattr(Launch, "__call__", lambda self, addresses, _: emulated.run_at(self, addresses, backwards))
    problem = ConvProblem.parse(text)
    inputs = problem.sample(np.random.default_rng(0), False)
    some = cover(text, PLANES, lambda one: some_of(ConvProblem.parse(one)))
    assert some
    for config in some:
        y = outputs_of(problem, config, inputs)
        verdict = compare(y, *problem.reference(inputs, ALGORITHM), problem.y_dtype)
        assert verdict, f"{config}: {verdict.message}"


@needs_compiler
@pytest.mark.parametrize("bad", [np.nan, np.inf])
@pytest.mark.parametrize("text", ["n3 c24 h7 w7 k16 r1 s1 f16", "n2 c72 h9 w15 k18 r1 s1 groups3 f16"])
def test_what_lies_beside_a_plane_reaches_no_output_of_it(emulation: None, text: str, bad: float) -> None:
    problem = ConvProblem.parse(text)
    inputs = problem.sample(np.random.default_rng(0), False)
    wanted = problem.reference(inputs, ALGORITHM)[0]
    # What comes with a plane's last pixels is the first ones of the channel, group or image behind it.
    inputs.x[:, :, 0, :3] = bad
    for config in some_of(problem).values():
        y = outputs_of(problem, config, inputs)
        assert not np.isfinite(y[:, :, 0, :3]).any()
        good = np.ones(problem.output, bool)
        good[0, :3] = False
        np.testing.assert_allclose(y[:, :, good], wanted[:, :, good], atol=1e-2, rtol=1e-2)


@pytest.mark.parametrize(
    "text",
    [
        "n32 c320 h75 w75 k40 r1 s1 f16", "n32 c768 h7 w7 k384 r1 s1 f16", "n4 c1024 h14 w13 k256 r1 s1 bf16",
        "n4 c96 h11 w11 k66 r1 s1 groups3 f16", "n3 c48 h7 w6 k40 r1 s1 bf16", "n2 c24 h25 w25 k24 r1 s1 f16",
    ],
)  # fmt: skip
def test_maps_are_what_tma_takes_and_end_with_x(text: str) -> None:
    problem = ConvProblem.parse(text)
    found = set()
    for config in ALGORITHM.configs(problem, H200):
        view = View.of(problem, config)
        shifted = view.shifted
        if not shifted:
            continue
        found.add(shifted.whole)
        made = tensor_maps.map_x(view)
        size = 8 if made.dtype == "f64" else 2
        assert all(stride % 16 == 0 for stride in made.strides)
        assert made.box[0] * size % 16 == 0 and max(made.box) <= 256 and made.swizzle_bytes == 0
        reaches = [(count - 1) * stride for count, stride in zip(made.sizes[1:], made.strides, strict=True)]
        assert sum(reaches) + made.sizes[0] * size == 2 * prod(problem.x_shape)
        # Bytes of all copies of a chunk have room in a buffer, and a row's last piece behind them.
        copies = 1 if shifted.whole else shifted.classes
        assert copies * prod(made.box) * size <= shifted.chunk_bytes
        assert shifted.chunk_bytes % 128 == 0
    assert found


@pytest.mark.parametrize(
    ("text", "classes", "taken"),
    [
        ("n2 c24 h7 w7 k8 r1 s1 f16", 8, True), ("n2 c20 h7 w7 k8 r1 s1 f16", 8, False),
        ("n2 c24 h7 w6 k8 r1 s1 f16", 4, True), ("n2 c22 h7 w6 k8 r1 s1 f16", 4, False),
        ("n2 c22 h6 w6 k8 r1 s1 f16", 2, False), ("n2 c22 h6 w8 k8 r1 s1 f16", 1, True),
        ("n2 c24 h7 w7 k8 r1 s1 groups2 f16", 8, False), ("n2 c21 h8 w6 k8 r1 s1 f16", 1, True),
    ],
)  # fmt: skip
def test_groups_have_whole_classes_of_channels(text: str, classes: int, taken: bool) -> None:
    problem = ConvProblem.parse(text)
    assert plane_classes(problem) == classes
    configs = ALGORITHM.configs(problem, SMALL)
    assert any(one.transposed_pixels and not one.gather_bytes for one in configs) is taken
    # Else x is packed or gathered as before.
    assert any(not one.transposed_pixels or one.gather_bytes for one in configs)
