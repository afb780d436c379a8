"""batch_norm_stats and batch_norm_backward: against PyTorch's autograd, and what they make of hostile arrays."""

from __future__ import annotations

from dataclasses import replace
from fractions import Fraction
from typing import Any

import ml_dtypes
import numpy as np
import pytest

import emulated
import tapwise
from tapwise import dispatch, registry
from tapwise.activation import ACTIVATIONS
from tapwise.cuda.jit.device import H200
from tapwise.errors import InvalidProblem
from tapwise.ops.batch_norm import reference
from tapwise.ops.batch_norm.problem import BatchNormProblem

torch = pytest.importorskip("torch")
functional = torch.nn.functional
RNG = np.random.default_rng(0)
SHAPES = [(2, 5, 3, 4), (1, 37, 9, 11), (3, 64, 7, 7), (1, 1, 1, 2), (2, 130, 17, 13)]
ACTIVATED = [None, *ACTIVATIONS, "leaky_relu0.2"]


def drawn(n: int, c: int, h: int, w: int, kind: Any = np.float32) -> tuple[np.ndarray, np.ndarray, np.ndarray]:
    """dy, x, parameters."""
    dy, x = (RNG.standard_normal((n, c, h, w)).astype(kind) for _ in range(2))
    invstd = 1 + RNG.random(c)
    vectors = np.stack((RNG.standard_normal(c), invstd, RNG.standard_normal(c), RNG.standard_normal(c)))
    return dy, x, vectors.astype(np.float64 if kind is np.float64 else np.float32)


def activated(u: Any, activation: str | None) -> Any:
    if activation is None:
        return u
    if activation.startswith("leaky_relu"):
        return functional.leaky_relu(u, float(activation[10:] or 0.01))
    return functional.gelu(u, approximate="tanh") if activation == "gelu_tanh" else getattr(functional, activation)(u)


def wanted(dy: Any, x: Any, parameters: Any, activation: str | None = None) -> tuple[np.ndarray, np.ndarray]:
    """PyTorch's gradients, in float64: by x, and by bias and weight. mean and invstd are any numbers, not x's own, with
    the derivatives that x's own have."""
    dy, x = (torch.from_numpy(np.array(one, np.float64)) for one in (dy, x))
    mean, invstd, weight, bias = torch.from_numpy(np.array(parameters, np.float64))[:, :, None, None].unbind()
    weight, bias = weight.clone().requires_grad_(), bias.clone().requires_grad_()
    x.requires_grad_()
    count = x.numel() // x.shape[1]
    # (mean, 1 / invstd^2) and their differentials.
    by_mean = mean + (x - x.detach()).mean((0, 2, 3), keepdim=True)
    by_variance = invstd**-2 + (2 * (x.detach() - mean) * (x - x.detach())).sum((0, 2, 3), keepdim=True) / count
    activated((x - by_mean) * by_variance.rsqrt() * weight + bias, activation).backward(dy)
    return x.grad.numpy(), torch.stack((bias.grad.flatten(), weight.grad.flatten())).numpy()


def check(found: tuple[Any, Any], expected: tuple[np.ndarray, np.ndarray], rtol: float, atol: float) -> None:
    """(by x, sums)."""
    for one, other in zip(found, expected, strict=True):
        np.testing.assert_allclose(np.asarray(one, np.float64), other, rtol=rtol, atol=atol)


def moments(x: Any) -> np.ndarray:
    x = np.array(x, np.float64)
    return np.stack((x.mean(axis=(0, 2, 3)), x.var(axis=(0, 2, 3))))


def channels_last(x: np.ndarray) -> np.ndarray:
    return np.ascontiguousarray(x.transpose(0, 2, 3, 1)).transpose(0, 3, 1, 2)


