"""Dispatch: forced > cost model > registry order, with reasons; nothing is swallowed."""

from __future__ import annotations

import warnings
from collections.abc import Iterator, Sequence
from dataclasses import dataclass
from typing import Any

import pytest

from tapwise import dispatch, registry
from tapwise.algorithm import Algorithm, Config, Device, Plan
from tapwise.cpu.device import host
from tapwise.errors import InvalidProblem, NotApplicable
from tapwise.ops.conv.problem import ConvProblem

PROBLEM = ConvProblem.parse("c8 h9 w9 k8 r3 s3")
DEVICE = Device("cpu", "a CPU", 2, vector_bytes=32, registers=16, gflops=80.0, gbps=20.0)


@dataclass(frozen=True)
class Tile(Config):
    m: int
    n: int


class Fake(Algorithm[Tile]):
    """Predicts what it is told to: config -> (us, workspace bytes)."""

    summary = "a fake"

    def __init__(
        self,
        name: str,
        tiles: dict[Tile, tuple[float, int]],
        reason: str | None = None,
        pack: float = 0.0,
        exact: bool = True,
    ) -> None:
        self.id = f"cpu.{name}"  # type: ignore[misc]
        self.exact = exact  # type: ignore[misc]
        self._tiles, self._reason, self._pack = tiles, reason, pack

    def rejects(self, problem: ConvProblem, device: Device) -> str | None:
        return self._reason

    def configs(self, problem: ConvProblem, device: Device) -> Sequence[Tile]:
        return list(self._tiles)

    def predict_us(self, problem: ConvProblem, config: Tile, device: Device) -> float:
        return self._tiles[config][0]

    def pack_us(self, problem: ConvProblem, config: Tile, device: Device) -> float:
        return self._pack

    def workspace_bytes(self, problem: ConvProblem, config: Tile, device: Device) -> int:
        return self._tiles[config][1]

    def plan(self, problem: ConvProblem, config: Tile, device: Device) -> Plan:
        raise NotImplementedError


FAST = Fake("fast", {Tile(4, 4): (90.0, 10), Tile(6, 2): (50.0, 1000), Tile(6, 4): (60.0, 100)}, pack=500.0)
SAME = Fake("same", {Tile(1, 1): (50.0, 0)})
LOOSE = Fake("loose", {Tile(2, 2): (20.0, 0)}, exact=False)
SLOW = Fake("slow", {Tile(1, 1): (70.0, 0)}, pack=1.0)
NEVER = Fake("never", {}, reason="takes 1x1 filters, not 3x3")


@pytest.fixture(autouse=True)
def fresh() -> Iterator[None]:
    dispatch._choose.cache_clear()
    yield
    dispatch._choose.cache_clear()


def use(monkeypatch: pytest.MonkeyPatch, *fakes: Fake) -> None:
    by_name: dict[str, Algorithm[Any]] = {fake.id: fake for fake in fakes}
    monkeypatch.setattr(registry, "get", lambda identifier, operator="conv": by_name[identifier])
    monkeypatch.setattr(registry, "of_backend", lambda kind, operator="conv": list(fakes))


def test_shortest_prediction_wins_with_its_best_config(monkeypatch: pytest.MonkeyPatch) -> None:
    use(monkeypatch, NEVER, SLOW, FAST)
    choice = dispatch.choose(PROBLEM, DEVICE)
    assert choice.algorithm == "cpu.fast"
    assert choice.config == Tile(6, 2)
    assert choice.predicted_us == 50.0
    assert choice.workspace_bytes == 1000
    assert choice.reason == "cost model: 50 us, next cpu.slow 70 us"


def test_registry_order_decides_between_equals(monkeypatch: pytest.MonkeyPatch) -> None:
    use(monkeypatch, SAME, FAST)
    assert dispatch.choose(PROBLEM, DEVICE).algorithm == "cpu.same"
    dispatch._choose.cache_clear()
    use(monkeypatch, FAST, SAME)
    assert dispatch.choose(PROBLEM, DEVICE).algorithm == "cpu.fast"


