"""Calls on PyTorch's tensors of a GPU that are made again: memory and launches, without what leads to them; those on
arrays in this machine's memory likewise (host_calls.py).

The first call of its kind goes the whole way and is captured (capture.py). Calls with tensors of the same shapes,
strides, dtypes, GPU and alignment, and with the same other words, then only check that nobody records what is done with
them, take new memory and launch. What they compute is the same: a capture holds no value and no address of any tensor,
and filters that a kernel wants in an order of its own are packed by the launches, each time.
"""

from __future__ import annotations

from collections.abc import Callable, Mapping
from functools import partial
from threading import Lock
from typing import TYPE_CHECKING, Any, Final

import numpy as np

from tapwise.arrays.device import ALIGNMENT, torch_stream
from tapwise.arrays.host_calls import HostCalls
from tapwise.arrays.tensors import is_torch, recorder
from tapwise.capture import Address, Capture, capturing

if TYPE_CHECKING:
    from tapwise.cuda.jit.launch import Arguments, Launch

# Kinds of calls that a function keeps: the last so many new ones, and of as many before what was called since.
KEPT: Final = 1024
# The least number of a GPU: what lies elsewhere has less.
FIRST_GPU = 0
# What a call has in place of results that cannot be made again.
CALL_IT: Final = object()

# The results of a call from its words and the addresses of its tensors.
Run = Callable[[tuple[Any, ...], list[int]], Any]


class Replays:
    """The captured calls of one function. Safe for many threads.

    `constants`: addresses in what the function itself owns, such as packed filters, stay as they are.
    """

    def __init__(self, constants: bool = False) -> None:
        self._constants = constants
        # By words, and by shape, strides, dtype, GPU and alignment of each tensor.
        self._young: dict[Any, Run] = {}
        self._old: dict[Any, Run] = {}
        self._lock = Lock()
        self._on_host = HostCalls()

    def call(self, function: Callable[..., Any], words: tuple[Any, ...], out: Any, x: Any, *more: Any) -> Any:
        """function(words, out, x, *more), or what it does without calling it. All tensors but x may be None."""
        if not more and out is None and _pytorch is not None and (result := self._of_one(words, x)) is not CALL_IT:
            return result
        if type(x) is np.ndarray and out is None:
            return self._on_host.call(function, words, _same, None, x, *more)
        torch = _pytorch or _looked_up(x)
        if torch is None or out is not None or torch.recording():
            return function(words, out, x, *more)
        if type(x) in torch.kinds and x.is_cpu and x.get_device() < FIRST_GPU:
            return self._on_host.call(function, words, _same, torch, x, *more)
        key: Any = words
        addresses = []
        try:
            for tensor in (x, *more):
                if tensor is None:
                    key = key, None
                    continue
                if (
                    type(tensor) not in torch.kinds
                    or (index := tensor.get_device()) < FIRST_GPU
                    or tensor.is_neg()
                    or (tensor.requires_grad and torch.grad_enabled())
                ):
                    return function(words, out, x, *more)
                address = tensor.data_ptr()
                addresses.append(address)
                key = key, tensor.shape, tensor.stride(), tensor.dtype, index, address % ALIGNMENT
            run = self._young.get(key)
        except (TypeError, RuntimeError):
            # Words that have no hash, tensors that have no strides or no memory.
            return function(words, out, x, *more)
        if run is None:
            return self._first(key, function, words, x, *more)
        result = run(words, addresses)
        return function(words, out, x, *more) if result is CALL_IT else result

    def _of_one(self, words: tuple[Any, ...], x: Any) -> Any:
        """The result of a call with one tensor that is kept, else CALL_IT: as below, but without a loop."""
        torch = _pytorch
        if (
            torch is None
            or type(x) not in torch.kinds
            or (index := x.get_device()) < FIRST_GPU
            or x.is_neg()
            or (x.requires_grad and torch.grad_enabled())
            or torch.recording()
        ):
            return CALL_IT
        try:
            address = x.data_ptr()
            run = self._young.get((words, x.shape, x.stride(), x.dtype, index, address % ALIGNMENT))
        except (TypeError, RuntimeError):
            return CALL_IT
        return CALL_IT if run is None else run(words, [address])

    def _first(self, key: Any, function: Callable[..., Any], words: tuple[Any, ...], *tensors: Any) -> Any:
        """A call that is not among the latest."""
        found = self._old.get(key)
        if found is not None:
            self._keep(key, found)
            return self.call(function, words, None, *tensors)
        if not _is_plain(words):
            return function(words, None, *tensors)
        result, run = captured(partial(function, words, None), *tensors, words=words, constants=self._constants)
        self._keep(key, run or (lambda words, addresses: CALL_IT))
        return result

    def _keep(self, key: Any, run: Run) -> None:
        with self._lock:
            if len(self._young) >= KEPT:
                self._young, self._old = {}, self._young
            self._young[key] = run


def captured(
    function: Callable[..., Any], *tensors: Any, words: tuple[Any, ...] = (), constants: bool = False
) -> tuple[Any, Run | None]:
    """(function(*tensors), what makes that call again for other tensors like these; None where that cannot be).

    Tensors may be None. `words` are checked by the run, `constants` as of Replays.
    """
    # One tensor in two places is two inputs.
    inputs: list[Any] = []
    for tensor in tensors:
        again = tensor is not None and any(tensor is one for one in inputs)
        inputs.append(tensor.detach() if again else tensor)
    with capturing([one for one in inputs if one is not None]) as seen:
        result = function(*inputs)
    return result, _run_of(seen, words, result, constants)


