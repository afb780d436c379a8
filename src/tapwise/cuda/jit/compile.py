"""CUDA C++ to cubin with NVRTC; needs no GPU and no driver.

A kernel is a template in a .cu file of this package. What is compiled is a stub: an include, and an extern "C" function
that instantiates the template. The cubin's key holds the stub, the text of every file of this package that it includes,
the options, the architecture and NVRTC's version. Cubins and not PTX: a newer PTX fails on an older driver.
"""

from __future__ import annotations

import re
import tempfile
from collections.abc import Mapping
from dataclasses import dataclass, replace
from functools import cache, lru_cache
from hashlib import sha256
from itertools import chain, product
from pathlib import Path
from typing import Final

from tapwise import disk_cache, settings
from tapwise.cuda.jit import nvrtc_process
from tapwise.errors import CompileError

# Kernels are named by their path in the package, headers by their names.
FOLDER: Final = Path(__file__).parents[2]
INCLUDES: Final = (FOLDER, FOLDER / "cuda" / "include")
# NVRTC's own cache does not know which compiles came before (nvrtc_process.py).
OPTIONS: Final = ("--std=c++17", "--device-as-default-execution-space", "--ptxas-options=-v", "--no-cache")
# What a stub of CUDA's float16 begins with: the header takes longer to compile than a kernel.
HALF: Final = "#define WITH_HALF\n"
# An argument with a value that no template takes: a macro in front has it.
_SLOPE = re.compile(r"LEAKY_RELU\((.+?)\)")
_CLUSTER = re.compile(r"__cluster_dims__[(](\d+)[)]")
_INCLUDE = re.compile(r'^\s*#include\s+"([^"]+)"', re.MULTILINE)
_PARAMETERS = re.compile(r"__grid_constant__ (\w+) p\)")
_WORD = re.compile(r"(\w+)((?:\[\d+\])*)\s*[,;]")


@dataclass(frozen=True)
class Source:
    """A stub to compile. `name` is the kernel's file, for readers of the cache folder; `entry` the function."""

    name: str
    text: str
    entry: str = "kernel"


@dataclass(frozen=True)
class Resources:
    """What ptxas reports of a kernel: registers and bytes of stack and of spills a thread; bytes of shared memory."""

    registers: int
    stack_bytes: int
    spill_bytes: int
    shared_bytes: int


def stub(
    file: str, template: str, arguments: str, parameters: str, threads: int, blocks: int = 1, header: str = "",
    cluster: int = 1, declarations: str = "",
) -> Source:  # fmt: skip
    """The stub that instantiates `template<arguments>` of a .cu file as a kernel of one parameter struct.

    `arguments`: tapwise.cuda.types.template_args has them. `threads` a block at most, `blocks` a multiprocessor at
    least: they bound the registers. `header` goes in front of the
    include, `declarations` behind it. `cluster`: blocks that run together.
    """
    header += HALF if "__half" in arguments else ""
    if slope := _SLOPE.search(arguments + declarations):
        header += f"#define LEAKY_RELU_SLOPE {slope[1]}\n"
    bounds = f"__launch_bounds__({threads}, {blocks})" + (f" __cluster_dims__({cluster})" if cluster > 1 else "")
    text = (
        f'{header}#include "{file}"\n{declarations}'
        f'extern "C" __global__ void {bounds} kernel(const __grid_constant__ {parameters} p)'
        f" {{ {template}<{arguments}>(p); }}\n"
    )
    return Source(Path(file).stem, text)


def beside(source: Source) -> Source:
    """The same kernel for a launch that needs nothing of the one before it, which waits for all that both need: it
    begins at once, and ends behind that one (include/grid.cuh)."""
    return replace(source, text="#define BESIDE\n" + source.text.replace("(p); }\n", "(p); end_beside<true>(); }\n"))


def cluster_of(source: Source) -> int:
    """Blocks of a kernel's clusters."""
    found = _CLUSTER.search(source.text)
    return int(found[1]) if found else 1


def traits(element: str, values: Mapping[str, int | bool | str]) -> str:
    """`struct Traits`: the element type T, and values by name, for a kernel that is a template of it alone."""
    words = {name: str(value).lower() if isinstance(value, bool) else str(value) for name, value in values.items()}
    kinds = {name: "bool" if isinstance(value, bool) else "int" for name, value in values.items()}
    lines = "".join(f"    static constexpr {kinds[name]} {name} = {word};\n" for name, word in words.items())
    return f"struct Traits {{\n    using T = {element};\n{lines}}};\n"


