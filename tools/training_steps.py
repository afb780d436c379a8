"""A training step of a torchvision model on a GPU, by PyTorch, torch.compile and tapwise, in turns.

    training_steps.py resnet50 convnext_tiny --images 64 --json benchmarks/results/h200/study/times/training-steps.json

Other models' times that the file has are kept.

Forward in float16 autocast, backward, and SGD with momentum, of images of 224 x 224 in channels-last order, each
variant captured in a CUDA graph. Dropout and drop path are off. Milliseconds: medians over rounds, least and most.
"""

from __future__ import annotations

import argparse
import copy
import json
from collections.abc import Callable
from pathlib import Path
from typing import Any

import numpy as np
import torch
import torchvision
from torch import nn

import tapwise.torch
from tapwise.cuda.jit.device import gpu
from tapwise.lab import records

WARMUP, ROUNDS, STEPS = 4, 7, 8
VARIANTS = ("torch", "compile", "tapwise", "tapwise + compile")


def step_of(model: nn.Module, variant: str, x: torch.Tensor, wanted: torch.Tensor) -> Callable[[], torch.Tensor]:
    """A step of a copy of the model; its loss."""
    mine: Any = copy.deepcopy(model)
    if variant.startswith("tapwise"):
        with torch.autocast("cuda", torch.float16):
            mine = tapwise.torch.optimize(mine, x, training=True, graphs=True)
    run = torch.compile(mine) if variant.endswith("compile") else mine
    optimizer = torch.optim.SGD(mine.parameters(), lr=1e-3, momentum=0.9, fused=True)

    def step() -> torch.Tensor:
        optimizer.zero_grad(set_to_none=True)
        with torch.autocast("cuda", torch.float16):
            loss = nn.functional.cross_entropy(run(x).float(), wanted)
        loss.backward()
        optimizer.step()
        return loss

    return step


def captured(step: Callable[[], torch.Tensor]) -> tuple[torch.cuda.CUDAGraph, float]:
    """(the step in a CUDA graph, its loss at the first replay)."""
    stream = torch.cuda.Stream()
    stream.wait_stream(torch.cuda.current_stream())
    with torch.cuda.stream(stream):
        for _ in range(WARMUP):
            step()
    torch.cuda.current_stream().wait_stream(stream)
    graph = torch.cuda.CUDAGraph()
    with torch.cuda.graph(graph):
        loss = step()
    graph.replay()
    return graph, loss.item()


def milliseconds(graph: torch.cuda.CUDAGraph) -> float:
    begin, end = (torch.cuda.Event(enable_timing=True) for _ in range(2))
    begin.record()
    for _ in range(STEPS):
        graph.replay()
    end.record()
    torch.cuda.synchronize()
    return float(begin.elapsed_time(end)) / STEPS


def main() -> None:
    parser = argparse.ArgumentParser(description=__doc__, formatter_class=argparse.RawDescriptionHelpFormatter)
    parser.add_argument("models", nargs="+", help="names of torchvision")
    parser.add_argument("--images", type=int, default=64)
    parser.add_argument("--json", type=Path)
    given = parser.parse_args()
    torch.backends.cudnn.benchmark = True
    header = {"study": "training-steps", "device": gpu().name, "versions": records.versions()}
    before = json.loads(given.json.read_text())[1:] if given.json and given.json.exists() else []
    kept: list[dict[str, Any]] = [header, *(one for one in before if one["model"] not in given.models)]
    for name in given.models:
        torch.manual_seed(0)
        model = torchvision.models.get_model(name).cuda().to(memory_format=torch.channels_last).train()
        for part in model.modules():
            if isinstance(part, nn.Dropout | torchvision.ops.StochasticDepth):
                part.p = 0.0
        x = torch.randn(given.images, 3, 224, 224, device="cuda").contiguous(memory_format=torch.channels_last)
        wanted = torch.randint(0, 1000, (given.images,), device="cuda")
        # What a graph reads and writes is the step's.
        steps = {variant: step_of(model, variant, x, wanted) for variant in VARIANTS}
        graphs = {variant: captured(step) for variant, step in steps.items()}
        times: dict[str, list[float]] = {variant: [] for variant in VARIANTS}
        for _ in range(1 + ROUNDS):
            for variant, (graph, _loss) in graphs.items():
                times[variant].append(milliseconds(graph))
        medians = {variant: float(np.median(values[1:])) for variant, values in times.items()}
        fastest = min(medians["torch"], medians["compile"])
        for variant, values in times.items():
            print(
                f"{name} {variant:18} {medians[variant]:7.3f} ms [{min(values[1:]):.3f} {max(values[1:]):.3f}], "
                f"{fastest / medians[variant]:.3f} of PyTorch's fastest, loss {graphs[variant][1]:.4f}",
                flush=True,
            )
        measured = {variant: records.rounded(values[1:]) for variant, values in times.items()}
        kept.append({"model": name, "images": given.images, "commit": records.commit(), "milliseconds": measured})
        if given.json:
            given.json.write_text(json.dumps(kept, indent=1) + "\n")


if __name__ == "__main__":
    main()
