"""Activations and the functions they need, on vectors of any width, in the arithmetic dtype.

exp: x = n ln2 + r with |r| <= ln2 / 2 (Cody and Waite's two-part ln2), a Taylor polynomial for e^r - 1, and 2^n put
into the exponent in two halves so that subnormal results come out right. erf: of float32 a rational function; else a
Taylor series and, for its tail, a Chebyshev series of e^(z^2) erfc(z).
"""

from __future__ import annotations

from collections.abc import Sequence
from functools import cache
from math import erfc, factorial, log, pi, sqrt
from math import exp as exp_of
from typing import Any, Final

import numpy as np
from llvmlite import ir

from tapwise.activation import named_activation
from tapwise.cpu.simd import Kernel

# Upper part of ln2 with few enough bits that n * _LN2_HIGH is exact.
_LN2_HIGH: Final = {"f32": 0.693359375, "f64": 0.693147180369123816490}
_EXP_DEGREE: Final = {"f32": 7, "f64": 13}
_EXP_RANGE: Final = {"f32": (-104.0, 89.0), "f64": (-746.0, 710.0)}
_EXP_LIFTED_DEGREE: Final = {"f32": 6, "f64": 12}
# The factor of exp_lifted, as a power of two: enough for the smallest subnormal number of either dtype.
LIFT: Final = 64
_ERF_EDGE: Final = 1.0
_ERF_END: Final = 6.0
_ERF_SHIFT: Final = -(_ERF_END + _ERF_EDGE) / (_ERF_END - _ERF_EDGE)
_ERF_TERMS: Final = 19
# erf(z) / z of float32 as P(z^2) / Q(z^2), fitted up to where erf rounds to 1, with a relative error of 2^-25.
_ERF_ONE: Final = 3.92
_ERF_P: Final = (1.12837916, 0.188708779, 0.0525301227, 0.00369500685, 0.000283679527, 2.06780133e-06)
_ERF_Q: Final = (1.0, 0.500571806, 0.113412894, 0.0148267741, 0.00114617649, 3.82131728e-05)
# Of the dtypes: bits of the mantissa, bias of the exponent, and the integer of the same size.
_MANTISSA: Final = {"f32": 23, "f64": 52}
_BIAS: Final = {"f32": 127, "f64": 1023}
_INTEGER: Final = {"f32": "i32", "f64": "i64"}


# Of a chain of steps, each of which waits for the one before, a processor's queues hold too little of one vector's: so
# many take each step together (measured: 15 cycles a vector of silu in place of 20). gelu and tanh gain nothing.
_TOGETHER: Final = 4
_CHAINS: Final = frozenset({"sigmoid", "silu", "gelu_tanh"})


def together(activation: str | None) -> int:
    """Vectors that are best activated at once."""
    return _TOGETHER if named_activation(activation)[0] in _CHAINS else 1


def activate_all(k: Kernel, activation: str | None, vectors: Sequence[Any]) -> list[Any]:
    """The activation of vectors of the same length, step by step of all of them."""
    count, lanes = len(vectors), k.lanes_of(vectors[0])
    if count == 1 or lanes == 1:
        return [activate(k, activation, one) for one in vectors]
    joined = list(vectors)
    while len(joined) > 1:
        pairs = zip(joined[::2], joined[1::2], strict=True)
        joined = [k.shuffle(a, b, range(2 * k.lanes_of(a))) for a, b in pairs]
    done = activate(k, activation, joined[0])
    return [k.shuffle(done, done, range(first, first + lanes)) for first in range(0, count * lanes, lanes)]


