"""bias_backward and bias_activation_backward: against PyTorch's autograd, and what they make of hostile arrays."""

from __future__ import annotations

from dataclasses import replace
from typing import Any

import ml_dtypes
import numpy as np
import pytest

import emulated
import tapwise
from tapwise import registry
from tapwise.activation import ACTIVATIONS
from tapwise.cuda.jit.device import H200
from tapwise.errors import InvalidProblem
from tapwise.ops.bias_activation.problem import BiasActivationProblem
from tapwise.verify import compare

torch = pytest.importorskip("torch")

from tapwise.torch import derivatives  # noqa: E402
from tapwise.torch.activations import activated, result_says  # noqa: E402

RNG = np.random.default_rng(0)
SHAPES = [(2, 5, 3, 4), (1, 37, 9, 11), (3, 64, 7, 7), (1, 1, 1, 1), (2, 130, 17, 13)]
ACTIVATED = [*ACTIVATIONS, "leaky_relu0.2", "leaky_relu-0.5"]
OPS = torch.ops.tapwise


def drawn(shape: tuple[int, ...], activation: str | None, kind: Any = np.float64) -> tuple[Any, Any, Any, Any]:
    """dy, what the derivative is taken from, and PyTorch's gradients of these values in float64."""
    dy, z = (RNG.standard_normal(shape).astype(kind) for _ in range(2))
    u = torch.from_numpy((z * 3).astype(np.float64)).requires_grad_()
    y = activated(u, activation)
    y.backward(torch.from_numpy(dy.astype(np.float64)))
    given = y if result_says(activation) else u
    return dy, given.detach().numpy().astype(kind), u.grad.numpy(), u.grad.sum((0, 2, 3)).numpy()


def channels_last(x: np.ndarray) -> np.ndarray:
    return np.ascontiguousarray(x.transpose(0, 2, 3, 1)).transpose(0, 3, 1, 2)


@pytest.mark.parametrize("activation", ACTIVATED)
def test_as_pytorch(activation: str) -> None:
    for shape in SHAPES:
        dy, y, dz, db = drawn(shape, activation)
        for one, other in ((dy, y), (channels_last(dy), channels_last(y)), (dy, channels_last(y))):
            found, sums = tapwise.bias_activation_backward(one, other, activation)
            # PyTorch takes a sixth from float32.
            tolerance = 1e-7 if activation == "hardsigmoid" else 1e-12
            np.testing.assert_allclose(found, dz, rtol=tolerance, atol=tolerance)
            np.testing.assert_allclose(sums, db, rtol=tolerance, atol=tolerance * 100)
            np.testing.assert_allclose(tapwise.bias_backward(one), dy.sum((0, 2, 3)), rtol=1e-12, atol=1e-12)


@pytest.mark.parametrize(("kind", "tolerance"), [(np.float32, 1e-5), (np.float16, 3e-3), (ml_dtypes.bfloat16, 2e-2)])
def test_dtypes(kind: Any, tolerance: float) -> None:
    dy, y, _, _ = drawn((2, 20, 6, 5), "relu", kind)
    dz = np.where(y > 0, dy, 0).astype(np.float64)
    found, sums = tapwise.bias_activation_backward(dy, y, "relu")
    assert found.dtype == sums.dtype == dy.dtype
    np.testing.assert_array_equal(found.astype(np.float64), dz)
    np.testing.assert_allclose(sums.astype(np.float64), dz.sum((0, 2, 3)), rtol=tolerance, atol=tolerance)
    sums = tapwise.bias_backward(dy).astype(np.float64)
    np.testing.assert_allclose(sums, dy.astype(np.float64).sum((0, 2, 3)), rtol=tolerance, atol=tolerance)


