"""The registry's rows and the contract of every algorithm in it, on each backend. Documentation: test_docs.py."""

from __future__ import annotations

import subprocess
import sys
from collections.abc import Iterator
from dataclasses import replace
from typing import Any

import pytest

from tapwise import dispatch, registry
from tapwise.algorithm import Algorithm, Config, Device
from tapwise.cpu.device import host
from tapwise.cuda.jit.compile import Source
from tapwise.cuda.jit.device import H200
from tapwise.errors import InvalidProblem
from tapwise.lab import suites
from tapwise.ops.conv.problem import DIRECTIONS, ConvProblem

ROWS = [(operator, identifier) for operator, rows in registry.ALGORITHMS.items() for identifier in rows]
DEVICES = {"cpu": replace(host(2), amx=True), "cuda": H200}
# What makes plans is of this machine.
HERE = {"cpu": host(2), "cuda": H200}
CONVOLUTIONS = [
    "c5 h9 w7 k6 r3 s3 pad1",
    "n2 c8 h14 w14 k12 r1 s1 nhwc",
    "c12 h9 w9 k12 r5 s5 pad2 groups12 stride2 f64",
    "c64 h56 w56 k64 r3 s3 pad1",
    "n2 c64 h14 w14 k64 r3 s3 pad1 f16 nhwc",
    "c3 h32 w32 k32 r3 s3 pad1 tf32 nhwc",
    "c64 h14 w14 k64 r3 s3 pad1 groups8 bf16 nhwc relu",
    "c64 h14 w14 k64 r3 s3 dilation2 3xtf32 residual",
    "c64 h7 w7 k96 r1 s1",
]
PROBLEMS = {
    "conv": CONVOLUTIONS,
    "dgrad": [
        *[f"{text} dgrad" for text in CONVOLUTIONS if "residual" not in text],
        "c3 h9 w8 k16 r3 s3 stride2 dgrad",
        "c3 h8 w6 k16 r2 s2 stride2 dgrad",
    ],
    "wgrad": [
        *[f"{text} wgrad" for text in CONVOLUTIONS if not {"residual", "relu"} & set(text.split())],
        "n2 c24 h14 w14 k24 r3 s3 pad1 groups24 f16 nhwc wgrad",
    ],
    "im2col": [
        "im2col c3 h11 w13 r3 s2 pad1",
        "im2col c2 d4 h7 w9 t2 r3 s3 stride2 f64",
        "im2col n2 c3 w40 s5 bf16",
        "im2col n2 c3 h24 w30 r3 s2 bf16",
    ],
    "col2im": ["col2im c3 h11 w13 r3 s2 pad1", "col2im c2 d4 h7 w9 t2 r3 s3 stride2 f64", "col2im n2 c3 w40 s5 f16"],
    "pool": [
        "maxpool c3 h13 w19 r3 s3 stride2 pad1",
        "avgpool c5 h19 w21 r17 s2 f64 nhwc",
        "maxpool c3 h9 w9 r2 s2 indices bf16",
        "avgpool n2 c6 h7 w5 r7 s5 f16",
        "avgpool n2 c8 h9 w11 r3 s3 pad1 nhwc",
    ],
    "pool_dgrad": [
        "maxpool c3 h13 w19 r3 s3 stride2 pad1 dgrad",
        "avgpool c5 h19 w21 r17 s2 f64 nhwc dgrad",
        "maxpool c3 h9 w9 r2 s3 dilation2 bf16 nhwc dgrad",
        "avgpool c4 h9 w9 r2 s2 dilation3 f16 dgrad",
    ],
    "filter": [
        "filter gaussian h64 w48 c3 sigma2 u8",
        "filter correlate d5 h32 w32 t3 r3 s3 f64",
        "filter maximum h40 w40 size5 f16",
        "filter minimum h40 w50 size3 u8",
        "filter sobel h30 w40 i8 to:i16",
    ],
    "softmax": [
        "softmax 7x77",
        "log_softmax 3x1003 bf16",
        "softmax 3x5x19 axis1 f64",
        "softmax 5x8201 f16",
        "log_softmax 33x41 bf16",
    ],
    "softmax_dgrad": ["softmax 7x77 dgrad", "log_softmax 3x1003 f16 dgrad", "softmax 3x5x19 axis1 f64 dgrad"],
    "batch_norm": ["batch_norm n2 c37 h9 w11", "batch_norm n3 c36 h8 w11 f16 nhwc", "batch_norm c72 h7 w7 f64 nhwc"],
    "batch_norm_dgrad": [
        "batch_norm n2 c37 h9 w11 dgrad hardswish",
        "batch_norm n3 c36 h8 w11 dgrad gelu f64 nhwc",
        "batch_norm c72 h7 w7 dgrad silu bf16 nhwc",
    ],
    "bias_activation_dgrad": [
        "bias_activation n2 c37 h9 w11 dgrad tanh",
        "bias_activation n3 c36 h8 w11 dgrad relu f16 nhwc",
        "bias_activation c72 h7 w7 dgrad f64 nhwc",
    ],
    "squeeze_excitation": [
        "squeeze_excitation n2 c37 h9 w11 m5 hardsigmoid",
        "squeeze_excitation n3 c36 h8 w11 m50 gelu f64 nhwc",
        "squeeze_excitation c72 h7 w7 m3 silu bf16 nhwc",
    ],
    "reduce": ["reduce sum 5x333", "reduce argmax 3x257 axis1 f64", "reduce logsumexp 8x41 axis0 bf16"],
}
# What an algorithm does not take of its operator's problems, by their numbers. A new one may be left out: what its own
# declarations leave of them is taken.
REFUSED: dict[tuple[str, str], set[int]] = {
    ("conv", "cpu.winograd"): {1, 2, 8},
    ("conv", "cpu.strassen"): {0, 1, 2, 4, 5, 6},
    ("conv", "cpu.depthwise"): {0, 1, 3, 4, 5, 6, 7, 8},
    ("conv", "cpu.pointwise"): {0, 2, 3, 4, 5, 6, 7},
    ("conv", "cpu.direct"): set(),
    ("conv", "cpu.im2col_gemm"): set(),
    ("conv", "cpu.serial"): set(),
    ("conv", "cuda.implicit_gemm"): {0, 1, 2, 3, 8},
    ("conv", "cuda.implicit_gemm_mma"): {0, 1, 2, 3, 8},
    ("conv", "cuda.few_channels"): {0, 1, 2, 3, 4, 6, 7, 8},
    ("conv", "cuda.narrow_groups"): {0, 1, 2, 3, 4, 5, 7, 8},
    ("conv", "cuda.winograd"): {1, 2, 4, 6, 7, 8},
    ("conv", "cuda.implicit_gemm_simt"): {4, 6},
    ("conv", "cuda.direct"): {1, 4, 5, 6, 7},
    ("conv", "cuda.im2col_gemm"): {1, 4, 5, 6},
    ("conv", "cuda.sliding_window"): set(),
    ("conv", "cuda.depthwise"): {0, 1, 3, 4, 5, 6, 7, 8},
    ("pool", "cpu.simd"): {1, 2},
    **{
        key: set()
        for key in (
            ("im2col", "cpu.simd"), ("im2col", "cpu.serial"), ("im2col", "cuda.grid_stride"),
            ("col2im", "cpu.simd"), ("col2im", "cpu.serial"), ("col2im", "cuda.grid_stride"),
            ("pool", "cpu.serial"), ("pool", "cuda.sliding_window"), ("filter", "cpu.tiles"), ("filter", "cpu.serial"),
            ("filter", "cuda.sliding_window"),
            ("softmax", "cpu.simd"), ("softmax", "cpu.serial"), ("softmax", "cuda.block_reduction"),
            ("reduce", "cpu.simd"), ("reduce", "cpu.serial"), ("reduce", "cuda.block_reduction"),
        )
    },
}  # fmt: skip


