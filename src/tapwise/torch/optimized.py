"""Whole models: convolutions fused with what follows them, in one memory order, each by the faster library."""

from __future__ import annotations

import copy
from collections.abc import Callable, Iterator
from dataclasses import dataclass, field
from functools import partial
from itertools import chain
from typing import Any, Final

import torch
from torch import fx

from tapwise.arguments import flag, one_of, whole
from tapwise.errors import InvalidProblem
from tapwise.ops.conv.problem import MATHS
from tapwise.torch import fusion, gated, layers, shuffle
from tapwise.torch.folded import Folded
from tapwise.torch.fused import FusedConv
from tapwise.torch.graphs import Graphs
from tapwise.torch.recorded import record
from tapwise.torch.tensors import version
from tapwise.torch.timing import medians
from tapwise.torch.training import for_training

# Orders of images by name; None: as they come.
FORMATS: Final = {"channels_last": torch.channels_last, "contiguous": torch.contiguous_format, "preserve": None}
# Of the choice between orders, for each: a call of a model takes as long as all that a layer is timed for.
MODEL_SECONDS: Final = 0.5
# Modules without a forward of their own.
CONTAINERS: Final = (torch.nn.ModuleList, torch.nn.ModuleDict)


@dataclass
class Report:
    """What became of a model: its `layers` where it was measured, the order of its images, and modules that torch.fx
    cannot trace, with the reason."""

    memory_format: str = "preserve"
    layers: list[layers.Layer] = field(default_factory=list)
    untraced: dict[str, str] = field(default_factory=dict)
    fused: int = 0

    def __str__(self) -> str:
        lines = [f"{self.fused} convolutions fused with what follows them; images: {self.memory_format}"]
        lines += [f"left as it is: {name or 'the model'}: {reason}" for name, reason in self.untraced.items()]
        if self.layers:
            kept = sum(not layer.by_torch for layer in self.layers)
            lines += [f"{kept} of {len(self.layers)} by tapwise:", layers.table(self.layers)]
        return "\n".join(lines)


class _Named:
    """Tensors by name, of each module. An object: torch.export copies the lists and dicts that it finds in a module."""

    def __init__(self, parts: list[dict[str, torch.Tensor | None]]) -> None:
        # Most modules have no parameters and no buffers.
        self._parts = [part for part in parts if part]

    def tensors(self) -> Iterator[torch.Tensor | None]:
        return chain.from_iterable(map(dict.values, self._parts))


class Optimized(torch.nn.Module):
    """A model as `optimize` left it: its own modules, parameters and state_dict, and a graph that computes them.

    In training mode the model itself computes. `report` says what was done.
    """

    def __init__(self, model: torch.nn.Module, graph: torch.nn.Module, report: Report, graphs: int = 0) -> None:
        super().__init__()
        # The model's own children under their own names; the rest of it is not registered.
        self._parameters, self._buffers, self._modules = model._parameters, model._buffers, model._modules
        self.__dict__["model"], self.__dict__["graph"], self.report = model, graph, report
        self.__dict__["named"] = _Named([part for one in self.modules() for part in (one._parameters, one._buffers)])
        self.__dict__["captured"] = (
            Graphs(self._compute, self._version, graphs, not report.untraced) if graphs else None
        )
        self.train(model.training)

    def forward(self, *inputs: Any, **named: Any) -> Any:
        if self.training:
            return self.__dict__["model"](*inputs, **named)
        captured = self.__dict__["captured"]
        return self._compute(*inputs, **named) if captured is None else captured(*inputs, **named)

    def _version(self) -> tuple[int, ...]:
        """What changes with a write to a parameter or a buffer. It is asked for at each call: with the modules' own
        iterators it would take four times as long."""
        return version(self.__dict__["named"].tensors())

    def _compute(self, *inputs: Any, **named: Any) -> Any:
        if (order := FORMATS[self.report.memory_format]) is not None:
            inputs = tuple(_in_order(one, order) for one in inputs)
            named = {name: _in_order(one, order) for name, one in named.items()}
        return self.__dict__["graph"](*inputs, **named)

    def train(self, mode: bool = True) -> Optimized:
        super().train(mode)
        for part in (self.__dict__["model"], self.__dict__["graph"]):
            part.train(mode)
        return self

    def _apply(self, fn: Callable[..., Any], recurse: bool = True) -> Optimized:
        super()._apply(fn, recurse)
        for module in self.__dict__["graph"].modules():
            if isinstance(module, Folded):
                module._apply(fn)
                module.refresh()
        return self


def _in_order(value: Any, order: torch.memory_format) -> Any:
    return value.contiguous(memory_format=order) if isinstance(value, torch.Tensor) and value.ndim == 4 else value


