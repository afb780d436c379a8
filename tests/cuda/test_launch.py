"""Launches without a GPU: structs as the kernels declare them, packed arguments."""

from __future__ import annotations

import re
import struct
from pathlib import Path
from types import SimpleNamespace
from typing import Any

import pytest

import tapwise
from tapwise import registry
from tapwise.algorithm import Buffers
from tapwise.cuda import copy
from tapwise.cuda.jit import compile as compiler
from tapwise.cuda.jit import launch as launches
from tapwise.cuda.jit.compile import Source
from tapwise.cuda.jit.device import H200
from tapwise.cuda.jit.launch import FIRST, Launch
from tapwise.errors import CompileError

PLANNED = [
    "n2 c6 h40 w52 k6 r6 s6",
    "n5 c16 h30 w30 k24 r3 s3 gelu residual f16",
    "n2 c3 h64 w64 k32 r3 s3 stride2 pad1 f16 nhwc relu",
    "n1 c512 h7 w7 k512 r3 s3 pad1 f16 nhwc bias",
    "n2 c48 h20 w20 k48 r3 s3 pad1 groups12 bf16 nhwc",
    "n2 c64 h20 w20 k96 r3 s3 pad1 3xtf32",
    "im2col n1 c3 h20 w20 r5 s5",
    "col2im n2 c3 h20 w33 r3 s2",
    "maxpool n2 c3 h20 w22 r2 s3 indices",
    "filter gaussian sigma2 h99 w77 u8",
    "filter maximum size5 h99 w77",
    "reduce sum 10000000",
    "reduce argmin 64x1000x7 axis1 f64",
    "softmax 1024x1000",
    "softmax 1000000",
    "squeeze_excitation n2 c40 h9 w11 m5 f16 nhwc",
    "batch_norm n2 c40 h9 w11 f16 nhwc",
    "bias_activation n2 c40 h9 w11 dgrad f16 nhwc",
]


def a_source(words: str) -> Source:
    """A kernel's source whose struct has these words."""
    return Source("any", f"struct Args {{ {words} }};\nvoid kernel(const __grid_constant__ Args p)")


def test_words_are_those_of_the_struct() -> None:
    source = a_source("const void *x;\n// Sizes, in elements.\nvoid *y, *z;\nalignas(64) unsigned long long map[2], n;")
    assert compiler.struct_words(source) == ("x", "y", "z", "map0", "map1", "n")
    assert compiler.struct_words(copy.source(4))[:5] == ("x", "y", "total", "shape0", "shape1")
    for wrong in ("int n;", "long long n; unsigned m, k;", "float v[2];"):
        with pytest.raises(CompileError, match="8 bytes"):
            compiler.struct_words(a_source(wrong))


def test_arguments_are_packed() -> None:
    source = a_source("const void *x; long long n; void *y;")
    launch = Launch(source, {"n": -7}, (1, 2, 3), 32)
    assert struct.unpack("8q", launch._template) == (0, -7, 0, 0, 0, 0, 0, 0)
    assert launch._open == {"x": FIRST, "y": FIRST + 2}
    with pytest.raises(KeyError, match="m"):
        Launch(source, {"m": 1}, (1, 1, 1), 1)
    with pytest.raises(CompileError, match="grid"):
        Launch(source, {}, (1, 1 << 16, 1), 1)


def test_launches_wait_by_themselves_where_the_gpu_can(monkeypatch: pytest.MonkeyPatch) -> None:
    """From compute capability 9.0 on; architectures are compared as numbers."""
    monkeypatch.setattr(launches, "_kernel", lambda *_: SimpleNamespace(function=1))
    monkeypatch.setattr(launches, "count", lambda: 1)
    monkeypatch.setattr(launches, "_entry", lambda: lambda *_: 0)
    source = a_source("const void *x;")
    for architecture, can in (("sm_80", 0), ("sm_89", 0), ("sm_90a", 1), ("sm_100a", 1)):
        for dependent in (False, True):
            launch = Launch(source, {}, (1, 1, 1), 32, dependent=dependent)
            launch.load(architecture, 0)
            head = launches._Head.from_buffer(launch.arguments()[0])
            assert head.attribute_count == can * dependent, (architecture, dependent)


