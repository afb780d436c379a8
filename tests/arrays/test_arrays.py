"""Arrays of any library in, the same kind out; memory orders; scratch memory."""

from __future__ import annotations

from threading import Barrier, Thread
from typing import Any

import numpy as np
import pytest
import torch
import torch.autograd.forward_ad as forward_ad
from torch._subclasses import FakeTensorMode
from torch.fx.experimental.proxy_tensor import make_fx

import tapwise
from tapwise import arrays
from tapwise.arrays import device
from tapwise.arrays.workspaces import aligned, pool, workspace
from tapwise.errors import InvalidProblem
from tapwise.problem import DTYPES


class Foreign:
    """An array that only speaks DLPack."""

    def __init__(self, array: np.ndarray) -> None:
        self.array = array

    def __dlpack__(self, **options: Any) -> Any:
        return self.array.__dlpack__(**options)

    def __dlpack_device__(self) -> tuple[int, int]:
        return self.array.__dlpack_device__()


class Standard(Foreign):
    """An array of the array API standard, as far as it takes."""

    def __array_namespace__(self, api_version: str | None = None) -> Any:
        return Namespace


class Namespace:
    @staticmethod
    def from_dlpack(value: Any) -> Standard:
        return Standard(np.from_dlpack(value))


@pytest.mark.parametrize("layout", ["nchw", "nhwc"])
@pytest.mark.parametrize("dtype", ["f32", "bf16"])
def test_new_arrays_begin_with_a_cache_line(layout: str, dtype: str) -> None:
    """Those that are not small; dense, of their own memory, and nobody else's."""
    kept = [arrays.empty((2, 3, 81, 93 + i), DTYPES[dtype], layout) for i in range(8)]
    for i, one in enumerate(kept):
        assert (one.shape, one.dtype, arrays.is_dense(one, layout)) == ((2, 3, 81, 93 + i), DTYPES[dtype], True)
        assert one.ctypes.data % 64 == 0 and one.flags.writeable
        one[...] = i
    assert all((one == i).all() for i, one in enumerate(kept))
    x, w = np.ones((1, 8, 40, 40), np.float32), np.ones((40, 8, 3, 3), np.float32)
    operator = tapwise.prepare("c8 h40 w40 k40 r3 s3", w)
    results = [y for _ in range(4) for y in (tapwise.conv2d(x, w), operator(x))]
    assert all(y.ctypes.data % 64 == 0 for y in results)
    assert arrays.empty((0, 3, 5, 5), DTYPES[dtype], layout).shape == (0, 3, 5, 5)
    assert arrays.empty((2, 3), DTYPES[dtype], "nchw").shape == (2, 3)


def test_views_share_memory() -> None:
    array = np.arange(24, dtype=np.float32).reshape(2, 3, 4)
    tensor = torch.arange(24, dtype=torch.float32).reshape(2, 3, 4)
    assert np.shares_memory(arrays.view(array, "x"), array)
    assert np.shares_memory(arrays.view(Foreign(array), "x"), array)
    assert np.shares_memory(arrays.view(tensor, "x"), tensor.numpy())
    assert type(arrays.view(array.view(np.memmap), "x")) is np.ndarray


def test_bfloat16_of_pytorch_is_ml_dtypes_own() -> None:
    tensor = torch.randn(4, 6, dtype=torch.bfloat16)[::2].t()
    array = arrays.view(tensor, "x")
    assert array.dtype is DTYPES["bf16"] and arrays.dtype_name(array, "x") == "bf16"
    assert (array.ctypes.data, array.strides) == (tensor.data_ptr(), (2, 24))
    assert np.array_equal(array.astype(np.float32), tensor.float().numpy())
    again = arrays.like(array, tensor)
    assert (again.dtype, again.data_ptr(), again.stride()) == (torch.bfloat16, tensor.data_ptr(), tensor.stride())


