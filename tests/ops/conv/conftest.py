"""Fixtures of the tests beside it."""

from emulated_plans import emulation

__all__ = ["emulation"]
