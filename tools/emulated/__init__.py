"""CUDA kernels on the CPU, for their correctness alone: a block after the other, its threads in turns (emulated.h).

What kernels share, scheduler, copies and matrix instructions, is one library, compiled once; a kernel is another.

    PYTHONPATH=tools python -m emulated "n2 c24 h9 w11 k24 r3 s3 pad1 groups24 f16 nhwc" cuda.depthwise

verifies every config of an algorithm without a GPU. Needs g++ of version 12 or newer (_Float16). Takes kernels that
copy by cp.async or TMA (boxes, windows of 4 axes) and multiply in registers, by mma.sync or by wgmma (operands of 16
bits), and clusters whose blocks read each other's shared memory.
"""

from __future__ import annotations

import ctypes
import mmap
import os
import re
import shutil
import subprocess
import tempfile
from collections.abc import Mapping, Sequence
from functools import cache
from hashlib import sha256
from pathlib import Path
from typing import Final

import numpy as np

from tapwise.cuda.jit import compile as compiler
from tapwise.cuda.jit.compile import Source
from tapwise.cuda.jit.launch import FIRST, Launch
from tapwise.cuda.jit.tensor_map import TensorMap
from tapwise.cuda.types import DTYPES

_HERE: Final = Path(__file__).parent
# Headers that emulated.h stands for.
_REPLACED: Final = {
    "float16.cuh", "shared_memory.cuh", "cp_async.cuh", "matrix.cuh", "grid.cuh", "tma.cuh", "hopper.cuh",
}  # fmt: skip
_INCLUDE: Final = re.compile(r'^\s*#(?:include\s+["<]([^">]+)[">]|pragma (once|unroll.*))\s*$', re.MULTILINE)
_PTX: Final = (
    (r'asm\("ex2\.approx[^;]*;" : "=f"\(r\) : "f"\(v\)\);', "r = exp2f(v);"),
    (r'asm\("cvt\.f32\.bf16[^;]*;" : "=f"\(wide\) : "h"\(v\.bits\)\);', "wide = widen(v);"),
    (r'asm volatile\("cp\.async\.wait_all;" ::: "memory"\);', "cp_async_commit(), cp_async_wait<0>();"),
    (
        r'asm volatile\("ld\.shared\.v2\.b64[^"]*"\s*: "=l"\((.*?)\), "=l"\((.*?)\)\s*: "r"\((.*?)\)\s*: "memory"\);',
        r"load_words(\3, \1, \2);",
    ),
    (
        r'asm volatile\("st\.shared\.v2\.b64[^"]*" ::"r"\((.*?)\), "l"\((.*?)\),\s*"l"\((.*?)\)\s*: "memory"\);',
        r"store_words(\1, \2, \3);",
    ),
    (r'asm\("rcp\.approx[^;]*;" : "=f"\(r\) : "f"\(v\)\);', "r = 1.0f / v;"),
    (
        r'asm\("(max|min)\.NaN[^;]*;" : "=f"\(chosen\) : "f"\(a\), "f"\(b\)\);',
        r"chosen = a != a || b != b ? a + b : f\1f(a, b);",
    ),
)
_PAGE: Final = mmap.PAGESIZE


def available() -> bool:
    """Whether there is a compiler for it."""
    return shutil.which("g++") is not None


def run(launch: Launch, arrays: Mapping[str, np.ndarray], backwards: bool = False) -> None:
    """A launch on arrays by the names of its addresses. Raises RuntimeError with what a kernel did wrong.

    Every array is followed by a page that may not be touched. `backwards`: blocks and threads take turns in the other
    order.
    """
    copies = {name: Guarded(array) for name, array in arrays.items()}
    run_at(launch, {name: copy.address for name, copy in copies.items()}, backwards)
    for name, array in arrays.items():
        if array.flags.writeable:
            array[...] = copies[name].array


def run_at(launch: Launch, addresses: Mapping[str, int], backwards: bool = False) -> None:
    """A launch with addresses of this machine's memory, by their names."""
    words = list(launch.words)
    for place, name in launch.filled:
        words[place - FIRST] = addresses.get(name, 0)
    for name, tensor in launch.maps.items():
        first = launch.names.index(f"{name}0")
        known = (addresses[launch.source_of(name)], DTYPES[tensor.dtype].size_bytes, *_shape_of(tensor))
        words[first : first + len(known)] = known
    run_words(launch, words, backwards)


def _shape_of(tensor: TensorMap) -> tuple[int, ...]:
    """The words of a map behind the bytes of an element, as emulated.h has them: four axes, or windows of them."""

    def packed(values: Sequence[int]) -> int:
        return int.from_bytes(np.array(values, "<i2").tobytes(), "little", signed=True)

    missing = 4 - len(tensor.sizes)
    sizes, strides = (*tensor.sizes, *[1] * missing), (*tensor.strides, *[16] * missing)
    box = (*tensor.box, *[1] * missing)
    if tensor.corners is not None:
        lower, upper = tensor.corners
        box = (*tensor.box, packed((*lower, *upper)), packed((*tensor.steps, 0, 0)))
    windows = tensor.corners is not None
    steps = packed((1,) * 4 if windows or not tensor.steps else (*tensor.steps, *[1] * missing))
    return tensor.swizzle_bytes, *sizes, *strides, *box, int(windows), steps


