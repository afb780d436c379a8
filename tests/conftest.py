"""Shared by all tests: a cache folder of their own, the `cuda` marker, and which kernels are compiled for what."""

from __future__ import annotations

import ctypes
import gc
import os
from collections.abc import Callable, Iterable, Iterator, Mapping
from pathlib import Path
from typing import Any
from zlib import crc32

import hypothesis
import pytest

# Idle threads of OpenMP sleep: the cores are other processes'. Set before anything loads a runtime.
os.environ.setdefault("OMP_WAIT_POLICY", "passive")
# Inductor compiles a model or two: headers made ready and processes that wait take longer than they save.
os.environ.setdefault("TORCHINDUCTOR_CPP_CACHE_PRECOMPILE_HEADERS", "0")
os.environ.setdefault("TORCHINDUCTOR_COMPILE_THREADS", "1")

# A first call compiles, and other processes have the cores: how long an example takes says nothing.
hypothesis.settings.register_profile("tapwise", deadline=None, suppress_health_check=[hypothesis.HealthCheck.too_slow])
hypothesis.settings.load_profile("tapwise")

# Of the kernels that a test only compiles, one in so many is compiled, for the first architecture; with --all-kernels
# each is, for each architecture.
SHARE = 12
# Of the cases of a test marked `many`, one in so many is taken.
CASES = 4
ARCHITECTURES = ("sm_90a", "sm_80", "sm_100a")
TESTS = Path(__file__).parent
# Folders and files of tests that have the kernels of the CPU as users have them: what LLVM makes of each algorithm,
# against float64. All other tests take kernels as they are.
OPTIMISED = {
    "cpu", "ops/conv/test_depthwise_cpu.py", "ops/conv/test_filters_in_place.py", "ops/conv/test_gradients.py",
    "ops/conv/test_wgrad_cpu.py", "ops/filter", "ops/patches", "ops/pool", "ops/reduce", "ops/softmax",
    "ops/squeeze_excitation", "test_algorithms.py",
}  # fmt: skip


def pytest_addoption(parser: pytest.Parser) -> None:
    parser.addoption("--all-kernels", action="store_true", help="compile every kernel for every architecture")


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


@pytest.fixture
def share(request: pytest.FixtureRequest) -> Callable[[Iterable[Any]], list[Any]]:
    """Of all that a test only compiles what it compiles now: one in SHARE, and with --all-kernels each.

    The test's name says which, so that tests with like kernels take different ones.
    """

    def taken(kernels: Iterable[Any]) -> list[Any]:
        each = list(dict.fromkeys(kernels))
        assert each
        if request.config.getoption("--all-kernels"):
            return each
        first = crc32(request.node.nodeid.encode())
        return each[first % min(SHARE, len(each)) :: SHARE]

    return taken


@pytest.fixture
def every(request: pytest.FixtureRequest) -> bool:
    """Whether this is the long run, with --all-kernels: a test that takes turns then takes each."""
    return bool(request.config.getoption("--all-kernels"))


_covered: dict[str, dict[Any, list[Any]]] = {}


@pytest.fixture
def cover(request: pytest.FixtureRequest) -> Callable[..., list[Any]]:
    """cover(case, cases, configs_of): of the configs of one case of a test those that it runs now, with
    --all-kernels each. `configs_of(case)` has them by their kinds.

    In the quick run each case has one config at least, and each kind of config that any of them offers is run with
    one case at least: that which has the fewest so far.
    """

    def taken(case: Any, cases: Iterable[Any], configs_of: Callable[[Any], Mapping[Any, Any]]) -> list[Any]:
        if request.config.getoption("--all-kernels"):
            return list(configs_of(case).values())
        test = request.node.nodeid.split("[")[0]
        if test not in _covered:
            _covered[test] = _shared_out({one: configs_of(one) for one in cases})
        return _covered[test][case]

    return taken


def _shared_out(offered: Mapping[Any, Mapping[Any, Any]]) -> dict[Any, list[Any]]:
    """Rare kinds first, so that common ones go where nothing is yet."""
    having: dict[Any, list[Any]] = {}
    for case, configs in offered.items():
        for kind in configs:
            having.setdefault(kind, []).append(case)
    found: dict[Any, list[Any]] = {case: [] for case in offered}
    for kind, having_it in sorted(having.items(), key=lambda item: len(item[1])):
        case = min(having_it, key=lambda one: len(found[one]))
        found[case].append(offered[case][kind])
    for number, (case, configs) in enumerate(offered.items()):
        if not found[case] and configs:
            found[case].append(list(configs.values())[number % len(configs)])
    return found


@pytest.fixture(autouse=True)
def quick_where_tests_take_kernels_as_they_are(request: pytest.FixtureRequest) -> None:
    place = request.path.relative_to(TESTS)
    if OPTIMISED.isdisjoint(one.as_posix() for one in (place, *place.parents)):
        request.getfixturevalue("quick_code")


@pytest.fixture
def quick_code() -> Iterator[None]:
    """Kernels of the CPU are compiled without optimisation, in half of the time.

    Code that is kept has what it was compiled with in its key.
    """
    from tapwise import dispatch
    from tapwise.cpu import jit

    with pytest.MonkeyPatch.context() as patched:
        patched.setattr(jit, "PASSES", ())
        patched.setattr(jit, "LEVEL", 0)
        yield
    dispatch._plan.cache_clear()


def pytest_collection_finish() -> None:
    """What is there before the first test stays: Python need not go through it for cycles, each time that a kernel's
    generator has made some thousand objects. A fifth of the time of tests."""
    gc.collect()
    gc.freeze()
    gc.set_threshold(200_000, 20, 50)


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
    """Deselect tests marked `cuda` where there is no GPU, and further architectures and three in four cases of tests
    marked `many` unless all are wanted, or asked for by name. Tests that take a share of kernels or of configs, or of
    their cases, are marked `kernels`."""

    def is_wanted(item: pytest.Item) -> bool:
        if item.get_closest_marker("cuda"):
            return has_gpu
        parameters = item.callspec.params if isinstance(item, pytest.Function) and hasattr(item, "callspec") else {}
        return every or parameters.get("architecture") not in ARCHITECTURES[1:]

    has_gpu, every = gpu_count() > 0, config.getoption("--all-kernels")
    named = config.getoption("keyword") or any("::" in argument for argument in config.args)
    many: dict[str, list[pytest.Item]] = {}
    for item in items:
        if {"share", "cover", "every"} & set(getattr(item, "fixturenames", ())):
            item.add_marker("kernels")
        if item.get_closest_marker("many"):
            item.add_marker("kernels")
            many.setdefault(item.nodeid.partition("[")[0], []).append(item)
    wanted = {item for item in items if is_wanted(item)}
    if not every and not named:
        wanted -= {item for cases in many.values() for item in _left_out([one for one in cases if one in wanted])}
    if len(wanted) < len(items):
        config.hook.pytest_deselected(items=[item for item in items if item not in wanted])
        items[:] = [item for item in items if item in wanted]


def _left_out(cases: list[pytest.Item]) -> list[pytest.Item]:
    """Neighbours are mostly of a kind: of each few of them all but one, which a hash of its name says, so that of a
    grid of parameters not always the same is taken."""
    left: list[pytest.Item] = []
    for first in range(0, len(cases), CASES):
        some = sorted(cases[first : first + CASES], key=lambda item: crc32(item.nodeid.encode()))
        left += some[1:]
    return left
