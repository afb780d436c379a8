"""Suites: every shipped file reads, notes are kept, mistakes name their place."""

from __future__ import annotations

from pathlib import Path

import pytest

from tapwise.errors import InvalidProblem
from tapwise.lab import suites
from tapwise.ops.conv.problem import ConvProblem


@pytest.mark.parametrize("name", suites.names())
def test_shipped_suite(name: str) -> None:
    cases = suites.load(name)
    assert cases
    assert all(case.suite == name and case.uses >= 1 and case.category != "other" and case.source for case in cases)
    assert len({(case.problem, case.category) for case in cases}) == len(cases)


def test_quick_has_every_class_of_real_layers() -> None:
    quick, real = suites.load("quick"), suites.load("real_layers")
    assert {case.category for case in quick} == {case.category for case in real}
    assert len(quick) >= 16
    assert {case.problem for case in quick} <= {case.problem for case in real}


def test_notes_and_comments() -> None:
    text = "# a suite\n\nc3 h9 w8 k4 r3 s3  # class=stem uses=7 from=net\nc1 h5 w5 k1 r1 s1\n"
    first, second = suites.parse(text, "mine")
    assert (first.category, first.uses, first.source) == ("stem", 7, "net")
    assert (second.category, second.uses, second.source) == ("other", 1, "")
    assert second.problem == ConvProblem.parse("c1 h5 w5 k1 r1 s1")


@pytest.mark.parametrize(("line", "says"), [("c3 h9 q8", "q8"), ("c3 h9 w8 k4 r3 s3 # uses=many", "many")])
def test_mistake_names_line_and_word(line: str, says: str) -> None:
    with pytest.raises(InvalidProblem, match=f"mine, line 2: .*{says}"):
        suites.parse("# title\n" + line, "mine")


def test_select_changes_problems_and_drops_repeats(tmp_path: Path) -> None:
    path = tmp_path / "twice.txt"
    path.write_text("c3 h9 w8 k4 r3 s3  # class=a\nc3 h9 w8 k4 r3 s3  # class=a\nc4 h9 w8 k4 r3 s3  # class=b\n")
    cases = suites.select([str(path)], batch=5, dtype="f64", layout="nhwc")
    assert [str(case.problem) for case in cases] == [f"n5 c{c} h9 w8 k4 r3 s3 f64 nhwc" for c in (3, 4)]
    assert [case.category for case in suites.select([str(path)], categories=["b"])] == ["b"]
    with pytest.raises(InvalidProblem, match="class='z'"):
        suites.select([str(path)], categories=["z"])


def test_unknown_target_and_empty_file(tmp_path: Path) -> None:
    with pytest.raises(InvalidProblem, match="neither a suite"):
        suites.load("no_such_suite")
    path = tmp_path / "empty.txt"
    path.write_text("# nothing\n")
    with pytest.raises(InvalidProblem, match="no problem in it"):
        suites.load(str(path))


def test_select_says_what_an_operator_has_not() -> None:
    assert [str(case.problem) for case in suites.select(["softmax 5x7"], dtype="f64")] == ["softmax 5x7 f64"]
    for change in ({"batch": 2}, {"dtype": "tf32"}):
        with pytest.raises(InvalidProblem, match=f"{next(iter(change))}=.*softmax"):
            suites.select(["softmax 5x7"], **change)