def test_arrays_as_they_come() -> None:
    dy, y, dz, db = drawn((2, 6, 8, 10), "silu", np.float32)

    def same(dy: Any, y: Any, **words: Any) -> None:
        found, sums = tapwise.bias_activation_backward(dy, y, "silu", **words)
        np.testing.assert_allclose(found, dz, rtol=1e-4, atol=1e-5)
        np.testing.assert_allclose(sums, db, rtol=1e-4, atol=1e-4)

    wide = np.zeros((2, 6, 16, 20), np.float32)
    wide[:, :, ::2, ::-2] = y
    same(dy, wide[:, :, ::2, ::-2])
    same(dy.astype(">f4"), y.astype(">f4"))
    for one in (dy, y):
        one.flags.writeable = False
    same(dy, y)
    found, sums = tapwise.bias_activation_backward(torch.tensor(dy), torch.tensor(y), "silu")
    assert isinstance(found, torch.Tensor) and isinstance(sums, torch.Tensor)
    out = np.zeros((2, 6, 8, 10), np.float32)
    first, _ = tapwise.bias_activation_backward(dy, y, "silu", out=out)
    assert first is out
    np.testing.assert_allclose(out, dz, rtol=1e-4, atol=1e-5)
    sums = np.zeros(6, np.float32)
    assert tapwise.bias_backward(dy, out=sums) is sums


def test_nothing_adds_up_to_zero() -> None:
    for shape in ((0, 3, 4, 4), (2, 3, 0, 5)):
        dy = np.ones(shape, np.float16)
        np.testing.assert_array_equal(tapwise.bias_backward(dy), np.zeros(3, np.float16))
        dz, db = tapwise.bias_activation_backward(dy, dy, "relu")
        assert dz.shape == shape
        np.testing.assert_array_equal(db, np.zeros(3, np.float16))


def test_what_is_no_number() -> None:
    """As with PyTorch, what an activation let nothing through of gives 0, of an infinity too."""
    dy, y = np.ones((1, 3, 2, 2), np.float32), np.ones((1, 3, 2, 2), np.float32)
    dy[0, 0, 0, 0], y[0, 0, 0, 0], dy[0, 1, 1, 1], y[0, 2, 0, 1] = np.inf, 0, np.nan, np.nan
    dz, db = tapwise.bias_activation_backward(dy, y, "relu")
    wanted = torch.ops.aten.threshold_backward(torch.from_numpy(dy), torch.from_numpy(y), 0)
    np.testing.assert_array_equal(dz, wanted)
    np.testing.assert_array_equal(db, wanted.sum((0, 2, 3)))


def test_bad_arguments_are_named() -> None:
    dy, y, _, _ = drawn((2, 6, 4, 4), "relu", np.float32)
    for name, arrays in {
        "grad_output": (dy[0], y[0]), "y has shape": (dy, y[:1]), "y has dtype": (dy, y.astype(np.float16)),
        "at least one channel": (dy[:, :0], y[:, :0]),
    }.items():  # fmt: skip
        with pytest.raises(InvalidProblem, match=name):
            tapwise.bias_activation_backward(*arrays, "relu")
    for words in ({"activation": None}, {"out": dy}, {"out": y[:1]}, {"algorithm": "cpu.none"}):
        with pytest.raises(InvalidProblem, match=next(iter(words))):
            tapwise.bias_activation_backward(dy, y, **{"activation": "relu", **words})
    for text in ("c4 h2", "c4 h2 w2 c5 dgrad", "c0 h2 w2 dgrad", "c4 h2 w2 dgrad relu silu", "c4 h2 w2 wgrad"):
        with pytest.raises(InvalidProblem):
            BiasActivationProblem.parse(f"bias_activation {text}")


EMULATED = [
    "n2 c24 h9 w11 dgrad f16 nhwc", "n2 c37 h3 w5 dgrad silu nhwc", "n3 c5 h4 w6 dgrad hardswish bf16",
    "n2 c3 h5 w5 dgrad f64", "n2 c264 h3 w2 dgrad tanh f16 nhwc", "n1 c6 h6 w4 dgrad sigmoid f64 nhwc",
]  # fmt: skip


