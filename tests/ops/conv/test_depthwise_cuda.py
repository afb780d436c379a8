"""cuda.depthwise without a GPU: kernels compile without spills, and by emulation compute the convolution."""

from __future__ import annotations

from collections.abc import Iterator
from dataclasses import replace
from typing import Any

import numpy as np
import pytest
from compiled_kernels import Cover, Share, compiled

import emulated
from emulated.verify import check, finite_elsewhere, packed, run_once
from tapwise import dispatch
from tapwise.algorithm import Device
from tapwise.cuda.jit.device import H200
from tapwise.ops.conv.cuda.depthwise.banded import Banded
from tapwise.ops.conv.cuda.depthwise.depthwise import Depthwise
from tapwise.ops.conv.cuda.depthwise.streamed import Streamed
from tapwise.ops.conv.problem import ConvProblem

ALGORITHM = Depthwise()
COMPILED = [
    "n32 c288 h28 w28 k288 r5 s5 pad2 groups288 f16 nhwc bias silu residual",
    "n32 c256 h28 w28 k256 r7 s7 pad3 groups256 bf16 nhwc",
    "n32 c256 h56 w56 k256 r31 s31 pad15 groups256 f16 nhwc bias",
    "n8 c96 h112 w112 k96 r3 s3 stride2 pad1 groups96 nhwc bias gelu",
    "n8 c64 h28 w28 k64 r7 s7 pad3 groups64",
    "n32 c144 h56 w56 k144 r5 s5 stride2 pad2 groups144 nhwc residual gelu",
    "n1 c64 h28 w28 k64 r9 s9 pad4 groups64 f64",
    "n32 c640 h8 w8 k640 r7 s7 pad3 groups640 f16 nhwc bias silu",
    "n8 c63 h28 w28 k63 r5 s5 pad2 groups63 bf16 nhwc residual gelu",
    "n8 c64 h14 w14 k64 r13 s13 pad6 groups64 f64 nhwc",
    "n32 c288 h28 w28 k288 r5 s5 pad2 groups288 bf16 bias silu residual",
    "n8 c96 h112 w112 k96 r3 s3 stride2 pad1 groups96 f64 gelu",
    "n32 c256 h56 w56 k256 r31 s31 pad15 groups256 bf16 bias silu residual",
]
EMULATED = [
    "n2 c48 h11 w26 k48 r3 s3 pad1:0x2:1 groups48 bf16 nhwc residual silu",
    "n3 c7 h9 w13 k7 r3 s3 stride2 pad1 groups7 nhwc bias",
    "n2 c20 h9 w19 k20 r3 s3 pad1:0x2:1 groups20 f16 nhwc bias silu residual",
    "n3 c9 h7 w7 k9 r7 s7 pad3 groups9 bf16 nhwc leaky_relu-2.5",
    "n4 c60 h7 w7 k60 r7 s7 pad3 groups60 f16 nhwc residual bias hardswish",
    "c72 h17 w35 k72 r3 s3 pad1 groups72 bf16 nhwc relu6",
    "c16 h9 w14 k16 r5 s5 stride2x3 pad2 dilation3x2 groups16 f16 nhwc",
    "n2 c36 h11 w15 k36 r3 s3 stride2x1 pad1:0x2:1 groups36 nhwc silu residual bias",
    "c8 h12 w17 k8 r13 s15 pad6x7 groups8 f16 nhwc bias hardsigmoid",
    "c5 h14 w15 k10 r3 s3 pad2 dilation2 groups5 nhwc relu",
    "c3 h12 w13 k6 r5 s5 stride2 pad2 groups3 bias leaky_relu0.2",
    "c3 h10 w11 k3 r7 s7 pad3 groups3 f64 residual gelu_tanh",
    "n2 c6 h9 w11 k6 r5 s3 stride2x1 pad1:0x2:1 groups6 nhwc silu residual",
    "n2 c4 h4 w20 k4 r3 s3 pad1x3 groups4 nhwc f64 dilation1x3",
    "c70 h5 w6 k70 r3 s1 groups70 nhwc f16 bias",
    "n5 c16 h7 w6 k16 r7 s5 pad3x2 groups16 f16 nhwc residual bias silu",
    "n2 c8 h20 w18 k8 r4 s9 pad0:3x4:1 groups8 f16 nhwc residual",
    "n3 c8 h14 w13 k8 r27 s27 pad13 groups8 bf16 nhwc bias",
    "c2 h9 w20 k2 r2 s31 pad1x15 groups2 bf16 gelu_tanh",
    "n3 c7 h9 w13 k7 r3 s3 stride2 pad1:0x2:1 groups7 f16 bias residual silu",
    "n2 c9 h7 w7 k9 r7 s7 pad3 groups9 bf16 residual",
    "c3 h71 w9 k3 r3 s5 stride1x2 pad1x2 groups3 f64 bias relu",
    "c3 h4 w5 k3 r2 s2 pad9 groups3 f16",
    "c5 h47 w61 k5 r5 s5 stride3x1 pad2 groups5 leaky_relu0.2",
    "n3 c5 h7 w7 k5 r9 s9 pad4 groups5 bias relu",
    "c3 h40 w37 k3 r13 s11 pad6x5 groups3 bf16 bias residual silu",
    "c2 h20 w19 k2 r9 s7 stride2 pad4:0x3:1 groups2 f64",
]


