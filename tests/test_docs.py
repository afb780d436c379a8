"""Documentation says what is: pages and rows match, links lead somewhere, commands exist, examples run."""

from __future__ import annotations

import ast
import re
from operator import attrgetter
from pathlib import Path

import pytest
import typer

import tapwise
from tapwise import settings
from tapwise.ops.conv.problem import ConvProblem
from tapwise.registry import ALGORITHMS, FUNCTIONS, get

ROOT = Path(__file__).parent.parent
PACKAGE = ROOT / "src" / "tapwise"
PAGES = {path.stem: path for path in (ROOT / "docs" / "algorithms").glob("*.md")}
DOCUMENTS = [ROOT / "README.md", ROOT / "CONTRIBUTING.md", *sorted((ROOT / "docs").rglob("*.md"))]
README = DOCUMENTS[0].read_text()
PROBLEMS = (ROOT / "docs" / "problems.md").read_text()
# Lines of an algorithm's page; what was tried goes to docs/study.
MOST_LINES = 150


def code_blocks(text: str, language: str) -> list[str]:
    """Fenced blocks of a language."""
    return re.findall(rf"^```{language}\n(.*?)^```", text, re.MULTILINE | re.DOTALL)


def command_words(program: str) -> set[str]:
    """What follows `program` in indented lines and code spans of all documents."""
    pattern = re.compile(rf"(?:^    |`){program}\s+([a-z][a-z_-]*)", re.MULTILINE)
    return {word for document in DOCUMENTS for word in pattern.findall(document.read_text())}


def anchors(text: str) -> set[str]:
    """The anchors that headings get."""
    headings = re.findall(r"^#+ (.+)$", text, re.MULTILINE)
    return {re.sub(r"[^\w\- ]", "", heading.lower()).replace(" ", "-") for heading in headings}


@pytest.mark.parametrize("identifier", ALGORITHMS["conv"])
def test_registry_row_has_a_page(identifier: str) -> None:
    backend, name = identifier.split(".")
    assert get(identifier).id == identifier
    assert name in PAGES, f"docs/algorithms/{name}.md is missing"
    text = PAGES[name].read_text()
    assert f"{backend}.{name}" in text.splitlines()[0]
    assert {"method", "memory", "accuracy", "how-close-to-the-floor", "sources"} <= anchors(text)
    assert len(text.splitlines()) <= MOST_LINES
    assert re.search(r"\n\n {4}.*\n", text.split("\n## Accuracy\n")[0]), "no drawing, formula or loop"


def test_page_has_a_registry_row() -> None:
    """A page for each algorithm of convolution, two for the filters' own, and one for a gradient's."""
    own = {"filter", "filter_cuda", "depthwise_mma_sp"}
    assert set(PAGES) == {identifier.split(".")[1] for identifier in ALGORITHMS["conv"]} | own
    pages = PAGES["filter"].read_text() + PAGES["filter_cuda"].read_text()
    assert {f"# {identifier}" for identifier in ALGORITHMS["filter"]} <= set(pages.splitlines())


def test_algorithm_class_has_a_registry_row() -> None:
    """A class with an id of its own, anywhere in the package, is a row, and a row is such a class."""
    found = {}
    for path in PACKAGE.rglob("*.py"):
        module = ".".join(path.relative_to(PACKAGE.parent).with_suffix("").parts)
        classes = [node for node in ast.parse(path.read_text()).body if isinstance(node, ast.ClassDef)]
        for node in classes:
            for line in node.body:
                if isinstance(line, ast.AnnAssign | ast.Assign) and isinstance(line.value, ast.Constant):
                    target = line.target if isinstance(line, ast.AnnAssign) else line.targets[0]
                    if ast.unparse(target) == "id":
                        found[f"{module}:{node.name}"] = line.value.value
    rows = {row: identifier for table in ALGORITHMS.values() for identifier, row in table.items()}
    assert found == rows


@pytest.mark.parametrize("page", ["README.md", "docs/torch.md", "docs/directions.md"])
def test_examples_of_a_page_run(page: str) -> None:
    blocks = code_blocks((ROOT / page).read_text(), "python")
    assert len(blocks) >= 2
    for block in blocks:
        assert len([line for line in block.splitlines() if line.strip()]) <= 10
        exec(compile(block, page, "exec"), {})


@pytest.mark.parametrize(("name", "instruction"), [("avx512", "vfmadd"), ("avx2", "vfmadd"), ("neon", "fmla")])
def test_kernel_of_the_vector_layer_page_compiles(name: str, instruction: str) -> None:
    (block,) = code_blocks((ROOT / "docs" / "simd.md").read_text(), "python")
    seen: dict[str, str] = {}
    exec(compile(block.replace('"host"', f'"{name}"'), "simd.md", "exec"), seen)
    assert instruction in seen["text"]


def test_kernel_of_the_vector_layer_page_runs_as_it_stands() -> None:
    (block,) = code_blocks((ROOT / "docs" / "simd.md").read_text(), "python")
    seen: dict[str, str] = {}
    exec(compile(block, "simd.md", "exec"), seen)
    assert "axpy" in seen["text"]


