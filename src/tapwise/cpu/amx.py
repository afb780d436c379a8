"""Intel's AMX: eight tile registers of 16 rows of 64 bytes, and products of two of them.

A tile of bfloat16 a, 16 rows of 16 pairs, and one of b, 16 pairs of 16 columns, give sums of float32, 16 rows of 16
columns: c[i][j] += sum over pairs p of a[i][2p] * b[p][2j] + a[i][2p + 1] * b[p][2j + 1]. It takes and gives zeros for
subnormal numbers, and rounds after each product and sum. Linux gives a process the registers when it asks for them.

Source: Intel 64 and IA-32 Architectures Software Developer's Manual, volume 1, chapter 18; Linux, Documentation/arch/
x86/xstate.rst.
"""

from __future__ import annotations

import ctypes
import sys
from functools import cache
from typing import Any, Final

import numpy as np
from llvmlite import ir

from tapwise.cpu.pairs import PairKernel
from tapwise.cpu.simd import Int, Ptr

ROWS: Final = 16
# Pairs of a row, and columns of sums.
PAIRS: Final = 16
CONFIG_BYTES: Final = 64
_I8: Final = ir.IntType(8)
# arch_prctl(ARCH_REQ_XCOMP_PERM, XFEATURE_XTILEDATA), <asm/prctl.h> of x86-64.
_ARCH_PRCTL, _REQUEST, _TILE_DATA = 158, 0x1023, 18


@cache
def granted() -> bool:
    """Whether Linux lets this process use the tile registers. What threads and forks of it come later may, too."""
    return sys.platform == "linux" and ctypes.CDLL(None).syscall(_ARCH_PRCTL, _REQUEST, _TILE_DATA) == 0


def configs(pairs: int) -> np.ndarray:
    """(16, 64) uint8: what ldtilecfg takes for products of 1 to 16 rows of so many pairs: tiles 0 to 3 are sums, 4 and
    5 rows, 6 and 7 pairs of columns."""
    table = np.zeros((ROWS, CONFIG_BYTES), np.uint8)
    table[:, 0] = 1
    widths = table[:, 16:48].view(np.uint16)
    widths[:, :8] = 4 * PAIRS
    widths[:, 4:6] = 4 * pairs
    table[:, 48:54] = np.arange(1, ROWS + 1)[:, None]
    table[:, 54:56] = pairs
    return table


class TileKernel(PairKernel):
    """A kernel of pairs that has tile registers, named by number."""

    def configure(self, config: Ptr) -> None:
        self._tile("ldtilecfg", [config.value])

    def release(self) -> None:
        """Lets the core save less for this thread."""
        self._tile("tilerelease", [])

    def zero(self, tile: int) -> None:
        self._tile("tilezero", [_I8(tile)])

    def load_tile(self, tile: int, pointer: Ptr, step: Int | int) -> None:
        """Rows `step` bytes apart."""
        self._tile("tileloadd64", [_I8(tile), pointer.value, self.integer(step).ir])

    def store_tile(self, pointer: Ptr, step: Int | int, tile: int) -> None:
        self._tile("tilestored64", [_I8(tile), pointer.value, self.integer(step).ir])

    def add_products(self, sums: int, rows: int, columns: int) -> None:
        self._tile("tdpbf16ps", [_I8(sums), _I8(rows), _I8(columns)])

    def _tile(self, name: str, operands: list[Any]) -> None:
        full = f"llvm.x86.{name}"
        function = self.module.globals.get(full)
        if function is None:
            kinds = [operand.type for operand in operands]
            function = ir.Function(self.module, ir.FunctionType(ir.VoidType(), kinds), full)
            for argument in (one for one in function.args if one.type == _I8):
                argument.add_attribute("immarg")
        self.b.call(function, operands)
