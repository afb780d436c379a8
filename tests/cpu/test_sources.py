"""The kernel cache's key: it follows what a generator is made of, and nothing else."""

from __future__ import annotations

import shutil
from collections.abc import Iterator
from pathlib import Path

import pytest

from tapwise.cpu import jit, sources
from tapwise.cpu.simd import INT, Kernel, Target, target

GENERATORS = [
    "tapwise.ops.conv.cpu.direct.kernel",
    "tapwise.ops.conv.cpu.winograd.kernel",
    "tapwise.ops.conv.cpu.depthwise.kernel",
    "tapwise.ops.conv.cpu.depthwise.in_place",
    "tapwise.ops.conv.cpu.depthwise.small_planes",
    "tapwise.ops.filter.cpu.kernel",
    "tapwise.ops.pool.cpu_kernel",
    "tapwise.ops.pool.cpu_backward_kernel",
    "tapwise.ops.patches.cpu_kernel",
    "tapwise.ops.softmax.cpu_kernel",
    "tapwise.ops.softmax.cpu_backward_kernel",
    "tapwise.ops.reduce.cpu_kernel",
]


def generate(target: Target, *, value: int) -> Kernel:
    k = Kernel(target, "f32")
    with k.function("task", public=True, args="i64", worker=INT) as (args, _):
        k.b.store(k.integer(value).ir, args.value)
    return k


@pytest.fixture
def package(monkeypatch: pytest.MonkeyPatch, tmp_path: Path) -> Iterator[Path]:
    """A copy of the package whose files may be changed; the keys are made from it."""
    copy = tmp_path / "tapwise"
    shutil.copytree(sources.PACKAGE, copy, ignore=shutil.ignore_patterns("__pycache__", "cuda", "image", "lab"))
    monkeypatch.setattr(sources, "PACKAGE", copy)
    sources.of_module.cache_clear()
    yield copy
    sources.of_module.cache_clear()


def change(path: Path) -> None:
    path.write_text(path.read_text() + "\n# changed\n")
    sources.of_module.cache_clear()


@pytest.mark.parametrize("module", GENERATORS)
def test_only_what_writes_code_counts(module: str) -> None:
    """A generator imports vector code: no cost model, no plan, no problem, no algorithm."""
    names = {path.relative_to(sources.PACKAGE).with_suffix("").as_posix() for path in sources.files(module)}
    own = module.removeprefix("tapwise.").replace(".", "/")
    assert {own, "cpu/simd/kernel"} <= names
    for name in names:
        assert name.split("/")[-1] not in {"algorithm", "cost", "plan", "problem", "blocking", "registry", "dispatch"}
        assert name.startswith(("cpu/", own.split("/cpu")[0])) or name in ("errors", "integers", "activation")


def test_changed_generator_changes_its_key_alone(package: Path) -> None:
    before = {module: sources.of_module(module) for module in GENERATORS}
    assert len(set(before.values())) == len(GENERATORS)
    change(package / "ops" / "reduce" / "cpu_positions.py")
    changed = {module for module in GENERATORS if sources.of_module(module) != before[module]}
    assert changed == {"tapwise.ops.reduce.cpu_kernel"}


def test_changed_vector_layer_changes_every_key(package: Path) -> None:
    before = {module: sources.of_module(module) for module in GENERATORS}
    change(package / "cpu" / "simd" / "values.py")
    assert all(sources.of_module(module) != before[module] for module in GENERATORS)


@pytest.mark.parametrize("name", ["cpu/cost.py", "ops/conv/cpu/direct/direct.py", "cpu/plan.py", "ops/conv/problem.py"])
def test_changed_cost_model_leaves_caches_alone(package: Path, name: str) -> None:
    before = {module: sources.of_module(module) for module in GENERATORS}
    change(package / name)
    assert {module: sources.of_module(module) for module in GENERATORS} == before


def test_key_in_the_file_name(package: Path, monkeypatch: pytest.MonkeyPatch, tmp_path: Path) -> None:
    """The loader builds anew what a changed vector layer writes, and finds what nothing has changed."""
    monkeypatch.setenv("TAPWISE_CACHE_DIR", str(tmp_path / "cache"))
    objects = tmp_path / "cache" / "cpu"
    for path, count in ((package / "cpu" / "cost.py", 1), (package / "cpu" / "tile.py", 2)):
        jit.load("test", generate, target(), value=3)
        change(path)
        jit.load("test", generate, target(), value=3)
        assert len(list(objects.glob("*.o"))) == count


def test_every_form_of_import(tmp_path: Path) -> None:
    package = tmp_path / "tapwise"
    (package / "a").mkdir(parents=True)
    texts = {
        "__init__": "import tapwise.never",
        "a/__init__": "",
        "a/one": "from tapwise.a import two\nfrom tapwise.a.three import (\n    X,\n    Y,\n)\n",
        "a/two": "import tapwise.four\nimport numpy as np\n",
        "a/three": "def late() -> None:\n    from tapwise.a import one, five as other\n",
        "a/five": "from tapwise.a import two as again, NAME\n",
        "four": "",
        "never": "",
    }
    for name, text in texts.items():
        (package / f"{name}.py").write_text(text)
    found = [path.relative_to(package).as_posix() for path in sources.files("tapwise.a.one", package)]
    assert found == ["a/__init__.py", "a/five.py", "a/one.py", "a/three.py", "a/two.py", "four.py"]