def test_make_targets_exist() -> None:
    targets = set(re.findall(r"^([a-z-]+):", (ROOT / "Makefile").read_text(), re.MULTILINE))
    named = command_words("make")
    assert {"bench", "test", "test-all", "check", "docs"} <= named
    assert named <= targets


def test_pre_commit_runs_what_make_check_runs() -> None:
    recipe = re.search(r"^check:.*\n((?:\t.*\n)+)", (ROOT / "Makefile").read_text(), re.MULTILINE)
    assert recipe is not None
    made = re.findall(r"\$\(BIN\)/([\w-]+(?: [a-z]+)?)", recipe[1])
    hooks = re.findall(r"entry: \.venv/bin/([\w-]+(?: [a-z]+)?)", (ROOT / ".pre-commit-config.yaml").read_text())
    assert set(made) == set(hooks) and {"ruff check", "ruff format", "mypy", "clang-format"} <= set(made)


def test_files_that_tools_name_exist() -> None:
    for tool in (path for path in (ROOT / "tools").rglob("*") if path.suffix in (".py", ".sh")):
        for path in re.findall(r"\b(?:tests|src|tools)/[\w./]+", tool.read_text()):
            assert (ROOT / path).exists(), f"{tool.name}: {path}"


def test_commands_exist() -> None:
    from tapwise.cli import app

    commands = set(typer.main.get_command(app).commands)  # type: ignore[attr-defined]
    named = command_words("tapwise")
    assert {"bench", "explain", "verify", "info"} <= named
    assert named <= commands


def test_environment_variables_are_documented() -> None:
    """The README's table, the settings and the code name the same variables."""
    table = set(re.findall(r"^\| `(TAPWISE_\w+)`", README, re.MULTILINE))
    assert table == set(settings.VARIABLES)
    for path in PACKAGE.rglob("*.py"):
        named = set(re.findall(r"TAPWISE_[A-Z_]+", path.read_text()))
        assert named <= table, path
        assert path.name == "settings.py" or 'environ.get("TAPWISE' not in path.read_text(), path


@pytest.mark.parametrize("document", DOCUMENTS, ids=lambda path: str(path.relative_to(ROOT)))
def test_links_lead_somewhere(document: Path) -> None:
    prose = re.sub(r"^```.*?^```", "", document.read_text(), flags=re.MULTILINE | re.DOTALL)
    for target in re.findall(r"\]\(([^)\s]+)\)", prose):
        if target.startswith("http"):
            continue
        name, _, anchor = target.partition("#")
        path = (document.parent / name).resolve() if name else document
        assert path.exists(), target
        if anchor:
            assert anchor in anchors(path.read_text()), target


def test_problem_strings_of_the_page_are_canonical() -> None:
    (block,) = code_blocks(PROBLEMS, "problem")
    for line in block.splitlines():
        assert str(ConvProblem.parse(line)) == line


def test_suites_of_the_page_are_shipped() -> None:
    named = set(re.findall(r"^\| `([a-z0-9_]+)` \|", PROBLEMS.split("## Suite files")[1], re.MULTILINE))
    assert named == {path.stem for path in (PACKAGE / "lab" / "suites").glob("*.txt")}


def test_results_markers_are_paired() -> None:
    assert re.findall(r"<!-- (/?results)(?::\w+)? -->", README) == ["results", "/results"]


@pytest.mark.parametrize("operator", ALGORITHMS)
def test_operator_has_a_page_and_functions(operator: str) -> None:
    text = (ROOT / "docs" / "operators" / f"{operator}.md").read_text()
    assert {"algorithms", "bound", "errors", "figures"} <= anchors(text)
    for identifier in ALGORITHMS[operator]:
        assert identifier in text, f"{identifier} is not on the page"
    for name in FUNCTIONS[operator]:
        assert callable(attrgetter(name)(tapwise))
        assert f"`{name}`" in README


def test_operator_pages_have_a_registry_row() -> None:
    assert {path.stem for path in (ROOT / "docs" / "operators").glob("*.md")} == set(ALGORITHMS) == set(FUNCTIONS)


def test_operator_table_is_what_the_registry_gives() -> None:
    from tapwise.lab.report import rewrite

    assert "<!-- operators -->\n| operator" in README
    without = re.sub(r"<!-- results.*?<!-- /results -->", "", README, flags=re.DOTALL)
    assert rewrite(without, {}) == without


def test_directions_are_what_the_registry_gives() -> None:
    """Each algorithm of convolution and its gradients once, with its backends."""
    from tapwise.lab.report import rewrite

    text = (ROOT / "docs" / "directions.md").read_text()
    assert len(text.splitlines()) <= MOST_LINES
    assert rewrite(text, {}) == text
    rows = re.findall(r"^\| \[(\w+)\]\(.*?\) \| (.*) \| (.*) \| (.*) \|$", text.split("<!-- directions -->")[1], re.M)
    for number, operator in enumerate(("conv", "dgrad", "wgrad"), 1):
        found = {f"{backend}.{row[0]}" for row in rows for backend in row[number].split(", ") if backend != "-"}
        assert found == set(ALGORITHMS[operator])
