"""NVRTC in processes of its own: nobody else's compiles change what it gives, and a process that ends is replaced."""

from __future__ import annotations

import os
import sys
from concurrent.futures import ThreadPoolExecutor
from pathlib import Path

import pytest

from tapwise import registry
from tapwise.cuda import copy
from tapwise.cuda.jit import compile as compiler
from tapwise.cuda.jit import nvrtc_process
from tapwise.cuda.jit.compile import Source
from tapwise.cuda.jit.device import H200
from tapwise.errors import CompileError

PLAIN = 'extern "C" __global__ void kernel(float *x) { x[threadIdx.x] += 1.0f; }'


def few_channels() -> Source:
    problem = registry.parse("n32 c3 h192 w192 k16 r3 s3 stride2 pad1 f16 nhwc")
    algorithm = registry.get("cuda.few_channels", "conv")
    return algorithm.sources(problem, algorithm.configs(problem, H200)[0])[-1]  # type: ignore[attr-defined, no-any-return]


def test_compiles_of_others_change_nothing() -> None:
    """-G stays on for the rest of a process, whatever later compiles ask for."""
    source = few_channels()
    before, _ = compiler.compile_now(source, "sm_90a")
    assert nvrtc_process.compile_here(PLAIN, ("--gpu-architecture=sm_90a", "-G")).code
    after, _ = compiler.compile_now(source, "sm_90a")
    assert after == before


def test_a_process_that_has_ended_is_replaced() -> None:
    compiler.compile_now(copy.source(4), "sm_90a")
    for process in nvrtc_process._free:
        process._process.kill()
        process._process.wait()
    assert compiler.compile_now(copy.source(4), "sm_90a")[0]


def test_many_threads_compile_at_once() -> None:
    sources = [copy.source(size) for size in (1, 2, 4, 8)]
    alone = [compiler.compile_now(source, "sm_90a")[0] for source in sources]
    with ThreadPoolExecutor(4) as pool:
        assert list(pool.map(lambda source: compiler.compile_now(source, "sm_90a")[0], sources)) == alone


def test_a_process_that_is_taken_down(tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    script = tmp_path / "script.py"
    script.write_text("import sys; sys.stdin.buffer.readline(1); sys.exit(1)")
    monkeypatch.setattr(nvrtc_process, "_free", [])
    monkeypatch.setattr(nvrtc_process, "__file__", str(script))
    with pytest.raises(CompileError, match="process ended with status 1"):
        compiler.compile_now(copy.source(4), "sm_90a")


def test_where_no_process_can_be_started(monkeypatch: pytest.MonkeyPatch) -> None:
    """Within a program that is not Python; and where the system refuses."""
    for program in ("/usr/bin/program", "", "/no/python3"):
        monkeypatch.setattr(nvrtc_process, "_free", [])
        monkeypatch.setattr(sys, "executable", program)
        assert compiler.compile_now(copy.source(4), "sm_90a")[0][:4] == b"\x7fELF"


def test_what_nvrtc_itself_refuses_is_a_compile_error(monkeypatch: pytest.MonkeyPatch) -> None:
    """In either process."""
    for program in (sys.executable, ""):
        monkeypatch.setattr(sys, "executable", program)
        with pytest.raises(CompileError, match="sm_1"):
            compiler.compile_now(Source("plain", PLAIN), "sm_1")
        monkeypatch.setattr(nvrtc_process, "compile_here", lambda *words: 1 / 0) if not program else None
    with pytest.raises(CompileError, match="division"):
        compiler.compile_now(Source("plain", PLAIN), "sm_90a")


def test_all_kernels_of_a_plan_are_compiled_ahead(tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setenv("TAPWISE_CACHE_DIR", str(tmp_path))
    problem = registry.parse("n32 c3 h192 w192 k16 r3 s3 stride2 pad1 f16 nhwc")
    algorithm = registry.get("cuda.few_channels", "conv")
    config = algorithm.configs(problem, H200)[0]
    algorithm.compile(problem, config, H200)
    assert len(list(tmp_path.glob("cuda/*.cubin"))) == len(algorithm.sources(problem, config)) == 2  # type: ignore[attr-defined]


@pytest.mark.skipif(not hasattr(os, "fork"), reason="no fork here")
def test_a_forked_child_has_processes_of_its_own() -> None:
    compiler.compile_now(copy.source(4), "sm_90a")
    child = os.fork()
    if not child:
        os._exit(0 if not nvrtc_process._free and compiler.compile_now(copy.source(4), "sm_90a")[0] else 1)
    assert os.waitpid(child, 0)[1] == 0
    assert compiler.compile_now(copy.source(4), "sm_90a")[0]
