"""Batch norm of models that are trained: by our sums and by PyTorch's own, with the activation behind it."""

from __future__ import annotations

import copy
import io
import pickle
from collections.abc import Iterator
from typing import Any

import pytest

pytest.importorskip("torch")

import torch
from torch import nn
from torch.nn import functional

import tapwise.torch
from tapwise.torch import activated as activations
from tapwise.torch import norms
from tapwise.torch.activations import activated
from tapwise.torch.norms import TrainedBatchNorm2d
from tapwise.torch.training import for_training

ACTIVATED = [
    None, "relu", "relu6", "silu", "gelu", "sigmoid", "tanh", "hardswish", "hardsigmoid", "leaky_relu0.2", "gelu_tanh",
]  # fmt: skip


@pytest.fixture(params=[True, False], ids=["ours", "torch"])
def ours(request: Any, monkeypatch: pytest.MonkeyPatch) -> bool:
    """Whether norms take our sums."""
    monkeypatch.setattr(norms, "by_kernels", lambda x: request.param)
    return bool(request.param)


def image(*shape: int, dtype: Any = torch.float64, last: bool = False) -> Any:
    x = torch.randn(shape, generator=torch.Generator().manual_seed(0), dtype=torch.float64).to(dtype)
    return x.contiguous(memory_format=torch.channels_last) if last else x


def norm(channels: int = 5, **words: Any) -> Any:
    made = nn.BatchNorm2d(channels, **words).double()
    for one in made.parameters():
        nn.init.normal_(one, generator=torch.Generator().manual_seed(1))
    return made


def compared(theirs: Any, mine: Any, x: Any, activation: str | None = None, rtol: float = 1e-10) -> None:
    """Two calls of each: results, gradients, statistics."""
    for number in range(2):
        first, second = (x.clone().detach().requires_grad_() for _ in range(2))
        y, z = activated(theirs(first), activation), mine(second)
        assert z.dtype is y.dtype and z.stride() == y.stride()
        dy = image(*y.shape).to(y.dtype) + number
        y.backward(dy), z.backward(dy)
        pairs = [(y, z), (first.grad, second.grad)]
        pairs += [(one.grad, other.grad) for one, other in zip(theirs.parameters(), mine.parameters(), strict=True)]
        pairs += list(zip(theirs.buffers(), mine.buffers(), strict=True))
        for one, other in pairs:
            torch.testing.assert_close(other, one, rtol=rtol, atol=rtol * 10)


@pytest.mark.parametrize("activation", ACTIVATED)
def test_as_pytorchs(activation: str | None, ours: bool) -> None:
    for last in (False, True):
        theirs = norm()
        mine = TrainedBatchNorm2d.of(copy.deepcopy(theirs), activation)
        compared(theirs, mine, image(3, 5, 7, 9, last=last), activation, 1e-7 if activation == "hardsigmoid" else 1e-10)


@pytest.mark.parametrize(
    "words",
    [{"affine": False}, {"momentum": None}, {"track_running_stats": False}, {"eps": 0.5, "momentum": 0.3}],
    ids=str,
)
def test_words_of_batch_norm(words: dict[str, Any], ours: bool) -> None:
    theirs = norm(**words)
    compared(theirs, TrainedBatchNorm2d.of(copy.deepcopy(theirs), "relu"), image(3, 5, 4, 6), "relu")
    theirs = norm(**words).eval()
    mine = TrainedBatchNorm2d.of(copy.deepcopy(theirs), "silu").eval()
    compared(theirs, mine, image(3, 5, 4, 6), "silu")


@pytest.mark.parametrize("dtype", [torch.float16, torch.bfloat16])
def test_half_precision(dtype: Any, monkeypatch: pytest.MonkeyPatch) -> None:
    """Parameters and statistics in float32 and in the same 16 bits."""
    monkeypatch.setattr(norms, "by_kernels", lambda x: True)
    for theirs in (norm().float(), norm().to(dtype)):
        compared(theirs, TrainedBatchNorm2d.of(copy.deepcopy(theirs)), image(3, 5, 7, 9, dtype=dtype), None, 2e-2)


