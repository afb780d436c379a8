"""The contract that every algorithm keeps, and the objects that pass through it.

    problem -> Algorithm.refusal / configs / predict_us -> Choice -> Algorithm.plan -> Plan.pack -> Plan.run

Everything up to `Choice` is pure. A plan owns compiled kernels and launch geometry; it is immutable and safe to use
from many threads: whatever a call changes lives in the arrays and the workspace handed to `run`.
"""

from __future__ import annotations

from abc import ABC, abstractmethod
from collections.abc import Sequence
from dataclasses import asdict, dataclass
from typing import Any, ClassVar, Final, Generic, NamedTuple, TypeVar

import numpy as np

from tapwise.problem import LAYOUTS, Problem


@dataclass(frozen=True)
class Device:
    """Where a problem runs, as far as choosing and planning need to know.

    kind "cpu" or "cuda"; name as its maker gives it; `threads`: a CPU's workers; `vector_bytes` and `registers` of its
    vector unit; caches in bytes (L1 and L2 of one core, L3 shared); `gflops` fp32 peak of one worker or multiprocessor
    and `gbps` memory bandwidth, for cost models: estimates until measured; `vector_cycles`: 2 where a CPU's vectors are
    twice as wide as its units; `split_loads`: whether a vector that lies in two cache lines is loaded like two;
    `uneven`: of a task, what workers wait for the slowest; `start_us`: microseconds until a team has begun;
    `bf16_pairs`: whether vector units multiply pairs of bfloat16 faster than float32; `amx`: whether it has tile
    registers for bfloat16; `cache_rates`: bytes a cycle that one core reads from L1, L2 and L3. A GPU's
    `multiprocessors`, its `architecture` to compile for
    ("sm_90a"), its `index`, and `shared_bytes` that a block may have.
    """

    kind: str
    name: str
    threads: int = 0
    vector_bytes: int = 0
    registers: int = 0
    l1_bytes: int = 32 << 10
    l2_bytes: int = 512 << 10
    l3_bytes: int = 16 << 20
    gflops: float = 0.0
    gbps: float = 0.0
    multiprocessors: int = 0
    architecture: str = ""
    index: int = 0
    shared_bytes: int = 0
    vector_cycles: float = 1.0
    split_loads: bool = True
    uneven: float = 0.15
    start_us: float = 3.0
    bf16_pairs: bool = False
    amx: bool = False
    cache_rates: tuple[float, float, float] = (40.0, 28.0, 14.0)


@dataclass(frozen=True)
class Config:
    """Choices of one algorithm for one problem. Each algorithm has its own frozen subclass."""

    @property
    def automatic(self) -> bool:
        """Whether it may be chosen; others are taken only when they are asked for."""
        return True

    def __str__(self) -> str:
        return " ".join(f"{name}={value}" for name, value in asdict(self).items())


C = TypeVar("C", bound=Config)


@dataclass(frozen=True)
class Choice:
    """What dispatch decided, and why."""

    algorithm: str
    config: Config
    reason: str
    predicted_us: float
    workspace_bytes: int


class Buffers(NamedTuple):
    """The arrays of one run. A tuple, as it is made for each call.

    x (n, c, *spatial), y and residual (n, k, *output): dense in the problem's layout. `w`: what `pack` gave. bias (k,).
    Of dgrad x is dy, y is dx and bias (c,); of wgrad w is dy, as it is, and y is dw, in the problem's layout. Of other
    operators' dgrad w is what it takes besides dy, as it is: positions of max, y of softmax.
    `workspace`: at least the plan's `workspace_bytes`, contents of no meaning before and after. `stream`: for CUDA, the
    one to launch on, by default that of x's library.
    """

    x: Any
    w: Any
    y: Any
    workspace: Any = None
    bias: Any = None
    residual: Any = None
    stream: Any = None


class Plan(ABC):
    """Compiled kernels and launch geometry for one problem, config and device."""

    problem: Any
    workspace_bytes: int = 0
    # Of packed filters that may lie in memory which is given, for one call.
    packed_bytes: int = 0

    def pack(self, w: Any) -> Any:
        """The filters in the kernel's own order. `w` is (k, c/groups, *kernel), any strides.

        The result is a copy, or a view of `w` where the kernel takes it as it is.

        None where an operator has no filters: then there is nothing to pack.
        """
        return None

    def pack_into(self, w: Any, memory: Any) -> Any:
        """The same, in memory of at least `packed_bytes`, if there are any."""
        return self.pack(w)

    @abstractmethod
    def run(self, buffers: Buffers) -> None:
        """Compute y = activation(conv(x, w) + bias + residual), or what else the problem says."""

    def for_time(self, us: float) -> Plan:
        """This plan, or one like it that suits calls which take so long."""
        return self


@dataclass(frozen=True)
class Steady:
    """A run of a plan on arrays that stay where they are, to be called again and again."""

    plan: Plan
    buffers: Buffers

    def __call__(self) -> None:
        self.plan.run(self.buffers)


_ORDERS: Final = {"nchw": "NCHW", "nhwc": "channels-last"}


def _listed(words: Sequence[object]) -> str:
    """`a`, or `a, b and c`."""
    *most, last = map(str, words)
    return f"{', '.join(most)} and {last}" if most else last


