"""Forks. A forked child has one thread, and every lock and half-made thing of the others as it was at that moment.

So whatever is made once and kept (kernels, plans, modules imported on the way) is made under one lock, and a fork waits
for it: the child finds all of it whole.
"""

from __future__ import annotations

# Hooks registered last run first: the locks of these, which a fork holds too, are wanted while something is made.
import logging  # noqa: F401
import os
import sys
import threading
from collections.abc import Callable
from concurrent.futures import thread  # noqa: F401
from typing import Any, Final, Generic, TypeVar, overload

import filelock  # noqa: F401

T = TypeVar("T")

# Held while something is made that all threads will use.
making: Final = threading.RLock()
# A compile takes seconds. After so long a fork goes on: two that wait for each other would wait for ever.
MOST_SECONDS: Final = 60.0
_held = threading.local()


class cached_property(Generic[T]):
    """As functools' own, without the lock that Python 3.11 holds meanwhile: a child forked then would wait for ever.

    Choosing among 420 configs of a convolution took 44 ms with it, and 84 with functools' own and no lock.
    """

    def __init__(self, function: Callable[[Any], T]) -> None:
        self._function, self.__doc__ = function, function.__doc__

    def __set_name__(self, owner: type, name: str) -> None:
        self._name = name

    @overload
    def __get__(self, instance: None, owner: type | None = None) -> cached_property[T]: ...
    @overload
    def __get__(self, instance: object, owner: type | None = None) -> T: ...
    def __get__(self, instance: object | None, owner: type | None = None) -> cached_property[T] | T:
        if instance is None:
            return self
        value = self._function(instance)
        # Found there from now on, before this is asked.
        instance.__dict__[self._name] = value
        return value


def _before() -> None:
    _held.locks = []
    # Loops compile when they are called first, other people's too, under Numba's own lock. llvmlite's is held for each
    # call of LLVM, also where the garbage collector ends what was compiled.
    numba = getattr(sys.modules.get("numba.core.compiler_lock"), "global_compiler_lock", None)
    llvm = getattr(getattr(sys.modules.get("llvmlite.binding.ffi"), "lib", None), "_lock", None)
    for lock in (making, *(other._lock for other in (numba, llvm) if other)):
        if lock.acquire(timeout=MOST_SECONDS):
            _held.locks.append(lock)


def _after() -> None:
    for lock in _held.locks:
        lock.release()


def _in_child() -> None:
    _after()
    # It may still be another thread's, which is no more.
    making._at_fork_reinit()  # type: ignore[attr-defined]


if hasattr(os, "register_at_fork"):
    os.register_at_fork(before=_before, after_in_parent=_after, after_in_child=_in_child)