def refusals(operator: str, identifier: str) -> set[int]:
    algorithm, device = registry.get(identifier, operator), DEVICES[identifier.split(".")[0]]
    found = [algorithm.refusal(registry.parse(text), device) for text in PROBLEMS[operator]]
    return {number for number, reason in enumerate(found) if reason is not None}


def expected(operator: str, identifier: str) -> set[int]:
    return REFUSED[operator, identifier] if (operator, identifier) in REFUSED else refusals(operator, identifier)


def taken() -> Iterator[tuple[str, str, str]]:
    for operator, identifier in ROWS:
        refused = expected(operator, identifier)
        algorithm, device = registry.get(identifier, operator), HERE[identifier.split(".")[0]]
        for number, text in enumerate(PROBLEMS[operator]):
            if number not in refused and algorithm.refusal(registry.parse(text), device) is None:
                yield operator, identifier, text


@pytest.mark.parametrize(("operator", "identifier"), ROWS)
def test_row_leads_to_its_algorithm(operator: str, identifier: str) -> None:
    algorithm = registry.get(identifier, operator)
    assert isinstance(algorithm, Algorithm)
    assert algorithm.id == identifier
    assert algorithm.operator == operator
    assert algorithm.summary
    assert registry.get(identifier, operator) is algorithm
    assert not vars(algorithm), "algorithms have no state"


