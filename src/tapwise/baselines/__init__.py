"""Libraries to measure against. They are never chosen for the user, and imported only when asked for.

A peer prepares a problem once (filters handed over, session made) and is then called like a prepared operator of ours.
"""

from __future__ import annotations

from collections.abc import Callable
from dataclasses import dataclass
from importlib import import_module, util
from typing import Any, Final

from tapwise.errors import InvalidProblem, PeerUnavailable
from tapwise.problem import Inputs, Problem

# Convolution and its gradients.
CONVOLUTION: Final = ("conv", "dgrad", "wgrad")


@dataclass(frozen=True)
class Prepared:
    """`run()` computes once, as a user of the library would call it; `result()` computes and gives the whole result: a
    NumPy array, or a PyTorch tensor on the GPU."""

    run: Callable[[], object]
    result: Callable[[], Any]
    # Threads that go on spinning after a run would slow whoever is measured next.
    pause_s: float = 0.005


@dataclass(frozen=True)
class Peer:
    """`module` must be importable; `install` says how to get it; `home` holds `prepare(name, problem, inputs,
    threads)`; `operators` that it is measured for."""

    name: str
    module: str
    install: str
    home: str
    operators: tuple[str, ...] = CONVOLUTION
    device: str = "cpu"

    @property
    def installed(self) -> bool:
        return util.find_spec(self.module) is not None

    def prepare(self, problem: Problem, inputs: Inputs, threads: int) -> Prepared:
        """Hand the problem over. Raises PeerUnavailable with the reason where the library does not take it."""
        try:
            import_module(self.module)
        except ImportError as error:
            raise PeerUnavailable(f"{self.module} is not installed: {error}") from None
        prepared: Prepared = import_module(self.home).prepare(self.name, problem, inputs, threads)
        return prepared


# Operators that have one input and no filters.
PLAIN: Final = ("softmax", "reduce", "pool", "im2col", "col2im")
# And those that PyTorch has besides convolution.
PYTORCH: Final = (
    *(*PLAIN, "pool_dgrad", "softmax_dgrad", "squeeze_excitation"),
    *("batch_norm", "batch_norm_dgrad", "bias_activation_dgrad"),
)

PEERS: Final = {
    peer.name: peer
    for peer in (
        Peer("onednn", "torch", "make bench TORCH=1", "tapwise.baselines.torch_conv"),
        Peer("onednn-cl", "torch", "make bench TORCH=1", "tapwise.baselines.torch_conv"),
        Peer("mlas", "onnxruntime", "pip install 'tapwise[peers]'", "tapwise.baselines.mlas", ("conv",)),
        Peer("cudnn", "torch", "PyTorch with CUDA", "tapwise.baselines.torch_conv", device="cuda"),
        Peer("cudnn-cl", "torch", "PyTorch with CUDA", "tapwise.baselines.torch_conv", device="cuda"),
        Peer("aten", "torch", "PyTorch with CUDA", "tapwise.baselines.torch_conv", device="cuda"),
        Peer("torch", "torch", "make bench TORCH=1", "tapwise.baselines.plain", PYTORCH),
        Peer("torch-cuda", "torch", "PyTorch with CUDA", "tapwise.baselines.plain", PYTORCH, "cuda"),
        Peer("numpy", "numpy", "", "tapwise.baselines.plain", PLAIN),
        Peer("onnxruntime", "onnxruntime", "pip install 'tapwise[peers]'", "tapwise.baselines.plain", PLAIN),
        Peer("opencv", "cv2", "pip install 'tapwise[peers]'", "tapwise.baselines.pictures", ("filter",)),
        Peer("scipy", "scipy", "pip install 'tapwise[peers]'", "tapwise.baselines.pictures", ("filter",)),
    )
}


def select(words: str, device: str = "cpu") -> list[Peer]:
    """ "auto": the installed ones for a device; "none"; or names with commas. Raises InvalidProblem for another."""
    if words == "auto":
        return [peer for peer in PEERS.values() if peer.installed and peer.device == device]
    if words == "none":
        return []
    chosen = []
    for name in words.split(","):
        if name not in PEERS:
            raise InvalidProblem(f"peers={name!r}: auto, none, or of {', '.join(PEERS)}")
        chosen.append(PEERS[name])
    return chosen
