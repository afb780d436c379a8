"""GPUs as Devices. Without a driver every question has an answer: no GPU, and why."""

from __future__ import annotations

import os
from functools import cache
from typing import Any, Final

from tapwise.algorithm import Device
from tapwise.errors import DeviceUnavailable
from tapwise.forks import making

# Compute capability from which the kernels run.
OLDEST: Final = (8, 0)
# fp32 multiply-adds a cycle of one multiprocessor: 128 lanes; 64 on compute capability 8.0.
_LANES: Final = {(8, 0): 64}

# For choosing and compiling where there is no GPU: tests, `tapwise explain`.
H200: Final = Device(
    kind="cuda", name="NVIDIA H200", multiprocessors=132, l1_bytes=256 << 10, l2_bytes=60 << 20, gflops=507.0,
    gbps=4280.0, architecture="sm_90a", shared_bytes=232448,
)  # fmt: skip


def architecture_of(major: int, minor: int) -> str:
    """What to compile for: Hopper and newer with their own instructions."""
    return f"sm_{major}{minor}" + ("a" if major >= 9 else "")


# Of a process that has started the driver, and of a child forked from one.
_started = _forked = False
_FORKED: Final = "a process forked from one that uses the GPU cannot use it; start it with spawn or forkserver"


def _in_child() -> None:
    global _forked
    if _started:
        _forked = True
        why_none.cache_clear()
        gpu.cache_clear()


if hasattr(os, "register_at_fork"):
    os.register_at_fork(after_in_child=_in_child)


@cache
def why_none() -> str | None:
    """Why there is no GPU to use, or None."""
    global _started
    if _forked:
        return _FORKED
    try:
        from cuda.bindings import driver
    except ImportError as error:
        return f"cuda-bindings is not installed (pip install tapwise[cuda]): {error}"
    try:
        (status,) = driver.cuInit(0)
    except (ImportError, OSError, RuntimeError) as error:
        return f"no NVIDIA driver: {error}"
    if status:
        # Other libraries of the parent may have started the driver.
        forked = status.name == "CUDA_ERROR_NOT_INITIALIZED"
        return _FORKED if forked else f"no NVIDIA driver: cuInit gives {status.name}"
    _started = True
    _, count = driver.cuDeviceGetCount()
    return None if count else "the NVIDIA driver reports no GPU"


def count() -> int:
    """GPUs that the driver reports."""
    if why_none() is not None:
        return 0
    from cuda.bindings import driver

    return int(driver.cuDeviceGetCount()[1])


def check(result: tuple[Any, ...]) -> Any:
    """The value of a driver call's result. Raises DeviceUnavailable where the driver refuses."""
    status, *values = result
    if status:
        raise DeviceUnavailable(_FORKED if _forked else f"the CUDA driver refuses: {status.name}")
    return values[0] if values else None


@cache
def cuda_core() -> Any:
    """cuda.core, imported by one thread at a time: a second one would find it half made. Raises ImportError."""
    with making:
        from cuda import core
    return core


@cache
def gpu(index: int = 0) -> Device:
    """A GPU of this machine. Raises DeviceUnavailable where there is none, or it is too old."""
    reason = why_none()
    if reason is not None:
        raise DeviceUnavailable(f"device='cuda': {reason}")
    if not 0 <= index < count():
        raise DeviceUnavailable(f"device='cuda:{index}': GPUs of this machine are numbered from 0 to {count() - 1}")
    device = cuda_core().Device(index)
    capability = tuple(device.compute_capability)
    if capability < OLDEST:
        has = ".".join(map(str, capability))
        raise DeviceUnavailable(f"{device.name} has compute capability {has}: at least 8.0 is needed")
    found = device.properties
    gigahertz = found.clock_rate / 1e6
    # Two transfers a cycle of the memory clock; an estimate where the driver does not tell the clock.
    gbps = 2 * found.memory_clock_rate * 1e3 * found.global_memory_bus_width / 8 / 1e9
    return Device(
        kind="cuda",
        name=device.name,
        multiprocessors=found.multiprocessor_count,
        l2_bytes=found.l2_cache_size,
        gflops=2 * _LANES.get(capability, 128) * gigahertz,
        gbps=0.9 * gbps or 1000.0,
        architecture=architecture_of(*capability),
        index=index,
        shared_bytes=found.max_shared_memory_per_block_optin,
    )


def described() -> str:
    """The GPUs of this machine in words, or why there is none to use."""
    reason = why_none()
    if reason is not None:
        return f"none: {reason}"
    lines = []
    for index in range(count()):
        try:
            found = gpu(index)
        except DeviceUnavailable as error:
            lines.append(f"{index}: {error}")
            continue
        size = f"{found.multiprocessors} multiprocessors, L2 {found.l2_bytes >> 20} M"
        lines.append(f"{index}: {found.name}, {found.architecture}, {size}")
    return "; ".join(lines)
