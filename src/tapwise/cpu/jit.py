"""Compile generated kernels to objects, keep the objects on disk, and load them.

An object's key holds everything that it depends on: the generator's name and parameters, the sources of the generators,
the versions of tapwise, llvmlite and LLVM, and the target. A file is a checksum followed by the object, published by
rename, so a reader sees all of it or nothing; one that is damaged is rebuilt with a warning. A folder that cannot be
written costs a compile in each process, nothing else.
"""

from __future__ import annotations

import ctypes
import hashlib
import os
import tempfile
import threading
import warnings
from collections.abc import Callable
from contextlib import nullcontext
from functools import cache
from pathlib import Path
from typing import Any

import llvmlite
import llvmlite.binding as llvm

from tapwise import settings
from tapwise.cpu.simd import Kernel, Target
from tapwise.errors import CompileError

llvm.initialize_all_targets()
llvm.initialize_all_asmprinters()

_lock = threading.Lock()
_libraries: dict[str, Library] = {}


class Library:
    """Loaded kernels. `address(name)` for the parallel driver; `call(name)` for a direct call, which releases the
    GIL."""

    def __init__(self, data: bytes, target: Target) -> None:
        # An engine owns the module it was made with; objects are added to it.
        empty = llvm.parse_assembly(f'target triple = "{target.triple}"')
        self._engine = llvm.create_mcjit_compiler(empty, _machine(target))
        self._engine.add_object_file(llvm.ObjectFileRef.from_data(data))
        self._engine.finalize_object()

    def address(self, name: str) -> int:
        return int(self._engine.get_function_address(name))

    def function(self, name: str) -> Callable[[int, int], None]:
        prototype = ctypes.CFUNCTYPE(None, ctypes.c_void_p, ctypes.c_int64)
        return prototype(self.address(name))


def _machine(target: Target) -> llvm.TargetMachine:
    triple = llvm.Target.from_triple(target.triple)
    return triple.create_target_machine(
        cpu=target.cpu,
        features=target.features,
        opt=2,
        reloc="pic",
        codemodel="default" if "x86" in target.triple else "small",
    )


def lower(kernel: Kernel) -> tuple[llvm.ModuleRef, llvm.TargetMachine]:
    """Verified and optimised LLVM module of a kernel, and the machine to emit it with."""
    machine = _machine(kernel.target)
    try:
        module = llvm.parse_assembly(str(kernel.module))
        module.verify()
    except RuntimeError as error:
        raise CompileError(f"generated kernel is not valid LLVM IR: {error}") from error
    module.data_layout = str(machine.target_data)
    # The generators vectorise and unroll by hand; LLVM's own attempts only grow the code.
    options = llvm.create_pipeline_tuning_options(speed_level=2)
    options.loop_vectorization = False
    options.slp_vectorization = False
    options.loop_unrolling = False
    builder = llvm.create_pass_builder(machine, options)
    builder.getModulePassManager().run(module, builder)
    return module, machine


def assembly(kernel: Kernel) -> str:
    """Assembly text, for tests that look for vector instructions and spills."""
    module, machine = lower(kernel)
    return str(machine.emit_assembly(module))


@cache
def _sources() -> str:
    """Checksum of everything that generates code."""
    digest = hashlib.sha256()
    for path in sorted(Path(__file__).parent.glob("*.py")):
        digest.update(path.name.encode() + b"\0" + path.read_bytes())
    return digest.hexdigest()


def load(name: str, generate: Callable[..., Kernel], target: Target, **parameters: Any) -> Library:
    """The kernels that generate(target, **parameters) emits: from memory, from disk, or compiled now."""
    words = [name, repr(sorted(parameters.items())), repr(target), _sources(), llvmlite.__version__]
    words.append(repr(llvm.llvm_version_info))
    key = f"{name}-{hashlib.sha256(chr(0).join(words).encode()).hexdigest()[:32]}"
    with _lock:
        library = _libraries.get(key)
        if library is None:
            library = _libraries[key] = Library(_object(key, lambda: generate(target, **parameters)), target)
        return library


def _object(key: str, generate: Callable[[], Kernel]) -> bytes:
    """The object file of that key, from the cache folder if it is there and whole."""
    folder = settings.cache_dir() / "cpu"
    path = folder / f"{key}.o"
    data = _read(path)
    if data is not None:
        return data
    with _file_lock(folder, key):
        data = _read(path)  # another process may have built it meanwhile
        if data is None:
            module, machine = lower(generate())
            data = bytes(machine.emit_object(module))
            _publish(path, data)
    return data


def _file_lock(folder: Path, key: str) -> Any:
    """A lock between processes, or none where the folder cannot be written."""
    import filelock

    try:
        folder.mkdir(parents=True, exist_ok=True)
        if not os.access(folder, os.W_OK):
            return nullcontext()
        lock = filelock.FileLock(folder / f"{key}.lock", timeout=60)
        lock.acquire()
    except (OSError, filelock.Timeout):
        return nullcontext()
    return lock


def _read(path: Path) -> bytes | None:
    try:
        text = path.read_bytes()
    except OSError:
        return None
    checksum, data = text[:32], text[32:]
    if hashlib.sha256(data).digest() != checksum:
        warnings.warn(f"kernel cache: {path.name} is damaged and is built again", RuntimeWarning, stacklevel=2)
        return None
    return data


def _publish(path: Path, data: bytes) -> None:
    """Write beside the target, then rename: never half a file. A full or read-only disk only costs the cache."""
    temporary = None
    try:
        handle, temporary = tempfile.mkstemp(dir=path.parent, prefix=path.name)
        with os.fdopen(handle, "wb") as file:
            file.write(hashlib.sha256(data).digest() + data)
            file.flush()
            os.fsync(file.fileno())
        os.replace(temporary, path)
    except OSError as error:
        if temporary is not None:
            Path(temporary).unlink(missing_ok=True)
        _warn_unwritable(str(path.parent), str(error))


@cache
def _warn_unwritable(folder: str, error: str) -> None:
    warnings.warn(
        f"kernel cache: {folder} cannot be written ({error}); kernels are kept in memory", RuntimeWarning, stacklevel=2
    )