def test_unknown_algorithm_lists_the_names() -> None:
    with pytest.raises(InvalidProblem) as error:
        registry.get("cpu.fast")
    assert "cpu.fast" in str(error.value)
    for identifier in registry.ALGORITHMS["conv"]:
        assert identifier in str(error.value)


@pytest.mark.parametrize("operator", registry.ALGORITHMS)
def test_backends(operator: str) -> None:
    for kind in ("cpu", "cuda"):
        found = [algorithm.id for algorithm in registry.of_backend(kind, operator)]
        assert found == [
            identifier for identifier in registry.ALGORITHMS[operator] if identifier.startswith(f"{kind}.")
        ]
        assert found, f"{operator} has no algorithm for {kind}"
    assert registry.of_backend("cpu", operator)[-1].id == "cpu.serial", "the reference is last"


@pytest.mark.parametrize(("operator", "identifier"), ROWS)
def test_what_is_taken(operator: str, identifier: str) -> None:
    refused = refusals(operator, identifier)
    assert refused == expected(operator, identifier)
    assert len(refused) < len(PROBLEMS[operator]), "it takes none of its operator's problems"


@pytest.mark.parametrize(
    "text",
    [
        "c8 h9 w9 k1 r3 s3 pad1",
        "c8 h9 w9 k2 r3 s3 pad1",
        "c8 h9 w9 k4 r3 s3 groups4",
        "c8 h9 w9 k8 r3 s3 groups4 stride2",
        "c2 h3 w3 k2 r3 s3",
        "c64 h8 w8 k1 r1 s1",
        "c1 h1 w1 k1 r1 s1",
        "c1 h5 w5 k3 r5 s5 stride7",
    ],
)
def test_what_refuses_nothing_has_a_config(text: str) -> None:
    problem = ConvProblem.parse(text)
    for kind, dtype in [("cpu", "f32"), ("cpu", "f16"), ("cuda", "f32"), ("cuda", "f16")]:
        for layout in ("nchw", "nhwc"):
            one = problem.replace(dtype=dtype, layout=layout)
            for algorithm in registry.of_backend(kind):
                if algorithm.refusal(one, DEVICES[kind]) is None:
                    assert any(config.automatic for config in algorithm.configs(one, DEVICES[kind])), algorithm.id


def test_no_refusals_are_listed_of_what_is_gone() -> None:
    assert set(REFUSED) <= set(ROWS)


@pytest.mark.parametrize(("operator", "identifier", "text"), list(taken()))
def test_contract(operator: str, identifier: str, text: str) -> None:
    algorithm, problem = registry.get(identifier, operator), registry.parse(text)
    device = HERE[identifier.split(".")[0]]
    configs = algorithm.configs(problem, device)
    assert configs
    assert len(set(configs)) == len(configs)
    assert len({str(config) for config in configs}) == len(configs), "a string names one config"
    for config in configs:
        assert isinstance(config, Config)
        assert 0 < algorithm.predict_us(problem, config, device) < 1e6
        assert 0 <= algorithm.pack_us(problem, config, device) < 1e6
        assert algorithm.workspace_bytes(problem, config, device) >= 0
    choice = dispatch.choose(problem, device, identifier)
    assert choice.config in configs
    if device.kind == "cuda":
        sources = algorithm.sources(problem, choice.config)  # type: ignore[attr-defined]
        assert sources and all(isinstance(source, Source) for source in sources)
    else:
        plan = algorithm.plan(problem, choice.config, device)
        assert plan.workspace_bytes <= choice.workspace_bytes


