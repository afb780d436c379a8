"""On a GPU: what bench measures."""

from __future__ import annotations

import pytest

from tapwise import baselines as peers
from tapwise import registry
from tapwise.lab import bench, records
from tapwise.lab.suites import Case

pytestmark = pytest.mark.cuda


def test_bench_times_fused_and_plain_layers_in_turns() -> None:
    """Ours and cuDNN's, each over its own plain convolution; a plain layer has nothing to compare."""
    text = "n2 c64 h16 w16 k64 r3 s3 pad1 f16 nhwc"
    cases = [Case(registry.parse(text + more)) for more in (" bias relu residual", "")]
    rows: list[records.Record] = []
    bench.run(cases, bench.Options(peers=(peers.PEERS["cudnn-cl"],), repeats=3, device="cuda"), rows.append)
    fused, plain = rows
    assert fused.verified and set(fused.over_plain) == {fused.algorithm, "cudnn-cl"}
    assert all(ratio > 0.5 for ratio in fused.over_plain.values())
    assert set(fused.cold_us) == set(fused.wall_us) == set(fused.over_plain)
    assert plain.verified and not plain.over_plain
