"""Problems of windows that move over an image, and the grammar of their strings."""

from __future__ import annotations

import re
from collections.abc import Callable, Mapping
from dataclasses import dataclass, fields
from typing import Any, ClassVar, Final, Self

from tapwise.arguments import number_in, one_of, settle_flags, shown, whole, wholes, words_of
from tapwise.errors import InvalidProblem
from tapwise.forks import cached_property
from tapwise.problem import DTYPES, LAYOUTS, Problem

Pair = tuple[int, int]

# Letters of the spatial axes by their number, innermost last: input, output and filter sizes.
INPUT_LETTERS: Final = {1: ("w",), 2: ("h", "w"), 3: ("d", "h", "w")}
FILTER_LETTERS: Final = {1: ("s",), 2: ("r", "s"), 3: ("t", "r", "s")}
AXIS_NAMES: Final = {1: ("width",), 2: ("height", "width"), 3: ("depth", "height", "width")}
STEPS: Final = ("stride", "pad", "dilation")

# Of a stride, a dilation or a side of padding: what lies beyond says nothing that a smaller one does not.
LARGEST_STEP: Final = 2**31 - 1

_NUMBER_WORD: Final = re.compile(r"([a-z]+)([0-9][0-9:x]*)")


@dataclass(frozen=True)
class Words:
    """Words that say one thing: `meanings` gives the fields that each of them sets; the default needs no word.

    Or, without meanings, a number behind the field's name: "groups4". Or `read`: words that are the field's values, by
    the function that gives a word's value, and None for others.
    """

    name: str
    meanings: Mapping[str, Mapping[str, Any]] | None = None
    read: Callable[[str], Any] | None = None


def choices(name: str, words: tuple[str, ...]) -> Words:
    """Words that are the field's values themselves."""
    return Words(name, {word: {name: word} for word in words})


def flag(word: str, name: str, value: bool = True) -> Words:
    return Words(name, {word: {name: value}})


DTYPE_WORDS: Final = choices("dtype", tuple(DTYPES))


