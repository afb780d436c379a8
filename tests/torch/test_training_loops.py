"""What training loops have around a model: several processes, scaled losses, CUDA graphs."""

from __future__ import annotations

import copy
import gc
import os
from functools import partial
from pathlib import Path
from typing import Any

import pytest

pytest.importorskip("torch")

import torch
from torch import distributed, nn
from torch.nn import functional
from torch.utils.checkpoint import checkpoint

import tapwise.torch
from tapwise.torch.training import TrainedConv2d, TrainedConvTranspose2d, for_training


def model(by_torch: bool = False) -> nn.Sequential:
    """`by_torch`: the reference, with the same parameters."""
    torch.manual_seed(0)
    middle = nn.Conv2d(8, 8, 1)
    return nn.Sequential(
        nn.Conv2d(4, 8, 3, 2, 1), nn.ReLU(),
        nn.Sequential(middle, nn.SiLU()) if by_torch else tapwise.torch.nn.Conv2d.of(middle, "silu"),
        nn.ConvTranspose2d(8, 4, 2, 2, bias=False),
    )  # fmt: skip


def images(number: int, device: str = "cpu") -> torch.Tensor:
    generator = torch.Generator().manual_seed(number)
    return torch.randn(4, 4, 6, 8, generator=generator).to(device)


def process(rank: int, folder: str) -> list[torch.Tensor]:
    """One of two: gradients of half of the images."""
    distributed.init_process_group("gloo", init_method=f"file://{folder}/meeting", rank=rank, world_size=2)
    own = nn.parallel.DistributedDataParallel(for_training(model()[:2], None)[0])
    for _ in range(2):
        own.zero_grad()
        own(images(0)[2 * rank : 2 * rank + 2]).square().mean().backward()
    gradients: Any = [one.grad for one in own.parameters()]
    # Gloo's threads end with the last that holds the group.
    del own
    gc.collect()
    distributed.destroy_process_group()
    return gradients


def other_process(_number: int, folder: str) -> None:
    torch.save(process(1, folder), f"{folder}/gradients")
    # Gloo's threads, where they still hold tensors when the interpreter ends, abort the process.
    os._exit(0)


@pytest.mark.skipif(not distributed.is_available(), reason="PyTorch without processes")
def test_two_processes_have_the_gradients_of_one(tmp_path: Path) -> None:
    other = torch.multiprocessing.spawn(other_process, (str(tmp_path),), join=False)
    found = process(0, str(tmp_path))
    assert other is not None
    while not other.join():
        pass
    alone = model(by_torch=True)[:2]
    alone(images(0)).square().mean().backward()
    for both in zip(found, torch.load(tmp_path / "gradients"), alone.parameters(), strict=True):
        torch.testing.assert_close(both[0], both[2].grad, rtol=1e-4, atol=1e-5)
        assert torch.equal(both[0], both[1])


def step(own: nn.Module, optimizer: Any, scaler: Any, x: torch.Tensor, dtype: torch.dtype) -> float:
    with torch.autocast(x.device.type, dtype):
        loss = own(x).float().square().mean()
    optimizer.zero_grad()
    scaler.scale(loss).backward()
    scaler.step(optimizer)
    scaler.update()
    return float(loss.detach())


def test_scaled_losses() -> None:
    """Steps are PyTorch's, and one with gradients that are not finite is left out."""
    found = []
    for own in (for_training(model(), None)[0], model(by_torch=True)):
        optimizer = torch.optim.SGD(own.parameters(), 0.5)
        scaler = torch.amp.GradScaler("cpu", init_scale=256.0)
        losses = [step(own, optimizer, scaler, images(number % 2), torch.bfloat16) for number in range(6)]
        before = copy.deepcopy(own.state_dict())
        step(own, optimizer, scaler, images(0) * torch.inf, torch.bfloat16)
        assert all(torch.equal(one, before[name]) for name, one in own.state_dict().items())
        assert scaler.get_scale() == 128.0 and losses[-1] < losses[0]
        found.append(losses)
    assert found[0] == pytest.approx(found[1], rel=0.05)


