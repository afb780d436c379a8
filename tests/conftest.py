"""Shared by all tests: a cache folder of their own, the `cuda` marker, and which architectures kernels are for."""

from __future__ import annotations

import ctypes
import os
from collections.abc import Iterator

import hypothesis
import pytest

# Idle threads of OpenMP sleep: the cores are other processes'. Set before anything loads a runtime.
os.environ.setdefault("OMP_WAIT_POLICY", "passive")

# A first call compiles, and other processes have the cores: how long an example takes says nothing.
hypothesis.settings.register_profile("tapwise", deadline=None, suppress_health_check=[hypothesis.HealthCheck.too_slow])
hypothesis.settings.load_profile("tapwise")

# Kernels that a test only compiles are compiled for the first of these, and with --all-architectures for each.
ARCHITECTURES = ("sm_90a", "sm_80", "sm_100a")


def pytest_addoption(parser: pytest.Parser) -> None:
    parser.addoption("--all-architectures", action="store_true", help="compile CUDA kernels for every architecture")


@pytest.fixture(scope="session", autouse=True)
def cache_folder(tmp_path_factory: pytest.TempPathFactory) -> Iterator[None]:
    """Kernels are compiled into a folder of this session, so no test depends on what earlier ones left behind.

    The processes of pytest-xdist share it. Set in the environment, so that child processes use it too.
    """
    before = os.environ.get("TAPWISE_CACHE_DIR")
    base = tmp_path_factory.getbasetemp()
    folder = (base.parent if "PYTEST_XDIST_WORKER" in os.environ else base) / "tapwise-cache"
    folder.mkdir(exist_ok=True)
    os.environ["TAPWISE_CACHE_DIR"] = str(folder)
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
    """Deselect tests marked `cuda` where there is no GPU, and further architectures unless all are wanted."""

    def is_wanted(item: pytest.Item) -> bool:
        if item.get_closest_marker("cuda"):
            return has_gpu
        parameters = item.callspec.params if isinstance(item, pytest.Function) and hasattr(item, "callspec") else {}
        return every or parameters.get("architecture") not in ARCHITECTURES[1:]

    has_gpu, every = gpu_count() > 0, config.getoption("--all-architectures")
    wanted = [item for item in items if is_wanted(item)]
    if len(wanted) < len(items):
        config.hook.pytest_deselected(items=[item for item in items if not is_wanted(item)])
        items[:] = wanted