def optimize(
    model: torch.nn.Module, example_inputs: Any = None, *, memory_format: str = "auto", math: str = "ieee",
    report: bool = False, graphs: bool | int = False, training: bool = False,
) -> Any:  # fmt: skip
    """A copy of a model for inference, with its convolutions by tapwise.

    Batch norm is folded into the filters, bias, activation and residual addition are computed behind the sums. What
    torch.fx cannot trace is left as it is, and its parts are tried. `example_inputs`, a tensor or a tuple of them, let
    layers be measured: those that are faster in PyTorch stay there. `memory_format`: "channels_last", "contiguous",
    "preserve" (images as they come), or "auto": with example inputs the fastest, else channels last for 16 bits on a
    GPU. `math` of float32 as for tapwise.conv2d. `report`: print what was done; `optimize(...).report` has it anyway.
    `graphs`: calls on a GPU come from CUDA graphs, on a CPU from recordings, one for each kind of inputs, so many at
    most (True: 8).

    The result is an nn.Module with the model's state_dict: it may be compiled, exported, copied, saved, moved, and its
    parameters may change. Its parameters require no gradient; in training mode the model itself computes.

    `training`: a copy to be trained instead, of the model's own class. Its convolutions and batch norms are replaced,
    norms take the activations behind them, nothing is folded, and with example inputs (under autocast, where training
    is) each direction of each layer is computed by the library that was faster, the host's time counted. `graphs`: the
    training step will be captured in CUDA graphs or compiled, so that the host's time does not count. `memory_format`
    is left to the training loop.
    Raises InvalidProblem for a bad argument.
    """
    if not isinstance(model, torch.nn.Module):
        raise InvalidProblem(f"model is a {type(model).__name__}: a torch.nn.Module is allowed")
    one_of(memory_format, "memory_format", ("auto", *FORMATS))
    several = example_inputs is None or isinstance(example_inputs, (tuple, list))
    if flag(training, "training"):
        if memory_format != "auto":
            raise InvalidProblem("training=True: goes without memory_format, which a training loop decides")
        given = None if example_inputs is None else tuple(example_inputs) if several else (example_inputs,)
        trained, said = for_training(model, given, math, bool(graphs))
        if flag(report, "report"):
            print(said)
        return trained
    one_of(math, "math", MATHS)
    inputs = example_inputs if several else (example_inputs,)
    kept = 8 * graphs if isinstance(graphs, bool) else whole(graphs, "graphs")
    if kept < 0:
        raise InvalidProblem(f"graphs={kept}: True, False, or how many at most")
    own = copy.deepcopy(model).eval().requires_grad_(False)
    done = Report()
    graph = _fused(own, math, done, "")
    result = Optimized(own, graph, done, kept)
    done.fused = sum(isinstance(one, FusedConv) for one in graph.modules())
    if memory_format != "auto":
        done.memory_format = memory_format
    elif inputs is None:
        half = any(one.dtype in (torch.float16, torch.bfloat16) and one.is_cuda for one in own.parameters())
        done.memory_format = "channels_last" if half else "preserve"
    if inputs is not None:
        formats = ("contiguous", "channels_last") if memory_format == "auto" else (memory_format,)
        _measure(result, tuple(inputs), formats, bool(kept) and not done.untraced)
    if flag(report, "report"):
        print(done)
    return result


def _measure(result: Optimized, inputs: tuple[Any, ...], formats: tuple[str, ...], recorded: bool) -> None:
    """Each layer by the faster library, in the order of images in which the model is."""
    done, graph = result.report, result.__dict__["graph"]
    tensors = [one for one in (*result.parameters(), *inputs) if isinstance(one, torch.Tensor)]
    device = tensors[-1].device if tensors else torch.device("cpu")
    measured: dict[str, list[layers.Layer]] = {}
    times: dict[str, float] = {}
    replays: dict[str, Callable[[], object]] = {}
    for done.memory_format in formats:
        order = FORMATS[done.memory_format]
        given = inputs if order is None else tuple(_in_order(one, order) for one in inputs)
        measured[done.memory_format] = layers.measured(graph, given, recorded)
        with torch.no_grad():
            # Not from graphs that are kept: those of another order would do as well.
            run: Callable[[], object] = partial(result._compute, *inputs)
            if recorded and device.type == "cpu":
                replays[done.memory_format] = record(run)[0].replay
            else:
                times[done.memory_format] = medians({"model": run}, device)[0]["model"]
    if len(replays) > 1:
        # In turns: what else the machine does from one second to the next decides nothing.
        times, _ = medians(replays, device, MODEL_SECONDS)
    done.memory_format = min(formats, key=lambda one: times.get(one, 0.0))
    found = measured[done.memory_format]
    for layer in found:
        graph.get_submodule(layer.name).by_torch = layer.by_torch
    done.layers = layers.called(graph, found)


def _fused(module: torch.nn.Module, math: str, done: Report, name: str) -> torch.nn.Module:
    """What computes a module: a graph, or the module with its parts in graphs where torch.fx cannot trace it."""
    if not isinstance(module, CONTAINERS):
        if fx.Tracer().is_leaf_module(module, name):
            return fusion.alone(module, math)
        try:
            traced = fx.symbolic_trace(module)
        except Exception as error:
            done.untraced[name] = f"{type(error).__name__}: {error}".splitlines()[0][:200]
        else:
            for node in traced.graph.nodes:
                # Annotations that are strings cannot be pickled.
                node.type = None
            fusion.remove_identities(traced)
            fusion.fuse(traced, math)
            fusion.fuse_linears(traced, math)
            fusion.replace_pools(traced)
            shuffle.replace(traced)
            gated.replace(traced)
            return traced.eval()
    # Parameters and buffers are the module's own.
    made = copy.copy(module)
    made._modules = {
        part: child if child is None else _fused(child, math, done, f"{name}.{part}".strip("."))
        for part, child in module._modules.items()
    }
    return made
