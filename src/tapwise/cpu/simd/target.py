"""The instruction sets that kernels are generated for."""

from __future__ import annotations

from dataclasses import dataclass
from functools import cache
from typing import Final

import llvmlite.binding as llvm

from tapwise.cpu.simd.values import BYTES
from tapwise.errors import InvalidProblem


@dataclass(frozen=True)
class Target:
    """An instruction set to generate for: vector width in bytes and number of vector registers steer the generators."""

    name: str
    triple: str
    cpu: str
    features: str
    vector_bytes: int
    registers: int

    def lanes(self, dtype: str) -> int:
        return self.vector_bytes // BYTES[dtype]

    @property
    def bf16_pairs(self) -> bool:
        """Whether it has AVX-512's instruction that multiplies pairs of bfloat16 (cpu/pairs.py)."""
        return self.vector_bytes == 64 and "+avx512bf16" in self.features.split(",")

    @property
    def rounds_bf16(self) -> bool:
        """Whether it has instructions that round float32 to bfloat16: AVX-512's or those of Arm."""
        return not {"+avx512bf16", "+bf16"}.isdisjoint(self.features.split(","))


_X86: Final = "x86_64-unknown-linux-gnu"
_AVX512: Final = "+avx512f,+avx512vl,+avx512dq,+avx512bw,+fma,+f16c"
_NAMED: Final = {
    "avx512-bf16": Target("avx512-bf16", _X86, "cooperlake", f"{_AVX512},+avx512bf16", 64, 32),
    "avx512": Target("avx512", _X86, "skylake-avx512", _AVX512, 64, 32),
    "avx2": Target("avx2", _X86, "haswell", "+avx2,+fma,+f16c", 32, 16),
    # Half of AVX2's width: what a study of vector widths compares with.
    "avx2-128": Target("avx2-128", _X86, "haswell", "+avx2,+fma,+f16c", 16, 16),
    "neon": Target("neon", "aarch64-unknown-linux-gnu", "cortex-a72", "+neon", 16, 32),
}


@cache
def target(name: str = "host") -> Target:
    """The target of that name: host, avx512-bf16, avx512, avx2, avx2-128 or neon. Raises InvalidProblem for another."""
    if name in _NAMED:
        return _NAMED[name]
    if name != "host":
        raise InvalidProblem(f"cpu target {name!r:.60}: host, {', '.join(_NAMED)}")
    features = llvm.get_host_cpu_features()
    triple = llvm.get_process_triple()
    if triple.startswith(("aarch64", "arm64")):
        width, registers = 16, 32
    elif features.get("avx512f") and features.get("avx512vl"):
        width, registers = 64, 32
    elif features.get("avx2") and features.get("fma"):
        width, registers = 32, 16
    else:
        width, registers = 16, 16
    flags = features.flatten()
    if width == 64:
        flags += ",-prefer-256-bit"
    return Target("host", triple, llvm.get_host_cpu_name(), flags, width, registers)


def runnable() -> list[str]:
    """Names of the targets that this processor has the instructions of; "host" is one everywhere."""
    has = llvm.get_host_cpu_features()
    return ["host", *(n for n, t in _NAMED.items() if all(has.get(word[1:]) for word in t.features.split(",")))]
