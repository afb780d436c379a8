"""How the outputs of an image are shared out to blocks of threads: the shapes of include/partition.cuh."""

from __future__ import annotations

from typing import Final

# How a block's outputs lie: a piece of a row, a square, a piece of a column.
PARTITIONS: Final = ("row", "block", "column")


def tile_shape(partition: str, outputs: int) -> tuple[int, int]:
    """(across, down) of a block's outputs, a power of two."""
    if partition == "row":
        return outputs, 1
    if partition == "column":
        return 1, outputs
    # As square as powers of two allow, wider than high.
    high = 1 << ((outputs.bit_length() - 1) // 2)
    return outputs // high, high
