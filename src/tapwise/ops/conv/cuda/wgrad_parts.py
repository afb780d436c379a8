"""What implicit GEMMs of weight gradients share: what they refuse, their sizes, and the sum of parts of the pixels."""

from __future__ import annotations

from math import prod
from typing import Final

from tapwise.cuda.jit.compile import Source, stub
from tapwise.cuda.jit.launch import Launch
from tapwise.cuda.types import INDEX_LIMIT, reciprocal, template_args, tensor_core_type
from tapwise.integers import ceil_div, round_up
from tapwise.ops.conv.cuda import window
from tapwise.ops.conv.problem import ConvProblem

# Threads that add up parts, and bytes of each of their pieces.
THREADS: Final = 256
PIECE: Final = 16
# Warps that share an element's parts when they are added.
SLICES: Final = (8, 4, 2, 1)
# Most bytes of all parts. What L2 holds.
PARTS_BYTES, EARLY_BYTES = 1 << 29, 60 << 20
# Rows, columns and padding that places count.
EXTENT_LIMIT: Final = 1 << 28


def rejects(problem: ConvProblem) -> str | None:
    """Why not, where 32 bits do not count a problem's elements or place its windows."""
    sizes = map(prod, (problem.x_shape, problem.y_shape, problem.w_shape))
    if max(sizes) >= INDEX_LIMIT:
        return "takes arrays of fewer than 2^31 elements"
    extents = [n + sum(sides) for n, sides in zip(problem.spatial, problem.padding, strict=True)]
    if max(extents) >= EXTENT_LIMIT:
        return "takes fewer than 2^28 rows and columns, padding included"
    return None


def padded(problem: ConvProblem) -> bool:
    return any(map(any, problem.padding))


def pointwise(problem: ConvProblem) -> bool:
    """Whether dy's pixels are x's."""
    return problem.kernel == problem.stride == (1, 1) and problem.output == problem.spatial and not padded(problem)


def begins_early(problem: ConvProblem, held: int, share: int = 1) -> bool:
    """Whether what comes next may be placed while a launch still waits for what was before, of blocks of which a
    multiprocessor holds so many, and has so many where they are shared out evenly: 3x3 of 512 channels on 14x14 5.5 us
    instead of 6.4. Not where it holds more, as some would get more than others, nor where L2 does not hold what is read
    (5x5 of stride 2 on 120x120 40.7 instead of 34.7)."""
    return held <= share and problem.bytes <= EARLY_BYTES


def fields(problem: ConvProblem, source: Source, step: int, split_k: int) -> dict[str, int]:
    """The words of `Gradient` but for its tiles, where steps are so many pixels."""
    steps = ceil_div(problem.n * prod(problem.output), step)
    return window.window_fields(problem, source) | {
        "columns": problem.gemm_k, "row": problem.gemm_k, "taps": prod(problem.kernel),
        "pixels": problem.n * prod(problem.output), "steps": steps, "part_steps": ceil_div(steps, split_k),
        "part_pitch": part_pitch(problem), "by_plane": reciprocal(prod(problem.output)),
        "by_q": reciprocal(problem.output[1]),
    }  # fmt: skip


def part_pitch(problem: ConvProblem) -> int:
    """Elements of a part: whole pieces of 16 bytes."""
    return round_up(prod(problem.w_shape), 4)


def workspace_bytes(problem: ConvProblem, split_k: int) -> int:
    return split_k * part_pitch(problem) * max(4, problem.itemsize) if split_k > 1 else 0


def slices_of(split_k: int) -> int:
    """Warps that share the parts of an element."""
    return next(count for count in SLICES if count <= split_k)


def sum_source(problem: ConvProblem, split_k: int) -> Source:
    words = template_args(tensor_core_type(problem.dtype), slices_of(split_k))
    return stub("ops/conv/cuda/wgrad_parts.cu", "add_parts", words, "Parts", THREADS)


def sum_launch(problem: ConvProblem, split_k: int) -> Launch:
    """Of parts in the workspace to dw."""
    count, slices = prod(problem.w_shape), slices_of(split_k)
    words = {"count": count, "part_pitch": part_pitch(problem), "split_k": split_k}
    grid = (ceil_div(count, THREADS // slices * PIECE // max(4, problem.itemsize)), 1, 1)
    room = THREADS * PIECE if slices > 1 else 0
    source, names = sum_source(problem, split_k), {"parts": "workspace"}
    return Launch(source, words, grid, THREADS, room, dependent=True, names_of=names)