@pytest.mark.skipif(not emulated.available(), reason="no compiler to emulate with")
@pytest.mark.parametrize("text", EMULATED)
def test_kernels_by_emulation(text: str) -> None:
    problem = BiasActivationProblem.parse(f"bias_activation {text}")
    inputs = problem.sample(np.random.default_rng(0))
    algorithm: Any = registry.get("cuda.block_reduction", problem.operator)
    configs = algorithm.configs(problem, H200)
    last = problem.layout == "nhwc"

    def laid(one: np.ndarray) -> np.ndarray:
        return np.ascontiguousarray(np.moveaxis(one, 1, -1)) if last and one.ndim == 4 else one

    for number, config in enumerate((replace(configs[0], parts=3), replace(configs[-1], parts=1))):
        arrays = {"x": inputs.x, "y": np.full(problem.y_shape, np.nan, problem.y_dtype)}
        arrays |= {"workspace": np.full(1 << 15, 0xFF, np.uint8)}
        if problem.second is not None:
            arrays |= {"w": inputs.w, "second": np.full(problem.c, np.nan, problem.x_dtype)}
        arrays = {name: laid(one) for name, one in arrays.items()}
        for launch in algorithm.launches(problem, config):
            named = {name: arrays[launch.source_of(name)] for name in launch.names if launch.source_of(name) in arrays}
            emulated.run(launch, named, backwards=number % 2 == 1)
        y = np.moveaxis(arrays["y"], -1, 1) if last and arrays["y"].ndim == 4 else arrays["y"]
        verdict = compare(y, *problem.reference(inputs))
        assert verdict, f"{config}: {verdict.message}"
        if problem.second is not None:
            verdict = compare(arrays["second"], *problem.second_reference(inputs))
            assert verdict, f"{config}: {verdict.message}"


@pytest.mark.many
@pytest.mark.parametrize("activation", [None, *ACTIVATED])
def test_autograd_in_one_pass(activation: str | None, monkeypatch: pytest.MonkeyPatch) -> None:
    """What convolution's gradients are by these operators, as on a GPU."""
    calls = []

    def in_one_pass(dy: Any) -> bool:
        calls.append(dy)
        return not torch.is_grad_enabled()

    x, b = torch.randn(2, 4, 7, 6, dtype=torch.float64), torch.randn(5, dtype=torch.float64)
    for order in (torch.contiguous_format, torch.channels_last):
        for name, shape in (("conv2d", (5, 4, 3, 3)), ("conv_transpose2d", (4, 5, 3, 3))):
            found = []
            for patched in (False, True):
                with monkeypatch.context() as patch:
                    if patched:
                        patch.setattr(derivatives, "_in_one_pass", in_one_pass)
                    given = x.clone(memory_format=order).requires_grad_()
                    w = torch.ones(shape, dtype=torch.float64).mul_(0.1).requires_grad_()
                    bias = b.clone().requires_grad_()
                    y = getattr(OPS, name)(given, w, bias, activation=activation)
                    (y * y).sum().backward()
                found.append((given.grad, w.grad, bias.grad))
            for one, other in zip(*found, strict=True):
                torch.testing.assert_close(one, other, rtol=1e-6, atol=1e-6)
    assert len(calls) == 4


@pytest.mark.cuda
@pytest.mark.parametrize("dtype", ["float32", "float16", "bfloat16", "float64"])
@pytest.mark.parametrize("sizes", SHAPES)
def test_on_a_gpu(sizes: tuple[int, ...], dtype: str) -> None:
    kind = getattr(torch, dtype)
    tolerance = {"float64": 1e-12, "float32": 1e-4}.get(dtype, 2e-2)
    for activation in ("relu", "silu"):
        dy, y, _, _ = (torch.from_numpy(one).cuda() for one in drawn(sizes, activation))
        dy, y = dy.to(kind), y.to(kind)
        wide = torch.ops.aten.threshold_backward if activation == "relu" else torch.ops.aten.silu_backward
        dz = wide(dy.double(), y.double(), *([0] if activation == "relu" else []))
        for order in (torch.contiguous_format, torch.channels_last):
            one, other = (image.contiguous(memory_format=order) for image in (dy, y))
            found = *tapwise.bias_activation_backward(one, other, activation), tapwise.bias_backward(one)
            again = *tapwise.bias_activation_backward(one, other, activation), tapwise.bias_backward(one)
            assert all(map(torch.equal, found, again))
            expected = dz, dz.sum((0, 2, 3)), dy.double().sum((0, 2, 3))
            for mine, wanted in zip(found, expected, strict=True):
                torch.testing.assert_close(mine.double(), wanted, rtol=tolerance, atol=tolerance)