@lru_cache(512)
def struct_words(source: Source) -> tuple[str, ...]:
    """The 8-byte words of the struct that a kernel takes, by their names in order: of an array x[2], x0 and x1, of
    x[2][1], x0_0 and x1_0."""
    (struct,) = _PARAMETERS.findall(source.text)
    text = re.sub("//.*", "", "".join([source.text, *_texts(source.text)]))
    body = text.split(f"struct {struct} {{")[1].split("};")[0]
    if wrong := re.findall(r"\b(?:int|unsigned|float|double|bool|char|short)\s+\w+\s*[,;\[]", body):
        raise CompileError(f"{source.name}: not words of 8 bytes: {wrong}")
    return tuple(chain.from_iterable(_elements(name, counts) for name, counts in _WORD.findall(body)))


def _elements(name: str, counts: str) -> list[str]:
    """The elements of an array: `counts` as in its declaration, "" where it is none."""
    indices = product(*(range(int(count)) for count in re.findall(r"\d+", counts)))
    return [name + "_".join(map(str, index)) for index in indices]


def cubin(source: Source, architecture: str, unusable: bool = False) -> bytes:
    """The compiled kernel, from disk or compiled now; `unusable`: not that of before, which does not load.

    Raises CompileError.
    """
    words = [source.text, *_texts(source.text), repr(OPTIONS), architecture, nvrtc_version()]
    key = sha256(chr(0).join(words).encode()).hexdigest()[:32]
    path = settings.cache_dir() / "cuda" / f"{source.name}-{architecture}-{key}.cubin"
    return disk_cache.load(path, lambda: _compile(source, architecture)[0], unusable)


def compile_now(source: Source, architecture: str) -> tuple[bytes, Resources]:
    """The cubin and what it uses; no cache. Raises CompileError with NVRTC's messages."""
    code, log = _compile(source, architecture)
    return code, _resources(log, source)


def _compile(source: Source, architecture: str) -> tuple[bytes, str]:
    """The cubin and ptxas' report."""
    # Only float16 needs a header of CUDA's.
    headers = (_headers(settings.cache_dir() / "cuda"),) if HALF in source.text else ()
    folders = [f"--include-path={folder}" for folder in (*INCLUDES, *headers)]
    try:
        code, log = nvrtc_process.compile_cubin(source.text, (f"--gpu-architecture={architecture}", *folders, *OPTIONS))
    except Exception as error:
        raise CompileError(f"{source.name} for {architecture} does not compile: {error}") from error
    if not code:
        raise CompileError(f"{source.name} for {architecture} does not compile: {log}")
    return code, log


@cache
def nvrtc_version() -> str:
    """NVRTC's version, "13.0"."""
    try:
        from cuda.bindings import nvrtc

        _, major, minor = nvrtc.nvrtcVersion()
    except (ImportError, OSError, RuntimeError) as error:
        raise CompileError(f"CUDA kernels need cuda-core and NVRTC (pip install tapwise[cuda]): {error}") from error
    return f"{major}.{minor}"


@cache
def _headers(folder: Path) -> Path:
    """Where cuda_fp16.h is. Raises CompileError.

    NVRTC 13.3 and newer bring their headers along: they are unpacked below `folder`, each version beside the others, or
    where that cannot be written, for this process only. Before that, the runtime's package or the toolkit has them.
    """
    from cuda.bindings import nvrtc

    if tuple(map(int, nvrtc_version().split("."))) >= (13, 3) and hasattr(nvrtc, "nvrtcInstallBundledHeaders"):
        for own in (False, True):
            place = Path(tempfile.mkdtemp(prefix="tapwise-")) if own else folder / f"headers-{nvrtc_version()}"
            status, *_ = nvrtc.nvrtcInstallBundledHeaders(str(place).encode(), 0)
            if not status:
                return place
    from cuda import pathfinder

    found = pathfinder.find_nvidia_header_directory("cudart")
    if not found:
        raise CompileError("cuda_fp16.h is not found: float16 needs NVRTC 13.3, nvidia-cuda-runtime or a toolkit")
    return Path(found)


def _texts(text: str) -> list[str]:
    """The texts of all files of this package that a text includes, each once, in order of appearance."""
    found: dict[str, str] = {}
    waiting = [text]
    while waiting:
        for name in _INCLUDE.findall(waiting.pop(0)):
            if name not in found:
                found[name] = _read(name)
                waiting.append(found[name])
    return list(found.values())


def _read(name: str) -> str:
    for folder in INCLUDES:
        if (folder / name).is_file():
            return (folder / name).read_text(encoding="utf-8")
    raise CompileError(f"include {name!r} is not a file of {FOLDER}")


def _resources(log: str, source: Source) -> Resources:
    def number(pattern: str) -> int:
        match = re.search(pattern, log)
        return int(match[1]) if match else 0

    if "registers" not in log:
        raise CompileError(f"{source.name}: ptxas reported nothing about the kernel: {log!r}")
    spills = number(r"(\d+) bytes spill stores") + number(r"(\d+) bytes spill loads")
    registers, stack = number(r"Used (\d+) registers"), number(r"(\d+) bytes stack frame")
    return Resources(registers, stack, spills, number(r"(\d+) bytes smem"))