def test_bfloat16_of_pytorch_call_after_call() -> None:
    """What is kept of the first call makes the others."""
    x, w = (torch.randn(shape).bfloat16() for shape in ((1, 4, 5, 6), (3, 4, 2, 2)))
    found = [tapwise.conv2d(scale * x, w).float() for scale in (1, 2, 4)]
    assert torch.equal(found[1], 2 * found[0]) and torch.equal(found[2], 4 * found[0])
    wanted = torch.nn.functional.conv2d(x.float(), w.float())
    torch.testing.assert_close(found[0], wanted, rtol=0.01, atol=0.05)
    values, places = tapwise.max_pool2d(x, 2, return_indices=True)
    again, same = tapwise.max_pool2d(x, 2, return_indices=True)
    assert values.dtype is again.dtype is torch.bfloat16
    assert torch.equal(values, again) and torch.equal(places, same)


def test_result_is_of_the_same_kind() -> None:
    array = np.arange(6, dtype=np.float32).reshape(2, 3).T
    assert arrays.like(array, np.zeros(1)) is array
    tensor = arrays.like(array, torch.zeros(1))
    assert isinstance(tensor, torch.Tensor)
    assert tensor.data_ptr() == array.ctypes.data
    standard = arrays.like(array, Standard(array))
    assert isinstance(standard, Standard)
    np.testing.assert_array_equal(standard.array, array)
    assert arrays.like(array, Foreign(array)) is array


@pytest.mark.parametrize(
    ("value", "words"),
    [
        ([1.0, 2.0], ["w is a list", "NumPy", "PyTorch", "DLPack"]),
        (3.0, ["w is a float"]),
        (None, ["w is a NoneType"]),
        (np.ma.masked_array([1.0], [True]), ["masked"]),
        (torch.zeros(2, requires_grad=True), ["w requires a gradient", "w.detach()"]),
        (np.ndarray, ["w is a type"]),
        (torch._neg_view(torch.zeros(2, dtype=torch.bfloat16)), ["w has its negative bit set", "resolve_neg()"]),
        (torch.zeros(2, dtype=torch.float8_e5m2), ["w has dtype float8_e5m2: float32"]),
        (torch.zeros(2, dtype=torch.complex64).conj(), ["w has its conjugate bit set", "resolve_conj()"]),
        (torch.zeros(2, 2).to_sparse(), ["w is a tensor of layout torch.sparse_coo", "to_dense()"]),
        (torch.eye(2).to_sparse_csr(), ["torch.sparse_csr", "to_dense()"]),
        (torch.zeros(2, 2).to_mkldnn(), ["torch._mkldnn", "to_dense()"]),
        (torch.nested.nested_tensor([torch.zeros(2)], layout=torch.jagged), ["w is a nested tensor"]),
        (torch._neg_view(torch.zeros(2)), ["w has its negative bit set", "resolve_neg()"]),
        (torch.quantize_per_tensor(torch.zeros(2), 0.1, 0, torch.quint8), ["quantized", "dequantize()"]),
        (torch.zeros(2, device="meta"), ["meta", "no values"]),
        (FakeTensorMode().from_tensor(torch.zeros(2)), ["w is a fake tensor", "no values"]),
    ],
    ids=[
        "list", "float", "none", "masked", "gradient", "type", "bfloat16", "float8", "conj", "sparse", "csr", "mkldnn",
        "nested", "negative", "quantized", "device", "fake",
    ],
)  # fmt: skip
def test_refused_by_name(value: Any, words: list[str]) -> None:
    with pytest.raises(InvalidProblem) as error:
        arrays.view(value, "w")
    for word in words:
        assert word in str(error.value)
    assert "\n" not in str(error.value)


def _dual(call: Any, x: torch.Tensor) -> Any:
    with forward_ad.dual_level():
        return call(forward_ad.make_dual(x, x))


