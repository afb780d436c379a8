"""Implicit GEMM, one idea more on each rung: what TMA, tiles, warpgroups and halos are worth."""

from __future__ import annotations

from collections.abc import Callable
from functools import partial
from typing import Any, Final

from tapwise.lab.study.findings import Findings, ladder
from tapwise.lab.study.headline import climb_cpu
from tapwise.lab.study.laboratory import Call, CpuLaboratory, CudaLaboratory, Progress, filters, images
from tapwise.ops.conv.problem import ConvProblem

LAYERS: Final = (
    "n32 c64 h56 w56 k64 r3 s3 pad1 f16 nhwc",
    "n4 c64 h360 w640 k64 r3 s3 pad1 f16 nhwc",
    "n32 c176 h60 w60 k1056 r1 s1 f16 nhwc",
    "n32 c256 h16 w16 k256 r3 s3 pad1 f16 nhwc",
    "n32 c1280 h14 w14 k320 r1 s1 f16 nhwc",
    "n32 c44 h56 w56 k44 r3 s3 pad1 f16 nhwc",
    "n32 c512 h32 w32 k512 r3 s3 stride2 pad1 groups32 f16 nhwc",
    "n1 c512 h7 w7 k512 r3 s3 pad1 f16 nhwc",
)
CPU_LAYERS: Final = ("c64 h28 w28 k64 r3 s3 pad1", "c128 h14 w14 k128 r1 s1")
# Each rung adds configs to those of the one before; the model's best of them is measured. The first is the kernel
# that any GPU runs.
RUNGS: Final[tuple[tuple[str, Callable[[Any], bool]], ...]] = (
    ("TMA, 64 x 64", lambda c: _plain(c) and (c.tile_pixels, c.tile_filters) == (64, 64)),
    ("any tile", lambda c: _plain(c)),
    ("two warpgroups", lambda c: c.kernel == "im2col" and not c.filter_stationary and _alone(c)),
    ("filter-stationary", lambda c: c.kernel == "im2col" and _alone(c)),
    ("halo rows", lambda c: c.kernel != "halo_tile" and _alone(c) and not c.gather_bytes),
    ("halo tile", lambda c: _alone(c) and not c.gather_bytes),
    ("gather, groups per tile", lambda c: c.split_k == c.min_blocks_per_sm == 1),
    ("split_k, two blocks", lambda c: True),
)
GATHER: Final = "threads gather"


def _alone(config: Any) -> bool:
    """One block a multiprocessor that has a tile's gemm_k, and a group, for itself."""
    return bool(config.split_k == config.min_blocks_per_sm == config.groups_per_tile == 1)


def _plain(config: Any) -> bool:
    return bool(
        config.kernel == "im2col" and config.warpgroups == 1 and not config.filter_stationary and _alone(config)
    )


def gemm_ladder_cuda(lab: CudaLaboratory, sides: tuple[int, ...], progress: Progress) -> Findings:
    """cuda.implicit_gemm_mma, then cuda.implicit_gemm with more and more of its configs, and cuDNN, channels last."""
    import tapwise
    from tapwise import registry, verify

    findings = Findings("gemm-ladder", "Implicit GEMM: one idea more on each rung", lab.kind, lab.device.name)
    engine = registry.get("cuda.implicit_gemm")
    for text in LAYERS:
        problem = ConvProblem.parse(text)
        progress(text)
        x = lab.tensor(images(problem)).contiguous(memory_format=lab.torch.channels_last)
        w = lab.tensor(filters(problem)).to(x.dtype)
        choices: dict[str, tuple[str, Any]] = {GATHER: ("cuda.implicit_gemm_mma", None)}
        reason = engine.refusal(problem, lab.device)
        if reason is not None:
            findings.notes.append(f"{text}: cuda.implicit_gemm {reason}")
        else:
            configs = engine.configs(problem, lab.device)
            costs = {config: engine.predict_us(problem, config, lab.device) for config in configs}
            for name, takes in RUNGS:
                if taken := [config for config in costs if takes(config)]:
                    choices[name] = engine.id, min(taken, key=costs.__getitem__)
        runs: dict[str, Call] = {}
        good = {}
        for name, (identifier, config) in choices.items():
            operator = tapwise.prepare(problem, w, algorithm=identifier, config=config)
            runs[name] = partial(operator, x)
            good[name] = bool(verify.check(problem, identifier, operator.choice.config, device=lab.device))
        runs["cudnn-cl"] = lab.convolution(problem, x, w, True)
        findings.add_all({"layer": text}, "step", lab.times(runs), good)
    steps = (GATHER, *(name for name, _ in RUNGS))
    return ladder(findings, "ours", "layer", (*steps, "cudnn-cl"), steps, lines="layer")


def gemm_ladder_cpu(lab: CpuLaboratory, sides: tuple[int, ...], progress: Progress) -> Findings:
    """Plain loops, expansion and BLAS, the product whose matrix is never built, and what is chosen."""
    findings = Findings("gemm-ladder", "Implicit GEMM: one idea more on each rung", lab.kind, lab.device.name)
    algorithms = {
        "plain loops": "cpu.serial",
        "expansion, BLAS": "cpu.im2col_gemm",
        "implicit": "cpu.direct",
        "chosen": "auto",
    }
    rungs = [(name, algorithm, "host", None) for name, algorithm in algorithms.items()]
    for text in CPU_LAYERS:
        progress(text)
        climb_cpu(lab, findings, {"layer": text}, ConvProblem.parse(text), rungs)
    return ladder(findings, "ours", "layer", tuple(algorithms), tuple(algorithms), lines="layer")
