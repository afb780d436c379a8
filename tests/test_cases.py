"""Which cases of tests with long lists of them a quick run takes."""

from __future__ import annotations

from itertools import product
from pathlib import Path
from types import SimpleNamespace
from typing import Any

import pytest


@pytest.fixture
def conftest(request: pytest.FixtureRequest) -> Any:
    """tests/conftest.py."""
    return request.config.pluginmanager.get_plugin(str(Path(__file__).parent / "conftest.py"))


@pytest.mark.parametrize("count", [1, 2, 3, 4, 100])
def test_one_in_three_is_taken(count: int, conftest: Any) -> None:
    """And always one at least."""
    cases = [SimpleNamespace(nodeid=f"test_any[{number}]") for number in range(count)]
    left = conftest._left_out(cases)
    assert len(cases) - len(left) == -(-count // conftest.CASES)
    assert all(case in cases for case in left)


def test_of_a_grid_each_value_is_taken(conftest: Any) -> None:
    """Also where as many values follow each other as one case is taken of."""
    grid = product(range(12), ("f32", "f16", "bf16"))
    cases = [
        SimpleNamespace(nodeid=f"tests/test_any.py::test_any[{value}-{number}]", value=value) for number, value in grid
    ]
    left = conftest._left_out(cases)
    assert {case.value for case in cases if case not in left} == {"f32", "f16", "bf16"}


def test_no_test_loses_all_its_cases(conftest: Any, pytester: Any) -> None:
    """Not even one whose cases are for several architectures, of which a quick run has the first."""
    pytester.makeconftest((Path(__file__).parent / "conftest.py").read_text())
    pytester.makepyfile(
        """
        import pytest

        @pytest.mark.many
        @pytest.mark.parametrize("architecture", ["sm_80", "sm_90a", "sm_100a"])
        @pytest.mark.parametrize("number", range(6))
        def test_any(number, architecture):
            pass
        """
    )
    for more, count in (((), 2), (("--all-kernels",), 18), (("-k", "any"), 6)):
        result = pytester.runpytest_inprocess("-q", "-p", "no:cacheprovider", "--collect-only", *more)
        assert len([line for line in result.outlines if "::test_any[" in line]) == count, more