def test_packing_counts_when_not_prepared(monkeypatch: pytest.MonkeyPatch) -> None:
    use(monkeypatch, FAST, SLOW)
    choice = dispatch.choose(PROBLEM, DEVICE, prepared=False)
    assert choice.algorithm == "cpu.slow"
    assert choice.predicted_us == 71.0


def test_forced_by_name(monkeypatch: pytest.MonkeyPatch) -> None:
    use(monkeypatch, FAST, SLOW)
    choice = dispatch.choose(PROBLEM, DEVICE, "cpu.slow")
    assert choice.algorithm == "cpu.slow"
    assert "asked for by name" in choice.reason


@pytest.mark.parametrize(
    ("config", "expected"),
    [("m=4 n=4", Tile(4, 4)), ("n=4", Tile(6, 4)), (Tile(4, 4), Tile(4, 4)), ("", Tile(6, 2)), (None, Tile(6, 2))],
)
def test_forced_config(monkeypatch: pytest.MonkeyPatch, config: Config | str | None, expected: Tile) -> None:
    use(monkeypatch, FAST, SLOW)
    assert dispatch.choose(PROBLEM, DEVICE, "cpu.fast", config=config).config == expected


@pytest.mark.parametrize("config", ["m=5 n=5", "m=6 n=2 k=1", Tile(5, 5)])
def test_config_that_is_none_of_the_algorithms(monkeypatch: pytest.MonkeyPatch, config: Config | str) -> None:
    use(monkeypatch, FAST)
    with pytest.raises(InvalidProblem, match=r"config='.*cpu.fast has for .*'m=4 n=4', 'm=6 n=2'"):
        dispatch.choose(PROBLEM, DEVICE, "cpu.fast", config=config)


def test_config_needs_an_algorithm(monkeypatch: pytest.MonkeyPatch) -> None:
    use(monkeypatch, FAST)
    with pytest.raises(InvalidProblem, match="algorithm='auto'"):
        dispatch.choose(PROBLEM, DEVICE, config="m=4 n=4")


def test_forced_one_that_does_not_apply_says_why(monkeypatch: pytest.MonkeyPatch) -> None:
    use(monkeypatch, NEVER, FAST)
    with pytest.raises(NotApplicable, match=r"'cpu.never' does not apply to 'c8 h9 w9 k8 r3 s3'.*takes 1x1"):
        dispatch.choose(PROBLEM, DEVICE, "cpu.never")


def test_unknown_algorithm_lists_names() -> None:
    with pytest.raises(InvalidProblem, match=r"algorithm='cpu.fastest'.*cpu.serial"):
        dispatch.choose(PROBLEM, DEVICE, "cpu.fastest")


def test_float64_is_never_computed_less_exactly_unless_asked(monkeypatch: pytest.MonkeyPatch) -> None:
    use(monkeypatch, LOOSE, FAST)
    double = PROBLEM.replace(dtype="f64")
    assert dispatch.choose(PROBLEM, DEVICE).algorithm == "cpu.loose"
    assert dispatch.choose(PROBLEM.replace(dtype="f16"), DEVICE).algorithm == "cpu.loose"
    assert dispatch.choose(double, DEVICE).algorithm == "cpu.fast"
    assert dispatch.choose(double, DEVICE, "cpu.loose").algorithm == "cpu.loose"
    assert dispatch.explain(double, DEVICE)[0].reason is None


def test_too_little_workspace_takes_the_next_with_one_warning(monkeypatch: pytest.MonkeyPatch) -> None:
    use(monkeypatch, Fake("large", {Tile(1, 1): (10.0, 5000)}), SLOW)
    with pytest.warns(RuntimeWarning, match=r"workspace_limit=100: cpu.large .*5000 bytes.*cpu.slow is used") as caught:
        assert dispatch.choose(PROBLEM, DEVICE, workspace_limit=100).algorithm == "cpu.slow"
        assert dispatch.choose(PROBLEM, DEVICE, workspace_limit=100).algorithm == "cpu.slow"
    assert len(caught) == 1
    assert caught[0].filename == __file__


