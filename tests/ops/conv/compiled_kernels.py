"""Kernels as NVRTC compiles them, once for all problems and tests that have them."""

from __future__ import annotations

import pickle
from collections.abc import Callable, Iterable
from functools import cache
from hashlib import sha256
from typing import Any, NamedTuple

from tapwise import disk_cache, settings
from tapwise.cuda.jit import compile as compiler

# The fixtures of tests/conftest.py.
Share = Callable[[Iterable[Any]], list[Any]]
Cover = Callable[..., list[Any]]


class Compiled(NamedTuple):
    """`log` has ptxas' report and its warnings."""

    code: bytes
    resources: compiler.Resources
    log: str


@cache
def compiled(source: compiler.Source, architecture: str) -> Compiled:
    """As compiler.compile_now; the other processes of this session take it from the folder of its cache."""
    name = sha256(repr((source, architecture)).encode()).hexdigest()
    path = settings.cache_dir() / "compiled_kernels" / name
    code, log = pickle.loads(disk_cache.load(path, lambda: pickle.dumps(compiler._compile(source, architecture))))
    return Compiled(code, compiler._resources(log, source), log)
