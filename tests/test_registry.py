"""The registry's rows and the contract of every algorithm in it. Documentation pages: test_docs.py."""

from __future__ import annotations

import subprocess
import sys

import pytest

from tapwise import registry
from tapwise.algorithm import Algorithm, Config, Device
from tapwise.cpu.device import host
from tapwise.errors import InvalidProblem
from tapwise.ops.conv.problem import ConvProblem

IDENTIFIERS = [name for name in registry.ALGORITHMS["conv"] if name.startswith("cpu.")]
PROBLEMS = [
    "c5 h9 w7 k6 r3 s3 pad1",
    "n2 c8 h14 w14 k12 r1 s1 nhwc",
    "c12 h9 w9 k12 r5 s5 pad2 groups12 stride2 f64",
    "c64 h56 w56 k64 r3 s3 pad1",
]


@pytest.mark.parametrize("identifier", IDENTIFIERS)
def test_row_leads_to_its_algorithm(identifier: str) -> None:
    algorithm = registry.get(identifier)
    assert isinstance(algorithm, Algorithm)
    assert algorithm.id == identifier
    assert algorithm.summary
    assert registry.get(identifier) is algorithm
    assert not vars(algorithm), "algorithms have no state"


def test_unknown_algorithm_lists_the_names() -> None:
    with pytest.raises(InvalidProblem) as error:
        registry.get("cpu.fast")
    assert "cpu.fast" in str(error.value)
    for identifier in IDENTIFIERS:
        assert identifier in str(error.value)


def test_backends() -> None:
    found = [algorithm.id for algorithm in registry.of_backend("cpu")]
    assert found == [identifier for identifier in IDENTIFIERS if identifier.startswith("cpu.")]
    assert found[-1] == "cpu.serial", "the reference is last"


@pytest.mark.parametrize("identifier", IDENTIFIERS)
@pytest.mark.parametrize("text", PROBLEMS)
def test_contract(identifier: str, text: str) -> None:
    algorithm, problem, device = registry.get(identifier), ConvProblem.parse(text), host(2)
    if algorithm.refusal(problem, device) is not None:
        return
    configs = algorithm.configs(problem, device)
    assert configs
    assert len(set(configs)) == len(configs)
    assert len({str(config) for config in configs}) == len(configs), "a string names one config"
    for config in configs:
        assert isinstance(config, Config)
        assert algorithm.predict_us(problem, config, device) > 0
        assert algorithm.pack_us(problem, config, device) >= 0
        assert algorithm.workspace_bytes(problem, config, device) >= 0
    plan = algorithm.plan(problem, configs[0], device)
    assert plan.workspace_bytes <= algorithm.workspace_bytes(problem, configs[0], device)


@pytest.mark.parametrize("identifier", IDENTIFIERS)
def test_refusals_carry_a_reason(identifier: str) -> None:
    algorithm, device = registry.get(identifier), host()
    problem = ConvProblem.parse("c8 h9 w9 k8 r1 s1 groups8")
    for change in ({"direction": "dgrad"}, {"direction": "wgrad"}, {"dtype": "bf16"}):
        assert algorithm.refusal(problem.replace(**change), device)
    for text in ("c8 w9 k8 s1 groups8", "c8 d9 h9 w9 k8 t1 r1 s1 groups8"):
        assert algorithm.refusal(ConvProblem.parse(text), device)
    assert algorithm.refusal(problem, Device("cuda", "a GPU", 132))


def test_serial_takes_what_is_left() -> None:
    serial, device = registry.get("cpu.serial"), host()
    for text in (*PROBLEMS, "n0 c3 h4 w4 k3 r3 s3", "c0 h4 w4 k3 r3 s3", "c3 h4 w4 k3 r1 s1 f16 pad9 dilation3 gelu"):
        problem = ConvProblem.parse(text)
        assert serial.refusal(problem, device) is None
        assert serial.workspace_bytes(problem, serial.configs(problem, device)[0], device) == 0


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
