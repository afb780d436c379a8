"""Environment variables: what cannot be meant is refused by name, in one line."""

from __future__ import annotations

import ctypes
import sys
from types import SimpleNamespace

import llvmlite.binding as llvm
import numpy as np
import pytest

import tapwise
from tapwise import settings
from tapwise.cpu import device, jit
from tapwise.cpu.simd import INT, Kernel, runnable, target
from tapwise.errors import InvalidProblem


def softmax() -> np.ndarray:
    return np.asarray(tapwise.softmax(np.zeros((2, 4), np.float32)))


@pytest.mark.parametrize("value", ["0", "-1", "1.5", "", "\u00b2", "\u0663", "1025", "9" * 5000, "two"])
def test_number_of_threads_that_is_none(monkeypatch: pytest.MonkeyPatch, value: str) -> None:
    monkeypatch.setenv("TAPWISE_NUM_THREADS", value)
    with pytest.raises(InvalidProblem, match=r"^TAPWISE_NUM_THREADS='.{0,110}: a whole number, 1 to 1024, is allowed$"):
        softmax()


@pytest.mark.parametrize("value", ["1", "3", "1024"])
def test_number_of_threads(monkeypatch: pytest.MonkeyPatch, value: str) -> None:
    monkeypatch.setenv("TAPWISE_NUM_THREADS", value)
    assert settings.threads() == int(value)


@pytest.mark.parametrize("value", ["", "pentium", "AVX2"])
def test_unknown_instruction_set(monkeypatch: pytest.MonkeyPatch, value: str) -> None:
    monkeypatch.setenv("TAPWISE_CPU_TARGET", value)
    with pytest.raises(InvalidProblem, match=f"^TAPWISE_CPU_TARGET='{value}': on this processor host.* is allowed$"):
        softmax()


def test_instruction_set_that_this_processor_lacks(monkeypatch: pytest.MonkeyPatch) -> None:
    lacking = {"avx512-amx", "avx512-bf16", "avx512", "avx2", "avx2-128", "neon-bf16", "neon"} - set(runnable())
    assert lacking, "no processor has them all"
    for name in lacking:
        monkeypatch.setenv("TAPWISE_CPU_TARGET", name)
        with pytest.raises(InvalidProblem, match=f"^TAPWISE_CPU_TARGET='{name}': on this processor host"):
            softmax()
        # For reading, its code can be generated all the same.
        k = Kernel(target(name), "f32")
        with k.function("task", public=True, args="i64", worker=INT) as (args, _):
            k.b.store(k.integer(1).ir, args.value)
        assert "task" in jit.assembly(k)


def test_avx512_needs_a_processor_that_has_it(monkeypatch: pytest.MonkeyPatch) -> None:
    haswell = {"avx2": True, "fma": True, "f16c": True, "avx512f": False}
    monkeypatch.setattr(llvm, "get_host_cpu_features", lambda: haswell)
    assert runnable() == ["host", "avx2", "avx2-128"]
    device._host.cache_clear()
    monkeypatch.setenv("TAPWISE_CPU_TARGET", "avx512")
    with pytest.raises(InvalidProblem, match="avx512': on this processor host, avx2, avx2-128 is allowed"):
        device.host(1)


@pytest.mark.parametrize("bits", [0, 1 << 14, ~(1 << 14)])
def test_bfloat16_of_an_arm_processor_is_what_linux_says(monkeypatch: pytest.MonkeyPatch, bits: int) -> None:
    asked = []

    def getauxval(word: int) -> int:
        asked.append(word)
        return bits

    monkeypatch.setattr(llvm, "get_process_triple", lambda: "aarch64-unknown-linux-gnu")
    monkeypatch.setattr(llvm, "get_host_cpu_features", lambda: llvm.FeatureMap({"neon": True}))
    monkeypatch.setattr(sys, "platform", "linux")
    monkeypatch.setattr(ctypes, "CDLL", lambda name: SimpleNamespace(getauxval=getauxval))
    has = bits == 1 << 14
    # Past what is kept of this processor.
    assert target.__wrapped__().bf16_pairs == has
    assert runnable() == ["host", *["neon-bf16"] * has, "neon"] and set(asked) == {26}