@pytest.mark.parametrize("text", PLANNED)
def test_a_launch_is_dependent_if_its_kernel_waits(text: str, monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setattr(Launch, "load", lambda *_: None)
    problem, ran = registry.parse(text), 0
    for algorithm in registry.of_backend("cuda", problem.operator):
        if algorithm.refusal(problem, H200):
            continue
        for config in list(algorithm.configs(problem, H200))[:2]:
            for launch in getattr(algorithm.plan(problem, config, H200), "launches", ()):
                (file,) = re.findall(r'#include "(ops/[^"]*[.]cu)"', launch.source.text)
                code = (Path(tapwise.__file__).parent / file).read_text()
                waits = re.search(r"begin_dependent\(|wait_for_previous\(\)|begin_beside<", code) is not None
                assert launch.dependent == waits, (algorithm.id, config, file)
                ran += 1
    assert ran


@pytest.mark.parametrize("text", PLANNED)
def test_a_plan_loads_the_kernels_that_its_algorithm_names(text: str, monkeypatch: pytest.MonkeyPatch) -> None:
    loaded: set[Source] = set()
    monkeypatch.setattr(Launch, "load", lambda self, architecture, index: loaded.add(self.source))
    problem, ran = registry.parse(text), 0
    for algorithm in registry.of_backend("cuda", problem.operator):
        if algorithm.refusal(problem, H200):
            continue
        configs = list(algorithm.configs(problem, H200))
        for config in {configs[0], configs[len(configs) // 2], configs[-1]}:
            loaded.clear()
            algorithm.plan(problem, config, H200)
            named = algorithm.sources(problem, config)  # type: ignore[attr-defined]
            assert loaded and loaded <= set(named), f"{algorithm.id} {config}"
            assert len(set(named)) == len(named)
            ran += 1
    assert ran


@pytest.mark.parametrize("text", PLANNED)
def test_a_run_gives_every_launch_its_addresses(text: str, monkeypatch: pytest.MonkeyPatch) -> None:
    """Words that no plan knows are addresses of buffers: only what a problem does not have may be left out."""
    launched: list[tuple[Launch, dict[str, int], int]] = []
    monkeypatch.setattr(Launch, "load", lambda *_: None)
    monkeypatch.setattr(Launch, "__call__", lambda self, addresses, stream: launched.append((self, addresses, stream)))
    problem = registry.parse(text)
    has = {"bias": getattr(problem, "bias", False), "residual": getattr(problem, "residual", False)}
    has["places"] = getattr(problem, "indices", False)
    for algorithm in registry.of_backend("cuda", problem.operator):
        if algorithm.refusal(problem, H200):
            continue
        configs = list(algorithm.configs(problem, H200))
        for config in {configs[0], configs[len(configs) // 2], configs[-1]}:
            launched.clear()
            made = algorithm.plan(problem, config, H200)
            arrays = {name: SimpleNamespace(ptr=1 + number, stream=7) for number, name in enumerate(Buffers._fields)}
            packed: Any = SimpleNamespace(ptr=100, synchronized=True)
            if problem.operator not in ("conv", "squeeze_excitation"):
                # What a filter's lists come with: the second's place, or the launch.
                beside = made.launches[0] if algorithm.id.startswith("cuda.tiles") else 8  # type: ignore[attr-defined]
                packed = (packed, beside) if problem.operator == "filter" else None
            y: Any = (arrays["y"], arrays["y"]) if has["places"] else arrays["y"]
            scratch = arrays["workspace"] if made.workspace_bytes else None
            bias, residual = (arrays[name] if has[name] else None for name in ("bias", "residual"))
            made.run(Buffers(arrays["x"], packed, y, scratch, bias, residual))
            assert launched
            for launch, addresses, stream in launched:
                wanted = {launch._names_of.get(name, name) for name in launch.maps}
                # Other open words are sizes of what another config of the same kernel has.
                wanted |= {name for _, name in launch.filled} & {*Buffers._fields, "places", "list", "accumulators"}
                if not made.workspace_bytes:
                    wanted -= {"workspace"}
                wanted -= {name for name, there in has.items() if not there}
                assert wanted <= set(addresses), f"{algorithm.id} {config}"
                assert stream == 7
