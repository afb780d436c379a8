"""Peers compute what the float64 reference computes: a wrong model would be an unfair race."""

from __future__ import annotations

import numpy as np
import onnx
import pytest

from tapwise import arrays, registry
from tapwise.baselines import PEERS, mlas, select
from tapwise.errors import InvalidProblem, PeerUnavailable
from tapwise.ops.conv.problem import ConvProblem
from tapwise.ops.reduce.problem import REDUCTIONS, ReduceProblem
from tapwise.ops.softmax.problem import SoftmaxProblem
from tapwise.ops.squeeze_excitation.problem import SqueezeExcitationProblem
from tapwise.problem import Inputs

PROBLEMS = [
    "c5 h9 w11 k7 r3 s3 pad1",
    "n3 c6 h10 w7 k4 r3 s2 stride2x1 pad0:1x2:0 dilation1x2 groups2",
    "c4 h8 w8 k4 r5 s5 pad2 groups4 bias relu residual",
    "c3 h6 w6 k2 r1 s1 bias silu",
    "c3 h6 w6 k2 r1 s1 bias hardswish",
    "c3 h6 w6 k2 r1 s1 leaky_relu",
    "c3 h6 w6 k2 r3 s3 residual tanh nhwc",
]


@pytest.mark.parametrize("text", PROBLEMS)
@pytest.mark.parametrize(
    "name", [name for name, peer in PEERS.items() if "conv" in peer.operators and peer.device == "cpu"]
)
def test_peer_computes_the_problem(name: str, text: str) -> None:
    problem = ConvProblem.parse(text)
    rng = np.random.default_rng(1)

    def random(*shape: int) -> np.ndarray:
        return rng.standard_normal(shape, dtype=np.float32)

    x = arrays.dense(random(*problem.x_shape), problem.layout)
    w = random(*problem.w_shape)
    bias = random(problem.k) if problem.bias else None
    residual = random(*problem.y_shape) if problem.residual else None
    prepared = PEERS[name].prepare(problem, Inputs(x, w, bias, residual), 2)
    prepared.run()
    expected = problem.convolve(x, w, bias, residual)
    np.testing.assert_allclose(prepared.result(), expected, rtol=1e-4, atol=1e-4)


def test_model_is_what_onnx_reads() -> None:
    problem = ConvProblem.parse("n2 c4 h9 w8 k6 r3 s2 stride2x1 pad1:0x2:1 groups2 bias relu")
    w = np.arange(np.prod(problem.w_shape), dtype=np.float32).reshape(problem.w_shape)
    model = onnx.load_model_from_string(mlas.model(problem, w, np.zeros(6, np.float32)))
    onnx.checker.check_model(model, full_check=True)
    attributes = {a.name: onnx.helper.get_attribute_value(a) for a in model.graph.node[0].attribute}
    assert attributes["pads"] == [1, 2, 0, 1] and attributes["strides"] == [2, 1] and attributes["group"] == 2
    assert np.array_equal(onnx.numpy_helper.to_array(model.graph.initializer[0]), w)


def test_what_a_peer_does_not_take() -> None:
    for name, text, why in (
        ("mlas", "c3 h6 w6 k2 r1 s1 wgrad", "fprop"),
        ("onednn", "c3 h6 w6 k2 r1 s1 dgrad relu", "gradients"),
        ("onednn", "c3 d6 h6 w6 k2 t1 r1 s1", "two spatial axes"),
        ("onednn-cl", "c3 h6 w6 k2 r2 s2 pad1:0 wgrad", "equal padding"),
    ):
        problem = ConvProblem.parse(text)
        with pytest.raises(PeerUnavailable, match=why):
            PEERS[name].prepare(problem, problem.sample(np.random.default_rng(0)), 1)


