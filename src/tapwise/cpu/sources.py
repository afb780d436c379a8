"""What a generated kernel depends on among the files of the package: the key of the kernel cache holds its checksum."""

from __future__ import annotations

import hashlib
import re
import sys
from collections.abc import Callable, Iterator
from functools import cache
from pathlib import Path
from typing import Any

PACKAGE = Path(__file__).parents[1]

# Import statements of the package's own modules. A text is searched much faster than it is parsed.
_IMPORT = re.compile(r"^[ \t]*(?:from (tapwise[\w.]*) import (\([^)]*\)|[^\n(]*)|import (tapwise[\w.]*))", re.MULTILINE)


def checksum(generate: Callable[..., Any]) -> str:
    """SHA-256 of the text of the module that defines a generator and of all that it imports of the package."""
    return of_module(generate.__module__)


@cache
def of_module(module: str) -> str:
    """The same, for the module's name."""
    digest = hashlib.sha256()
    if module.partition(".")[0] != "tapwise":
        # A generator from elsewhere: its own file, and all that writes vector code for it.
        file = getattr(sys.modules.get(module), "__file__", None)
        digest.update(Path(file).read_bytes() if file else b"")
        module = "tapwise.cpu.tile"
    for path in files(module):
        digest.update(path.name.encode() + b"\0" + path.read_bytes())
    return digest.hexdigest()


def files(module: str, package: Path | None = None) -> list[Path]:
    """The file of a module of the package and of all modules of it that it imports, directly or not, in a fixed order.

    Packages on the way to a module do not count: they import nothing that a kernel is made of.
    """
    package = package or PACKAGE
    found: dict[str, Path] = {}
    waiting = [module]
    while waiting:
        name = waiting.pop()
        path = _path(name, package)
        if path is None or name in found:
            continue
        found[name] = path
        waiting += _imported(path.read_text(encoding="utf-8"), package)
    return [found[name] for name in sorted(found)]


def _imported(text: str, package: Path) -> Iterator[str]:
    """Modules that a text imports: `from a import b` is a's, unless b is a module itself."""
    for source, names, plain in _IMPORT.findall(text):
        if plain:
            yield plain
        for name in re.findall(r"\w+", names):
            inner = f"{source}.{name}"
            yield inner if _path(inner, package) else source


def _path(module: str, package: Path) -> Path | None:
    """The file of a module of the package, or None where it has none of that name."""
    base = package.joinpath(*module.split(".")[1:])
    return next((path for path in (base.with_suffix(".py"), base / "__init__.py") if path.is_file()), None)
