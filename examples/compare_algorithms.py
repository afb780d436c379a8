"""Every algorithm on one problem: why not, or how exact and how fast. `tapwise bench` does this with more care."""

import sys
from time import perf_counter

import numpy as np

import tapwise
from tapwise.cpu.device import host
from tapwise.dispatch import explain
from tapwise.verify import check

problem = tapwise.ConvProblem.parse(" ".join(sys.argv[1:]) or "c32 h28 w28 k48 r3 s3 pad1")
rng = np.random.default_rng(0)
x = rng.standard_normal(problem.x_shape, dtype=np.float32)
w = rng.standard_normal(problem.w_shape, dtype=np.float32)

print(problem)
for candidate in explain(problem, host()):
    if candidate.reason is not None:
        print(f"{candidate.algorithm:16} does not apply: {candidate.reason}")
        continue
    verdict = check(problem, candidate.algorithm)
    assert verdict.verified, verdict.message
    layer = tapwise.prepare(problem, w, algorithm=candidate.algorithm)
    layer(x)
    times = []
    for _ in range(10):
        start = perf_counter()
        layer(x)
        times.append(perf_counter() - start)
    microseconds = 1e6 * min(times)
    print(
        f"{candidate.algorithm:16} {microseconds:8.0f} us  {problem.flops / microseconds / 1e3:6.1f} GFLOP/s  "
        f"error {verdict.error:.1e} of {verdict.bound:.1e} allowed"
    )