@pytest.mark.parametrize("sizes", SHAPES)
def test_as_pytorch(sizes: tuple[int, ...]) -> None:
    dy, x, parameters = drawn(*sizes)
    for one, other in ((dy, x), (channels_last(dy), channels_last(x)), (dy, channels_last(x))):
        y = tapwise.batch_norm_stats(other)
        assert y.dtype == np.float32 and y.shape == (2, sizes[1])
        np.testing.assert_allclose(y, moments(x), rtol=1e-5, atol=1e-6)
        found = tapwise.batch_norm_backward(one, other, parameters, "silu")
        assert found[0].dtype == np.float32 and found[0].shape == sizes and found[1].shape == (2, sizes[1])
        check(found, wanted(dy, x, parameters, "silu"), 1e-4, 1e-3)


@pytest.mark.parametrize("activation", ACTIVATED)
def test_activations(activation: str | None) -> None:
    arrays = drawn(2, 12, 5, 5, np.float64)
    found = tapwise.batch_norm_backward(*arrays, activation)
    # PyTorch takes a sixth from float32.
    tolerance = 1e-7 if activation == "hardsigmoid" else 1e-12
    check(found, wanted(*arrays, activation), tolerance, tolerance * 10)


@pytest.mark.parametrize(("kind", "tolerance"), [(np.float64, 1e-12), (np.float16, 1e-4), (ml_dtypes.bfloat16, 1e-4)])
def test_dtypes(kind: Any, tolerance: float) -> None:
    dy, x, parameters = drawn(2, 20, 6, 5, kind)
    y = tapwise.batch_norm_stats(x)
    assert y.dtype == parameters.dtype
    np.testing.assert_allclose(y, moments(x), rtol=tolerance, atol=tolerance)
    dx, sums = tapwise.batch_norm_backward(dy, x, parameters)
    expected = wanted(dy, x, parameters)
    assert dx.dtype == kind and sums.dtype == parameters.dtype
    np.testing.assert_allclose(sums, expected[1], rtol=tolerance, atol=10 * tolerance)
    rounding = float(ml_dtypes.finfo(kind).eps)  # type: ignore[no-untyped-call]
    np.testing.assert_allclose(dx.astype(np.float64), expected[0], rtol=rounding, atol=tolerance)


def test_a_large_mean_leaves_the_variance() -> None:
    x = (1e4 + RNG.standard_normal((4, 3, 16, 16))).astype(np.float32)
    np.testing.assert_allclose(tapwise.batch_norm_stats(x), moments(x), rtol=1e-4)


def test_arrays_as_they_come() -> None:
    dy, x, parameters = drawn(2, 6, 8, 10)

    def same(dy: Any, x: Any, parameters: Any, **words: Any) -> None:
        found = tapwise.batch_norm_backward(dy, x, parameters, "relu", **words)
        check(found, wanted(dy, x, parameters, "relu"), 1e-5, 1e-4)
        np.testing.assert_allclose(tapwise.batch_norm_stats(x), moments(x), rtol=1e-5, atol=1e-6)

    wide = np.zeros((2, 6, 16, 20), np.float32)
    wide[:, :, ::2, ::-2] = x
    same(dy, wide[:, :, ::2, ::-2], parameters)
    same(dy.astype(">f4"), x.astype(">f4"), parameters[:, ::-1].copy()[:, ::-1])
    for one in (dy, x, parameters):
        one.flags.writeable = False
    same(dy, x, parameters)
    found = tapwise.batch_norm_backward(torch.tensor(dy), torch.tensor(x), torch.tensor(parameters), "relu")
    again = tapwise.batch_norm_backward(dy, x, parameters, "relu")
    for tensor, array in zip(found, again, strict=True):
        assert isinstance(tensor, torch.Tensor)
        np.testing.assert_array_equal(tensor, array)
    into = np.zeros_like(x)
    first, sums = tapwise.batch_norm_backward(dy, x, parameters, "relu", out=into)
    assert first is into
    np.testing.assert_array_equal(into, again[0])
    np.testing.assert_array_equal(sums, again[1])
    out = np.zeros((2, 6), np.float32)
    assert tapwise.batch_norm_stats(x, out=out) is out
    np.testing.assert_allclose(out, moments(x), rtol=1e-5, atol=1e-6)