@pytest.mark.parametrize(
    ("record", "words"),
    [
        (_dual, "w has a tangent"),
        (lambda call, x: torch.func.jvp(call, (x,), (x,)), "w is followed by a transform of torch.func"),
        (lambda call, x: torch.func.functionalize(call)(x), "w is followed by a transform of torch.func"),
        (lambda call, x: torch.func.grad(call)(x), "w requires a gradient"),
        (lambda call, x: torch.vmap(call)(x), "w is batched by torch.vmap"),
        (lambda call, x: torch.jit.trace(call, (x,)), "w is traced by torch.jit.trace"),
        (lambda call, x: make_fx(call)(x), "w is traced by make_fx"),
        (lambda call, x: torch.fx.symbolic_trace(call), "w is a Proxy of torch.fx"),
    ],
    ids=["dual", "jvp", "functionalize", "grad", "vmap", "jit", "make_fx", "fx"],
)
@pytest.mark.parametrize("there", [False, True], ids=["host", "device"])
def test_what_pytorch_records_is_refused(record: Any, words: str, there: bool) -> None:
    """A result without the record would be a silent zero derivative, or a constant of the trace."""

    def call(x: Any) -> torch.Tensor:
        # The way of a GPU's tensors, as far as it goes without one.
        device.view(x, "w") if there and isinstance(x, torch.Tensor) else arrays.anywhere(x, "w", None)
        return torch.zeros(())

    with pytest.raises(InvalidProblem) as error:
        record(call, torch.ones(3, 4))
    assert str(error.value).startswith(words)


@pytest.mark.parametrize(
    "tensor",
    [
        torch._neg_view(torch.zeros(2)),
        torch.zeros(2, 2).to_sparse(),
        torch.nested.nested_tensor([torch.zeros(2)], layout=torch.strided),
        FakeTensorMode().from_tensor(torch.zeros(2)),
        torch.zeros(2, dtype=torch.complex64),
    ],
    ids=["negative", "sparse", "nested", "fake", "complex"],
)
def test_a_tensor_of_a_gpu_that_is_more_than_its_memory_is_refused(tensor: torch.Tensor) -> None:
    with pytest.raises(InvalidProblem, match=r"^w (has|is) "):
        device.view(tensor, "w")


def test_a_tensor_without_a_tangent_is_taken_beside_one_that_has() -> None:
    with forward_ad.dual_level():
        forward_ad.make_dual(torch.ones(3), torch.ones(3))
        np.testing.assert_array_equal(arrays.view(torch.ones(3), "w"), [1, 1, 1])


def test_tensor_with_gradient_is_taken_where_none_is_recorded() -> None:
    tensor = torch.ones(3, requires_grad=True)
    with torch.no_grad():
        np.testing.assert_array_equal(arrays.view(tensor, "w"), [1, 1, 1])


def test_dtype_names() -> None:
    for name, dtype in DTYPES.items():
        assert arrays.dtype_name(np.zeros(1, dtype), "x") == name
        assert arrays.dtype_name(np.zeros(1, dtype.newbyteorder()), "x") == name
    for other in (np.int64, np.uint8, np.complex64, np.bool_, np.longdouble):
        with pytest.raises(InvalidProblem, match=f"x has dtype {np.dtype(other)}.*float32"):
            arrays.dtype_name(np.zeros(1, other), "x")


def test_foreign_byte_order_becomes_native() -> None:
    array = np.arange(5, dtype=np.dtype(np.float32).newbyteorder())
    native = arrays.native(array)
    assert native.dtype == np.float32
    np.testing.assert_array_equal(native, array)
    assert arrays.native(native) is native


@pytest.mark.parametrize("spatial", [(5,), (4, 5), (3, 4, 5)])
def test_layouts(spatial: tuple[int, ...]) -> None:
    shape = (2, 3, *spatial)
    for layout in ("nchw", "nhwc"):
        array = arrays.empty(shape, np.dtype(np.float32), layout)
        assert array.shape == shape
        assert arrays.layout_of(array) == layout
        assert arrays.is_dense(array, layout)
        assert arrays.dense(array, layout) is array
        other = {"nchw": "nhwc", "nhwc": "nchw"}[layout]
        array[...] = np.random.default_rng(0).standard_normal(shape)
        copy = arrays.dense(array, other)
        assert arrays.layout_of(copy) == other
        np.testing.assert_array_equal(copy, array)