class Algorithm(ABC, Generic[C]):
    """One way to compute an operator. Stateless; `id` is `backend.name`, `operator` whose problems it takes."""

    operator: ClassVar[str] = "conv"

    id: ClassVar[str]
    summary: ClassVar[str]
    # It sums the definition's own terms: integers that the accumulator can hold come out exact.
    exact: ClassVar[bool] = True
    # An infinity or NaN of x reaches the outputs whose definition has it, and no others.
    keeps_infinities: ClassVar[bool] = True
    # It multiplies on tensor cores, which round the factors of float32 and float64.
    tensor_cores: ClassVar[bool] = False
    # What it takes: dtypes ("tf32" and "3xtf32" among them), memory orders, numbers of spatial axes. None stands for
    # all that the operator has.
    dtypes: ClassVar[tuple[str, ...] | None] = ("f32", "f64", "f16", "bf16")
    layouts: ClassVar[tuple[str, ...]] = LAYOUTS
    axes: ClassVar[tuple[int, ...] | None] = None
    # Problems without an output, or with nothing that goes into one.
    takes_empty: ClassVar[bool] = False

    def refusal(self, problem: Any, device: Device) -> str | None:
        """The reason why it does not apply, or None: what is declared, then what `rejects` adds. Pure."""
        return self._undeclared(problem, device) or self.rejects(problem, device)

    def _undeclared(self, problem: Problem, device: Device) -> str | None:
        backend = self.id.partition(".")[0]
        if device.kind != backend:
            return f"runs on a {'GPU' if backend == 'cuda' else 'CPU'}, not on {device.kind}"
        dtype = problem.dtype if problem.math == "ieee" else problem.math
        # Float32 whose factors may be rounded can be computed as IEEE float32, too.
        if self.dtypes is not None and not {dtype, problem.dtype} & set(self.dtypes):
            rounded = self.tensor_cores and dtype in ("f32", "f64")
            why = ": tensor cores round the factors of f32 and f64" if rounded else ""
            return f"takes {_listed(self.dtypes)}, not {dtype}{why}"
        if problem.operator != self.operator:
            return f"computes {self.operator}, not {problem.operator}"
        if self.axes is not None and problem.spatial_axes not in self.axes:
            return f"takes {_listed(self.axes)} spatial axes, not {problem.spatial_axes}"
        if problem.trivial and not self.takes_empty:
            return "has nothing to compute"
        if problem.layout not in self.layouts:
            return f"takes {_listed([_ORDERS[one] for one in self.layouts])}, not {_ORDERS[problem.layout]}"
        return None

    def rejects(self, problem: Any, device: Device) -> str | None:
        """The reason why it does not apply to a problem that has what is declared, or None. Pure."""
        return None

    @abstractmethod
    def configs(self, problem: Any, device: Device) -> Sequence[C]:
        """Legal configs, a valid default first. Called only where there is no refusal."""

    @abstractmethod
    def predict_us(self, problem: Any, config: C, device: Device) -> float:
        """Predicted time of one prepared run in microseconds; the model is explained in the docstring."""

    def after_us(self, problem: Any, config: C) -> float:
        """What the call behind a run takes longer, in microseconds: counted where something is chosen."""
        return 0.0

    def explain(self, problem: Any, config: C, device: Device) -> str:
        """What the predicted time is made of, in words; "" where the model has no more to say."""
        return ""

    def pack_us(self, problem: Any, config: C, device: Device) -> float:
        """Predicted time of bringing the filters into the kernel's order, paid on each call that is not prepared."""
        return 0.0

    def in_place(self, problem: Any, device: Device, beside: bool) -> Sequence[C]:
        """Configs that read filters where they lie, which no call packs; `beside`: neighbours lie side by side."""
        return ()

    def turned_us(self, problem: Any, config: C, device: Device, apart: int) -> float:
        """What a call takes longer, to pack or to read in place, for filters whose channels and filters are swapped, as
        dgrad has them: neighbours lie `apart` elements apart, channels further."""
        return 0.0

    @abstractmethod
    def workspace_bytes(self, problem: Any, config: C, device: Device) -> int:
        """Scratch of one run, all threads together."""

    def compile(self, problem: Any, config: C, device: Device) -> None:
        """What can be made ready for `plan` by many threads at once. Raises CompileError."""

    @abstractmethod
    def plan(self, problem: Any, config: C, device: Device) -> Plan:
        """Compile and lay out. May take a second when cold; raises CompileError."""

    def error_factor(self, problem: Any) -> float:
        """c in the bound |y - y64| <= c * u * magnitude, u the unit roundoff of the accumulator; convolution alone."""
        return float(problem.error_factor)

    def magnitude(self, problem: Any, x: np.ndarray, w: np.ndarray) -> np.ndarray:
        """The size of what is summed for each output, in float64: |w| * |x| unless an algorithm sums something else."""
        return np.asarray(problem.magnitude(x, w))

    def magnitude_there(self, problem: Any, x: Any, w: Any, device: Device) -> np.ndarray:
        """`magnitude` worked out on a GPU, of arrays there, for its algorithms whose sums are not the definition's."""
        raise NotImplementedError