def test_workspace_limit_within_one_algorithm(monkeypatch: pytest.MonkeyPatch) -> None:
    use(monkeypatch, FAST, SLOW)
    with warnings.catch_warnings():
        warnings.simplefilter("error")
        choice = dispatch.choose(PROBLEM, DEVICE, workspace_limit=100)
    assert (choice.algorithm, choice.config) == ("cpu.fast", Tile(6, 4))
    with pytest.raises(NotApplicable, match=r"workspace of 10 bytes, and workspace_limit=9"):
        dispatch.choose(PROBLEM, DEVICE, "cpu.fast", workspace_limit=9)
    with pytest.raises(NotApplicable, match=r"cpu.large needs 10 bytes of workspace"):
        use(monkeypatch, Fake("large", {Tile(1, 1): (10.0, 10)}))
        dispatch.choose(PROBLEM, DEVICE, workspace_limit=9)


@pytest.mark.parametrize("text", ["c4 d5 h5 w5 k4 t3 r3 s3", "c4 d5 h5 w5 k4 t3 r3 s3 bf16 nhwc"])
def test_no_algorithm_applies_gives_every_reason(text: str) -> None:
    with pytest.raises(NotApplicable) as error:
        dispatch.choose(ConvProblem.parse(text), host())
    for algorithm in registry.of_backend("cpu"):
        assert f"{algorithm.id} " in str(error.value)


def test_no_algorithm_of_a_backend() -> None:
    with pytest.raises(NotApplicable, match="none for abacus"):
        dispatch.choose(PROBLEM, Device("abacus", "beads", 1))


def test_module_that_cannot_be_imported_is_an_error(monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setitem(registry.ALGORITHMS["conv"], "cpu.missing", "tapwise.cpu.missing:Missing")
    with pytest.raises(ModuleNotFoundError, match=r"tapwise\.cpu\.missing"):
        dispatch.choose(PROBLEM, host())


def test_error_inside_an_algorithm_is_not_swallowed(monkeypatch: pytest.MonkeyPatch) -> None:
    class Broken(Fake):
        def rejects(self, problem: ConvProblem, device: Device) -> str | None:
            raise ZeroDivisionError("a bug")

    use(monkeypatch, Broken("broken", {}), SLOW)
    with pytest.raises(ZeroDivisionError, match="a bug"):
        dispatch.choose(PROBLEM, DEVICE)


def test_explain_goes_through_the_registry(monkeypatch: pytest.MonkeyPatch) -> None:
    use(monkeypatch, NEVER, FAST)
    never, fast = dispatch.explain(PROBLEM, DEVICE)
    assert never == dispatch.Candidate("cpu.never", "takes 1x1 filters, not 3x3")
    assert fast == dispatch.Candidate("cpu.fast", None, Tile(6, 2), 50.0, 500.0, 1000)


def test_explain_shows_an_algorithm_without_a_config_that_may_be_chosen(monkeypatch: pytest.MonkeyPatch) -> None:
    use(monkeypatch, FAST)
    monkeypatch.setattr(FAST, "configs", lambda problem, device: [])
    assert dispatch.explain(PROBLEM, DEVICE) == [
        dispatch.Candidate("cpu.fast", "has no config that may be chosen for it")
    ]
    with pytest.raises(NotApplicable, match=r"'cpu.fast' does not apply to 'c8 h9 w9 k8 r3 s3': it has no config"):
        dispatch.choose(PROBLEM, DEVICE, "cpu.fast")
    with pytest.raises(NotApplicable, match=r"no algorithm applies.*: cpu.fast has no config"):
        dispatch.choose(PROBLEM, DEVICE)


def test_real_algorithms_are_explained_and_chosen() -> None:
    device = host()
    candidates = dispatch.explain(PROBLEM, device)
    assert [candidate.algorithm for candidate in candidates] == [one.id for one in registry.of_backend("cpu")]
    choice = dispatch.choose(PROBLEM, device)
    times = {c.algorithm: c.predicted_us for c in candidates if c.predicted_us is not None}
    assert choice.predicted_us == min(times.values()) == times[choice.algorithm]
    assert dispatch.choose(PROBLEM, device) is choice
    plan = dispatch.plan_for(PROBLEM, choice, device)
    assert dispatch.plan_for(PROBLEM, choice, device) is plan
    assert plan.problem.flops == PROBLEM.flops