def _run_of(seen: Capture, words: tuple[Any, ...], result: Any, constants: bool) -> Run | None:
    """A captured call for other tensors like its own; None where it did what cannot be made again."""
    new = seen.owners[seen.inputs :]
    memory = [(tuple(one.shape), one.stride(), one.dtype) for one in new]
    results = []
    for one in result if isinstance(result, tuple) else (result,):
        at = next((number - seen.inputs for given, number in seen.given if given is one), -1)
        # All of its memory, so that it is made in the result's own order.
        if at < 0 or one.numel() != new[at].numel():
            return None
        memory[at] = tuple(one.shape), one.stride(), one.dtype
        results.append(at)
    launches = [(launch, *_places(launch, addresses)) for launch, addresses in seen.launches]
    if seen.refused or not launches or any(launch.remade for launch, _, _ in launches):
        return None
    if not constants and any(fixed for _, fixed, _ in launches):
        return None
    return _written(words, seen.owners[0].get_device(), seen.inputs, memory, launches, results)


def _places(launch: Launch, addresses: Mapping[str, int]) -> tuple[dict[int, int], list[tuple[int, Address]]]:
    """Of a launch's words that a call fills in: those that stay, and those that lie in the call's arrays."""
    values = [(place, addresses.get(name, 0)) for place, name in launch.filled]
    fixed = {place: value for place, value in values if value and not isinstance(value, Address)}
    return fixed, [(place, value) for place, value in values if isinstance(value, Address)]


def _written(
    words: tuple[Any, ...], index: int, inputs: int, memory: list[Any], launches: list[Any], results: list[int]
) -> Run:
    """The call as a function of straight lines: loops over its few arrays and words take as long as a launch.

    Equal words need not mean the same, as 1 is True and 1.0: w0, w1 ... are to be the objects k0, k1 ..., or of their
    types.
    a0, a1 ... are the addresses of inputs, then of new arrays m0, m1 ...; `free0` holds arguments of the first launch
    that no call uses.
    """
    import torch

    several = torch.cuda.device_count() > 1
    names: dict[str, Any] = {"new": allocator(torch, index), "stream_of": torch_stream(), "call_it": CALL_IT}
    names |= {"same": _same, "known": words} | {f"k{at}": word for at, word in enumerate(words)}
    lines = [f"{', '.join(f'a{number}' for number in range(inputs))}, = addresses"]
    if words:
        alike = " and ".join(f"w{at} is k{at}" for at in range(len(words)))
        lines.append(f"{', '.join(f'w{at}' for at in range(len(words)))}, = words")
        lines.append(f"if not ({alike}) and not same(words, known): return call_it")
    if several:
        names["current"] = torch._C._cuda_getDevice
        lines.append(f"if current() != {index}: return call_it")
    for at, (shape, strides, dtype) in enumerate(memory):
        names |= {f"shape{at}": shape, f"strides{at}": strides, f"dtype{at}": dtype}
        lines += [f"m{at} = new(shape{at}, strides{at}, dtype{at})", f"a{inputs + at} = m{at}.data_ptr()"]
    lines.append(f"stream = stream_of({index})")
    for at, (launch, fixed, places) in enumerate(launches):
        free: list[Arguments] = []
        made = partial(launch.arguments, fixed)
        names |= {f"take{at}": free.pop, f"leave{at}": free.append, f"make{at}": made, f"again{at}": launch.again}
        lines += ["try:", f"    packed, enqueue = arguments = take{at}()"]
        lines += ["except IndexError:", f"    packed, enqueue = arguments = make{at}()"]
        lines.append(f"packed[{launch.stream_place}] = stream")
        lines += [f"packed[{place}] = a{one.array}" + f" + {one.offset}" * (one.offset != 0) for place, one in places]
        lines += ["status = enqueue()", f"if status: again{at}(status, enqueue)", f"leave{at}(arguments)"]
    found = ", ".join(f"m{at}" for at in results)
    lines.append(f"return {found}")
    exec("def run(words, addresses):\n" + "".join(f"    {line}\n" for line in lines), names)
    run: Run = names["run"]
    return run


def _is_plain(word: Any) -> bool:
    """Whether it never changes."""
    return type(word) in (int, str, bool, type(None)) or (type(word) is tuple and all(map(_is_plain, word)))


def _same(one: Any, other: Any) -> bool:
    """Whether equal words are of the same types."""
    return type(one) is type(other) and (type(one) is not tuple or all(map(_same, one, other)))


class _PyTorch:
    """What every call asks of PyTorch, looked up once."""

    def __init__(self, torch: Any) -> None:
        self.kinds = frozenset((torch.Tensor, torch.nn.Parameter))
        self.recording, self.grad_enabled = recorder(torch), torch.is_grad_enabled
        self._strided = torch.strided

    def plain(self, tensor: Any) -> bool:
        """Whether a tensor in this machine's memory is memory and nothing more."""
        return (
            type(tensor) in self.kinds
            and tensor.is_cpu
            and tensor.layout is self._strided
            and not tensor.is_neg()
            and not (tensor.requires_grad and self.grad_enabled())
        )


_pytorch: _PyTorch | None = None


def _looked_up(x: Any) -> _PyTorch | None:
    """None where x is no tensor."""
    global _pytorch
    if _pytorch is None and is_torch(x):
        import torch

        _pytorch = _PyTorch(torch)
    return _pytorch


def allocator(torch: Any, index: int) -> Callable[..., Any]:
    """New memory on a GPU, which is the current one, of a shape, strides in elements and a dtype."""
    # PyTorch's own, for the code that its compiler writes, takes a third of the public one's time.
    guards = getattr(getattr(torch._C, "_dynamo", None), "guards", None)
    quick: Callable[..., Any] | None = getattr(guards, "_empty_strided_cuda", None)
    device = torch.device("cuda", index)
    return quick or (lambda shape, strides, dtype: torch.empty_strided(shape, strides, dtype=dtype, device=device))
