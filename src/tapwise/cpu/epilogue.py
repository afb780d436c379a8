"""Activations and the functions they need, on vectors of any width, in the arithmetic dtype.

exp: x = n ln2 + r with |r| <= ln2 / 2 (Cody and Waite's two-part ln2), a Taylor polynomial for e^r - 1, and 2^n put into
the exponent in two halves so that subnormal results come out right. erf: Chebyshev series, exact to the last bits.
"""

from __future__ import annotations

from functools import cache
from math import erf, factorial, log, pi, sqrt
from typing import Any, Final

import numpy as np
from llvmlite import ir

from tapwise.cpu.simd import I32, INT, Kernel

# Upper part of ln2 with few enough bits that n * _LN2_HIGH is exact.
_LN2_HIGH: Final = {"f32": 0.693359375, "f64": 0.693147180369123816490}
_EXP_DEGREE: Final = {"f32": 7, "f64": 13}
_EXP_RANGE: Final = {"f32": (-104.0, 89.0), "f64": (-746.0, 710.0)}
_ERF_EDGE: Final = {"f32": 4.0, "f64": 6.0}
_MANTISSA: Final = {"f32": 23, "f64": 52}


def activate(k: Kernel, name: str | None, x: Any) -> Any:
    """The activation of that name (None: x itself)."""
    lanes = k.lanes_of(x)
    zero, one = k.constant(0.0, lanes), k.constant(1.0, lanes)
    if name is None:
        return x
    if name == "relu":
        return _at_least(k, x, zero)
    if name == "relu6":
        six = k.constant(6.0, lanes)
        capped = _at_least(k, x, zero)
        return k.b.select(k.b.fcmp_ordered(">", capped, six), six, capped)
    if name == "sigmoid":
        return sigmoid(k, x)
    if name == "silu":
        return k.mul(x, sigmoid(k, x))
    if name == "tanh":
        return tanh(k, x)
    if name == "gelu":
        half = k.mul(x, k.constant(0.5, lanes))
        return k.mul(half, k.add(one, error_function(k, k.mul(x, k.constant(1 / sqrt(2), lanes)))))
    raise ValueError(f"activation {name!r}")


def _at_least(k: Kernel, x: Any, least: Any) -> Any:
    """max(x, least) that keeps NaN."""
    return k.b.select(k.b.fcmp_ordered("<", x, least), least, x)


def _at_most(k: Kernel, x: Any, most: Any) -> Any:
    return k.b.select(k.b.fcmp_ordered(">", x, most), most, x)


def _expm1_parts(k: Kernel, x: Any) -> tuple[Any, Any, Any]:
    """(p, s1, s2) with e^x = (1 + p) * s1 * s2; s1 and s2 are powers of two."""
    lanes = k.lanes_of(x)
    low, high = _EXP_RANGE[k.dtype]
    x = _at_most(k, _at_least(k, x, k.constant(low, lanes)), k.constant(high, lanes))
    ln2 = _LN2_HIGH[k.dtype]
    rounded = k.intrinsic("llvm.rint", k.mul(x, k.constant(1 / log(2), lanes)))
    r = k.fma(rounded, k.constant(-ln2, lanes), x)
    r = k.fma(rounded, k.constant(_ln2_low(ln2), lanes), r)
    degree = _EXP_DEGREE[k.dtype]
    p = k.constant(1 / factorial(degree), lanes)
    for power in range(degree - 1, 0, -1):
        p = k.fma(p, r, k.constant(1 / factorial(power), lanes))
    p = k.mul(p, r)
    integer = I32 if k.dtype == "f32" else INT
    kind = integer if lanes == 1 else ir.VectorType(integer, lanes)
    n = k.b.fptosi(rounded, kind)

    def fill(value: int) -> Any:
        return ir.Constant(kind, value if lanes == 1 else [value] * lanes)

    half = k.b.ashr(n, fill(1))
    bits = _MANTISSA[k.dtype]
    bias = fill(127 if k.dtype == "f32" else 1023)
    powers = [
        k.b.bitcast(k.b.shl(k.b.add(part, bias), fill(bits)), k.vector(k.dtype, lanes))
        for part in (half, k.b.sub(n, half))
    ]
    return p, powers[0], powers[1]


def _ln2_low(high: float) -> float:
    """-(ln2 - high), to more digits than a double of ln2 holds."""
    return -(float(np.longdouble("0.69314718055994530941723212145817657") - np.longdouble(high)))


def exp(k: Kernel, x: Any) -> Any:
    """e^x; NaN stays NaN, overflow gives infinity, tiny results are subnormal."""
    p, s1, s2 = _expm1_parts(k, x)
    value = k.mul(k.fma(p, s1, s1), s2)
    return k.b.select(k.b.fcmp_unordered("uno", x, x), x, value)


def sigmoid(k: Kernel, x: Any) -> Any:
    """1 / (1 + e^-x)."""
    one = k.constant(1.0, k.lanes_of(x))
    return k.div(one, k.add(one, exp(k, k.b.fneg(x))))


def tanh(k: Kernel, x: Any) -> Any:
    """em / (em + 2) with em = e^2|x| - 1, so that small x keep their relative accuracy; the sign is put back."""
    lanes = k.lanes_of(x)
    size = _at_most(k, k.intrinsic("llvm.fabs", x), k.constant(20.0, lanes))
    p, s1, s2 = _expm1_parts(k, k.add(size, size))
    scale = k.mul(s1, s2)
    em = k.fma(p, scale, k.sub(scale, k.constant(1.0, lanes)))
    return k.intrinsic("llvm.copysign", k.div(em, k.add(em, k.constant(2.0, lanes))), x)


@cache
def _erf_series(dtype: str) -> list[float]:
    """Chebyshev coefficients of erf(z) / z in t = z^2, scaled to [-1, 1], over |z| <= edge."""
    edge = _ERF_EDGE[dtype]

    def function(scaled: Any) -> Any:
        z = [sqrt(value) for value in (np.asarray(scaled) + 1) * (edge * edge / 2)]
        return np.array([erf(v) / v if v > 1e-8 else 2 / sqrt(pi) for v in z])

    degree = {"f32": 24, "f64": 60}[dtype]
    return [float(c) for c in np.polynomial.chebyshev.chebinterpolate(function, degree)]


def error_function(k: Kernel, z: Any) -> Any:
    """erf(z): z * series(z^2) inside, +-1 outside; Clenshaw's recurrence."""
    lanes = k.lanes_of(z)
    edge = _ERF_EDGE[k.dtype]
    inside = k.b.select(
        k.b.fcmp_ordered(">", k.intrinsic("llvm.fabs", z), k.constant(edge, lanes)),
        k.intrinsic("llvm.copysign", k.constant(edge, lanes), z),
        z,
    )
    t = k.fma(k.mul(inside, inside), k.constant(2 / (edge * edge), lanes), k.constant(-1.0, lanes))
    twice = k.add(t, t)
    first, *rest = _erf_series(k.dtype)
    b1, b2 = k.constant(0.0, lanes), k.constant(0.0, lanes)
    for coefficient in reversed(rest):
        b1, b2 = k.sub(k.fma(twice, b1, k.constant(coefficient, lanes)), b2), b1
    return k.mul(inside, k.sub(k.fma(t, b1, k.constant(first, lanes)), b2))
