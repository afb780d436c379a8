"""Calls of a prepared operator that find everything as the kernels want it."""

from __future__ import annotations

from typing import TYPE_CHECKING, Any

from tapwise.cuda.plan import CudaPlan

if TYPE_CHECKING:
    from tapwise.ops.conv.api import PreparedConv


class TorchCall:
    """A prepared operator on tensors of a GPU that need no conversion: what is left is memory, and launches."""

    @classmethod
    def of(cls, operator: PreparedConv, filters: Any) -> TorchCall | None:
        """Where the filters are PyTorch's, and the plan does no more than to launch kernels."""
        if filters.library != "torch" or getattr(type(operator.plan), "run", None) is not CudaPlan.run:
            return None
        return cls(operator, filters)

    def __init__(self, operator: PreparedConv, filters: Any) -> None:
        import torch

        from tapwise.arrays.device import ALIGNMENT, torch_stream

        problem = operator.problem
        images = problem.layout == "nhwc"
        self._alignment, self._stream, self._tensor, self._index = (
            ALIGNMENT,
            torch_stream(),
            torch.Tensor,
            filters.index,
        )
        self._grad, self._empty = torch.is_grad_enabled, torch.empty
        self._dtype, self._device = filters.owner.dtype, filters.owner.device
        self._x_shape, self._y_shape = torch.Size(problem.x_shape), torch.Size(problem.y_shape)
        order = torch.channels_last if images else torch.contiguous_format
        self._order, self._residual = order, problem.residual
        self._x_strides, self._y_strides = (
            torch.empty(shape, device="meta").to(memory_format=order).stride()
            for shape in (problem.x_shape, problem.y_shape)
        )
        self._enqueue = operator.plan.enqueue  # type: ignore[attr-defined]
        self._workspace, self._bytes = operator.plan.workspace_bytes, torch.uint8
        self._fixed = {"w": operator._packed.ptr, "settled": int(operator._packed.settled)}
        if operator._bias is not None:
            self._fixed["bias"] = operator._bias.ptr

    def takes(self, x: Any, residual: Any = None) -> bool:
        if not self._is_plain(x, self._x_shape, self._x_strides):
            return False
        if self._residual:
            return self._is_plain(residual, self._y_shape, self._y_strides)
        return residual is None

    def _is_plain(self, tensor: Any, shape: Any, strides: tuple[int, ...]) -> bool:
        return (
            type(tensor) is self._tensor
            and tensor.dtype is self._dtype
            and tensor.shape == shape
            and tensor.stride() == strides
            and tensor.get_device() == self._index
            and tensor.data_ptr() % self._alignment == 0
            and not (tensor.requires_grad and self._grad())
        )

    def __call__(self, x: Any, residual: Any = None) -> Any:
        y = self._empty(self._y_shape, dtype=self._dtype, device=self._device, memory_format=self._order)
        addresses = {"x": x.data_ptr(), "y": y.data_ptr(), **self._fixed}
        if residual is not None:
            addresses["residual"] = residual.data_ptr()
        if self._workspace:
            # Freed at once, and not given to anyone before the launches on this stream are done with it.
            scratch = self._empty(self._workspace, dtype=self._bytes, device=self._device)
            addresses["workspace"] = scratch.data_ptr()
        self._enqueue(addresses, self._stream(self._index))
        return y