def test_what_is_no_number_stays_in_its_channel() -> None:
    _, x, _ = drawn(2, 6, 4, 4)
    x[0, 2, 0, 0], x[1, 4, 1, 1] = np.inf, np.nan
    mean, variance = tapwise.batch_norm_stats(x)
    assert mean[2] == np.inf and np.isnan(variance[2]) and np.isnan(mean[4])
    rest = [0, 1, 3, 5]
    np.testing.assert_allclose(mean[rest], moments(x)[0, rest], rtol=1e-5, atol=1e-6)
    assert np.isfinite(variance[rest]).all()


def test_bad_arguments_are_named() -> None:
    dy, x, parameters = drawn(2, 6, 4, 4)
    for name, arrays in {
        "grad_output": (dy[0], x[0], parameters), "x has shape": (dy, x[:1], parameters),
        "parameters has shape": (dy, x, parameters[:3]), "x has dtype": (dy, x.astype(np.float16), parameters),
        "parameters has dtype": (dy, x, parameters.astype(np.float16)),
        "at least one element": (dy[:0], x[:0], parameters),
    }.items():  # fmt: skip
        with pytest.raises(InvalidProblem, match=name):
            tapwise.batch_norm_backward(*arrays)
    for words in ({"activation": "softplus"}, {"out": parameters[:2]}, {"algorithm": "cpu.none"}):
        with pytest.raises(InvalidProblem, match=next(iter(words))):
            tapwise.batch_norm_backward(dy, x, parameters, **words)
    for text in ("c4 h2", "c4 h2 w2 c5", "c0 h2 w2", "c4 h2 w2 relu", "c4 h2 w2 dgrad relu silu", "c4 h2 w2 wgrad"):
        with pytest.raises(InvalidProblem):
            BatchNormProblem.parse(f"batch_norm {text}")