@pytest.mark.parametrize("activation", [None, "silu"])
@pytest.mark.parametrize("shape", [(3, 5, 7, 9), (1, 1, 1, 2), (2, 5, 1, 1), (17, 3, 13, 11)], ids=str)
def test_single_precision(shape: tuple[int, ...], activation: str | None, monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setattr(norms, "by_kernels", lambda x: True)
    for last in (False, True):
        theirs = norm(shape[1]).float()
        mine = TrainedBatchNorm2d.of(copy.deepcopy(theirs), activation)
        compared(theirs, mine, image(*shape, dtype=torch.float32, last=last), activation, 2e-5)


@pytest.mark.parametrize("dtype", [torch.float32, torch.bfloat16])
def test_under_autocast(dtype: Any, monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setattr(norms, "by_kernels", lambda x: True)
    theirs = norm().float()
    with torch.autocast("cpu", torch.bfloat16):
        mine = TrainedBatchNorm2d.of(copy.deepcopy(theirs), "silu")
        compared(theirs, mine, image(3, 5, 7, 9, dtype=dtype), "silu", 1e-5 if dtype is torch.float32 else 2e-2)


def test_statistics_of_many_batches(monkeypatch: pytest.MonkeyPatch) -> None:
    """The mean over all batches, of which the factor is no power of two; and without a count, which leaves them."""
    monkeypatch.setattr(norms, "by_kernels", lambda x: True)
    for counted in (True, False):
        theirs = norm(momentum=None)
        theirs.num_batches_tracked = theirs.num_batches_tracked if counted else None
        mine = TrainedBatchNorm2d.of(copy.deepcopy(theirs))
        for number in range(5):
            theirs(image(3, 5, 4, 6) + number), mine(image(3, 5, 4, 6) + number)
        for one, other in zip(theirs.buffers(), mine.buffers(), strict=True):
            torch.testing.assert_close(other, one, rtol=1e-13, atol=1e-13)


@pytest.mark.parametrize("compiled", [False, True])
def test_under_torch_func(compiled: bool, monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setattr(norms, "by_kernels", lambda x: not compiled or torch.compiler.is_compiling())
    theirs = norm(track_running_stats=False)
    mine = TrainedBatchNorm2d.of(copy.deepcopy(theirs), "relu")
    x = torch.stack([image(3, 5, 4, 6), image(3, 5, 4, 6) * 2 + 1])
    wrap: Any = (lambda one: torch.compile(one, backend="aot_eager")) if compiled else (lambda one: one)
    torch.testing.assert_close(wrap(torch.vmap(mine))(x), torch.vmap(theirs)(x).relu())
    found = wrap(torch.func.grad(lambda x: mine(x).square().sum()))(x[0])
    torch.testing.assert_close(found, torch.func.grad(lambda x: theirs(x).relu().square().sum())(x[0]))


def test_gradients_checked(monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setattr(norms, "by_kernels", lambda x: True)
    mine = TrainedBatchNorm2d.of(norm(3), "silu")
    x = image(2, 3, 4, 3).requires_grad_()
    assert torch.autograd.gradcheck(lambda x, *_: mine(x), (x, *mine.parameters()))


def test_what_stays_pytorchs(monkeypatch: pytest.MonkeyPatch) -> None:
    """One element a channel, gaps between elements, and all that is not compiled for a GPU."""
    assert not norms.by_kernels(torch.ones(1))
    monkeypatch.setattr(norms, "by_kernels", lambda x: True)
    mine = TrainedBatchNorm2d.of(norm())
    with pytest.raises(ValueError, match="more than 1 value"):
        mine(image(1, 5, 1, 1))
    compared(norm(), TrainedBatchNorm2d.of(norm()), image(3, 5, 7, 18)[..., ::2])
    with pytest.raises(RuntimeError, match="mixed dtype"):
        mine(image(3, 5, 4, 6, dtype=torch.float32))
    with pytest.raises(ValueError, match="expected 4D"):
        mine(image(3, 5, 4))
    assert "activation=relu" in repr(TrainedBatchNorm2d.of(norm(), "relu"))


class Block(nn.Module):
    """ResNet's: one module of relu for all three places."""

    def __init__(self, channels: int = 6) -> None:
        super().__init__()
        self.conv1, self.bn1 = nn.Conv2d(channels, channels, 3, padding=1), nn.BatchNorm2d(channels)
        self.conv2, self.bn2 = nn.Conv2d(channels, channels, 3, padding=1), nn.BatchNorm2d(channels)
        self.relu = nn.ReLU(inplace=True)

    def forward(self, x: Any) -> Any:
        y = self.relu(self.bn1(self.conv1(x)))
        return self.relu(self.bn2(self.conv2(y)) + x)


class Model(nn.Module):
    def __init__(self) -> None:
        super().__init__()
        self.stem = nn.Sequential(nn.Conv2d(3, 6, 3), nn.BatchNorm2d(6), nn.SiLU())
        self.block = Block()
        self.head = nn.Linear(6, 4)

    def forward(self, x: Any) -> Any:
        return self.head(self.block(self.stem(x)).mean((2, 3)))


@pytest.fixture
def model() -> Iterator[Any]:
    torch.manual_seed(0)
    yield Model().double()


def losses(model: Any, x: Any, steps: int = 4) -> list[float]:
    optimizer = torch.optim.SGD(model.parameters(), lr=0.1, momentum=0.9)
    wanted, found = torch.arange(len(x)) % 4, []
    for _ in range(steps):
        optimizer.zero_grad()
        loss = functional.cross_entropy(model(x), wanted)
        loss.backward()
        optimizer.step()
        found.append(loss.item())
    return found


def prepared(model: Any, x: Any | None) -> tuple[Any, Any]:
    own, report = for_training(model, None if x is None else (x,))
    return own, report


@pytest.fixture(autouse=True)
def unmeasured(monkeypatch: pytest.MonkeyPatch) -> None:
    """Convolutions are not timed here."""
    monkeypatch.setattr("tapwise.torch.training.measured", lambda *_: [])


def test_activations_move_and_training_goes_on(model: Any, ours: bool) -> None:
    x = image(4, 3, 9, 10)
    own, report = prepared(model, x)
    assert (report.norms, report.activations) == (3, 2)
    assert [own.stem[1].activation, own.block.bn1.activation, own.block.bn2.activation] == ["silu", "relu", None]
    assert isinstance(own, Model) and isinstance(own.block, Block) and type(own.stem[2]) is nn.Identity
    assert "2 activations" in str(report)
    assert list(own.state_dict()) == list(model.state_dict())
    copies = [copy.deepcopy(own), pickle.loads(pickle.dumps(own))]
    file = io.BytesIO()
    torch.save(own, file)
    file.seek(0)
    copies.append(torch.load(file, weights_only=False))
    wanted = losses(copy.deepcopy(model), x)
    for one in (own, *copies):
        assert losses(one, x) == pytest.approx(wanted, rel=1e-9)
    trained = Model().double()
    trained.load_state_dict(own.state_dict())
    torch.testing.assert_close(own.eval()(x), trained.eval()(x))
    # A copy has modules of its own.
    assert copies[0].block.bn1 is not own.block.bn1 and copies[0].block.bn1.activation == "relu"


def test_without_inputs_only_sequences_change(model: Any) -> None:
    own, report = prepared(model, None)
    assert report.activations == 1 and type(own.block) is Block


def test_compiled(model: Any, monkeypatch: pytest.MonkeyPatch) -> None:
    from torch._dynamo.backends.common import aot_autograd

    monkeypatch.setattr(norms, "by_kernels", lambda x: torch.compiler.is_compiling())
    x = image(4, 3, 9, 10)
    own, _ = prepared(model, x)
    code: list[str] = []

    def kept(graph: Any, _inputs: Any) -> Any:
        code.append(graph.code)
        return graph.forward

    compiled = torch.compile(own, backend=aot_autograd(fw_compiler=kept, bw_compiler=kept), fullgraph=True)
    assert losses(compiled, x) == pytest.approx(losses(copy.deepcopy(model), x), rel=1e-9)
    forward, backward = code
    assert forward.count("batch_norm_stats.default") == 3 == backward.count("batch_norm_backward.default")
    # Silu and two of three relus have gone into the norms.
    assert backward.count("'relu'") == 1 == backward.count("'silu'")


class Odd(nn.Module):
    """Norms that may take nothing: read by two, called twice, and with dropout by a function beside them."""

    def __init__(self, kind: str) -> None:
        super().__init__()
        self.kind, self.bn, self.relu = kind, nn.BatchNorm2d(3), nn.ReLU()

    def forward(self, x: Any) -> Any:
        y = self.bn(x)
        if self.kind == "two users":
            return self.relu(y) + y
        if self.kind == "called twice":
            return self.relu(self.bn(self.relu(y)))
        if self.kind == "dropout":
            return functional.dropout(self.relu(y), 0.5, training=self.training)
        if self.kind == "mode":
            return self.relu(y) if self.training else y
        return self.relu(y) if bool(x.sum() > 0) else y


@pytest.mark.parametrize("kind", ["two users", "called twice", "dropout", "mode", "values"])
def test_what_takes_no_activation(kind: str) -> None:
    x = image(2, 3, 4, 5).abs()
    model = Odd(kind).double()
    own, report = prepared(model, x)
    assert report.activations == 0 and type(own) is Odd
    if kind != "dropout":
        torch.testing.assert_close(own(x), model(x))


def test_hooks_and_shared_modules_stay() -> None:
    bn = nn.BatchNorm2d(3)
    shared = nn.Sequential(nn.Sequential(bn, nn.ReLU()), nn.Sequential(bn, nn.Tanh()))
    hooked = nn.Sequential(nn.BatchNorm2d(3), nn.ReLU())
    seen: list[Any] = []
    hooked[0].register_forward_hook(lambda module, given, result: seen.append(result))
    x = image(2, 3, 4, 5, dtype=torch.float32)
    for model in (shared, hooked):
        own, report = prepared(model, x)
        assert report.activations == 0
        torch.testing.assert_close(own(x), copy.deepcopy(model)(x))
    assert seen


def test_a_wrong_trace_is_undone(model: Any, monkeypatch: pytest.MonkeyPatch) -> None:
    x = image(2, 3, 9, 10)
    real = activations._function

    def wrong(module: Any, graph: Any, taken: Any) -> Any:
        made = real(module, graph, taken)
        return lambda *given: made(*given) + 1

    monkeypatch.setattr(activations, "_function", wrong)
    own, report = prepared(model, x)
    assert report.activations == 1 and type(own.block) is Block and own.block.bn1.activation is None
    torch.testing.assert_close(own.eval()(x), copy.deepcopy(model).eval()(x))


@pytest.mark.cuda
def test_a_compiled_step_on_a_gpu(model: Any) -> None:
    x = image(4, 3, 9, 10, dtype=torch.float32).cuda().contiguous(memory_format=torch.channels_last)
    model = model.float().cuda().to(memory_format=torch.channels_last)
    own = tapwise.torch.optimize(model, x, training=True, graphs=True)
    wanted = losses_on_gpu(copy.deepcopy(model), x)
    assert losses_on_gpu(torch.compile(own), x) == pytest.approx(wanted, rel=1e-3)


def losses_on_gpu(model: Any, x: Any) -> list[float]:
    optimizer, wanted, found = torch.optim.SGD(model.parameters(), lr=0.1), torch.arange(len(x), device="cuda") % 4, []
    for _ in range(4):
        optimizer.zero_grad()
        loss = functional.cross_entropy(model(x), wanted)
        loss.backward()
        optimizer.step()
        found.append(loss.item())
    return found
