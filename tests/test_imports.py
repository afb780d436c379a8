"""The graph of imports: no circle, and arrows point down the layers only, lazy imports counted."""

from __future__ import annotations

import ast
import subprocess
import sys
from collections.abc import Iterator
from functools import cache
from pathlib import Path

import pytest

import tapwise
from tapwise import errors

PACKAGE = Path(tapwise.__file__).parent
# From the lowest: a module imports of its own layer, where `ALONE` does not say otherwise, and of those before it.
LAYERS: dict[str, tuple[str, ...]] = {
    "words": ("errors", "settings", "integers", "arguments", "forks", "activation"),
    "files": ("disk_cache",),
    "problems": ("problem", "window_problem", "channels_problem"),
    "contract": ("algorithm", "capture"),
    "toolkits": ("cpu", "cuda"),
    "arrays": ("arrays",),
    "registry": ("registry",),
    "dispatch": ("dispatch",),
    "operators": ("ops",),
    "checks": ("verify",),
    "pictures": ("image",),
    "models": ("torch",),
    "peers": ("baselines",),
    "laboratory": ("lab",),
    "command line": ("cli", "__main__"),
}
# Rooms of one layer that do not know each other.
ALONE = ("cpu", "cuda")
# Modules of ops beside the operators.
SHARED = ("axes", "orders", "parameters")
# Within an operator: its modules, cpu and cuda with all that begins so; and what operators share.
OPERATOR_LAYERS = (
    ("reference", "reference_backward", "edges", "axes", "weights"),
    ("problem",),
    ("winograd", "phases"),
    ("cpu", "cuda"),
    ("parameters", "orders"),
    ("prepared",),
    ("api", "gradients", "repeated"),
)


def _name(file: Path) -> str:
    parts = file.relative_to(PACKAGE).with_suffix("").parts
    return ".".join(parts[:-1] if parts[-1] == "__init__" else parts)


MODULES = {_name(file): file for file in PACKAGE.rglob("*.py")}


def _run_time(node: ast.AST) -> Iterator[ast.AST]:
    """All nodes but those under `if TYPE_CHECKING:`."""
    for child in ast.iter_child_nodes(node):
        if isinstance(child, ast.If) and isinstance(child.test, ast.Name) and child.test.id == "TYPE_CHECKING":
            continue
        yield child
        yield from _run_time(child)


@cache
def imports(name: str) -> frozenset[str]:
    """The modules of the package that a module names in its imports, at the top or in a function."""
    found = set()
    for node in _run_time(ast.parse(MODULES[name].read_text())):
        names: list[str] = []
        if isinstance(node, ast.Import):
            names = [alias.name for alias in node.names]
        elif isinstance(node, ast.ImportFrom) and node.module:
            assert node.level == 0, f"{name}: imports are absolute"
            inside = [f"{node.module}.{alias.name}" for alias in node.names]
            names = [one if one.removeprefix("tapwise.") in MODULES else node.module for one in inside]
        found |= {one.removeprefix("tapwise.") for one in names if one.startswith("tapwise.")}
    return frozenset(found & set(MODULES) - {name})


def layer(name: str) -> int:
    """The number of a module's layer, the lowest first."""
    room = name.partition(".")[0]
    return next(number for number, rooms in enumerate(LAYERS.values()) if room in rooms)


def test_every_module_has_a_layer() -> None:
    assert len(MODULES) > 100
    for name in MODULES:
        assert not name or layer(name) >= 0, name


def test_imports_are_found() -> None:
    assert "problem" in imports("window_problem")
    assert "ops.conv.prepared" not in imports("verify"), "types alone do not count"
    assert {"cpu.device", "cuda.jit.device"} <= imports("ops.parameters"), "lazy imports count"


@pytest.mark.parametrize("name", sorted(set(MODULES) - {""}))
def test_arrows_point_down(name: str) -> None:
    room = name.partition(".")[0]
    for other in imports(name):
        assert layer(other) <= layer(name), f"{name} imports {other}, of a layer above"
        there = other.partition(".")[0]
        assert there == room or room not in ALONE or there not in ALONE, f"{name} imports {other}"


def _place(name: str) -> tuple[str, str, int]:
    """(operator, module, number of its layer) of a module of ops; operators share what has none."""
    parts = name.split(".")[1:]
    operator, module = ("", parts[0]) if len(parts) == 1 or parts[0] in SHARED else (parts[0], parts[1])
    kind = next((one for one in ALONE if module.split("_")[0] == one), module)
    return operator, kind, next(number for number, modules in enumerate(OPERATOR_LAYERS) if kind in modules)


@pytest.mark.parametrize("name", sorted(name for name in MODULES if name.count(".") > 1 and name.startswith("ops.")))
def test_arrows_point_down_within_operators(name: str) -> None:
    _, kind, number = _place(name)
    for other in imports(name):
        if other.startswith("ops.") and MODULES[other].name != "__init__.py":
            _, there, below = _place(other)
            assert below <= number, f"{name} imports {other}"
            assert there == kind or kind not in ALONE or there not in ALONE, f"{name} imports {other}"


def test_no_circles() -> None:
    done: set[str] = set()

    def visit(name: str, path: tuple[str, ...]) -> None:
        assert name not in path, " -> ".join((*path[path.index(name) :], name))
        if name not in done:
            for other in sorted(imports(name)):
                visit(other, (*path, name))
            done.add(name)

    for name in sorted(MODULES):
        visit(name, ())


def test_the_cpu_needs_nothing_of_cuda() -> None:
    code = (
        "import sys, numpy as np, tapwise, tapwise.arrays\n"
        "x = np.ones((1, 4, 9, 9), np.float32)\n"
        "tapwise.conv2d(x, np.ones((4, 4, 3, 3), np.float32))\n"
        "tapwise.softmax(x), tapwise.reduce(x, 'sum'), tapwise.max_pool2d(x, 2), tapwise.im2col(x, 3)\n"
        "tapwise.image.sobel(x[0, 0])\n"
        "found = [name for name in sys.modules if name.startswith('tapwise.cuda') or '.cuda' in name]\n"
        "assert not found, found\n"
    )
    done = subprocess.run([sys.executable, "-c", code], capture_output=True, text=True, timeout=300, check=False)
    assert done.returncode == 0, done.stderr


def test_every_error_is_a_public_name() -> None:
    """What a call raises can be caught by a name of the package."""
    mine = {
        name for name, value in vars(errors).items() if isinstance(value, type) and value.__module__ == errors.__name__
    }
    assert mine <= set(tapwise.__all__)
    for name in mine:
        assert getattr(tapwise, name) is getattr(errors, name)
