"""scipy's own tests of its filters, with the functions of tapwise.image in their place.

scipy_tests.py [pytest's arguments]: needs scipy 1.17 with its tests, pytest and hypothesis. Tests of functions that
tapwise does not have run scipy's.
"""

from __future__ import annotations

import subprocess
import sys
import tempfile
from pathlib import Path

CONFTEST = """
import numpy
import pytest
import scipy._lib._array_api as capabilities
from scipy import ndimage
from tapwise import image

for name in image.__all__:
    known = capabilities.xp_capabilities_table
    if getattr(ndimage, name) in known:
        known[getattr(image, name)] = known[getattr(ndimage, name)]
    setattr(ndimage, name, getattr(image, name))


@pytest.fixture
def xp():
    return numpy


@pytest.fixture
def num_parallel_threads():
    return 1


def pytest_configure(config):
    for name in ("skip_xp_backends", "xfail_xp_backends", "thread_unsafe", "slow", "uses_xp_capabilities"):
        config.addinivalue_line("markers", f"{name}(*words): scipy's")
"""


def main() -> int:
    """pytest's exit status."""
    import scipy.ndimage

    home = Path(scipy.ndimage.__file__).parent / "tests" / "test_filters.py"
    text = home.read_text(encoding="utf-8").replace("from . import", "from scipy.ndimage.tests import")
    with tempfile.TemporaryDirectory() as folder:
        (Path(folder) / "conftest.py").write_text(CONFTEST, encoding="utf-8")
        (Path(folder) / "test_scipy_filters.py").write_text(text, encoding="utf-8")
        words = [sys.executable, "-m", "pytest", "-q", "-W", "ignore", *sys.argv[1:], folder]
        return subprocess.run(words, cwd=folder, check=False).returncode


if __name__ == "__main__":
    sys.exit(main())
