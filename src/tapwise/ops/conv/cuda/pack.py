"""x and filters in the order that tensor cores want, and the parts of 3xtf32: what algorithms begin with."""

from __future__ import annotations

from collections.abc import Callable, Mapping, Sequence
from functools import lru_cache
from math import gcd, lcm, prod
from typing import Any, Final

from tapwise.algorithm import Device
from tapwise.arrays.device import DeviceArray, empty
from tapwise.cuda.jit.compile import Source, stub
from tapwise.cuda.jit.launch import Launch
from tapwise.cuda.plan import CudaPlan
from tapwise.cuda.types import template_args, tensor_core_type
from tapwise.integers import ceil_div, round_up
from tapwise.ops.conv.problem import ConvProblem

THREADS: Final = 256
# Elements that a block transposes; and where a thread loads single pixels, those of one channel.
TILE: Final = 4096
TIMES: Final = 4
# Blocks of windows that have room on a multiprocessor: as many as its registers allow without spills.
WINDOW_BLOCKS: Final = 6
# Blocks a multiprocessor, of kernels that loop over what is beyond.
BLOCKS_EACH: Final = 16
# Strides of filters whose loaded launch a plan keeps.
STRIDES_KEPT: Final = 8


class PackedPlan(CudaPlan):
    """Launches; `packer` gives the one that packs filters of such strides (elements) to `packed_bytes`."""

    def __init__(
        self, problem: ConvProblem, device: Device, launches: Sequence[Launch],
        packer: Callable[[tuple[int, ...]], Launch], packed_bytes: int, workspace_bytes: int = 0,
    ) -> None:  # fmt: skip
        super().__init__(problem, device, launches, workspace_bytes)
        self._packed_bytes = packed_bytes

        @lru_cache(maxsize=STRIDES_KEPT)
        def loaded(steps: tuple[int, ...]) -> Launch:
            made = packer(steps)
            made.load(device.architecture, device.index)
            return made

        self.packer = loaded

    def pack(self, w: Any) -> DeviceArray:
        """The filters as the kernel's threads take them."""
        size = w.dtype.itemsize
        launch = self.packer(tuple(step // size for step in w.strides))
        packed = empty((self._packed_bytes // size,), w.dtype, w)
        launch({"w": w.ptr, "y": packed.ptr}, w.stream)
        return packed


def parts(problem: ConvProblem) -> int:
    """Numbers that stand for one of x: two in 3xtf32."""
    return 2 if problem.math == "3xtf32" else 1


def wide(problem: ConvProblem) -> int:
    """Channels of a group in packed x: whole pieces of 16 bytes."""
    return round_up(problem.group_c, 16 // problem.itemsize)


@lru_cache(256)
def thinned(problem: ConvProblem) -> ConvProblem:
    """The same sums over fewer pixels of x in NCHW: those that filters of 1x1 with a stride meet. The problem itself
    where there are no others."""
    if problem.layout == "nhwc" or problem.padding != ((0, 0), (0, 0)) or prod(problem.kernel) > 1:
        return problem
    return problem.replace(spatial=problem.output, stride=(1, 1))


def is_thinned(problem: ConvProblem) -> bool:
    """Whether it has fewer pixels."""
    return thinned(problem).spatial != problem.spatial


def images_source(problem: ConvProblem, thin: bool = False) -> Source:
    widths = (*_widths(problem, thin), *([True] if thin else ()))
    words = template_args(tensor_core_type(problem.dtype), parts(problem), *widths)
    name = f"pack_channels_{'first' if problem.layout == 'nchw' else 'last'}"
    return stub("ops/conv/cuda/pack.cu", name, words, "Images", THREADS)


def pair_source(first: ConvProblem, second: ConvProblem) -> Source:
    words = template_args(tensor_core_type(first.dtype), *_widths(first), *_widths(second))
    name = f"pack_pair_channels_{'first' if first.layout == 'nchw' else 'last'}"
    return stub("ops/conv/cuda/pack.cu", name, words, "ImagePair", THREADS)


def _widths(problem: ConvProblem, thin: bool = False) -> tuple[int, ...]:
    """Bytes of pieces of x; or channels of a warp, and pixels that a thread loads at once."""
    if problem.layout == "nchw":
        return _transposed(problem, beside := _beside(problem, thin)), beside
    return (next(count for count in (16, 8, 4, 2) if problem.group_c * problem.itemsize % count == 0),)


def _beside(problem: ConvProblem, thin: bool = False) -> int:
    """Pixels that a thread loads at once: planes are multiples of them; `thin`: every second of twice as many, of which
    rows are."""
    plane, counts = prod(problem.spatial), (4, 2, 1)
    if not thin:
        return next(count for count in counts if plane % count == 0)
    (_, width), (step, apart), (_, q) = problem.spatial, problem.stride, problem.output
    fitting = (
        count for count in counts
        if apart == 2 and width >= 2 * q and gcd(2 * q, step * width, plane) % (2 * count) == 0
        and 2 * count * problem.itemsize <= 16
    )  # fmt: skip
    return next(fitting, 1)


def _transposed(problem: ConvProblem, beside: int) -> int:
    """Channels that a block transposes; of single pixels those of a warp, which leave it 32 bytes of each."""
    most = 64 if beside > 1 else 16
    return next((count for count in (8, 16, 32) if wide(problem) <= count and count < most), most)


def images_bytes(problem: ConvProblem) -> int:
    """What packed x takes."""
    return parts(problem) * problem.groups * problem.n * prod(problem.spatial) * wide(problem) * problem.itemsize


def images(
    problem: ConvProblem, device: Device, names_of: Mapping[str, str] | None = None, thin: bool = False
) -> Launch:
    """x, dense in the problem's layout, to y: [part][group][n][h][w][channel]; `thin`: as `thinned` has it.
    `names_of`: of a launch."""
    seen = thinned(problem) if thin else problem
    fields, blocks = _images(seen, device, _beside(problem, thin))
    if thin:
        plane, (stride_h, stride_w) = prod(problem.spatial), problem.stride
        fields |= {
            "step_n": problem.c * plane, "step_c": plane, "width": problem.output[1], "step_w": stride_w,
            "step_h": stride_h * problem.spatial[1],
        }  # fmt: skip
    source = images_source(problem, thin)
    return Launch(source, fields, (blocks, 1, 1), THREADS, dependent=True, names_of=names_of, balance=2)


def pair(first: ConvProblem, second: ConvProblem, device: Device, names_of: Mapping[str, str]) -> Launch:
    """x of two problems of 16 bits, "x0" and "x1", of one layout, to "y0" and "y1", as `images` does."""
    (fields, blocks), (others, more) = (_images(one, device, _beside(one)) for one in (first, second))
    words = {f"{name}{i}": value for i, some in enumerate((fields, others)) for name, value in some.items()}
    grid, source = (blocks + more, 1, 1), pair_source(first, second)
    return Launch(source, words | {"blocks": blocks}, grid, THREADS, dependent=True, names_of=names_of)


def _images(problem: ConvProblem, device: Device, beside: int) -> tuple[dict[str, int], int]:
    """The words of `Images` and blocks, of threads that load so many pixels at once."""
    pixels = prod(problem.spatial)
    last = problem.layout == "nhwc"
    channels = _transposed(problem, beside)
    tiles = ceil_div(pixels * channels, TILE), ceil_div(wide(problem), channels)
    fields = {
        "n": problem.n, "groups": problem.groups, "channels": problem.group_c, "wide": wide(problem), "pixels": pixels,
        "step_n": problem.c * pixels, "step_c": 1 if last else pixels, "step_pixel": problem.c if last else 1,
        "tiles_pixels": tiles[0], "tiles_channels": tiles[1],
    }  # fmt: skip
    if not last and beside == 1:
        each = THREADS * (16 // problem.itemsize) // channels * TIMES
        return fields, ceil_div(problem.n * pixels, each) * tiles[1] * problem.groups
    if not last:
        return fields, tiles[0] * tiles[1] * problem.groups * problem.n
    pieces = problem.n * pixels * problem.groups * wide(problem) * problem.itemsize // 16
    return fields, max(1, min(ceil_div(pieces, THREADS), BLOCKS_EACH * device.multiprocessors))


def windows_source(problem: ConvProblem) -> Source:
    words = template_args(tensor_core_type(problem.dtype), parts(problem))
    return stub("ops/conv/cuda/pack.cu", "pack_windows", words, "Windows", THREADS, WINDOW_BLOCKS)


def windows(
    problem: ConvProblem, view: ConvProblem, device: Device, names_of: Mapping[str, str] | None = None
) -> Launch:
    """x, dense in the problem's layout, to y as its `view`: [part][n][h][w][tap][channel]. `names_of`: of a launch.

    Along an axis whose taps the view has no more, pixels lie as those of the output; where it is thinned, too.
    """
    h, w = problem.spatial
    rows, across = view.spatial
    step_c, step_w = (1, problem.c) if problem.layout == "nhwc" else (h * w, 1)
    fields = {
        "step_n": problem.c * h * w, "step_c": step_c, "step_h": w * step_w, "step_w": step_w, "channels": problem.c,
        "height": h, "width": w, "n": problem.n, "rows": rows, "across": across, "wide": wide(view),
        "taps": prod(problem.kernel) // prod(view.kernel), "taps_w": problem.kernel[1],
    }  # fmt: skip
    for axis, name in enumerate("hw"):
        along = view.kernel[axis] < problem.kernel[axis]
        up = problem.stride[axis] // view.stride[axis]
        fields |= {f"up_{name}": up, f"dilation_{name}": problem.dilation[axis]}
        fields[f"pad_{name}"] = problem.padding[axis][0] * along
    blocks = ceil_div(across * wide(view) * problem.itemsize, 16 * THREADS)
    high = min(problem.n * rows, ceil_div(BLOCKS_EACH * device.multiprocessors, blocks))
    return Launch(windows_source(problem), fields, (blocks, high, 1), THREADS, dependent=True, names_of=names_of)


def filter_rows(problem: ConvProblem, order: int, tile: int = 1) -> int:
    """Packed filters: whole orders and tiles, where no other group's filters follow."""
    return round_up(problem.k, lcm(order or 1, tile)) if problem.groups == 1 else problem.k


def filters_source(problem: ConvProblem, apart: bool = True) -> Source:
    count = parts(problem) if apart else 0
    words = template_args(tensor_core_type(problem.dtype), count)
    return stub("ops/conv/cuda/pack.cu", "pack_filters", words, "Filters", THREADS)


def filters(
    problem: ConvProblem,
    w: DeviceArray,
    tap_channels: int,
    device: Device,
    pitch: int = 0,
    apart: bool = True,
    order: int = 0,
    classes: tuple[int, int] = (1, 1),
    tile: int = 1,
) -> DeviceArray:
    """w (k, c / groups, r, s) of any strides as [k][tap][channel]; a tap has `tap_channels` in each part.

    The problem may be a view of w's with fewer taps, of as many times the channels. `pitch`: elements from one filter
    to the next, at least its own. `apart`: rounded to tf32, and 3xtf32 in parts. `order`: of so many filters
    each, those come together that threads of tensor cores hold (include/direct_store.cuh); 0 leaves them as they are.
    `classes`: (how many, of so many channels each): those come together that leave one remainder by their number; in
    whole pieces of 16 bytes. `tile`: filters of one group are filled up with zeros to whole tiles of so many.
    """
    size = w.dtype.itemsize
    pitch = pitch or prod(problem.kernel) * tap_channels * (3 if apart and parts(problem) == 2 else 1)
    packed = empty((filter_rows(problem, order, tile) * pitch,), w.dtype, w)
    steps = tuple(step // size for step in w.strides)
    launch = _filters(problem, tuple(w.shape[1:]), steps, tap_channels, pitch, apart, order, classes, tile, device)
    launch({"w": w.ptr, "y": packed.ptr}, w.stream)
    return packed


@lru_cache(maxsize=512)
def _filters(*words: Any) -> Launch:
    """The loaded launch of `filters_launch`, whose last word is the GPU."""
    launch, device = filters_launch(*words), words[-1]
    launch.load(device.architecture, device.index)
    return launch


def filters_launch(
    problem: ConvProblem, shape: tuple[int, ...], steps: tuple[int, ...], tap_channels: int, pitch: int, apart: bool,
    order: int, classes: tuple[int, int], tile: int, device: Device,
) -> Launch:  # fmt: skip
    """Packs filters of such a shape (c, r, s) and strides, in elements."""
    channels, *kernel = shape
    rows = filter_rows(problem, order, tile)
    taps = prod(problem.kernel)
    fields = {
        "k": rows, "taps": taps, "inner": prod(kernel) // taps, "channels": channels, "wide": tap_channels,
        "pitch": pitch, "step_k": steps[0], "step_c": steps[1], "step_r": steps[2], "step_s": steps[3],
        "taps_w": kernel[1], "order": order or 8, "real": problem.k, "classes": classes[0],
        "chunk": classes[1],
    }  # fmt: skip
    # As the kernel chooses.
    pieces = 16 // problem.itemsize
    each = 1 if channels % pieces or tap_channels % pieces or pitch % pieces else pieces
    blocks = max(1, min(ceil_div(rows * pitch, THREADS * each), BLOCKS_EACH * device.multiprocessors))
    return Launch(filters_source(problem, apart), fields, (blocks, 1, 1), THREADS, dependent=True)
