"""GPUs as devices, where there is none."""

from __future__ import annotations

import builtins
import os
import subprocess
import sys
import time
from concurrent.futures import ThreadPoolExecutor
from types import SimpleNamespace
from typing import Any

import numpy as np
import pytest

import tapwise
from tapwise import dispatch, registry
from tapwise.cuda.jit import device as devices
from tapwise.cuda.jit.device import H200, architecture_of, why_none
from tapwise.errors import DeviceUnavailable, InvalidProblem
from tapwise.ops.conv.problem import ConvProblem


@pytest.mark.skipif(why_none() is None, reason="there is a GPU")
def test_without_a_gpu_the_call_says_so() -> None:
    x, w = np.zeros((1, 3, 8, 8), np.float32), np.zeros((2, 3, 3, 3), np.float32)
    for call in (
        lambda: tapwise.conv2d(x, w, device="cuda"),
        lambda: tapwise.prepare("c3 h8 w8 k2 r3 s3", w, device="cuda"),
        lambda: tapwise.im2col(x, 3, device="cuda"),
    ):
        with pytest.raises(DeviceUnavailable, match="device='cuda'"):
            call()
    with pytest.raises(InvalidProblem, match="device='gpu'"):
        tapwise.conv2d(x, w, device="gpu")


@pytest.mark.skipif(why_none() is None, reason="there is a GPU")
def test_info_says_why() -> None:
    from typer.testing import CliRunner

    from tapwise.cli import app

    text = " ".join(CliRunner().invoke(app, ["info"]).output.split())
    assert "gpu none: no NVIDIA driver" in text


def test_architectures() -> None:
    found = [architecture_of(*capability) for capability in ((8, 0), (8, 6), (9, 0), (10, 0))]
    assert found == ["sm_80", "sm_86", "sm_90a", "sm_100a"]


def test_choice_needs_no_gpu() -> None:
    problem = ConvProblem.parse("c6 h768 w512 k6 r6 s6")
    choice = dispatch.choose(problem, H200)
    assert choice.algorithm == "cuda.direct"
    assert dispatch.choose(problem.replace(dilation=(2, 2)), H200).algorithm != "cuda.direct"
    assert {one.algorithm for one in dispatch.explain(problem, H200)} == {
        one.id for one in registry.of_backend("cuda", "conv")
    }


def test_cuda_core_is_imported_by_one_thread_at_a_time(monkeypatch: pytest.MonkeyPatch) -> None:
    """A second thread would find its module half made."""
    inside, most = [0], [0]
    real = builtins.__import__

    def slow(name: str, *more: Any, **named: Any) -> Any:
        if name != "cuda":
            return real(name, *more, **named)
        inside[0] += 1
        most[0] = max(most[0], inside[0])
        time.sleep(0.05)
        inside[0] -= 1
        return SimpleNamespace(core="whole")

    devices.cuda_core.cache_clear()
    monkeypatch.setattr(builtins, "__import__", slow)
    with ThreadPoolExecutor(4) as pool:
        found = list(pool.map(lambda _: devices.cuda_core(), range(4)))
    monkeypatch.undo()
    devices.cuda_core.cache_clear()
    assert found == ["whole"] * 4
    assert most == [1]


@pytest.mark.skipif(not hasattr(os, "register_at_fork"), reason="no fork here")
@pytest.mark.parametrize("asked", [True, False])
def test_child_forked_from_a_process_that_uses_the_gpu(asked: bool) -> None:
    """With a driver of our own. `asked`: the parent used it through tapwise, else through another library."""
    pytest.importorskip("cuda.bindings.driver")
    program = (
        "import os, sys\nimport numpy as np\nimport tapwise\nfrom cuda.bindings import driver\n"
        "from tapwise.cuda.jit import device\n"
        "pid = os.getpid()\n"
        "wrong, right = driver.CUresult.CUDA_ERROR_NOT_INITIALIZED, driver.CUresult.CUDA_SUCCESS\n"
        "driver.cuInit = lambda flags: (right if os.getpid() == pid else wrong,)\n"
        "driver.cuDeviceGetCount = lambda: (right, 1)\n"
        f"assert not {asked} or device.why_none() is None\n"
        "def ask():\n"
        "    try:\n        tapwise.softmax(np.zeros(3, np.float32), device='cuda')\n"
        "    except tapwise.DeviceUnavailable as error:\n        print(error, flush=True)\n"
        "    try:\n        device.check(driver.cuInit(0))\n"
        "    except tapwise.DeviceUnavailable as error:\n        print(error, flush=True)\n"
        "    os._exit(0)\n"
        "child = os.fork() or ask()\nassert os.waitpid(child, 0)[1] == 0\nassert device.why_none() is None\n"
    )
    result = subprocess.run([sys.executable, "-c", program], capture_output=True, text=True, timeout=60)
    assert result.returncode == 0, result.stderr
    first, second = result.stdout.splitlines()
    assert first.startswith("device='cuda': a process forked from one that uses the GPU cannot use it")
    assert second.startswith("a process forked" if asked else "the CUDA driver refuses: CUDA_ERROR_NOT_INIT")