def kinds(problem: ConvProblem, device: Device = H200) -> Iterator[Any]:
    """The model's best config of each kernel and way of copying, and one of another shape."""
    configs = sorted(ALGORITHM.configs(problem, device), key=lambda one: ALGORITHM.predict_us(problem, one, device))

    def kind(one: Any) -> tuple[str, ...]:
        return type(one).__name__, *(str(getattr(one, name, "")) for name in ("kernel", "by", "tma"))

    for found in sorted({kind(one) for one in configs}):
        mine = [one for one in configs if kind(one) == found]
        yield mine[0]
        yield mine[len(mine) * 2 // 3]


def turns(text: str) -> dict[object, Any]:
    """Problems take turns: one the best configs of all kinds, the next the others."""
    problem, turn = ConvProblem.parse(text), EMULATED.index(text) % 2

    def kind(one: Any) -> tuple[object, ...]:
        ways = (getattr(one, name, None) for name in ("kernel", "by", "tma"))
        return type(one), *ways, problem.dtype, turn

    return {kind(one): one for one in list(kinds(problem))[turn::2]}


@pytest.mark.many
@pytest.mark.parametrize("architecture", ["sm_80", "sm_90a", "sm_100a"])
@pytest.mark.parametrize("text", COMPILED)
def test_kernels_compile_without_spills(text: str, architecture: str, share: Share) -> None:
    problem = ConvProblem.parse(text)
    found = list(kinds(problem, replace(H200, architecture=architecture)))
    # The best of the first kernel and of the last one.
    some = found if architecture == "sm_90a" else (found[0], found[-2])
    for source in share(ALGORITHM.source(problem, config) for config in some):
        used = compiled(source, architecture).resources
        assert used.spill_bytes == 0, (source.text, used)


def test_rows_come_by_tma_where_it_can() -> None:
    """From compute capability 9.0 on, in pieces of 16 bytes; odd numbers of channels as whole rows."""

    def ways(channels: int, device: Device, words: str = "") -> set[str]:
        problem = ConvProblem.parse(f"c{channels} h20 w20 k{channels} r3 s3 pad1 groups{channels} f16 nhwc {words}")
        return {one.by for one in ALGORITHM.configs(problem, device) if isinstance(one, Streamed)}

    older = replace(H200, architecture="sm_80")
    assert (
        ways(64, H200) == {"tma", "pixels"}
        and ways(64, older) == {"pixels"}
        and ways(64, H200, "dilation2") == {"pixels"}
    )
    assert ways(60, H200) == {"pixels"} and ways(62, H200) == {"pixels", "rows"}
    assert ways(63, H200) == ways(63, older) == {"rows"}
    assert ways(63, H200, "dilation2") == ways(601, H200) == set()


@pytest.mark.skipif(not emulated.available(), reason="no compiler to emulate with")
def test_bytes_to_the_end_of_a_large_array_are_no_32_bits() -> None:
    """Whole rows end where the array does: here the kernel is told of images that would fill 2^33 bytes, of which it
    computes two and finds three."""
    problem = ConvProblem.parse("n2 c7 h9 w13 k7 r3 s3 pad1 groups7 nhwc")
    config = next(one for one in ALGORITHM.configs(problem, H200) if getattr(one, "by", "") == "rows")
    inputs = problem.sample(np.random.default_rng(0), True)
    y = np.full((2, 9, 13, 7), np.nan, np.float32)
    x = np.ascontiguousarray(np.moveaxis(inputs.x, 1, -1))
    x = np.concatenate([x, np.full_like(x[:1], np.nan)])
    (launch,) = ALGORITHM.launches(problem, config, H200)
    launch.words[launch.names.index("n")] = (1 << 31) // x[0].size
    emulated.run(launch, {"x": x, "w": packed(problem, ALGORITHM, config, inputs.w), "y": y})
    assert np.array_equal(np.moveaxis(y, -1, 1), problem.convolve(inputs.x, inputs.w).astype(np.float32))


@pytest.mark.skipif(not emulated.available(), reason="no compiler to emulate with")
@pytest.mark.parametrize("text", EMULATED)
def test_kernels_compute_the_convolution(text: str, cover: Cover) -> None:
    problem = ConvProblem.parse(text)
    for number, config in enumerate(cover(text, EMULATED, turns), EMULATED.index(text)):
        verdict = check(problem, ALGORITHM, config, backwards=number % 2 == 1)
        assert verdict, (config, verdict.message)


@pytest.mark.skipif(not emulated.available(), reason="no compiler to emulate with")
@pytest.mark.parametrize(
    "words", ["r3 s3 pad1 f16 nhwc", "r9 s9 pad4 f16 nhwc", "r3 s3 pad1 f16", "r5 s5 pad2", "r9 s9 pad4"]
)
def test_what_is_not_finite_stays_in_its_channel(words: str) -> None:
    """Where the operands' zeros, or the planes beside it, would spread it."""
    problem = ConvProblem.parse(f"c16 h9 w11 k16 groups16 {words}")
    for config in list(kinds(problem))[::2]:
        assert not (why := finite_elsewhere(problem, ALGORITHM, config)), (config, why)


@pytest.mark.skipif(not emulated.available(), reason="no compiler to emulate with")
@pytest.mark.parametrize(
    "text", ["c8 h9 w11 k8 r3 s3 pad1 groups8 f16 nhwc", "c8 h9 w8 k8 r7 s7 pad3 groups8 bf16 nhwc"]
)
def test_nothing_is_computed_again_where_all_is_finite(text: str) -> None:
    """Shared memory that nobody wrote, behind the last rows, is NaN here: it has no part in any output."""
    problem = ConvProblem.parse(text)
    found = [one for one in ALGORITHM.configs(problem, H200) if isinstance(one, Banded)]
    for config in found[:: len(found) // 3]:
        run_once(problem, ALGORITHM, config)


@pytest.mark.parametrize(
    ("text", "why"),
    [
        ("c8 h9 w9 k8 r3 s3", "one input channel a group"),
        ("c8 h9 w9 k8 r3 s3 groups4", "one input channel a group"),
        ("c8 h9 w90 k8 r3 s33 groups8", "up to 31 columns"),
        ("c8 h9 w300000000 k8 r3 s3 groups8 nhwc", "rows of fewer than 2^31"),
    ],
)
def test_what_it_does_not_take(text: str, why: str) -> None:
    assert why in str(ALGORITHM.refusal(ConvProblem.parse(text), H200))


@pytest.mark.parametrize("order", ["f32 nhwc", "f64 nhwc", "f16", "f16 nhwc", "bf16", "bf16 nhwc"])
def test_is_chosen(order: str) -> None:
    problem = ConvProblem.parse(f"n8 c96 h28 w28 k96 r7 s7 pad3 groups96 {order}")
    assert dispatch.choose(problem, H200).algorithm == "cuda.depthwise"