@pytest.mark.parametrize("name", ["onednn", "onednn-cl"])
@pytest.mark.parametrize("direction", ["dgrad", "wgrad"])
def test_gradients(name: str, direction: str) -> None:
    problem = ConvProblem.parse(f"n2 c4 h9 w8 k6 r3 s2 stride2x1 pad1x0 groups2 {direction}")
    inputs = problem.sample(np.random.default_rng(0))
    prepared = PEERS[name].prepare(problem, inputs, 2)
    np.testing.assert_allclose(prepared.result(), problem.convolve(inputs.x, inputs.w), rtol=1e-4, atol=1e-4)


def test_select() -> None:
    assert select("none") == []
    assert [peer.name for peer in select("mlas,onednn")] == ["mlas", "onednn"]
    assert {peer.device for peer in select("auto")} == {"cpu"}
    assert [peer.name for peer in select("auto", "cuda")] == ["cudnn", "cudnn-cl", "aten", "torch-cuda"]
    with pytest.raises(InvalidProblem, match="winograd"):
        select("winograd")


@pytest.mark.parametrize("text", ["softmax 7x33", "log_softmax 5x6x7 axis1", "softmax 100 f64"])
@pytest.mark.parametrize("name", ["torch", "onnxruntime"])
def test_plain_peer_computes_softmax(name: str, text: str) -> None:
    if not PEERS[name].installed:
        pytest.skip(f"{name} is not installed")
    problem = SoftmaxProblem.parse(text)
    x = np.random.default_rng(0).standard_normal(problem.shape).astype(problem.x_dtype)
    wanted, _ = problem.reference(Inputs(x))
    np.testing.assert_allclose(PEERS[name].prepare(problem, Inputs(x), 2).result(), wanted, rtol=1e-5, atol=1e-6)


@pytest.mark.parametrize("words", ["silu nhwc", "gelu_tanh hardsigmoid f64"])
def test_plain_peer_computes_gates(words: str) -> None:
    if not PEERS["torch"].installed:
        pytest.skip("torch is not installed")
    problem = SqueezeExcitationProblem.parse(f"squeeze_excitation n2 c7 h5 w6 m3 {words}")
    inputs = problem.sample(np.random.default_rng(0))
    wanted, _ = problem.reference(inputs)
    np.testing.assert_allclose(PEERS["torch"].prepare(problem, inputs, 2).result(), wanted, rtol=1e-5, atol=1e-6)


@pytest.mark.parametrize(
    "text",
    ["maxpool c3 h9 w8 r3 s2 pad1 stride1 nhwc", "avgpool c3 h9 w8 r2 s2 ceil divisor5", "log_softmax 5x7 axis0"],
)
def test_plain_peer_computes_gradients(text: str) -> None:
    if not PEERS["torch"].installed:
        pytest.skip("torch is not installed")
    problem = registry.parse(f"{text} dgrad")
    inputs = problem.sample(np.random.default_rng(0))
    wanted, _ = problem.reference(inputs)
    np.testing.assert_allclose(PEERS["torch"].prepare(problem, inputs, 2).result(), wanted, rtol=1e-5, atol=1e-6)


@pytest.mark.many
@pytest.mark.parametrize("axis", ["", " axis1", " axis0,2", " axis2 keepdims"])
@pytest.mark.parametrize("op", REDUCTIONS)
@pytest.mark.parametrize("name", ["torch", "numpy"])
def test_plain_peer_reduces(name: str, op: str, axis: str) -> None:
    if not PEERS[name].installed:
        pytest.skip(f"{name} is not installed")
    if op in ("argmax", "argmin") and "," in axis:
        pytest.skip("positions go along one axis or all")
    problem = ReduceProblem.parse(f"reduce {op} 5x6x7{axis}")
    x = np.random.default_rng(0).standard_normal(problem.shape, dtype=np.float32)
    wanted, _ = problem.reference(Inputs(x))
    try:
        prepared = PEERS[name].prepare(problem, Inputs(x), 2)
    except PeerUnavailable as error:
        assert op in ("prod", "logsumexp"), error
        return
    np.testing.assert_allclose(prepared.result(), wanted, rtol=1e-5, atol=1e-6)