def activate(k: Kernel, activation: str | None, x: Any) -> Any:
    """The activation of that word (None: x itself)."""
    name, slope = named_activation(activation)
    lanes = k.lanes_of(x)
    zero, one = k.constant(0.0, lanes), k.constant(1.0, lanes)
    if name is None:
        return x
    if name == "relu":
        return _at_least(k, x, zero)
    if name == "relu6":
        return _at_most(k, _at_least(k, x, zero), k.constant(6.0, lanes))
    if name == "leaky_relu":
        return k.b.select(k.b.fcmp_ordered(">", x, zero), x, k.mul(x, k.constant(slope, lanes)))
    if name in ("hardsigmoid", "hardswish"):
        raised = k.add(x, k.constant(3.0, lanes))
        hard = k.mul(_at_most(k, _at_least(k, raised, zero), k.constant(6.0, lanes)), k.constant(1 / 6, lanes))
        return hard if name == "hardsigmoid" else k.mul(x, hard)
    if name == "sigmoid":
        return sigmoid(k, x)
    if name == "silu":
        return sigmoid(k, x, x)
    if name == "tanh":
        return tanh(k, x)
    if name == "gelu":
        half = k.mul(x, k.constant(0.5, lanes))
        return k.mul(half, k.add(one, error_function(k, k.mul(x, k.constant(1 / sqrt(2), lanes)))))
    if name == "gelu_tanh":
        # 1 + tanh(t) is twice the sigmoid of 2 t.
        twice = 2 * sqrt(2 / pi)
        factor = k.fma(k.mul(x, x), k.constant(0.044715 * twice, lanes), k.constant(twice, lanes))
        return sigmoid(k, k.mul(x, factor), x)
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
    n = k.b.fptosi(rounded, k.vector(_INTEGER[k.dtype], lanes))
    half = k.b.ashr(n, _fill(n.type, 1))
    bits, bias = _fill(n.type, _MANTISSA[k.dtype]), _fill(n.type, _BIAS[k.dtype])
    s1, s2 = (k.b.bitcast(k.b.shl(k.b.add(part, bias), bits), x.type) for part in (half, k.b.sub(n, half)))
    return p, s1, s2


def _fill(kind: Any, value: int) -> Any:
    """An integer in all lanes."""
    return ir.Constant(kind, [value] * kind.count if isinstance(kind, ir.VectorType) else value)


def _ln2_low(high: float) -> float:
    """-(ln2 - high), to more digits than a double of ln2 holds."""
    return -(float(np.longdouble("0.69314718055994530941723212145817657") - np.longdouble(high)))


def exp(k: Kernel, x: Any) -> Any:
    """e^x; NaN stays NaN, overflow gives infinity, tiny results are subnormal."""
    p, s1, s2 = _expm1_parts(k, x)
    value = k.mul(k.fma(p, s1, s1), s2)
    return k.b.select(k.b.fcmp_unordered("uno", x, x), x, value)


def exp_lifted(k: Kernel, x: Any) -> Any:
    """e^x * 2^LIFT for x <= 0, as a shifted exponent is; NaN stays NaN.

    Lifted, no result is subnormal, so one power of two is enough, and it comes out of the sum that rounds x / ln2: its
    last bits are the exponent. Sums of such terms cancel the factor, and their quotients underflow as they should.
    """
    lanes = k.lanes_of(x)
    bits = _MANTISSA[k.dtype]

    def kept(value: float) -> Any:
        # A step's constants are read behind the step before. So the machine code keeps this order: vectors that are
        # computed together take each step together, and no vector's whole chain fills the scheduler's queue.
        k.fence()
        return k.kept(value, lanes)

    # Added to a small number, its ulp is 1: the sum is rounded to a whole number.
    magic = k.constant(1.5 * 2.0**bits + _BIAS[k.dtype] + LIFT, lanes)
    x = _at_least(k, x, kept(_EXP_RANGE[k.dtype][0]))
    shifted = k.fma(x, kept(1 / log(2)), magic)
    rounded = k.sub(shifted, magic)
    ln2 = _LN2_HIGH[k.dtype]
    r = k.fma(rounded, kept(-ln2), x)
    r = k.fma(rounded, kept(_ln2_low(ln2)), r)
    *rest, last = _exp_series(_EXP_LIFTED_DEGREE[k.dtype])
    p = kept(last)
    for coefficient in reversed(rest):
        p = k.fma(p, r, kept(coefficient))
    one = k.constant(1.0, lanes)
    p = k.fma(k.fma(p, r, one), r, one)
    kind = k.vector(_INTEGER[k.dtype], lanes)
    return k.mul(p, k.b.bitcast(k.b.shl(k.b.bitcast(shifted, kind), _fill(kind, bits)), x.type))


@cache
def _exp_series(degree: int) -> list[float]:
    """Coefficients of e^r for |r| <= ln2 / 2, from the second power on; the first two are 1.

    (e^r - 1 - r) / r^2 interpolated at Chebyshev points.
    """
    edge = log(2) / 2

    def rest(t: Any) -> Any:
        r = np.asarray(t * edge, np.longdouble)
        return np.asarray(sum(r**power / factorial(power + 2) for power in range(24)), np.float64)

    chebyshev = np.polynomial.chebyshev.chebinterpolate(rest, degree - 2)
    return [float(c) / edge**power for power, c in enumerate(np.polynomial.chebyshev.cheb2poly(chebyshev))]


