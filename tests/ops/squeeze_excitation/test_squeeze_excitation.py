"""squeeze_excitation: against PyTorch's layers one by one, and what it makes of hostile arrays."""

from __future__ import annotations

from dataclasses import replace
from typing import Any

import ml_dtypes
import numpy as np
import pytest

import emulated
import tapwise
from tapwise import dispatch, registry
from tapwise.algorithm import Config as Anything
from tapwise.cuda.jit.device import H200
from tapwise.errors import InvalidProblem
from tapwise.ops.squeeze_excitation.cuda import Config, SqueezeExcitationCluster
from tapwise.ops.squeeze_excitation.problem import BETWEEN, GATES, SqueezeExcitationProblem

torch = pytest.importorskip("torch")
functional = torch.nn.functional
RNG = np.random.default_rng(0)
SHAPES = [(2, 5, 3, 4, 2), (1, 37, 9, 11, 5), (3, 64, 7, 7, 40), (1, 1, 1, 1, 1), (2, 130, 37, 33, 9)]


def drawn(n: int, c: int, h: int, w: int, m: int, kind: Any = np.float32) -> tuple[np.ndarray, np.ndarray, np.ndarray]:
    """x, weight, bias: gates that are neither 0 nor 1."""
    filters = RNG.standard_normal((2, m, c)) / np.sqrt([[[c]], [[m]]])
    return RNG.standard_normal((n, c, h, w)).astype(kind), filters.astype(kind), RNG.standard_normal(m + c).astype(kind)


def layers(x: Any, weight: Any, bias: Any, activation: str = "relu", gate: str = "sigmoid") -> np.ndarray:
    """PyTorch's layers in float64."""
    x, weight, bias = (torch.from_numpy(np.array(one, np.float64)) for one in (x, weight, bias))
    m = weight.shape[1]
    between = {"gelu_tanh": lambda v: functional.gelu(v, approximate="tanh")}.get(activation)
    means = functional.adaptive_avg_pool2d(x, 1)
    squeezed = functional.conv2d(means, weight[0][:, :, None, None], bias[:m])
    squeezed = (between or getattr(functional, activation))(squeezed)
    gates = functional.conv2d(squeezed, weight[1].T[:, :, None, None], bias[m:])
    found: np.ndarray = (x * getattr(functional, gate)(gates)).numpy()
    return found


@pytest.mark.parametrize("identifier", ["auto", "cpu.simd", "cpu.serial"])
@pytest.mark.parametrize("sizes", SHAPES)
def test_as_pytorchs_layers(sizes: tuple[int, ...], identifier: str) -> None:
    x, weight, bias = drawn(*sizes)
    for images in (x, np.ascontiguousarray(x.transpose(0, 2, 3, 1)).transpose(0, 3, 1, 2)):
        y = tapwise.squeeze_excitation(images, weight, bias, "silu", algorithm=identifier)
        np.testing.assert_allclose(y, layers(x, weight, bias, "silu"), rtol=2e-5, atol=2e-6)
        assert y.dtype == np.float32 and y.strides == images.strides


@pytest.mark.parametrize("gate", GATES)
@pytest.mark.parametrize("activation", BETWEEN)
def test_activations(activation: str, gate: str) -> None:
    x, weight, bias = drawn(2, 12, 5, 5, 7)
    for identifier in ("cpu.simd", "cpu.serial"):
        y = tapwise.squeeze_excitation(x, weight, bias, activation, gate, algorithm=identifier)
        np.testing.assert_allclose(y, layers(x, weight, bias, activation, gate), rtol=2e-5, atol=2e-6)


@pytest.mark.parametrize(("kind", "tolerance"), [(np.float64, 1e-13), (np.float16, 2e-3), (ml_dtypes.bfloat16, 2e-2)])
def test_dtypes(kind: Any, tolerance: float) -> None:
    arrays = drawn(2, 20, 6, 5, 3, kind)
    y = tapwise.squeeze_excitation(*arrays)
    assert y.dtype == kind
    np.testing.assert_allclose(y.astype(np.float64), layers(*arrays), rtol=tolerance, atol=tolerance)


