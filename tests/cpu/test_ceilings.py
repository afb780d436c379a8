"""The ceilings' own kernels: what they measure is what they say."""

from __future__ import annotations

import re

import pytest

from tapwise.cpu import ceilings, jit
from tapwise.cpu.simd import target


@pytest.mark.parametrize("name", ["avx512", "avx2", "neon"])
def test_all_chains_are_computed(name: str) -> None:
    """LLVM has not put chains together that begin alike: as many multiply-adds in the loop as there are chains."""
    vector = target(name)
    text = jit.assembly(ceilings.generate(vector, dtype="f32")).split("fma:")[1].split("copy:")[0]
    found = re.findall(r"vfn?madd\w+ps\s|fmla\s+v", text)
    assert len(found) == (12 if vector.registers == 16 else 24)
