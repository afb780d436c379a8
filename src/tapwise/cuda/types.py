"""How our dtypes, template arguments and numbers are written in CUDA C++."""

from __future__ import annotations

from math import gcd
from typing import Final, NamedTuple

from tapwise.integers import ceil_div

# What a stub begins with where places need 64 bits (types.cuh).
WIDE: Final = "#define WIDE_COORDINATES\n"
# Elements of what a kernel counts in 32 bits are fewer.
INDEX_LIMIT: Final = 1 << 31


class Dtype(NamedTuple):
    """The C++ type of an element, and its bytes."""

    cpp: str
    size_bytes: int


DTYPES: Final = {
    "f32": Dtype("float", 4), "f64": Dtype("double", 8), "f16": Dtype("__half", 2), "bf16": Dtype("bf16", 2),
    "u8": Dtype("unsigned char", 1), "i8": Dtype("signed char", 1), "u16": Dtype("unsigned short", 2),
    "i16": Dtype("short", 2), "u32": Dtype("unsigned", 4), "i32": Dtype("int", 4),
    "u64": Dtype("unsigned long long", 8), "i64": Dtype("long long", 8),
}  # fmt: skip


def tensor_core_type(dtype: str) -> str:
    """The C++ type in kernels for tensor cores: float16 without CUDA's header (include/float16.cuh)."""
    return "f16" if dtype == "f16" else DTYPES[dtype].cpp


def template_args(*words: object) -> str:
    """A template's arguments: flags as true and false, numbers and names as they are."""
    return ", ".join(str(word).lower() if isinstance(word, bool) else str(word) for word in words)


def counter(count: int) -> str:
    """The type that counts so many elements: 64-bit divisions take longer than the rest of a kernel."""
    return "unsigned" if count < INDEX_LIMIT else "unsigned long long"


def coordinates(*extents: int) -> str:
    """What a stub begins with, by what is counted: elements of an image, ends of windows."""
    return WIDE if max(extents) >= INDEX_LIMIT else ""


def neighbours(count: int, itemsize: int) -> int:
    """Elements that a thread loads at once where each row has so many: the largest power of two up to 16 bytes that
    divides it."""
    return gcd(count, 16 // itemsize)


def reciprocal(count: int) -> int:
    """2^32 over a number, rounded up: the upper half of a product with it is a division. 0 for 1."""
    return ceil_div(1 << 32, count) if count > 1 else 0
