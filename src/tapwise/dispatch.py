"""Which algorithm computes a problem: one that is asked for by name, else the one with the shortest predicted time.

Nothing is measured here, so the same problem gets the same choice in each run. An algorithm whose sums are not the
definition's (`exact` is False) is never chosen silently for float64. An error inside an algorithm, or a module that
cannot be imported, is an error of the call: nothing is skipped without a reason.
"""

from __future__ import annotations

import warnings
from collections.abc import Iterable
from dataclasses import dataclass, replace
from functools import lru_cache
from math import inf
from typing import Any, Final

from tapwise import registry
from tapwise.algorithm import Algorithm, Choice, Config, Device, Plan
from tapwise.arguments import flag, shown, whole, word
from tapwise.errors import InvalidProblem, NotApplicable
from tapwise.forks import making
from tapwise.problem import Problem

CHOICES_KEPT: Final = 4096
PLANS_KEPT: Final = 512
ALGORITHM: Final = "'auto' or an id such as 'cpu.serial'"
# The reason of an algorithm that refuses nothing and has nothing to offer.
_NO_CONFIG: Final = "has no config that may be chosen for it"

# Configs, each with the time that decides.
Predicted = list[tuple[Config, float]]


@dataclass(frozen=True)
class Candidate:
    """One algorithm on one problem: `reason` tells why it does not apply, or is None and the rest is filled in.

    `config` is the best one by predicted time; `predicted_us` is one prepared run and `pack_us` the packing of filters
    that each call pays for when it is not prepared.
    """

    algorithm: str
    reason: str | None
    config: Config | None = None
    predicted_us: float | None = None
    pack_us: float | None = None
    workspace_bytes: int | None = None


def choose(
    problem: Problem,
    device: Device,
    algorithm: str = "auto",
    *,
    config: Config | str | None = None,
    prepared: bool = True,
    workspace_limit: int | None = None,
) -> Choice:
    """The algorithm and config for a problem, with the reason in words.

    `algorithm` is "auto" or an id such as "cpu.direct". `config`, for a named algorithm, is one of its configs or words
    of one's string ("m=6 n=2"); where several match, the fastest is taken. `prepared=False` counts the packing of
    filters too. `workspace_limit` in bytes: what needs more is passed over, with one warning if that matters.

    Raises InvalidProblem for an unknown algorithm or config, and NotApplicable with the reasons where none applies.
    """
    if type(algorithm) is not str:
        word(algorithm, "algorithm", ALGORITHM)
    if config is not None and not isinstance(config, (str, Config)):
        raise InvalidProblem(
            f"config={shown(config)}: None, a config of the algorithm or words of its string is allowed"
        )
    if workspace_limit is not None and whole(workspace_limit, "workspace_limit") < 0:
        raise InvalidProblem(f"workspace_limit={workspace_limit}: None or at least 0 bytes is allowed")
    return _choose(problem, device, algorithm, config, flag(prepared, "prepared"), workspace_limit)


@lru_cache(CHOICES_KEPT)
def _choose(
    problem: Problem, device: Device, algorithm: str, config: Config | str | None, prepared: bool, limit: int | None
) -> Choice:
    if algorithm == "auto":
        if config is not None:
            raise InvalidProblem(
                f"config={shown(str(config))}: goes with an algorithm's name, not with algorithm='auto'"
            )
        return _automatic(problem, device, prepared, limit)
    chosen = registry.get(algorithm, problem.operator)
    reason = chosen.refusal(problem, device)
    if reason is not None:
        raise NotApplicable(f"algorithm={algorithm!r} does not apply to '{problem}': it {reason}")
    predicted = _predicted(chosen, _matching(chosen, problem, device, config), problem, device, prepared)
    if not predicted:
        raise NotApplicable(f"algorithm={algorithm!r} does not apply to '{problem}': it {_NO_CONFIG}")
    best = _best(chosen, predicted, problem, device, limit)
    if best is None:
        least = min(chosen.workspace_bytes(problem, c, device) for c, _ in predicted)
        raise NotApplicable(
            f"algorithm={algorithm!r} does not apply to '{problem}': it needs a workspace of {least} bytes, "
            f"and workspace_limit={limit}"
        )
    return replace(best, reason=f"asked for by name, predicted {_time(best.predicted_us)}")