def test_parts_cover_the_rows() -> None:
    for text in ("n64 c64 h56 w56 f16 nhwc", "n3 c2048 h7 w7 nhwc", "n2 c3 h300 w301", "c5 h1 w1 nhwc f64"):
        for problem in (registry.parse(f"batch_norm {text}{more}") for more in ("", " dgrad silu")):
            algorithm: Any = registry.get("cuda.block_reduction", problem.operator)
            configs = algorithm.configs(problem, H200)
            assert any(one.parts == 1 for one in configs)
            for config in configs:
                first, *rest = algorithm.launches(problem, config)
                gradient = problem.direction == "dgrad"
                assert len(rest) == (config.parts > 1) + gradient and first.grid[1] == config.parts
                assert not gradient or rest[-1].grid == first.grid
                rows = algorithm.rows(problem)
                # No part is without a row.
                assert (config.parts - 1) * -(-rows // config.parts) < rows
                assert algorithm.workspace_bytes(problem, config, H200) == (
                    2 * problem.c * config.parts * problem.accumulator_bytes * (config.parts > 1)  # type: ignore[attr-defined]
                )


EMULATED = [
    "n2 c24 h9 w11 f16 nhwc", "n2 c37 h3 w5 dgrad silu nhwc", "n3 c5 h4 w6 dgrad hardswish bf16", "n2 c3 h5 w5 f64",
    "n2 c264 h3 w2 dgrad gelu f16 nhwc", "n1 c6 h6 w4 dgrad f64 nhwc",
]  # fmt: skip


@pytest.mark.skipif(not emulated.available(), reason="no compiler to emulate with")
@pytest.mark.parametrize("text", EMULATED)
def test_kernels_by_emulation(text: str) -> None:
    problem = BatchNormProblem.parse(f"batch_norm {text}")
    inputs = problem.sample(np.random.default_rng(0))
    algorithm: Any = registry.get("cuda.block_reduction", problem.operator)
    configs = algorithm.configs(problem, H200)
    few = configs[0]
    gradient = problem.second is not None
    of_sums = problem.second_reference(inputs) if gradient else problem.reference(inputs)
    for number, config in enumerate((replace(few, parts=3), replace(configs[-1], parts=1))):
        sums, dx = np.full((2, problem.c), np.nan, problem.sums_dtype), np.full_like(inputs.x, np.nan)
        arrays = {"x": inputs.x, "w": inputs.w, "bias": inputs.bias, "workspace": np.full(1 << 15, 0xFF, np.uint8)}
        arrays |= {"y": dx, "second": sums} if gradient else {"y": sums}
        arrays = {
            name: np.ascontiguousarray(np.moveaxis(one, 1, -1)) if one.ndim == 4 and problem.layout == "nhwc" else one
            for name, one in arrays.items()
            if one is not None
        }
        for launch in algorithm.launches(problem, config):
            named = {name: arrays[launch.source_of(name)] for name in launch.names if launch.source_of(name) in arrays}
            emulated.run(launch, named, backwards=number % 2 == 1)
        dx = np.moveaxis(arrays["y"], -1, 1) if gradient and problem.layout == "nhwc" else arrays["y"]
        pairs = [(sums, of_sums), (dx, problem.reference(inputs))] if gradient else [(sums, of_sums)]
        for found, (expected, bound) in pairs:
            assert (np.abs(found.astype(np.float64) - expected) <= bound).all(), config


def test_what_a_gpu_computes_it_by() -> None:
    for text in ("batch_norm n64 c64 h56 w56 f16 nhwc", "batch_norm n64 c2048 h7 w7 dgrad relu f16 nhwc"):
        chosen = dispatch.choose(registry.parse(text), H200)
        assert chosen.algorithm == "cuda.block_reduction" and chosen.config.parts > 1  # type: ignore[attr-defined]


@pytest.mark.cuda
@pytest.mark.parametrize("dtype", ["float32", "float16", "bfloat16", "float64"])
@pytest.mark.parametrize("sizes", SHAPES)
def test_on_a_gpu(sizes: tuple[int, ...], dtype: str) -> None:
    kind = getattr(torch, dtype)
    dy, x, parameters = (torch.from_numpy(one).cuda() for one in drawn(*sizes))
    dy, x = dy.to(kind), x.to(kind)
    parameters = parameters.to(torch.float64 if kind is torch.float64 else torch.float32)
    wide_dy, wide_x, wide_parameters = (one.double().cpu().numpy() for one in (dy, x, parameters))
    expected, stats = wanted(wide_dy, wide_x, wide_parameters, "silu"), moments(wide_x)
    for order in (torch.contiguous_format, torch.channels_last):
        one, other = (image.contiguous(memory_format=order) for image in (dy, x))
        found = tapwise.batch_norm_stats(other), *tapwise.batch_norm_backward(one, other, parameters, "silu")
        again = tapwise.batch_norm_stats(other), *tapwise.batch_norm_backward(one, other, parameters, "silu")
        assert all(map(torch.equal, found, again))
        np.testing.assert_allclose(found[0].cpu(), stats, rtol=1e-4, atol=1e-5)
        np.testing.assert_allclose(found[1].double().cpu(), expected[0], rtol=1e-2, atol=1e-2)
        np.testing.assert_allclose(found[2].cpu(), expected[1], rtol=1e-3, atol=1e-2)


def test_the_reference_is_as_exact_as_doubles_are() -> None:
    """Of channels-last images too, whose elements NumPy would add one after the other."""
    x = np.random.default_rng(0).integers(-3, 4, (2, 127, 15, 5)).astype(np.float64).transpose(0, 3, 1, 2)
    rows = x.swapaxes(0, 1).reshape(5, -1)
    count, first, second = rows.shape[1], rows.sum(axis=1), (rows * rows).sum(axis=1)
    exact = [float(Fraction(int(s), count) - Fraction(int(f), count) ** 2) for f, s in zip(first, second, strict=True)]
    np.testing.assert_allclose(reference.moments(x)[1], exact, rtol=2e-15)