def run_words(launch: Launch, words: Sequence[int], backwards: bool = False) -> None:
    """A launch with the words of its struct: addresses are of this machine's memory."""
    packed, grid = (ctypes.c_int64 * len(words))(*words), (ctypes.c_uint * 3)(*launch.grid)
    _compiled(launch.source).run(packed, grid, launch.block[0], launch.shared_bytes, int(backwards))


class Guarded:
    """A copy of an array that ends with its last page, but for what makes it a multiple of 16 bytes."""

    def __init__(self, array: np.ndarray) -> None:
        # 16 bytes are what an address may be asked to be a multiple of.
        size = max(array.nbytes, 1)
        size += -size % 16
        before = -size % _PAGE
        self._memory = mmap.mmap(-1, before + size + _PAGE)
        base = ctypes.addressof(ctypes.c_char.from_buffer(self._memory))
        self.address = base + before
        self.array = np.frombuffer(self._memory, array.dtype, array.size, before).reshape(array.shape)
        self.array[...] = array
        ctypes.CDLL(None).mprotect(ctypes.c_void_p(base + len(self._memory) - _PAGE), ctypes.c_size_t(_PAGE), 0)


@cache
def _compiled(source: Source) -> ctypes.CDLL:
    # Arrays of a known size are one block's, and blocks come one after the other.
    text = re.sub(r"(?<!extern )__shared__", "static", _flat(source.text, set()))
    for pattern, other in _PTX:
        text = re.sub(pattern, other, text, flags=re.DOTALL)
    clusters = re.search(r"__cluster_dims__\((\d+)\)", text)
    (parameters,) = re.findall(r"__grid_constant__ (\w+) p\)", text)
    text += (
        f"static void called(const void *p) {{ kernel(*static_cast<const {parameters} *>(p)); }}\n"
        'extern "C" void run(const void *p, const unsigned *grid, unsigned threads, unsigned shared, int backwards) {\n'
        '#ifndef WGMMA\n#define WGMMA ""\n#endif\n'
        f"    run_grid(called, p, grid, threads, shared, backwards, {clusters[1] if clusters else 1}, WGMMA);\n}}\n"
    )
    shared = _shared()
    library = shared / f"{sha256(text.encode()).hexdigest()[:24]}.so"
    if not library.exists():
        program, draft = library.with_suffix(".cpp"), library.with_suffix(f".{os.getpid()}")
        draft.write_text(text)
        draft.replace(program)
        _build(library, program, "-include", shared / "emulated.h", "-shared", shared / "shared.so")
    return ctypes.CDLL(str(library))


@cache
def _shared() -> Path:
    """The folder with what kernels share: the header, precompiled, and the library of all the rest."""
    texts = {path: path.read_bytes() for path in sorted(_HERE.iterdir()) if path.suffix in (".h", ".cpp")}
    folder = Path(tempfile.gettempdir()) / "tapwise-emulated" / sha256(b"".join(texts.values())).hexdigest()[:24]
    if not folder.exists():
        folder.parent.mkdir(exist_ok=True)
        own = Path(tempfile.mkdtemp(dir=folder.parent))
        for path, text in texts.items():
            (own / path.name).write_bytes(text)
        _build(own / "emulated.h.gch", "-x", "c++-header", own / "emulated.h")
        # Compiled once, run by all.
        _build(own / "shared.so", "-O2", "-shared", *(own / path.name for path in texts if path.suffix == ".cpp"))
        try:
            own.rename(folder)
        except OSError:
            # Another process was faster.
            shutil.rmtree(own)
    return folder


def _build(target: Path, *options: str | Path) -> None:
    """Compile beside the target, then rename: other processes see all of it or nothing."""
    unfinished = target.with_name(f"{target.name}.{os.getpid()}")
    command = ["g++", "-std=c++20", "-Og", "-w", "-fno-strict-aliasing", "-ffp-contract=fast", "-fPIC"]
    # What is inline has the same name in every library.
    command += ["-fno-gnu-unique", *map(str, options), "-o", str(unfinished)]
    done = subprocess.run(command, capture_output=True, text=True, check=False)
    if done.returncode:
        raise RuntimeError(f"{target.name}: {done.stderr[:4000]}")
    unfinished.replace(target)


def _flat(text: str, seen: set[str]) -> str:
    """A text with its includes in place."""

    def there(match: re.Match[str]) -> str:
        name = match[1]
        if name is None or name in seen or name in _REPLACED or name == "cuda_fp16.h":
            return ""
        seen.add(name)
        return _flat(compiler._read(name), seen)

    return _INCLUDE.sub(there, text)
