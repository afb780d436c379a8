"""The instruction sets that kernels are generated for."""

from __future__ import annotations

import ctypes
import sys
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
        """Whether it has an instruction that multiplies pairs of bfloat16 (cpu/pairs.py): AVX-512's or Arm's."""
        return self.rounds_bf16 and (self.arm or self.vector_bytes == 64)

    @property
    def amx(self) -> bool:
        """Whether it has tile registers that multiply bfloat16 (cpu/amx.py)."""
        return {"+amx-tile", "+amx-bf16"} <= set(self.features.split(","))

    @property
    def arm(self) -> bool:
        """Whether it is a 64-bit Arm processor's."""
        return _is_arm(self.triple)

    @property
    def rounds_bf16(self) -> bool:
        """Whether it has instructions that round float32 to bfloat16: AVX-512's or those of Arm."""
        return not {"+avx512bf16", "+bf16"}.isdisjoint(self.features.split(","))


def _is_arm(triple: str) -> bool:
    return triple.startswith(("aarch64", "arm64"))


_X86: Final = "x86_64-unknown-linux-gnu"
_AVX512: Final = "+avx512f,+avx512vl,+avx512dq,+avx512bw,+fma,+f16c"
_NAMED: Final = {
    "avx512-amx": Target("avx512-amx", _X86, "sapphirerapids", f"{_AVX512},+avx512bf16,+amx-tile,+amx-bf16", 64, 32),
    "avx512-bf16": Target("avx512-bf16", _X86, "cooperlake", f"{_AVX512},+avx512bf16", 64, 32),
    "avx512": Target("avx512", _X86, "skylake-avx512", _AVX512, 64, 32),
    "avx2": Target("avx2", _X86, "haswell", "+avx2,+fma,+f16c", 32, 16),
    # Half of AVX2's width: what a study of vector widths compares with.
    "avx2-128": Target("avx2-128", _X86, "haswell", "+avx2,+fma,+f16c", 16, 16),
    "neon-bf16": Target("neon-bf16", "aarch64-unknown-linux-gnu", "neoverse-n2", "+neon,+bf16", 16, 32),
    "neon": Target("neon", "aarch64-unknown-linux-gnu", "cortex-a72", "+neon", 16, 32),
}


# Linux's words on a processor's instructions: <elf.h>, <asm/hwcap.h> of arm64.
_HWCAP2: Final = 26
_HWCAP2_BF16: Final = 1 << 14


@cache
def target(name: str = "host") -> Target:
    """The target of that name: host, avx512-amx, avx512-bf16, avx512, avx2, avx2-128, neon-bf16 or neon. Raises
    InvalidProblem for another."""
    if name in _NAMED:
        return _NAMED[name]
    if name != "host":
        raise InvalidProblem(f"cpu target {name!r:.60}: host, {', '.join(_NAMED)}")
    features = _features()
    triple = llvm.get_process_triple()
    if _is_arm(triple):
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


def _features() -> llvm.FeatureMap:
    """What LLVM knows of this processor, and bfloat16 of Arm's, of which it does not ask."""
    features = llvm.get_host_cpu_features()
    if _is_arm(llvm.get_process_triple()) and sys.platform == "linux":
        features["bf16"] = bool(ctypes.CDLL(None).getauxval(_HWCAP2) & _HWCAP2_BF16)
    return features


def runnable() -> list[str]:
    """Names of the targets that this processor has the instructions of; "host" is one everywhere."""
    has = _features()
    return ["host", *(n for n, t in _NAMED.items() if all(has.get(word[1:]) for word in t.features.split(",")))]
