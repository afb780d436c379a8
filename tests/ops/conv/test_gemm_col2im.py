"""cpu.gemm_col2im: products of dy with all taps, added up where they overlap."""

from __future__ import annotations

from dataclasses import replace

import numpy as np
import pytest

from tapwise import dispatch, registry
from tapwise.algorithm import Buffers, Device
from tapwise.cpu.device import host
from tapwise.errors import NotApplicable
from tapwise.ops.conv.cpu.gemm_col2im import Col2imPlan, at_once
from tapwise.ops.conv.problem import ConvProblem
from tapwise.verify import check

ALGORITHM = registry.get("cpu.gemm_col2im", "dgrad")
TAKEN = [
    "c40 h13 w13 k33 r3 s3 stride2 pad1 dgrad", "n2 c6 h21 w70 k9 r3 s3 pad1 groups3 bias tanh dgrad",
    "n3 c5 h9 w11 k7 r4 s2 stride3x1 pad2:0x0:1 dilation1x2 f64 dgrad",
    "c3 h6 w35 k5 r5 s7 stride2x4 pad2x3 bias dgrad",
    "c4 h3 w2 k3 r5 s5 stride2 pad2 dgrad", "c2 h9 w8 k2 r1 s1 stride4 bias sigmoid dgrad",
    "n2 c3 h8 w19 k4 r3 s3 stride2 pad4 dilation3 dgrad", "c17 h33 w65 k16 r2 s2 stride2 relu dgrad",
]  # fmt: skip


@pytest.mark.many
@pytest.mark.parametrize("text", TAKEN)
def test_is_the_gradient(text: str) -> None:
    for threads in (1, 2):
        problem, device = ConvProblem.parse(text), host(threads)
        for config in ALGORITHM.configs(problem, device):
            assert (verdict := check(problem, ALGORITHM.id, config, device=device)), (config, verdict.message)


@pytest.mark.parametrize(
    "text", ["c4 h9 w9 k4 r3 s3 stride2x3 dgrad", "c4 h9 w9 k4 r3 s3 nhwc dgrad", "c4 h9 w9 k4 r3 s3 f16 dgrad"]
)
def test_what_it_does_not_take(text: str) -> None:
    with pytest.raises(NotApplicable, match="takes"):
        check(ConvProblem.parse(text), ALGORITHM.id, device=host(2))


@pytest.mark.parametrize(("images", "together"), [(6, 3), (5, 1), (1, 1)])
def test_images_whose_products_the_cache_holds(images: int, together: int) -> None:
    """As many at a time as divide all; results are the same."""
    problem = ConvProblem.parse(f"n{images} c16 h12 w12 k8 r3 s3 stride2 pad1 bias dgrad")
    products = 16 * 9 * 36 * 4
    device = replace(host(2), l3_bytes=2 * (4 * products + 1000))
    assert at_once(problem, device) == together
    assert (verdict := check(problem, ALGORITHM.id, device=device)), verdict.message


def test_filters_are_read_where_they_lie() -> None:
    """A plan packs nothing, so that it sees what w holds later."""
    problem, device = ConvProblem.parse("c8 h10 w10 k16 r3 s3 stride2 pad1 dgrad"), host(1)
    (config,) = ALGORITHM.configs(problem, device)
    plan = ALGORITHM.plan(problem, config, device)
    assert isinstance(plan, Col2imPlan)
    assert plan.packed_bytes == 0
    w = np.ones(problem.w_shape, np.float32)
    assert np.shares_memory(plan.pack(w), w)


def test_nan_and_infinity_reach_their_elements_alone() -> None:
    """Lanes of a vector that lie beside a row of products are left out, whatever they hold."""
    problem, device = ConvProblem.parse("c2 h9 w9 k3 r3 s3 stride2 pad1 dgrad"), host(1)
    (config,) = ALGORITHM.configs(problem, device)
    plan = ALGORITHM.plan(problem, config, device)
    workspace = np.full(plan.workspace_bytes, 255, np.uint8)
    dy, w = np.zeros(problem.y_shape, np.float32), np.ones(problem.w_shape, np.float32)
    dy[0, 1, 2, 2] = np.inf
    dx = np.empty(problem.x_shape, np.float32)
    plan.run(Buffers(dy, plan.pack(w), dx, workspace, None, None))
    expected = np.zeros(problem.x_shape, np.float32)
    expected[:, :, 3:6, 3:6] = np.inf
    np.testing.assert_array_equal(dx, expected)


def test_is_chosen_where_packing_would_take_as_long_as_the_products() -> None:
    """One small image and many filters, a stride: of phases each call packs all filters."""
    device = Device("cpu", "a CPU", 2, 64, 32, 32 << 10, 1 << 20, 32 << 20, gflops=115.0, gbps=25.0, vector_cycles=2.0)
    problem = ConvProblem.parse("c304 h8 w8 k352 r3 s3 stride2 pad1 dgrad")
    assert dispatch.choose(problem, device, prepared=False).algorithm == ALGORITHM.id
    assert dispatch.choose(problem, device).algorithm == "cpu.winograd"


def test_it_refuses_what_nothing_reads_in_place() -> None:
    """Vectors of NEON, and single pixels of single channels: no 1x1 convolution takes filters where they lie."""
    neon = replace(host(2), vector_bytes=16)
    for text, device in (("c8 h9 w9 k8 r3 s3 stride2 pad1 dgrad", neon), ("c1 h1 w1 k1 r1 s1 dgrad", host(1))):
        problem = ConvProblem.parse(text)
        assert not ALGORITHM.configs(problem, device)
        assert "where they lie" in str(ALGORITHM.refusal(problem, device))
        assert dispatch.choose(problem, device).algorithm != ALGORITHM.id
