"""What the tests of kernels for tensor cores share: problems, configs, a GPU without Hopper's instructions."""

from __future__ import annotations

from dataclasses import replace
from typing import Any

from compiled_kernels import Share, compiled

from tapwise.algorithm import Algorithm, Device
from tapwise.cuda.jit.device import H200
from tapwise.ops.conv.cuda.implicit_gemm.config import Config
from tapwise.ops.conv.cuda.implicit_gemm.implicit_gemm import ImplicitGemm
from tapwise.ops.conv.problem import ConvProblem

A100 = Device(
    kind="cuda",
    name="NVIDIA A100",
    multiprocessors=108,
    gflops=360.0,
    gbps=1400.0,
    architecture="sm_80",
    shared_bytes=166912,
)
COMPILED = [
    "n32 c64 h56 w56 k64 r3 s3 pad1 f16 nhwc",
    "n32 c64 h56 w56 k64 r3 s3 pad1 bf16 nhwc bias residual relu",
    "n32 c1280 h14 w14 k320 r1 s1 f16 nhwc",
    "n1 c512 h7 w7 k512 r3 s3 pad1 f16 nhwc bias silu",
    "n32 c44 h56 w56 k44 r3 s3 pad1 f16 nhwc",
    "n2 c33 h20 w20 k37 r3 s3 stride2 f16 nhwc residual",
    "n8 c128 h28 w28 k128 r3 s3 pad1 groups4 f16",
    "n8 c256 h14 w14 k256 r3 s3 pad1 tf32 nhwc gelu",
    "n32 c512 h7 w7 k2048 r1 s1 bf16 nhwc bias relu residual",
    "n8 c64 h28 w28 k40 r3 s3 pad1 bf16 nhwc residual",
    "n8 c64 h14 w14 k64 r3 s3 pad1 3xtf32 nhwc bias",
    "n32 c32 h112 w112 k192 r4 s4 stride4 f16 nhwc",
    "n32 c3 h224 w224 k64 r7 s7 stride2 pad3 f16 bias relu",
    "n32 c96 h28 w28 k96 r3 s3 pad1 f16 nhwc bias silu residual",
    "n32 c80 h1 w3000 k512 r1 s3 pad0x1 bf16 nhwc bias gelu",
    "n32 c320 h75 w75 k40 r1 s1 f16",
    "n32 c768 h7 w7 k384 r1 s1 bf16 bias silu residual",
    "n32 c1024 h14 w14 k256 r1 s1 f16 bias relu",
    "n8 c256 h8 w8 k512 r1 s1 f16 residual",
]


def some(problem: ConvProblem, device: Device = H200) -> list[Config]:
    """The model's best config of each kind."""
    algorithm = ImplicitGemm()
    kinds: dict[tuple[object, ...], Config] = {}
    for config in sorted(
        algorithm.configs(problem, device), key=lambda one: algorithm.predict_us(problem, one, device)
    ):
        kind = (
            config.kernel,
            config.swap_ab,
            config.warpgroups,
            config.ping_pong,
            config.split_k > 1,
            config.gather_bytes,
            config.transposed_pixels,
            config.groups_per_tile,
            config.filter_stationary,
            config.unfold,
            config.chunk_bytes,
            config.halo_buffers,
        )
        kinds.setdefault(kind, config)
    return list(kinds.values())


def assert_no_spills(share: Share, algorithm: Any, problem: ConvProblem, architecture: str, *names: str) -> None:
    device = replace(H200, architecture=architecture)
    configs = best_of(algorithm, problem, device, *names)[: 2 if architecture == "sm_90a" else 1]
    for source in share(source for config in configs for source in algorithm.sources(problem, config)):
        used = compiled(source, architecture).resources
        assert (used.stack_bytes, used.spill_bytes) == (0, 0), f"{source.text}: {used}"


def best_of(algorithm: Algorithm[Any], problem: ConvProblem, device: Device, *names: str) -> list[Any]:
    """The model's best config for each choice of the named fields."""
    kinds: dict[tuple[object, ...], Any] = {}
    for config in sorted(
        algorithm.configs(problem, device), key=lambda one: algorithm.predict_us(problem, one, device)
    ):
        kinds.setdefault(tuple(getattr(config, name) for name in names), config)
    return list(kinds.values())


def filter_of(row: int, order: int) -> int:
    """The filter that lies in a row of packed ones, of which so many are turned together."""
    if not order:
        return row
    j, rest = divmod(row % order, 8)
    t, e = divmod(rest, 2)
    return row - row % order + t * (order // 4) + 2 * j + e
