"""What a call costs the host on a GPU, beside PyTorch's call, in turns.

    host_calls.py --json benchmarks/results/h200/study/times/host-calls.json

Microseconds until a call is back, without a CUDA graph: checks, the result's memory, launches. Problems are small, so
that none waits for the GPU. Medians over rounds, and of the ratio (ours over PyTorch's) its quartiles, too.
"""

from __future__ import annotations

import argparse
import json
import time
from collections.abc import Callable
from pathlib import Path

import numpy as np
import torch
import torch.nn.functional as F

import tapwise
from tapwise.cuda.jit.device import gpu
from tapwise.lab import records

CALLS, ROUNDS = 200, 25
PREPARED = "prepared "

Call = Callable[[], object]


def cases() -> dict[str, tuple[Call, Call]]:
    """By name, PyTorch's call and ours."""
    x, w, depthwise = (torch.randn(*shape, device="cuda") for shape in ((2, 64, 14, 14), (64, 64, 3, 3), (64, 1, 3, 3)))
    halves = [one.half().contiguous(memory_format=torch.channels_last) for one in (x, w, depthwise)]
    rows, columns, dy = torch.randn(64, 1000, device="cuda"), F.unfold(x, 3, padding=1), torch.randn_like(x)
    found: dict[str, tuple[Call, Call]] = {}

    def convolution(name: str, x: torch.Tensor, w: torch.Tensor, groups: int = 1) -> None:
        layout = "nhwc" if x.dtype == torch.half else "nchw"
        layer = tapwise.prepare(tuple(x.shape), w, padding=1, groups=groups, layout=layout)
        call = lambda: F.conv2d(x, w, padding=1, groups=groups)  # noqa: E731
        found[name] = call, lambda: tapwise.conv2d(x, w, padding=1, groups=groups)
        found[PREPARED + name] = call, lambda: layer(x)

    for kind, (images, dense, single) in {"f32": (x, w, depthwise), "f16 nhwc": tuple(halves)}.items():
        convolution(f"conv2d {kind}", images, dense)
        convolution(f"conv2d depthwise {kind}", images, single, 64)
    shape = (2, 64, 14, 14)
    return found | {
        "conv_transpose2d": (
            lambda: F.conv_transpose2d(x, w, stride=2), lambda: tapwise.conv_transpose2d(x, w, stride=2),
        ),
        "conv2d_input": (
            lambda: torch.nn.grad.conv2d_input(shape, w, dy, padding=1),
            lambda: tapwise.conv2d_input(shape, w, dy, padding=1),
        ),
        "conv2d_weight": (
            lambda: torch.nn.grad.conv2d_weight(x, (64, 64, 3, 3), dy, padding=1),
            lambda: tapwise.conv2d_weight(x, (64, 64, 3, 3), dy, padding=1),
        ),
        "max_pool2d": (lambda: F.max_pool2d(x, 2), lambda: tapwise.max_pool2d(x, 2)),
        "avg_pool2d": (lambda: F.avg_pool2d(x, 3, 2, 1), lambda: tapwise.avg_pool2d(x, 3, 2, 1)),
        "softmax": (lambda: F.softmax(rows, -1), lambda: tapwise.softmax(rows, -1)),
        "log_softmax": (lambda: F.log_softmax(rows, -1), lambda: tapwise.log_softmax(rows, -1)),
        "im2col": (lambda: F.unfold(x, 3, padding=1), lambda: tapwise.im2col(x, 3, padding=1)),
        "col2im": (
            lambda: F.fold(columns, (14, 14), 3, padding=1), lambda: tapwise.col2im(columns, (14, 14), 3, padding=1),
        ),
        "reduce sum": (lambda: torch.sum(rows, -1), lambda: tapwise.reduce(rows, "sum", -1)),
    }  # fmt: skip


def host_us(call: Call) -> float:
    torch.cuda.synchronize()
    began = time.perf_counter()
    for _ in range(CALLS):
        call()
    ended = time.perf_counter()
    torch.cuda.synchronize()
    return (ended - began) / CALLS * 1e6


def main() -> None:
    parser = argparse.ArgumentParser(description=__doc__, formatter_class=argparse.RawDescriptionHelpFormatter)
    parser.add_argument("--json", type=Path)
    given = parser.parse_args()
    pairs, rows = cases(), []
    rounds: dict[str, list[tuple[float, float]]] = {name: [] for name in pairs}
    with torch.no_grad():
        for theirs, ours in pairs.values():
            for _ in range(20):
                theirs(), ours()
        for turn in range(ROUNDS):
            for name, (theirs, ours) in pairs.items():
                if turn % 2:
                    rounds[name].append((host_us(theirs), host_us(ours)))
                else:
                    after = host_us(ours)
                    rounds[name].append((host_us(theirs), after))
    for name, times in rounds.items():
        pytorch, tapwise_us = np.median(times, axis=0)
        low, ratio, high = np.percentile([ours / theirs for theirs, ours in times], [25, 50, 75])
        print(f"{name:34} PyTorch {pytorch:7.2f}  tapwise {tapwise_us:7.2f}  ratio {ratio:.2f} [{low:.2f} {high:.2f}]")
        values = {"pytorch_us": pytorch, "tapwise_us": tapwise_us, "ratio": ratio, "low": low, "high": high}
        rows.append({"call": name, **records.rounded({key: float(value) for key, value in values.items()})})
    if given.json:
        about = {
            "study": "host-calls",
            "device": gpu().name,
            "versions": records.versions(),
            "commit": records.commit(),
        }
        given.json.write_text(json.dumps([about, *rows], indent=1) + "\n")


if __name__ == "__main__":
    main()
