"""Arguments as users give them: whole numbers, flags and words; or an error that names the argument and its value."""

from __future__ import annotations

from dataclasses import fields
from functools import cache
from operator import index
from typing import Any, Final

from tapwise.errors import InvalidProblem

# What kernels count with, and the longest decimal of it.
LARGEST: Final = 2**63 - 1
_DIGITS: Final = 19
_MOST_SHOWN: Final = 100


def shown(value: Any) -> str:
    """A value in an error's message: one line, however large it is."""
    try:
        shape = getattr(value, "shape", None)
        if isinstance(shape, tuple) and shape and not isinstance(value, type):
            return f"an array of shape {_cut(str(tuple(shape)))}"
        return _cut(repr(value))
    # Whatever is wrong with it: the message is about the argument.
    except Exception:
        return f"a {type(value).__name__}"


def _cut(text: str) -> str:
    line = " ".join(text.split())
    return line if len(line) <= _MOST_SHOWN else f"{line[:_MOST_SHOWN]}..."


def whole(value: Any, name: str, allowed: str = "a whole number") -> int:
    """A whole number that kernels can count with; NumPy's too. Raises InvalidProblem for anything else."""
    try:
        # True is 1 to Python, and a mistake here.
        number = None if type(value) is bool else index(value)
    except (TypeError, ValueError, RuntimeError):
        number = None
    if number is None:
        raise InvalidProblem(f"{name}={shown(value)}: {allowed} is allowed")
    if not -LARGEST <= number <= LARGEST:
        raise InvalidProblem(f"{name}={shown(value)}: at most 2^63 - 1 is allowed")
    return number


def flag(value: Any, name: str) -> bool:
    """True or False; NumPy's too, and 1 or 0. Raises InvalidProblem for anything else."""
    if type(value) is bool:
        return value
    # NumPy's bool goes by two names.
    if type(value).__name__ in ("bool", "bool_", "int"):
        for one in (True, False):
            if value == one:
                return one
    raise InvalidProblem(f"{name}={shown(value)}: True or False is allowed")


def word(value: Any, name: str, allowed: str) -> str:
    """A string. Raises InvalidProblem for anything else, which could be no key."""
    if not isinstance(value, str):
        raise InvalidProblem(f"{name}={shown(value)}: {allowed} is allowed")
    return value


def wholes(values: Any, name: str) -> tuple[int, ...]:
    """Whole numbers, of a tuple or a list. Raises InvalidProblem for anything else."""
    if type(values) is tuple and all(type(value) is int and -LARGEST <= value <= LARGEST for value in values):
        return values
    if not isinstance(values, (tuple, list)):
        raise InvalidProblem(f"{name}={shown(values)}: a whole number for each axis is allowed")
    return tuple(whole(value, name) for value in values)


def one_of(value: Any, name: str, allowed: tuple[Any, ...]) -> None:
    """Raises InvalidProblem for what is none of the allowed words."""
    if not (value is None or isinstance(value, str)) or value not in allowed:
        raise InvalidProblem(f"{name}={shown(value)}: one of {', '.join(map(str, allowed))}")


def settle_flags(problem: Any) -> None:
    """Every field that is declared as True or False, made one. Raises InvalidProblem for another value."""
    kind: Any = type(problem)
    for name in _flags_of(kind):
        value = getattr(problem, name)
        if type(value) is not bool:
            object.__setattr__(problem, name, flag(value, name))


@cache
def _flags_of(kind: Any) -> tuple[str, ...]:
    return tuple(field.name for field in fields(kind) if field.type in (bool, "bool"))


def words_of(text: Any) -> list[str]:
    """The words of a problem's string. Raises InvalidProblem for what is none."""
    if not isinstance(text, str):
        raise InvalidProblem(f"problem {shown(text)}: a string is allowed, such as 'c64 h56 w56 k64 r3 s3 pad1'")
    return text.split()


def number_in(digits: str, text: str) -> int:
    """A number of a problem's string, `text`, from its digits. Raises InvalidProblem for one beyond 2^63."""
    number = int(digits) if len(digits) <= _DIGITS else LARGEST + 1
    if number > LARGEST:
        raise InvalidProblem(f"problem {shown(text)}: the number {shown(digits)} is beyond 2^63 - 1")
    return number
