"""How many blocks of a kernel a multiprocessor has at once, and shared memory by which they are balanced.

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
# Multiprocessors of an H200 that a cluster may lie on: as many clusters of 2, 4 and 8 find places at once as such rows
# hold; of 3, 5 and 6 on some as many, on two others 39, 22 and 17, where these hold 43, 23 and 20.
CLUSTER_ROWS: Final = (18, 18, 18, 18, 18, 16, 16, 10)


def room_of(device: Device, beside: int) -> int:
    """Bytes of shared memory of a block, of so many on a multiprocessor."""
    return (device.shared_bytes + MORE_BYTES) // beside - MORE_BYTES


def beside_of(device: Device, shared_bytes: int) -> int:
    """Blocks of so much shared memory for which a multiprocessor has room."""
    return (device.shared_bytes + MORE_BYTES) // (shared_bytes + MORE_BYTES)


def balanced_bytes(device: Device, shared_bytes: int, blocks: int) -> int:
    """Shared memory to ask for: so much that no multiprocessor has more of the blocks than it has to."""
    return max(shared_bytes, room_of(device, ceil_div(blocks, device.multiprocessors) + 1) + 1)


def cluster_places(device: Device, cluster: int, beside: int = 1) -> int:
    """Blocks that find places at once, of clusters of so many, so many `beside` each other on a multiprocessor."""
    placed = sum(row * beside // cluster * cluster for row in CLUSTER_ROWS)
    return device.multiprocessors * placed // sum(CLUSTER_ROWS)


def held(kernel: Any, threads: int, shared_bytes: int) -> int:
    """Blocks of a loaded kernel that a multiprocessor has at once. Raises DeviceUnavailable."""
    from cuda.bindings import driver

    return int(check(driver.cuOccupancyMaxActiveBlocksPerMultiprocessor(kernel, threads, shared_bytes)))