def test_arrays_as_they_come() -> None:
    x, weight, bias = drawn(2, 6, 8, 10, 3)
    wanted = layers(x, weight, bias)

    def same(*arrays: Any, **words: Any) -> None:
        np.testing.assert_allclose(tapwise.squeeze_excitation(*arrays, **words), wanted, rtol=2e-5, atol=2e-6)

    wide = np.zeros((2, 6, 16, 20), np.float32)
    wide[:, :, ::2, ::-2] = x
    same(wide[:, :, ::2, ::-2], weight, bias)
    same(x, np.asfortranarray(weight), bias[::-1].copy()[::-1])
    same(x.astype(">f4"), weight.astype(">f4"), bias)
    for one in (x, weight, bias):
        one.flags.writeable = False
    same(x, weight, bias)
    same(*map(torch.tensor, (x, weight, bias)))
    out = np.zeros_like(x)
    same(x, weight, bias, out=out)
    np.testing.assert_allclose(out, wanted, rtol=2e-5, atol=2e-6)
    assert tapwise.squeeze_excitation(x[:0], weight, bias).shape == (0, 6, 8, 10)
    assert tapwise.squeeze_excitation(x[:, :, :0], weight, bias).shape == (2, 6, 0, 10)
    again = tapwise.squeeze_excitation(x, weight, bias)
    assert np.array_equal(again, tapwise.squeeze_excitation(x, weight, bias))


def test_what_is_no_number_stays_in_its_image() -> None:
    x, weight, bias = drawn(2, 6, 4, 4, 3)
    x[1, 2, 0, 0] = np.nan
    for identifier in ("cpu.simd", "cpu.serial"):
        y = tapwise.squeeze_excitation(x, weight, bias, "silu", algorithm=identifier)
        assert np.isnan(y[1]).all() and np.isfinite(y[0]).all()


def test_bad_arguments_are_named() -> None:
    x, weight, bias = drawn(2, 6, 4, 4, 3)
    for name, arrays in {
        "x": (x[0], weight, bias), "weight": (x, weight[0], bias), "weight has shape": (x, weight[:, :, :5], bias),
        "bias": (x, weight, bias[1:]), "weight has dtype": (x, weight.astype(np.float64), bias),
        "bias has dtype": (x, weight, bias.astype(np.float64)), "m=0": (x, weight[:, :0], bias[3:]),
    }.items():  # fmt: skip
        with pytest.raises(InvalidProblem, match=name):
            tapwise.squeeze_excitation(*arrays)
    for words in ({"activation": "sigmoid"}, {"gate": "relu"}, {"out": x}, {"algorithm": "cpu.none"}):
        with pytest.raises(InvalidProblem, match=next(iter(words))):
            tapwise.squeeze_excitation(x, weight, bias, **words)
    for text in (
        "c4 h2 w2",
        "c4 h2 w2 m1 c5",
        "c4 h2 w2 m0",
        "c4 h2 w2 m1 sigmoid hardsigmoid",
        "c4 h2 w2 m1 leaky_relu",
    ):
        with pytest.raises(InvalidProblem):
            SqueezeExcitationProblem.parse(f"squeeze_excitation {text}")


