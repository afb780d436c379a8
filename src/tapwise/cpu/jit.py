"""Compile generated kernels to objects, keep the objects on disk, and load them.

An object's key holds everything that it depends on: the generator's name and parameters, the text of its module and of
all modules of tapwise that this imports (`sources`), the versions of llvmlite and LLVM, its passes and level, and the
target.
"""

from __future__ import annotations

import ctypes
import hashlib
import itertools
from collections.abc import Callable
from functools import cache
from typing import Any, Final

import llvmlite
import llvmlite.binding as llvm

from tapwise import disk_cache, settings
from tapwise.cpu import sources
from tapwise.cpu.simd import Kernel, Target
from tapwise.errors import CompileError
from tapwise.forks import making

llvm.initialize_all_targets()
llvm.initialize_all_asmprinters()

# The generators vectorise, unroll and inline by hand: of LLVM's passes these few give code as fast as all of -O2 do, in
# a quarter of their time. Loops that are not rotated cost gradients of depthwise filters 2 %.
PASSES: Final = (
    "global_dead_code_eliminate", "sroa", "simplify_cfg", "new_gvn", "instruction_combine", "simplify_cfg",
    "loop_simplify", "lcssa", "loop_rotate", "instruction_combine", "simplify_cfg",
)  # fmt: skip
# How hard LLVM works on machine code, 0 to 3.
LEVEL: Final = 2

_libraries: dict[str, Library] = {}
_numbers = itertools.count()
_kept: list[Any] = []


class Library:
    """Loaded kernels. `address(name)` for the parallel driver; `function(name)` for a direct call, which releases the
    GIL. They stay loaded for as long as the process lives."""

    def __init__(self, data: bytes, target: Target) -> None:
        self._engine, self._name = _engine(target), f"kernels{next(_numbers)}"
        builder = llvm.JITLibraryBuilder().add_object_img(data).add_current_process()
        _kept.append(builder.link(self._engine, self._name))

    def address(self, name: str) -> int:
        # What a lookup gives unloads the kernels when it is dropped.
        found = self._engine.lookup(self._name, name)
        _kept.append(found)
        return int(found[name])

    def function(self, name: str) -> Callable[[int, int], None]:
        prototype = ctypes.CFUNCTYPE(None, ctypes.c_void_p, ctypes.c_int64)
        return prototype(self.address(name))


@cache
def _engine(target: Target) -> llvm.LLJIT:
    """The linker of a target's kernels.

    JITLink lays all sections of an object side by side. The older linker may place them more than 2 GiB apart, out of
    each other's reach, in a process that holds as much address space as CUDA does.
    """
    return llvm.create_lljit_compiler(_machine(target), use_jit_link=True)


def _machine(target: Target) -> llvm.TargetMachine:
    triple = llvm.Target.from_triple(target.triple)
    model = "default" if "x86" in target.triple else "small"
    return triple.create_target_machine(target.cpu, target.features, opt=LEVEL, reloc="pic", codemodel=model)


def lower(kernel: Kernel) -> tuple[llvm.ModuleRef, llvm.TargetMachine]:
    """Verified and optimised LLVM module of a kernel, and the machine to emit it with."""
    machine = _machine(kernel.target)
    try:
        module = llvm.parse_assembly(str(kernel.module))
        module.verify()
    except RuntimeError as error:
        raise CompileError(f"generated kernel is not valid LLVM IR: {error}") from error
    module.data_layout = str(machine.target_data)
    passes = llvm.create_new_module_pass_manager()
    for name in PASSES:
        getattr(passes, f"add_{name}_pass")()
    passes.run(module, llvm.create_pass_builder(machine, llvm.create_pipeline_tuning_options()))
    return module, machine


def assembly(kernel: Kernel) -> str:
    """Assembly text, for tests that look for vector instructions and spills."""
    module, machine = lower(kernel)
    return str(machine.emit_assembly(module))


def load(name: str, generate: Callable[..., Kernel], target: Target, **parameters: Any) -> Library:
    """The kernels that generate(target, **parameters) emits: from memory, from disk, or compiled now."""
    words = [name, repr(sorted(parameters.items())), repr(target), sources.checksum(generate), llvmlite.__version__]
    words += [repr(llvm.llvm_version_info), repr((PASSES, LEVEL))]
    key = f"{name}-{hashlib.sha256(chr(0).join(words).encode()).hexdigest()[:32]}"
    with making:
        library = _libraries.get(key)
        if library is None:
            path = settings.cache_dir() / "cpu" / f"{key}.o"

            def build() -> bytes:
                return _object(generate(target, **parameters))

            data = disk_cache.load(path, build)
            try:
                library = Library(data, target)
            except RuntimeError:  # a whole file, and no object
                library = Library(disk_cache.load(path, build, unusable=True), target)
            _libraries[key] = library
        return library


def _object(kernel: Kernel) -> bytes:
    module, machine = lower(kernel)
    return bytes(machine.emit_object(module))