@dataclass(frozen=True, kw_only=True)
class WindowProblem(Problem):
    """What problems of windows share: x (n, c, *spatial), and a window of `kernel` taps an axis that moves over it.

    `padding` holds (before, after) for each spatial axis; stride, padding, dilation are in elements.
    A string is a name (`NAMES`), sizes, stride, padding, dilation and the words of `WORDS`, in that order.
    """

    # First words, and what they say; empty where sizes come first.
    NAMES: ClassVar[Mapping[str, Mapping[str, Any]]] = {}
    EXAMPLE: ClassVar[str]
    # Numbers of spatial axes.
    AXES: ClassVar[tuple[int, ...]] = (1, 2, 3)
    # Letters of sizes that stand between those of x and those of the kernel; each is a field.
    SIZES: ClassVar[tuple[str, ...]] = ()
    # A stride that is not given: the kernel's size, or 1.
    STRIDE_IS_KERNEL: ClassVar[bool] = False
    WORDS: ClassVar[tuple[Words, ...]] = (DTYPE_WORDS,)
    # Fields with a fixed set of values.
    ALLOWED: ClassVar[Mapping[str, tuple[Any, ...]]] = {"dtype": tuple(DTYPES), "layout": LAYOUTS}

    n: int
    c: int
    spatial: tuple[int, ...]
    kernel: tuple[int, ...]
    stride: tuple[int, ...]
    padding: tuple[Pair, ...]
    dilation: tuple[int, ...]
    dtype: str = "f32"
    layout: str = "nchw"

    @cached_property
    def reach(self) -> tuple[int, ...]:
        """Extent of the dilated window on each axis."""
        return tuple((r - 1) * d + 1 for r, d in zip(self.kernel, self.dilation, strict=True))

    @property
    def ends(self) -> tuple[int, ...]:
        """Where the last window ends on each axis, in the padded image."""
        windows = zip(self.output, self.stride, self.reach, strict=True)
        return tuple((count - 1) * stride + reach for count, stride, reach in windows)

    @cached_property
    def output(self) -> tuple[int, ...]:
        """Windows on each axis."""
        return tuple(
            (size + sum(pad) - reach) // stride + 1
            for size, pad, reach, stride in zip(self.spatial, self.padding, self.reach, self.stride, strict=True)
        )

    @property
    def window(self) -> tuple[tuple[int, ...], tuple[int, ...], tuple[Pair, ...], tuple[int, ...]]:
        """(kernel, stride, padding, dilation)."""
        return self.kernel, self.stride, self.padding, self.dilation

    @property
    def x_shape(self) -> tuple[int, ...]:
        return (self.n, self.c, *self.spatial)

    @property
    def spatial_axes(self) -> int:
        return len(self.spatial)

    @property
    def _shaped_by(self) -> str:
        return f"; stride={self.stride}, padding={self.padding}"

    def canonical(self, axes: int = 2) -> Self:
        """With so many spatial axes at least: those that lack are put before the others, with a size of one."""
        extra = axes - len(self.spatial)
        if extra <= 0:
            return self
        return self._planar if axes == 2 else self._with_more(extra)

    @cached_property
    def _planar(self) -> Self:
        """With two spatial axes instead of one: asked for by every call."""
        return self._with_more(1)

    def _with_more(self, extra: int) -> Self:
        ones, sides = (1,) * extra, ((0, 0),) * extra
        fields = {name: ones + getattr(self, name) for name in ("spatial", "kernel", "stride", "dilation")}
        return self.replace(**fields, padding=sides + self.padding)

    def __post_init__(self) -> None:
        """Raises InvalidProblem for sizes out of range, and a padded input smaller than the dilated kernel."""
        for name in ("n", "c", *self.SIZES):
            object.__setattr__(self, name, whole(getattr(self, name), name))
        for name in ("spatial", "kernel", "stride", "dilation"):
            object.__setattr__(self, name, wholes(getattr(self, name), name))
        object.__setattr__(self, "padding", _pairs(self.padding))
        settle_flags(self)
        axes = len(self.spatial)
        if axes not in self.AXES:
            *most, last = map(str, self.AXES)
            raise InvalidProblem(
                f"spatial={shown(self.spatial)}: {', '.join(most)} or {last} axes are allowed, not {axes}"
            )
        for name in ("kernel", "stride", "padding", "dilation"):
            if len(getattr(self, name)) != axes:
                raise InvalidProblem(
                    f"{name}={shown(getattr(self, name))}: one value for each of the {axes} spatial axes"
                )
        for name in ("n", "c", *self.SIZES):
            if getattr(self, name) < 0:
                raise InvalidProblem(f"{name}={getattr(self, name)}: at least 0")
        for name, least in (("spatial", 0), ("kernel", 1), ("stride", 1), ("dilation", 1)):
            if min(getattr(self, name)) < least:
                raise InvalidProblem(f"{name}={getattr(self, name)}: each at least {least}")
        if min(min(pair) for pair in self.padding) < 0:
            raise InvalidProblem(f"padding={self.padding}: each side at least 0")
        for name, allowed in self.ALLOWED.items():
            one_of(getattr(self, name), name, allowed)
        for axis, reach in enumerate(self.reach):
            padded = self.spatial[axis] + sum(self.padding[axis])
            if padded < self._least_padded(axis):
                raise InvalidProblem(
                    f"kernel={self.kernel} with dilation={self.dilation} spans {reach} in {AXIS_NAMES[axes][axis]}, "
                    f"larger than the padded input of {padded} (input {self.spatial[axis]}, "
                    f"padding {self.padding[axis]})"
                )
        # A window's own size is a stride, however large: it is the default of pooling.
        longest = max(LARGEST_STEP, *self.kernel)
        for name, largest in (
            ("stride", max(self.stride)),
            ("padding", max(map(max, self.padding))),
            ("dilation", max(self.dilation)),
        ):
            if largest > longest:
                raise InvalidProblem(f"{name}={getattr(self, name)}: at most {LARGEST_STEP} is allowed")

    def _least_padded(self, axis: int) -> int:
        """The smallest padded input that a window fits."""
        return self.reach[axis]

    @classmethod
    def parse(cls, text: str) -> Self:
        """The problem that a string names; the inverse of str(). Words may stand in any order, behind the first name.

        Sizes (`n8 c64 h56 w56 r3 s3`; n defaults to 1); `stride2` or `stride2x1`; `pad1`, `pad1x0` or `pad0:1x0:1`
        (top:bottom x left:right); `dilation2`; and the operator's own.
        """
        words, given = words_of(text), dict[str, str]()
        own: dict[str, Any] = {}
        if cls.NAMES:
            if not words or words[0] not in cls.NAMES:
                raise InvalidProblem(f"problem {shown(text)}: an example is {cls.EXAMPLE!r}")
            own |= cls.NAMES[words.pop(0)]
        most = max(cls.AXES)
        letters = {"n", "c", *cls.SIZES, *INPUT_LETTERS[most], *FILTER_LETTERS[most]}
        counts = {group.name for group in cls.WORDS if group.meanings is None and group.read is None}
        readers = {group.name: group.read for group in cls.WORDS if group.read is not None}
        meanings = {word: (group.name, what) for group in cls.WORDS for word, what in (group.meanings or {}).items()}
        for word in words:
            match = _NUMBER_WORD.fullmatch(word)
            name, value = match.groups() if match else ("", "")
            if word in meanings:
                name, what = meanings[word]
                own |= what
            elif said := {field: read(word) for field, read in readers.items() if read(word) is not None}:
                name, own = next(iter(said)), own | said
            elif not (name in STEPS or (value.isdigit() and name in letters | counts)):
                raise InvalidProblem(
                    f"problem {shown(text)}: word {shown(word)} is not known; an example is {cls.EXAMPLE!r}"
                )
            if name in given:
                raise InvalidProblem(f"problem {shown(text)}: word {shown(word)} gives {name} a second time")
            given[name] = value
        own |= {name: number_in(given[name], text) for name in counts if name in given}
        return cls._build(text, given, own)

    @classmethod
    def _build(cls, text: str, given: Mapping[str, str], own: Mapping[str, Any]) -> Self:
        """The problem from its sizes and steps by name, and the operator's own fields."""
        axes = 3 if {"d", "t"} & set(given) else 2 if {"h", "r"} & set(given) else 1
        for letter in ("c", *cls.SIZES, *INPUT_LETTERS[axes], *FILTER_LETTERS[axes]):
            if letter not in given:
                raise InvalidProblem(f"problem {shown(text)}: no word gives {letter}")
        found: dict[str, Any] = {letter: number_in(given[letter], text) for letter in ("c", *cls.SIZES)} | {
            "n": number_in(given.get("n", "1"), text)
        }
        for name, letters in (("spatial", INPUT_LETTERS), ("kernel", FILTER_LETTERS)):
            found[name] = tuple(number_in(given[letter], text) for letter in letters[axes])
        for name, default in (("stride", found["kernel"] if cls.STRIDE_IS_KERNEL else None), ("dilation", None)):
            found[name] = default or (1,) * axes
            if name in given:
                pairs = sides(given[name], axes, name, text)
                if any(before != after for before, after in pairs):
                    raise InvalidProblem(f"problem {shown(text)}: {name} takes one number an axis, not two with ':'")
                found[name] = tuple(before for before, _ in pairs)
        found["padding"] = sides(given.get("pad", "0"), axes, "pad", text)
        try:
            return cls(**found, **own)
        except InvalidProblem as error:
            raise InvalidProblem(f"problem {shown(text)}: {error}") from None

    def __str__(self) -> str:
        axes = len(self.spatial)
        words = [name for name, what in self.NAMES.items() if self._has(what)]
        words += ([f"n{self.n}"] if self.n != 1 else []) + [f"c{self.c}"]
        words += [f"{a}{v}" for a, v in zip(INPUT_LETTERS[axes], self.spatial, strict=True)]
        words += [f"{letter}{getattr(self, letter)}" for letter in self.SIZES]
        words += [f"{a}{v}" for a, v in zip(FILTER_LETTERS[axes], self.kernel, strict=True)]
        if self.stride != (self.kernel if self.STRIDE_IS_KERNEL else (1,) * axes):
            words.append("stride" + join(self.stride))
        if any(any(pair) for pair in self.padding):
            words.append("pad" + join([f"{a}" if a == b else f"{a}:{b}" for a, b in self.padding]))
        if set(self.dilation) != {1}:
            words.append("dilation" + join(self.dilation))
        defaults = {field.name: field.default for field in fields(self)}
        for group in self.WORDS:
            if group.meanings is None:
                value = getattr(self, group.name)
                word = value if group.read else f"{group.name}{value}"
                words += [word] if value != defaults[group.name] else []
                continue
            said = [
                word
                for word, what in group.meanings.items()
                if self._has(what) and any(defaults[name] != value for name, value in what.items())
            ]
            words += said[:1]
        return " ".join(words)

    def _has(self, what: Mapping[str, Any]) -> bool:
        return all(getattr(self, name) == value for name, value in what.items())