def test_accumulated_gradients_and_frozen_filters() -> None:
    ours, theirs = for_training(model(), None)[0], model(by_torch=True)
    for own in (ours, theirs):
        own[0].requires_grad_(False)  # type: ignore[index]
        for number in range(3):
            (own(images(number)).square().mean() / 3).backward()
    for mine, other in zip(ours.parameters(), theirs.parameters(), strict=True):
        assert (mine.grad is None) == (other.grad is None) == (not mine.requires_grad)
        if mine.grad is not None:
            torch.testing.assert_close(mine.grad, other.grad, rtol=1e-4, atol=1e-5)


WAYS: dict[str, Any] = {
    "compiled": lambda own: torch.compile(own, backend="aot_eager", fullgraph=True),
    "checkpoint": lambda own: lambda x: checkpoint(own, x, use_reentrant=False),
    "copies are saved": lambda own: partial(_saving_copies, own),
}


def _saving_copies(own: nn.Module, x: torch.Tensor) -> torch.Tensor:
    with torch.autograd.graph.saved_tensors_hooks(lambda one: one.tolist(), torch.tensor):
        return own(x)


@pytest.mark.parametrize("way", WAYS)
def test_other_ways_to_call(way: str) -> None:
    ours, theirs = for_training(model(), None)[0], model(by_torch=True)
    WAYS[way](ours)(images(0)).square().mean().backward()
    theirs(images(0)).square().mean().backward()
    for mine, other in zip(ours.parameters(), theirs.parameters(), strict=True):
        torch.testing.assert_close(mine.grad, other.grad, rtol=1e-4, atol=1e-5)


def on_gpu() -> tuple[nn.Module, nn.Module]:
    last = {"memory_format": torch.channels_last}
    theirs, ours = (model(by_torch).cuda().to(**last) for by_torch in (True, False))
    ours = for_training(ours, (images(0, "cuda"),), captured=True)[0]
    for module in ours.modules():
        if isinstance(module, (TrainedConv2d, TrainedConvTranspose2d)):
            module.by_torch = frozenset(("wgrad",)) if module.bias is None else frozenset()
    return ours, theirs


@pytest.mark.cuda
@pytest.mark.parametrize("dtype", [torch.float16, torch.bfloat16])
def test_a_step_in_a_cuda_graph(dtype: torch.dtype) -> None:
    """Forward, backward and optimizer, played back with other images: as PyTorch's eager steps."""
    ours, theirs = on_gpu()
    losses = []
    for own, captured in ((ours, True), (theirs, False)):
        optimizer = torch.optim.SGD(own.parameters(), 0.1)
        x = images(0, "cuda").contiguous(memory_format=torch.channels_last)

        def run(own: Any = own, optimizer: Any = optimizer, x: Any = x) -> torch.Tensor:
            optimizer.zero_grad(set_to_none=True)
            with torch.autocast("cuda", dtype, cache_enabled=False):
                loss = own(x).float().square().mean()
            loss.backward()
            optimizer.step()
            return loss.detach()

        found = []
        side = torch.cuda.Stream()
        side.wait_stream(torch.cuda.current_stream())
        with torch.cuda.stream(side):
            found += [float(run()) for _ in range(3)]
        torch.cuda.current_stream().wait_stream(side)
        graph = torch.cuda.CUDAGraph()
        if captured:
            with torch.cuda.graph(graph):
                loss = run()
        for number in range(1, 6):
            x.copy_(images(number, "cuda"))
            if captured:
                graph.replay()
            found.append(float(loss) if captured else float(run()))
        losses.append(found)
    assert losses[0] == pytest.approx(losses[1], rel=0.03)


@pytest.mark.cuda
def test_make_graphed_callables() -> None:
    ours, theirs = on_gpu()
    x = images(0, "cuda").requires_grad_()
    graphed = torch.cuda.make_graphed_callables(copy.deepcopy(ours), (x,))
    for number in range(3):
        found = []
        for own in (graphed, theirs):
            leaf = images(number, "cuda").requires_grad_()
            own.zero_grad()
            y = own(leaf)
            functional.mse_loss(y, torch.ones_like(y)).backward()
            found.append([y.detach().clone(), leaf.grad, *(one.grad.clone() for one in own.parameters())])
        for mine, other in zip(*found, strict=True):
            torch.testing.assert_close(mine, other, rtol=1e-2, atol=1e-3)