@pytest.mark.parametrize(("operator", "identifier"), ROWS)
def test_declarations_are_kept(operator: str, identifier: str) -> None:
    """What is not declared is refused, and a device of the other kind is."""
    algorithm, device = registry.get(identifier, operator), DEVICES[identifier.split(".")[0]]
    other = DEVICES["cpu" if device is H200 else "cuda"]
    number = next(n for n in range(len(PROBLEMS[operator])) if n not in expected(operator, identifier))
    problem: Any = registry.parse(PROBLEMS[operator][number])
    assert algorithm.refusal(problem, device) is None
    assert "runs on a" in (algorithm.refusal(problem, other) or "")
    if algorithm.dtypes is not None and "bf16" not in algorithm.dtypes:
        math = {"math": "ieee"} if isinstance(problem, ConvProblem) else {}
        assert "not bf16" in (algorithm.refusal(problem.replace(dtype="bf16", **math), device) or "")
    if not isinstance(problem, ConvProblem):
        return
    for direction in {*DIRECTIONS} - {problem.direction}:
        turned = problem.bare().replace(direction=direction)
        assert f"not {turned.operator}" in (algorithm.refusal(turned, device) or "")
    for layout in {"nchw", "nhwc"} - set(algorithm.layouts):
        assert "channels-last" in (algorithm.refusal(problem.replace(layout=layout), device) or "")
    for text in ("c8 w9 k8 s1", "c8 d9 h9 w9 k8 t1 r1 s1"):
        changed = ConvProblem.parse(text).replace(dtype=problem.dtype, math=problem.math, direction=problem.direction)
        assert "spatial axes" in (algorithm.refusal(changed, device) or "")


def test_serial_takes_what_is_left() -> None:
    serial, device = registry.get("cpu.serial"), host()
    for text in ("n0 c3 h4 w4 k3 r3 s3", "c0 h4 w4 k3 r3 s3", "c3 h4 w4 k3 r1 s1 f16 pad9 dilation3 gelu"):
        problem = ConvProblem.parse(text)
        assert serial.refusal(problem, device) is None
        assert serial.workspace_bytes(problem, serial.configs(problem, device)[0], device) == 0


@pytest.mark.parametrize("kind", DEVICES)
def test_each_config_is_predicted_once(kind: str, monkeypatch: pytest.MonkeyPatch) -> None:
    calls: list[tuple[str, Any, Config]] = []

    def counted(algorithm: Algorithm[Any]) -> None:
        real = algorithm.predict_us

        def predict_us(problem: Any, config: Config, device: Device) -> float:
            calls.append((algorithm.id, problem, config))
            return real(problem, config, device)

        monkeypatch.setitem(vars(algorithm), "predict_us", predict_us)

    problems = [case.problem for case in suites.load("small")]
    for operator, identifier in ROWS:
        if identifier.startswith(kind):
            counted(registry.get(identifier, operator))
    for problem in [*problems, *map(registry.parse, CONVOLUTIONS[:4])]:
        if kind == "cuda" and problem.layout == "nhwc":
            continue
        for options in ({}, {"prepared": False}, {"workspace_limit": 1 << 20}):
            calls.clear()
            dispatch._choose.cache_clear()
            dispatch.choose(problem, DEVICES[kind], **options)  # type: ignore[arg-type]
            # Phases of dgrad are problems of their own, which their configs choose for.
            own = [call for call in calls if problem.direction != "dgrad" or call[1] == problem]
            assert own
            assert len(set(own)) == len(own), f"{problem}: a config is predicted twice"


def test_importing_and_choosing_load_no_numba_and_no_torch() -> None:
    code = (
        "import sys, tapwise\n"
        "heavy = {'numba', 'torch', 'llvmlite', 'numpy'} & set(sys.modules)\n"
        "assert not heavy, f'import tapwise loads {heavy}'\n"
        "from tapwise.cpu.device import host\n"
        "from tapwise.dispatch import choose\n"
        "choose(tapwise.ConvProblem.parse('c8 h8 w8 k8 r3 s3 pad1'), host())\n"
        "heavy = {'numba', 'torch'} & set(sys.modules)\n"
        "assert not heavy, f'choosing loads {heavy}'\n"
    )
    done = subprocess.run([sys.executable, "-c", code], capture_output=True, text=True, timeout=60, check=False)
    assert done.returncode == 0, done.stderr
