"""The vector layer: kernels are written as staged Python that emits LLVM IR.

Python code runs once, when a kernel is generated: a Python loop unrolls, `k.loop` becomes a loop of the kernel, an
`Int` that holds a Python number is a constant folded away. Vectors have the width of the target, so one generator
serves AVX-512, AVX2 and NEON; whatever a target lacks (a masked edge, say) is expressed in what all have.

    with k.function("axpy", n=INT, a=PTR, x=PTR, y=PTR) as (n, a, x, y):
        scale = k.broadcast(a)
        with k.loop(0, n, k.lanes) as i:
            k.store(y + i, k.fma(scale, k.load(x + i), k.load(y + i)))
"""

from tapwise.cpu.simd.kernel import Kernel
from tapwise.cpu.simd.target import Target, runnable, target
from tapwise.cpu.simd.values import BYTES, I1, I32, INT, INTEGERS, PTR, TYPES, Int, Ptr, Var

__all__ = [
    "BYTES",
    "I1",
    "I32",
    "INT",
    "INTEGERS",
    "PTR",
    "TYPES",
    "Int",
    "Kernel",
    "Ptr",
    "Target",
    "Var",
    "runnable",
    "target",
]
