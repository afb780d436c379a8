"""How many blocks of a kernel a multiprocessor has at once, and shared memory by which they are spread evenly.

While the launch before ends, some multiprocessors have room for more blocks of the next than others, and take as many:
a launch whose blocks have places at once ends late where one has four and another two.
"""

from __future__ import annotations

from typing import Any, Final

from tapwise.algorithm import Device
from tapwise.cuda.jit.device import check
from tapwise.integers import ceil_div

# Bytes of shared memory that each block takes beside what it asks for.
MORE_BYTES: Final = 1 << 10


def room_of(device: Device, beside: int) -> int:
    """Bytes of shared memory of a block, of so many on a multiprocessor."""
    return (device.shared_bytes + MORE_BYTES) // beside - MORE_BYTES


def beside_of(device: Device, shared_bytes: int) -> int:
    """Blocks of so much shared memory for which a multiprocessor has room."""
    return (device.shared_bytes + MORE_BYTES) // (shared_bytes + MORE_BYTES)


def spread_bytes(device: Device, shared_bytes: int, blocks: int) -> int:
    """Shared memory to ask for: so much that no multiprocessor has more of the blocks than it has to."""
    return max(shared_bytes, room_of(device, ceil_div(blocks, device.multiprocessors) + 1) + 1)


def held(function: Any, threads: int, shared_bytes: int) -> int:
    """Blocks that a multiprocessor has at once. Raises DeviceUnavailable."""
    from cuda.bindings import driver

    return int(check(driver.cuOccupancyMaxActiveBlocksPerMultiprocessor(function, threads, shared_bytes)))


def cluster_of(function: Any) -> int:
    """Blocks of a kernel's cluster. Raises DeviceUnavailable."""
    from cuda.bindings import driver

    wanted = driver.CUfunction_attribute.CU_FUNC_ATTRIBUTE_REQUIRED_CLUSTER_WIDTH
    return int(check(driver.cuFuncGetAttribute(wanted, function))) or 1


def have_places(function: Any, device: Device, blocks: int, threads: int, shared_bytes: int) -> bool:
    """Whether so many blocks have places at once, those of a cluster near each other. Raises DeviceUnavailable."""
    if (cluster := cluster_of(function)) == 1:
        return held(function, threads, shared_bytes) * device.multiprocessors >= blocks
    from cuda.bindings import driver

    launch = driver.CUlaunchConfig()
    launch.gridDimX, launch.gridDimY, launch.gridDimZ = blocks, 1, 1
    launch.blockDimX, launch.blockDimY, launch.blockDimZ = threads, 1, 1
    launch.sharedMemBytes = shared_bytes
    return int(check(driver.cuOccupancyMaxActiveClusters(function, launch))) * cluster >= blocks
