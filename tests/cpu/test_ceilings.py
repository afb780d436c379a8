"""The ceilings' own kernels: what they measure is what they say."""

from __future__ import annotations

import ctypes
import re

import pytest

from tapwise.cpu import ceilings, driver, jit
from tapwise.cpu.simd import target


@pytest.mark.parametrize("name", ["avx512", "avx2", "neon"])
def test_all_chains_are_computed(name: str) -> None:
    """LLVM has not put chains together that begin alike: as many multiply-adds in the loop as there are chains."""
    vector = target(name)
    text = jit.assembly(ceilings.generate(vector, dtype="f32")).split("fma:")[1].split("copy:")[0]
    found = re.findall(r"vfn?madd\w+ps\s|fmla\s+v", text)
    assert len(found) == (12 if vector.registers == 16 else 24)


def test_a_line_goes_to_and_fro(monkeypatch: pytest.MonkeyPatch) -> None:
    """Each worker has seen all of the other's numbers, or there is no time."""
    seen: list[int] = []
    run = driver.run

    def counted(address: int, args: int, workers: int) -> None:
        run(address, args, workers)
        line = ctypes.c_int64.from_address(ctypes.c_int64.from_address(args).value)
        seen.append(line.value)

    monkeypatch.setattr(driver, "run", counted)
    found = ceilings.line_ns()
    assert seen and all(number in (2 * ceilings._TRIPS, ceilings._GIVEN_UP) for number in seen)
    assert (found is None) == (ceilings._GIVEN_UP in seen)
    assert found is None or found > 5


def test_a_line_that_nobody_sends_back_is_given_up(monkeypatch: pytest.MonkeyPatch) -> None:
    run = driver.run
    monkeypatch.setattr(driver, "run", lambda address, args, workers: run(address, args, 1))
    assert ceilings.line_ns() is None
