"""The NEON instructions in the kernels of each operator, as a Markdown table; needs no Arm machine.

python tools/neon_instructions.py
"""

from __future__ import annotations

import re
from collections import Counter
from collections.abc import Callable
from functools import partial
from typing import Any

from tapwise.cpu import jit, tile
from tapwise.cpu.simd import Kernel, target
from tapwise.ops.conv.cpu.depthwise import kernel as depthwise
from tapwise.ops.conv.cpu.depthwise import planes
from tapwise.ops.conv.cpu.direct import kernel as direct
from tapwise.ops.conv.cpu.winograd import kernel as winograd
from tapwise.ops.conv.winograd.transforms import Axis
from tapwise.ops.patches import cpu_kernel as patches
from tapwise.ops.pool import cpu_kernel as pool
from tapwise.ops.reduce import cpu_kernel as reduce
from tapwise.ops.softmax import cpu_kernel as softmax

NEON = target("neon")
M, N = tile.shapes(NEON)[0]
PLAIN: dict[str, Any] = {"storage": "f32", "bias": False, "residual": False, "activation": None}
ROWS, VECTORS = max(planes.tiles(NEON.registers, 3, 1, 1), key=lambda shape: shape[0] * shape[1])
AXIS = Axis(taps=3, stride=1, dilation=1, phases=1)
FOUR: dict[str, Any] = {"rows": AXIS, "columns": AXIS, "tile_h": 4, "tile_w": 4}
KERNELS: dict[str, Callable[..., Kernel]] = {
    "conv2d direct": partial(
        direct.generate, layout="nchw", route="sums", lanes="pixels", panels=True, m=M, n=N, **PLAIN
    ),
    "conv2d winograd": partial(winograd.generate, layout="nchw", lanes="tiles", m=M, n=N, **FOUR, **PLAIN),
    "conv2d depthwise": partial(
        depthwise.generate, layout="nchw", rows=ROWS, vectors=VECTORS, taps_h=3, stride_h=1, dilation_h=1, **PLAIN
    ),
    "im2col": partial(patches.generate_im2col, storage="f32"),
    "col2im": partial(patches.generate_col2im, storage="f32"),
    "max_pool2d": partial(pool.generate, storage="f32", layout="nchw", op="max", r=3, s=3, stride=2, dilation=1),
    "avg_pool2d": partial(pool.generate, storage="f32", layout="nchw", op="avg", r=3, s=3, stride=2, dilation=1),
    "reduce sum": partial(reduce.generate, storage="f32", op="sum", last=True),
    "reduce max": partial(reduce.generate, storage="f32", op="max", last=True),
    "softmax": partial(softmax.generate, storage="f32", log=False, last=True),
}
VECTOR = re.compile(r"^\t([a-z0-9]+)\t.*\bv\d+\.(?:4s|16b|2d|4h|8h)", re.MULTILINE)
WHOLE = re.compile(r"^\t((?:ld|st)[rnpu]+)\tq\d+", re.MULTILINE)


def counts(assembly: str) -> Counter[str]:
    """How often each vector instruction, and each load and store of a whole vector, stands in the text."""
    return Counter(VECTOR.findall(assembly)) + Counter(f"{name} q" for name in WHOLE.findall(assembly))


def main() -> None:
    """Print the table: the most frequent instructions of each kernel."""
    print("| kernel | vector instructions | the most frequent |")
    print("|---|---|---|")
    for name, generate in KERNELS.items():
        found = counts(jit.assembly(generate(NEON, dtype="f32")))
        frequent = ", ".join(f"`{one}` {count}" for one, count in found.most_common(7))
        print(f"| {name} | {found.total()} | {frequent} |")


if __name__ == "__main__":
    main()
