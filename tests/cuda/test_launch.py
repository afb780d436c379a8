"""Launches without a GPU: structs as the kernels declare them, packed arguments, plans that only launch."""

from __future__ import annotations

import struct
from collections.abc import Iterator
from types import SimpleNamespace
from typing import Any

import pytest

from tapwise import registry
from tapwise.algorithm import Buffers
from tapwise.cuda import block_reduction, copy, plan
from tapwise.cuda.jit import compile as compiler
from tapwise.cuda.jit.compile import Source
from tapwise.cuda.jit.device import H200
from tapwise.cuda.jit.launch import Launch
from tapwise.errors import CompileError
from tapwise.ops.conv.cuda import few_channels, im2col_gemm, implicit_gemm_mma, narrow_groups, pack, reference
from tapwise.ops.conv.cuda import window as window_
from tapwise.ops.conv.cuda.implicit_gemm import implicit_gemm
from tapwise.ops.filter import cuda as filters
from tapwise.ops.patches import cuda as patches
from tapwise.ops.pool import cuda as pool

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
]


def words_of(text: str, struct: str) -> tuple[str, ...]:
    """The names of a struct's words in CUDA source."""
    body = text.split(f"struct {struct} {{")[1].split("};")[0]
    lines = [line.split("//")[0] for line in body.splitlines()]
    names: list[str] = []
    for declaration in " ".join(lines).split(";"):
        for word in declaration.replace("*", " ").split(","):
            name = word.split()[-1:]
            if name:
                base, _, count = name[0].partition("[")
                names += [base] if not count else [f"{base}{i}" for i in range(int(count.rstrip("]")))]
    return tuple(names)


@pytest.mark.parametrize(
    ("file", "struct_name", "words"),
    [
        ("cuda/include/window.cuh", "Window", window_.WINDOW),
        ("ops/conv/cuda/reference.cu", "Reference", reference.WORDS),
        ("ops/patches/patches.cu", "Patches", patches.WORDS),
        ("cuda/copy.cu", "Copy", copy.WORDS),
        ("ops/pool/pool.cu", "Pooling", pool.WORDS),
        ("cuda/include/block_reduction.cuh", "Runs", block_reduction.WORDS),
        ("ops/conv/cuda/gemm.cu", "Gemm", im2col_gemm.WORDS),
        ("ops/filter/filter.cu", "Filter", filters.WORDS),
        ("ops/conv/cuda/pack.cu", "Images", pack.IMAGE_WORDS),
        ("ops/conv/cuda/pack.cu", "Filters", pack.FILTER_WORDS),
        ("ops/conv/cuda/implicit_gemm/implicit_gemm_im2col.cu", "Im2colGemm", implicit_gemm.IM2COL),
        ("ops/conv/cuda/implicit_gemm/implicit_gemm_halo.cu", "HaloGemm", implicit_gemm.HALO),
        ("ops/conv/cuda/implicit_gemm_mma.cu", "Gather", implicit_gemm_mma.WORDS),
        ("ops/conv/cuda/implicit_gemm_mma.cu", "Parts", implicit_gemm_mma.PART_WORDS),
        ("ops/conv/cuda/few_channels.cu", "ImageRows", few_channels.WORDS),
        ("ops/conv/cuda/few_channels.cu", "Fragments", few_channels.FRAGMENT_WORDS),
        ("ops/conv/cuda/narrow_groups.cu", "Groups", narrow_groups.WORDS),
        ("ops/conv/cuda/narrow_groups.cu", "GroupFilters", narrow_groups.FILTER_WORDS),
    ],
)
def test_words_are_packed_in_the_order_of_the_struct(file: str, struct_name: str, words: tuple[str, ...]) -> None:
    text = (compiler.FOLDER / file).read_text()
    assert words_of(text, struct_name) == tuple(words)


def test_arguments_are_packed() -> None:
    launch = Launch(Source("any", ""), ("x", "n", "y"), {"n": -7}, (1, 2, 3), (32, 1, 1))
    assert struct.unpack("9q", launch._template) == (0, 0, -7, 0, 0, 0, 0, 0, 0)
    assert launch._open == {"x": 1, "y": 3}
    with pytest.raises(KeyError, match="m"):
        Launch(Source("any", ""), ("x",), {"m": 1}, (1, 1, 1), (1, 1, 1))
    with pytest.raises(CompileError, match="grid"):
        Launch(Source("any", ""), ("x",), {}, (1, 1 << 16, 1), (1, 1, 1))


def test_plans_that_only_launch_say_so() -> None:
    """A plan with a way of its own to run is not called by addresses."""

    def kinds(kind: type[plan.CudaPlan]) -> Iterator[type[plan.CudaPlan]]:
        yield kind
        for more in kind.__subclasses__():
            yield from kinds(more)

    found = list(kinds(plan.CudaPlan))
    for kind in found:
        assert kind.launch_only == (kind.run is plan.CudaPlan.run), kind
    assert {kind.launch_only for kind in found if kind.__module__.startswith("tapwise.")} == {False, True}


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
            if problem.operator != "conv":
                packed = (packed, 8) if problem.operator == "filter" else None
            y: Any = (arrays["y"], arrays["y"]) if has["places"] else arrays["y"]
            scratch = arrays["workspace"] if made.workspace_bytes else None
            bias, residual = (arrays[name] if has[name] else None for name in ("bias", "residual"))
            made.run(Buffers(arrays["x"], packed, y, scratch, bias, residual))
            assert launched
            for launch, addresses, stream in launched:
                wanted = {launch._names_of.get(name, name) for name in launch.maps}
                # Other open words are sizes of what another config of the same kernel has.
                wanted |= {name for _, name in launch._filled} & {*Buffers._fields, "places", "list", "accumulators"}
                if not made.workspace_bytes:
                    wanted -= {"workspace"}
                wanted -= {name for name, there in has.items() if not there}
                assert wanted <= set(addresses), f"{algorithm.id} {config}"
                assert stream == 7
