"""cuda.grid_stride without a GPU: its partitions."""

from __future__ import annotations

from tapwise import registry
from tapwise.cuda import partition as partitions
from tapwise.cuda.jit.device import H200


def test_partitions_of_a_volume_and_a_line() -> None:
    for text, lines, width in (("im2col c2 d5 h6 w19 t2 r3 s3", 16, 17), ("im2col c2 w50 s5", 1, 46)):
        problem = registry.parse(text)
        algorithm = registry.get("cuda.grid_stride", "im2col")
        for config in algorithm.configs(problem, H200):
            if config.partition == "run":  # type: ignore[attr-defined]
                continue
            across, down = partitions.tile_shape(config.partition, config.threads)  # type: ignore[attr-defined]
            launch = algorithm.launch(problem, config, H200)  # type: ignore[attr-defined]
            assert launch.grid[0] == 2 * -(-width // across) * -(-lines // down)