def _automatic(problem: Problem, device: Device, prepared: bool, workspace_limit: int | None) -> Choice:
    offers, too_large, reasons = [], [], []
    for one in registry.of_backend(device.kind, problem.operator):
        reason = _rejects(one, problem, device)
        if reason is not None:
            reasons.append(f"{one.id} {reason}")
            continue
        predicted = _predicted(one, _offered(one, problem, device), problem, device, prepared)
        best = _best(one, predicted, problem, device, workspace_limit)
        if best is not None:
            offers.append(best)
        elif (best := _best(one, predicted, problem, device, None)) is not None:
            too_large.append(best)
            reasons.append(f"{one.id} needs {best.workspace_bytes} bytes of workspace")
        else:
            reasons.append(f"{one.id} {_NO_CONFIG}")
    if not offers:
        listed = "; ".join(reasons) or f"there is none for {device.kind}"
        raise NotApplicable(f"no algorithm applies to '{problem}': {listed}")
    # Stable: the registry's order decides between equal times.
    offers.sort(key=lambda offer: cost(offer, problem))
    best = offers[0]
    us = best.predicted_us
    faster = min(too_large, key=lambda offer: cost(offer, problem), default=best)
    if cost(faster, problem) < cost(best, problem):
        warnings.warn(
            f"workspace_limit={workspace_limit}: {faster.algorithm} would take {_time(faster.predicted_us)} with "
            f"{faster.workspace_bytes} bytes for '{problem}'; {best.algorithm} is used",
            RuntimeWarning,
            stacklevel=4,
        )
    if len(offers) == 1:
        return replace(best, reason=f"the only one that applies, predicted {_time(us)}")
    second = offers[1]
    return replace(best, reason=f"cost model: {_time(us)}, next {second.algorithm} {_time(second.predicted_us)}")


def _rejects(algorithm: Algorithm[Any], problem: Problem, device: Device) -> str | None:
    """As Algorithm.refusal, for "auto"."""
    reason = algorithm.refusal(problem, device)
    if reason is None and not algorithm.exact and problem.dtype == "f64":
        return "is less accurate than a direct sum: for f64 only when asked for by name"
    return reason


def _predicted(
    algorithm: Algorithm[Any], configs: Iterable[Config], problem: Problem, device: Device, prepared: bool
) -> Predicted:
    """Each config's time, worked out once."""

    def time(config: Config) -> float:
        us = algorithm.predict_us(problem, config, device)
        return us if prepared else us + algorithm.pack_us(problem, config, device)

    return [(config, time(config)) for config in configs]


def _best(
    algorithm: Algorithm[Any], predicted: Predicted, problem: Problem, device: Device, workspace_limit: int | None
) -> Choice | None:
    """The fastest config within the limit, or None where none is; without a reason yet."""
    best, least = None, inf
    for config, us in predicted:
        together = us + algorithm.after_us(problem, config)
        if best is None or together < least:
            size = algorithm.workspace_bytes(problem, config, device)
            if workspace_limit is None or size <= workspace_limit:
                best, least = Choice(algorithm.id, config, "", us, size), together
    return best


def cost(offer: Choice | Candidate, problem: Problem) -> float:
    """What decides between algorithms: microseconds of a run, and what the call behind it takes longer."""
    assert offer.config is not None and offer.predicted_us is not None
    return offer.predicted_us + registry.get(offer.algorithm, problem.operator).after_us(problem, offer.config)


def _offered(algorithm: Algorithm[Any], problem: Problem, device: Device) -> list[Config]:
    """The configs that may be chosen."""
    return [config for config in algorithm.configs(problem, device) if config.automatic]


def _matching(algorithm: Algorithm[Any], problem: Problem, device: Device, config: Config | str | None) -> list[Config]:
    """The algorithm's configs that `config` names; those that may be chosen for None."""
    if config is None:
        return _offered(algorithm, problem, device)
    configs = list(algorithm.configs(problem, device))
    if isinstance(config, str):
        words = set(config.split())
        found = [one for one in configs if words <= set(str(one).split())]
    else:
        found = [one for one in configs if one == config]
    if not found:
        some = ", ".join(repr(str(one)) for one in configs[:8])
        more = f" and {len(configs) - 8} more" if len(configs) > 8 else ""
        raise InvalidProblem(f"config={shown(str(config))}: {algorithm.id} has for '{problem}' {some}{more}")
    return found


def _time(us: float) -> str:
    return f"{us:.0f} us" if us < 1e4 else f"{us / 1e3:.0f} ms"


def explain(problem: Problem, device: Device) -> list[Candidate]:
    """Every algorithm of the device's backend, in the registry's order: its best config, or why it does not apply."""
    candidates = []
    for one in registry.of_backend(device.kind, problem.operator):
        reason = one.refusal(problem, device)
        if reason is not None:
            candidates.append(Candidate(one.id, reason))
            continue
        predicted = _predicted(one, _offered(one, problem, device), problem, device, True)
        best = _best(one, predicted, problem, device, None)
        if best is None:
            candidates.append(Candidate(one.id, _NO_CONFIG))
            continue
        pack_us = one.pack_us(problem, best.config, device)
        candidates.append(Candidate(one.id, None, best.config, best.predicted_us, pack_us, best.workspace_bytes))
    return candidates


def plan_for(problem: Problem, choice: Choice, device: Device) -> Plan:
    """The compiled plan of a choice, kept for when the problem comes back. Raises CompileError."""
    return _plan(problem, choice.algorithm, choice.config, device)


@lru_cache(PLANS_KEPT)
def _plan(problem: Problem, algorithm: str, config: Config, device: Device) -> Plan:
    one = registry.get(algorithm, problem.operator)
    # What compiles in other processes need not wait for other threads.
    one.compile(problem, config, device)
    with making:
        return one.plan(problem, config, device).for_time(one.predict_us(problem, config, device))