def test_layout_of_what_could_be_either_is_nchw() -> None:
    assert arrays.layout_of(np.zeros((2, 1, 4, 5)).transpose(0, 1, 2, 3)) == "nchw"
    assert arrays.layout_of(np.zeros((2, 4, 5, 1)).transpose(0, 3, 1, 2)) == "nchw"
    assert arrays.layout_of(np.zeros((2, 1, 1, 3)).transpose(0, 3, 1, 2)) == "nchw"
    assert arrays.layout_of(np.zeros((0, 4, 5, 3)).transpose(0, 3, 1, 2)) == "nchw"
    assert arrays.layout_of(np.zeros((1, 4, 5, 3)).transpose(0, 3, 1, 2)) == "nhwc"
    assert arrays.layout_of(np.zeros((2, 3, 4, 5))[:, :, ::2]) == "nchw"
    channels_last = torch.zeros(2, 3, 4, 5).to(memory_format=torch.channels_last)
    assert arrays.layout_of(channels_last.numpy()) == "nhwc"


def test_what_is_not_dense() -> None:
    storage = np.zeros(2 * 3 * 4 * 5 * 4 + 1, np.uint8)
    misaligned = storage[1:].view(np.float32).reshape(2, 3, 4, 5)
    for array in (
        misaligned,
        np.zeros((2, 3, 4, 10), np.float32)[..., ::2],
        np.zeros((2, 3, 4, 5), np.float32)[:, ::-1],
        np.broadcast_to(np.float32(1), (2, 3, 4, 5)),
        np.zeros((2, 3, 4, 5), np.dtype(np.float32).newbyteorder()),
    ):
        copy = arrays.dense(array, "nchw")
        assert copy is not array
        assert arrays.is_dense(copy, "nchw")
        np.testing.assert_array_equal(copy, array)


def test_overlap_looks_at_elements() -> None:
    array = np.zeros((8, 8))
    assert arrays.overlap(array[2:5], array[4:])
    assert not arrays.overlap(array[:4], array[4:])
    assert not arrays.overlap(array[:, ::2], array[:, 1::2])
    assert arrays.overlap(array[::-1], array.T)


@pytest.mark.parametrize("size", [1, 63, 64, 4096, 100_001])
def test_aligned_memory(size: int) -> None:
    for _ in range(3):
        memory = aligned(size)
        assert memory.nbytes == size
        assert memory.ctypes.data % 64 == 0
        assert not memory.any()
        memory[:] = 1


def test_workspaces_are_shared_by_size_and_never_by_two_calls() -> None:
    shared = pool(300_000, np.dtype(float))
    size = shared.size_bytes
    assert size >= 300_000
    assert pool(size, np.dtype(float)) is shared
    # Numbers of another kind would be tiny ones, which take long to compute with.
    assert pool(size + 1, np.dtype(float)) is not shared and pool(size, np.dtype(np.uint8)) is not shared
    shared.free[:] = [aligned(size) for _ in range(2)]
    taken: list[int] = []
    start, held = Barrier(4), Barrier(4)

    def take() -> None:
        start.wait()
        with workspace(size, np.empty(1)) as memory:
            taken.append(memory.ctypes.data)
            held.wait()

    threads = [Thread(target=take) for _ in range(4)]
    for thread in threads:
        thread.start()
    for thread in threads:
        thread.join()
    assert len(set(taken)) == 4
    assert sorted(memory.ctypes.data for memory in shared.free) == sorted(taken)
    shared.free.clear()


def test_a_workspace_goes_back_after_an_error() -> None:
    shared = pool(1 << 20, np.dtype(float))
    shared.free.clear()
    with pytest.raises(ValueError, match="wrong"), workspace(1 << 20, np.empty(1)) as memory:
        raise ValueError("wrong")
    (kept,) = shared.free
    assert kept is memory
    with workspace(0, np.empty(1)) as nothing:
        assert nothing is None
