"""MLAS through onnxruntime: a session over a model of one Conv node.

The model is written here, field by field, in the protobuf encoding of ONNX's published schema (onnx.proto), so that
measuring does not need the onnx package.
"""

from __future__ import annotations

from collections.abc import Mapping, Sequence
from types import MappingProxyType

import numpy as np

from tapwise.baselines import Prepared
from tapwise.errors import PeerUnavailable
from tapwise.ops.conv.problem import ConvProblem
from tapwise.problem import Inputs
from tapwise.window_problem import WindowProblem

Attributes = Mapping[str, int | Sequence[int]]

# TensorProto.DataType
_TYPES = {"f32": 1, "f16": 10, "f64": 11}
_KINDS = "f32, f64 and f16"
# activation -> nodes from t to y.
_NODES: dict[str | None, list[tuple[str, list[str], str]]] = {
    None: [],
    "relu": [("Relu", ["t"], "y")],
    "sigmoid": [("Sigmoid", ["t"], "y")],
    "tanh": [("Tanh", ["t"], "y")],
    "silu": [("Sigmoid", ["t"], "s"), ("Mul", ["t", "s"], "y")],
    "hardswish": [("HardSwish", ["t"], "y")],
    "leaky_relu": [("LeakyRelu", ["t"], "y")],
}
# onnxruntime's threads spin for a while after a run.
_SPIN_S = 0.1


def _varint(value: int) -> bytes:
    out = bytearray()
    while True:
        value, low = value >> 7, value & 0x7F
        out.append(low | (0x80 if value else 0))
        if not value:
            return bytes(out)


def _number(field: int, value: int) -> bytes:
    return _varint(field << 3) + _varint(value)


def _bytes(field: int, value: bytes | str) -> bytes:
    data = value.encode() if isinstance(value, str) else value
    return _varint(field << 3 | 2) + _varint(len(data)) + data


def _attribute(name: str, values: Sequence[int] | int) -> bytes:
    """AttributeProto: name 1, i 3, ints 8, type 20 (INT 2, INTS 7)."""
    if isinstance(values, int):
        return _bytes(1, name) + _number(3, values) + _number(20, 2)
    return _bytes(1, name) + b"".join(_number(8, value) for value in values) + _number(20, 7)


def _node(kind: str, inputs: Sequence[str], output: str, attributes: Attributes = MappingProxyType({})) -> bytes:
    """NodeProto: input 1, output 2, op_type 4, attribute 5."""
    parts = [_bytes(1, name) for name in inputs] + [_bytes(2, output), _bytes(4, kind)]
    return b"".join(parts + [_bytes(5, _attribute(name, value)) for name, value in attributes.items()])


def _tensor(name: str, array: np.ndarray, kind: int) -> bytes:
    """TensorProto: dims 1, data_type 2, name 8, raw_data 9."""
    dims = b"".join(_number(1, size) for size in array.shape)
    return dims + _number(2, kind) + _bytes(8, name) + _bytes(9, np.ascontiguousarray(array).tobytes())


def _value(name: str, shape: Sequence[int], kind: int) -> bytes:
    """ValueInfoProto: name 1, type 2 (tensor_type 1: elem_type 1, shape 2: dim 1: dim_value 1)."""
    dims = b"".join(_bytes(1, _number(1, size)) for size in shape)
    return _bytes(1, name) + _bytes(2, _bytes(1, _number(1, kind) + _bytes(2, dims)))


def window_attributes(problem: WindowProblem) -> dict[str, int | Sequence[int]]:
    """What Conv and the pooling nodes have in common."""
    befores, afters = zip(*problem.padding, strict=True)
    return {"kernel_shape": problem.kernel, "strides": problem.stride, "pads": (*befores, *afters)}


def model(problem: ConvProblem, w: np.ndarray, bias: np.ndarray | None) -> bytes:
    """ModelProto of y = activation(Conv(x, w, bias) + residual): ir_version 1, graph 7, opset_import 8 (version 2)."""
    kind = _TYPES[problem.dtype]
    attributes = window_attributes(problem) | {"dilations": problem.dilation, "group": problem.groups}
    if problem.activation not in _NODES:
        raise PeerUnavailable(f"activation {problem.activation} is not built for onnxruntime here")
    last, operands = "t" if problem.activation else "y", ["x", "w", *(["b"] if bias is not None else [])]
    graph = _bytes(1, _node("Conv", operands, "c" if problem.residual else last, attributes))
    if problem.residual:
        graph += _bytes(1, _node("Add", ["c", "residual"], last))
    graph += b"".join(_bytes(1, _node(*step)) for step in _NODES[problem.activation])
    graph += _bytes(2, "tapwise") + _bytes(5, _tensor("w", w, kind))
    if bias is not None:
        graph += _bytes(5, _tensor("b", bias, kind))
    graph += _bytes(11, _value("x", problem.x_shape, kind))
    if problem.residual:
        graph += _bytes(11, _value("residual", problem.y_shape, kind))
    graph += _bytes(12, _value("y", problem.y_shape, kind))
    return _number(1, 8) + _bytes(7, graph) + _bytes(8, _number(2, 17))


def node_model(kind: str, attributes: Attributes, x_shape: Sequence[int], y_shape: Sequence[int], dtype: str) -> bytes:
    """ModelProto of y = kind(x). Raises PeerUnavailable."""
    if dtype not in _TYPES:
        raise PeerUnavailable(f"onnxruntime is measured in {_KINDS}, not {dtype}")
    number = _TYPES[dtype]
    graph = _bytes(1, _node(kind, ["x"], "y", attributes))
    graph += _bytes(2, "tapwise") + _bytes(11, _value("x", x_shape, number)) + _bytes(12, _value("y", y_shape, number))
    return _number(1, 8) + _bytes(7, graph) + _bytes(8, _number(2, 17))


def prepare(name: str, problem: ConvProblem, inputs: Inputs, threads: int) -> Prepared:
    """A session over one convolution."""
    x, w, bias, residual, _ = inputs
    if problem.direction != "fprop" or problem.dtype not in _TYPES:
        raise PeerUnavailable(f"onnxruntime is measured for fprop in {_KINDS}, not {problem.dtype}")
    feeds = {"x": x} | ({"residual": residual} if residual is not None else {})
    return session_of(model(problem, w, bias), feeds, threads)


def session_of(graph: bytes, arrays: dict[str, np.ndarray], threads: int) -> Prepared:
    """A session with all graph optimisations; input and output are bound, so that no copy is timed."""
    import onnxruntime

    options = onnxruntime.SessionOptions()
    options.intra_op_num_threads = threads
    options.inter_op_num_threads = 1
    options.log_severity_level = 4
    try:
        session = onnxruntime.InferenceSession(graph, options, providers=["CPUExecutionProvider"])
        binding = session.io_binding()
        for key, array in arrays.items():
            binding.bind_ortvalue_input(key, onnxruntime.OrtValue.ortvalue_from_numpy(np.ascontiguousarray(array)))
        binding.bind_output("y", "cpu")
        session.run_with_iobinding(binding)
    except Exception as error:  # onnxruntime's own exceptions share no public base
        raise PeerUnavailable(f"onnxruntime: {str(error).splitlines()[0]}") from None

    def run() -> None:
        session.run_with_iobinding(binding)

    def result() -> np.ndarray:
        run()
        return np.asarray(binding.copy_outputs_to_cpu()[0])

    return Prepared(run, result, _SPIN_S)