def _pairs(padding: Any) -> tuple[Pair, ...]:
    """Padding as (before, after) in plain numbers, an axis each."""
    kinds = (tuple, list)
    if not isinstance(padding, kinds) or any(not isinstance(pair, kinds) or len(pair) != 2 for pair in padding):
        raise InvalidProblem(f"padding={shown(padding)}: (before, after) for each axis is allowed")
    return tuple((whole(before, "padding"), whole(after, "padding")) for before, after in padding)


def join(values: tuple[int, ...] | list[str]) -> str:
    """One number when all axes agree, else `axb`."""
    texts = [str(v) for v in values]
    return texts[0] if len(set(texts)) == 1 else "x".join(texts)


def sides(value: str, axes: int, name: str, text: str) -> tuple[Pair, ...]:
    """`2`, `2x1` or `0:1x0:1` as a (before, after) pair for each axis."""
    pairs = []
    for part in value.split("x"):
        numbers = part.split(":")
        if len(numbers) > 2 or not all(number.isdigit() for number in numbers):
            raise InvalidProblem(
                f"problem {shown(text)}: word {shown(name + value)} is not a number, a pair or sides a:bxc:d"
            )
        pairs.append((number_in(numbers[0], text), number_in(numbers[-1], text)))
    if len(pairs) == 1:
        pairs *= axes
    if len(pairs) != axes:
        raise InvalidProblem(
            f"problem {shown(text)}: word {shown(name + value)} gives {len(pairs)} values for {axes} axes"
        )
    return tuple(pairs)