def sigmoid(k: Kernel, x: Any, factor: Any = None) -> Any:
    """factor / (1 + e^-x), 1 where no factor is given; by e^-|x|, which does not overflow where the result is tiny."""
    lanes = k.lanes_of(x)
    zero, one = k.constant(0.0, lanes), k.constant(1.0, lanes)
    power = k.mul(exp_lifted(k, k.b.fneg(k.intrinsic("llvm.fabs", x))), k.constant(2.0**-LIFT, lanes))
    below, above = (power, one) if factor is None else (k.mul(factor, power), factor)
    return k.div(k.b.select(k.b.fcmp_ordered("<", x, zero), below, above), k.add(one, power))


def tanh(k: Kernel, x: Any) -> Any:
    """em / (em + 2) with em = e^2|x| - 1, so that small x keep their relative accuracy; the sign is put back."""
    lanes = k.lanes_of(x)
    size = _at_most(k, k.intrinsic("llvm.fabs", x), k.constant(20.0, lanes))
    p, s1, s2 = _expm1_parts(k, k.add(size, size))
    scale = k.mul(s1, s2)
    em = k.fma(p, scale, k.sub(scale, k.constant(1.0, lanes)))
    return k.intrinsic("llvm.copysign", k.div(em, k.add(em, k.constant(2.0, lanes))), x)


@cache
def _tail_series() -> list[float]:
    """Chebyshev coefficients, on [-1, 1], of e^(z^2) erfc(z) over _ERF_EDGE <= z <= _ERF_END."""

    def scaled_tail(t: Any) -> Any:
        points = _ERF_EDGE + (np.asarray(t) + 1) * ((_ERF_END - _ERF_EDGE) / 2)
        return np.array([erfc(z) * exp_of(z * z) for z in points])

    return [float(c) for c in np.polynomial.chebyshev.chebinterpolate(scaled_tail, 26)]


def _polynomial(k: Kernel, coefficients: Sequence[float], x: Any) -> Any:
    """coefficients[0] + coefficients[1] * x + ..."""
    *rest, last = coefficients
    value = k.constant(last, k.lanes_of(x))
    for coefficient in reversed(rest):
        value = k.fma(value, x, k.constant(coefficient, k.lanes_of(x)))
    return value


def _clenshaw(k: Kernel, coefficients: list[float], t: Any) -> Any:
    """A Chebyshev series at t, |t| <= 1."""
    lanes = k.lanes_of(t)
    twice = k.add(t, t)
    first, *rest = coefficients
    b1, b2 = k.constant(0.0, lanes), k.constant(0.0, lanes)
    for coefficient in reversed(rest):
        b1, b2 = k.sub(k.fma(twice, b1, k.constant(coefficient, lanes)), b2), b1
    return k.sub(k.fma(t, b1, k.constant(first, lanes)), b2)


def error_function(k: Kernel, z: Any) -> Any:
    """erf(z): of float32 a rational function; else the Taylor series up to |z| = 1, then 1 - e^(-z^2) * series(|z|)."""
    lanes = k.lanes_of(z)
    if k.dtype == "f32":
        one = k.constant(_ERF_ONE, lanes)
        z = _at_most(k, _at_least(k, z, k.b.fneg(one)), one)
        above, below = (_polynomial(k, series, k.mul(z, z)) for series in (_ERF_P, _ERF_Q))
        return k.div(k.mul(z, above), below)
    edge, end = k.constant(_ERF_EDGE, lanes), k.constant(_ERF_END, lanes)
    size = k.intrinsic("llvm.fabs", z)
    inside = _at_most(k, size, edge)
    square = k.mul(inside, inside)
    terms = [(-1) ** n * 2 / sqrt(pi) / (factorial(n) * (2 * n + 1)) for n in range(_ERF_TERMS)]
    value = k.mul(inside, _polynomial(k, terms, square))
    outside = _at_least(k, _at_most(k, size, end), edge)
    t = k.fma(outside, k.constant(2 / (_ERF_END - _ERF_EDGE), lanes), k.constant(_ERF_SHIFT, lanes))
    tail = k.mul(exp(k, k.b.fneg(k.mul(outside, outside))), _clenshaw(k, _tail_series(), t))
    far = k.sub(k.constant(1.0, lanes), tail)
    value = k.b.select(k.b.fcmp_ordered(">", size, edge), far, value)
    return k.intrinsic("llvm.copysign", value, z)
