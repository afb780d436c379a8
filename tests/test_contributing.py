"""The walk in CONTRIBUTING.md, taken: a copy of the repository gets its algorithms, and what it promises holds."""

from __future__ import annotations

import os
import re
import shutil
import subprocess
import sys
from pathlib import Path

import pytest

ROOT = Path(__file__).parent.parent
IDENTIFIER, CUDA = "cpu.shifted_sum", "cuda.one_output"
PROBLEM = "c64 h56 w56 k64 r3 s3 pad1"
COPIED = ("src", "tests", "docs", "benchmarks", "README.md", "CONTRIBUTING.md", "Makefile", "pyproject.toml")


def block(language: str, number: int = 0) -> str:
    """A fenced block of the walk."""
    text = (ROOT / "CONTRIBUTING.md").read_text().split("## Add an algorithm")[1].split("\n## Add an operator")[0]
    return re.findall(rf"^```{language}\n(.*?)^```", text, re.MULTILINE | re.DOTALL)[number]


def insert(file: Path, line: str, before: str) -> None:
    """Write a line into a file before the first one that begins so."""
    first, found, rest = file.read_text().partition(before)
    assert found, f"{before} in {file}"
    file.write_text(f"{first}{line}{found}{rest}")


def run(copy: Path, *command: str) -> str:
    """What a Python module prints that runs in the copy. It must succeed."""
    environment = {**os.environ, "PYTHONPATH": str(copy / "src"), "COLUMNS": "200"}
    environment = {name: value for name, value in environment.items() if not name.startswith("PYTEST_")}
    done = subprocess.run(
        [sys.executable, "-m", *command],
        cwd=copy,
        env=environment,
        capture_output=True,
        text=True,
        timeout=300,
        check=False,
    )
    assert done.returncode == 0, done.stdout + done.stderr
    return done.stdout


@pytest.fixture(scope="module")
def copy(tmp_path_factory: pytest.TempPathFactory) -> Path:
    """The repository with the files, rows and pages of the walk, and its tables written anew."""
    copy = tmp_path_factory.mktemp("walk")
    for name in COPIED:
        if (ROOT / name).is_dir():
            shutil.copytree(ROOT / name, copy / name, ignore=shutil.ignore_patterns("__pycache__"))
        else:
            shutil.copy(ROOT / name, copy)
    package, docs = copy / "src" / "tapwise", copy / "docs"
    conv = package / "ops" / "conv"
    (conv / "cpu" / "shifted_sum.py").write_text(block("python"))
    (conv / "cuda" / "one_output.py").write_text(block("python", 2))
    (conv / "cuda" / "one_output.cu").write_text(block("cuda"))
    for number, identifier, last in ((1, IDENTIFIER, "cpu.serial"), (3, CUDA, "cuda.sliding_window")):
        name = identifier.partition(".")[2]
        insert(package / "registry.py", "        " + block("python", number), f'        "{last}": "tapwise.ops.conv')
        page, line = (
            block("markdown", one).replace(IDENTIFIER, identifier).replace("shifted_sum", name) for one in (0, 1)
        )
        (docs / "algorithms" / f"{name}.md").write_text(page)
        insert(docs / "operators" / "conv.md", line, f"| [{last}]")
    run(copy, "tapwise", "report")
    return copy


def test_it_is_verified(copy: Path) -> None:
    out = run(copy, "tapwise", "verify", "small", "--class", "conv", "--algorithms", IDENTIFIER)
    assert IDENTIFIER in out
    assert "within" in out or "ok" in out


def test_it_is_explained(copy: Path) -> None:
    (line,) = [line for line in run(copy, "tapwise", "explain", PROBLEM).splitlines() if IDENTIFIER in line]
    assert "padded=True" in line
    out = run(copy, "tapwise", "explain", f"{PROBLEM} gelu")
    (line,) = [line for line in out.splitlines() if IDENTIFIER in line]
    assert "fuses relu, not gelu" in line


def test_it_is_in_the_table_of_operators(copy: Path) -> None:
    readme = (copy / "README.md").read_text()
    assert f"`{IDENTIFIER}`: a product for each tap, added up" in readme
    assert f"`{CUDA}`: one thread an output, in the order of y's memory" in readme


def test_the_tests_find_it(copy: Path) -> None:
    """Its row, its contract, its results over odd problems, and its page."""
    tests = ("tests/test_registry.py", "tests/test_algorithms.py", "tests/test_docs.py")
    words = "shifted_sum or one_output or registry_row or operator or refused or what_it_is_for"
    out = run(copy, "pytest", "-q", "-p", "no:cacheprovider", *tests, "-k", words)
    passed = re.search(r"(\d+) passed", out)
    assert passed and int(passed[1]) > 80, out


def test_it_is_held_to_lint_and_types(copy: Path) -> None:
    """The code is in the house format."""
    for tool in (("ruff", "check"), ("ruff", "format", "--check"), ("mypy",)):
        if shutil.which(tool[0]) or (Path(sys.executable).parent / tool[0]).exists():
            run(copy, *tool, "src/tapwise/ops/conv/cpu/shifted_sum.py", "src/tapwise/ops/conv/cuda/one_output.py")


def test_its_kernel_is_compiled_without_a_gpu(copy: Path) -> None:
    """The tests of CUDA kernels find it by its sources."""
    (copy / "compiles.py").write_text(
        "import sys; sys.path.insert(0, 'tests/cuda')\n"
        "from test_compile import compiler, sources\n"
        f"found = [source for name, source in sources().items() if {CUDA!r} in name]\n"
        "assert len({source.text for source in found}) >= 6, len(found)\n"
        "for source in found:\n"
        "    code, used = compiler.compile_now(source, 'sm_90a')\n"
        "    assert (used.stack_bytes, used.spill_bytes) == (0, 0), used\n"
    )
    run(copy, "compiles")


@pytest.mark.cuda
def test_it_is_verified_on_a_gpu(copy: Path) -> None:
    assert CUDA in run(copy, "tapwise", "verify", "small", "--class", "conv", "--device", "cuda", "--algorithms", CUDA)
