"""Shared by all tests: a cache folder of their own, and the `cuda` marker."""

from __future__ import annotations

import ctypes
import os
from collections.abc import Iterator

import pytest


@pytest.fixture(scope="session", autouse=True)
def cache_folder(tmp_path_factory: pytest.TempPathFactory) -> Iterator[None]:
    """Kernels are compiled into a folder of this session, so no test depends on what earlier ones left behind.

    Set in the environment, so that child processes use it too.
    """
    before = os.environ.get("TAPWISE_CACHE_DIR")
    os.environ["TAPWISE_CACHE_DIR"] = str(tmp_path_factory.mktemp("tapwise-cache"))
    yield
    if before is None:
        del os.environ["TAPWISE_CACHE_DIR"]
    else:
        os.environ["TAPWISE_CACHE_DIR"] = before


def gpu_count() -> int:
    """NVIDIA GPUs that the driver reports, 0 where there is no driver."""
    try:
        driver = ctypes.CDLL("libcuda.so.1")
    except OSError:
        return 0
    count = ctypes.c_int(0)
    if driver.cuInit(0) or driver.cuDeviceGetCount(ctypes.byref(count)):
        return 0
    return count.value


def pytest_collection_modifyitems(config: pytest.Config, items: list[pytest.Item]) -> None:
    """Deselect tests marked `cuda` where there is no GPU."""
    marked = [item for item in items if item.get_closest_marker("cuda")]
    if marked and gpu_count() == 0:
        config.hook.pytest_deselected(items=marked)
        items[:] = [item for item in items if item not in marked]
