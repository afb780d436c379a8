"""What a process pays once: `python -m tapwise.lab.study.first_call cuda|cpu METHOD SIDE` prints wall times (us).

start: importing the library and, on a GPU, making the context; first call: with its search or compilation (nothing of
ours in the cache); second call.
"""

from __future__ import annotations

import json
import os
import sys
import tempfile
import time
from collections.abc import Callable
from typing import Any

from tapwise.problem import Inputs


def main(kind: str, method: str, side: int) -> dict[str, float]:
    """The times of one method on the RGB report's picture of that side, stride 1."""
    from tapwise.lab.study.laboratory import filters, images, pictures

    problem = pictures(side, 1)
    x, w = images(problem), filters(problem)
    began = time.perf_counter()
    call, settle = (_cuda if kind == "cuda" else _cpu)(method, problem, x, w)
    times = {"start": time.perf_counter() - began}
    for name in ("first call", "second call"):
        began = time.perf_counter()
        call()
        settle()
        times[name] = time.perf_counter() - began
    return {name: seconds * 1e6 for name, seconds in times.items()}


def _cuda(method: str, problem: Any, x: Any, w: Any) -> tuple[Callable[[], object], Callable[[], object]]:
    import torch

    torch.backends.cudnn.benchmark = True
    torch.backends.cudnn.allow_tf32 = False
    image, weights = torch.from_numpy(x).cuda(), torch.from_numpy(w).cuda()
    torch.cuda.synchronize()
    if method == "cudnn":
        return lambda: torch.nn.functional.conv2d(image, weights), torch.cuda.synchronize
    import tapwise

    return lambda: tapwise.conv2d(image, weights, algorithm=method), torch.cuda.synchronize


def _cpu(method: str, problem: Any, x: Any, w: Any) -> tuple[Callable[[], object], Callable[[], object]]:
    import tapwise
    from tapwise.baselines import PEERS

    if method == "tapwise":
        return lambda: tapwise.conv2d(x, w), lambda: None
    if method == "onednn":
        import torch

        image, weights = torch.from_numpy(x), torch.from_numpy(w)
        return lambda: torch.nn.functional.conv2d(image, weights), lambda: None
    return PEERS[method].prepare(problem, Inputs(x, w), os.cpu_count() or 1).run, lambda: None


if __name__ == "__main__":
    from tapwise.settings import CACHE_DIR

    with tempfile.TemporaryDirectory() as folder:
        os.environ[CACHE_DIR] = folder
        print(json.dumps(main(sys.argv[1], sys.argv[2], int(sys.argv[3]))))