def test_slices_cover_an_image_once() -> None:
    algorithm = SqueezeExcitationCluster()
    for text in (
        "c1152 h7 w7 m48 f16 nhwc", "c32 h112 w112 m8 f16 nhwc", "c37 h9 w11 m5 nhwc", "c5 h3 w3 m2",
        "c3 h300 w301 m2 f64",
    ):  # fmt: skip
        problem = SqueezeExcitationProblem.parse(f"squeeze_excitation n3 {text}")
        for config in algorithm.configs(problem, H200):
            channels, pixels = algorithm.sizes(problem, config)
            width = algorithm.width(problem)
            assert config.blocks % config.slices == 0
            assert channels * config.slices >= problem.c and pixels * (config.blocks // config.slices) >= problem.pixels
            # Vectors belong to one block.
            assert (channels if problem.layout == "nhwc" else pixels) % width == 0
            launch = algorithm.launch(problem, config)
            assert launch.grid == (3 * config.blocks, 1, 1) and launch.shared_bytes <= H200.shared_bytes
            if config.kept:
                rows = config.threads // (channels // width)
                assert problem.layout == "nhwc" and config.kept * rows >= pixels
            if config.staged:
                assert channels % config.staged == problem.c % config.staged == 0


def test_what_a_gpu_computes_it_by() -> None:
    small = registry.parse("squeeze_excitation c240 h14 w14 m10 f16 nhwc")
    chosen = dispatch.choose(small, H200)
    assert chosen.algorithm == "cuda.cluster" and isinstance(chosen.config, Config) and chosen.config.blocks == 8
    old = replace(H200, architecture="sm_80", shared_bytes=160 << 10)
    assert {one.blocks for one in SqueezeExcitationCluster().configs(small, old)} == {1}
    wide = registry.parse("squeeze_excitation c3000000 h1 w1 m2 f16 nhwc")
    assert "shared memory" in str(SqueezeExcitationCluster().refusal(wide, H200))
    assert dispatch.choose(wide, H200).algorithm == "cuda.grid_stride"


EMULATED = [
    "n2 c24 h9 w11 m5 silu f16 nhwc", "n1 c160 h3 w9 m41 gelu bf16 nhwc", "n2 c37 h9 w12 m5 hardswish",
    "n1 c6 h25 w21 m3 hardsigmoid f64 nhwc",
]  # fmt: skip


@pytest.mark.skipif(not emulated.available(), reason="no compiler to emulate with")
@pytest.mark.parametrize("text", EMULATED)
def test_kernels_by_emulation(text: str) -> None:
    problem = SqueezeExcitationProblem.parse(f"squeeze_excitation {text}")
    inputs = problem.sample(np.random.default_rng(0))
    inputs = inputs._replace(w=(inputs.w.astype(np.float64) / 8).astype(problem.x_dtype))
    x = np.ascontiguousarray(np.moveaxis(inputs.x, 1, -1)) if problem.layout == "nhwc" else inputs.x
    wanted, bound = problem.reference(inputs)
    cluster, plain = (registry.get(f"cuda.{name}", problem.operator) for name in ("cluster", "grid_stride"))
    few = [one for one in cluster.configs(problem, H200) if one.threads == 256 and one.blocks in (8, 1)]
    last = [None] if problem.dtype == "f32" else []
    for number, config in enumerate([*few, replace(few[0], kept=0, staged=0), *last]):
        launches = plain.launches(problem, Anything(), H200) if config is None else [cluster.launch(problem, config)]  # type: ignore[attr-defined]
        y = np.full(x.shape, np.nan, problem.x_dtype)
        arrays = {"x": x, "w": inputs.w, "bias": inputs.bias, "y": y, "workspace": np.full(1 << 14, 0xFF, np.uint8)}
        for launch in launches:
            named = {name: arrays[launch.source_of(name)] for name in launch.names if launch.source_of(name) in arrays}
            emulated.run(launch, named, backwards=number % 2 == 1)
        found = np.moveaxis(y, -1, 1) if problem.layout == "nhwc" else y
        assert (np.abs(found.astype(np.float64) - wanted) <= bound).all(), config


@pytest.mark.cuda
@pytest.mark.parametrize("dtype", ["float32", "float16", "bfloat16", "float64"])
@pytest.mark.parametrize("sizes", SHAPES)
def test_on_a_gpu(sizes: tuple[int, ...], dtype: str) -> None:
    kind = getattr(torch, dtype)
    x, weight, bias = (torch.from_numpy(one).cuda().to(kind) for one in drawn(*sizes))
    wide = [one.double().cpu().numpy() for one in (x, weight, bias)]
    wanted = layers(wide[0], wide[1], wide[2], "silu")
    tolerance = {torch.float32: 2e-5, torch.float64: 1e-12, torch.float16: 2e-3, torch.bfloat16: 2e-2}[kind]
    for images in (x, x.contiguous(memory_format=torch.channels_last)):
        for identifier in ("auto", "cuda.grid_stride"):
            y = tapwise.squeeze_excitation(images, weight, bias, "silu", algorithm=identifier)
            assert y.stride() == images.stride() and y.dtype == kind
            np.testing.assert_allclose(y.double().cpu().numpy(), wanted, rtol=tolerance, atol=tolerance)
            assert torch.equal(y, tapwise.squeeze_excitation(images, weight, bias, "silu", algorithm=identifier))
