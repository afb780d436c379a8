"""Arithmetic of whole numbers that all of tapwise uses."""

from __future__ import annotations


def ceil_div(a: int, b: int) -> int:
    """a / b, rounded up."""
    return -(-a // b)


def round_up(value: int, multiple: int) -> int:
    """The smallest multiple that is at least the value."""
    return -(-value // multiple) * multiple
