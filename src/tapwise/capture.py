"""What a call asks of a GPU: new memory, and launches whose addresses lie in its inputs and in that memory.

While a call is captured, the addresses of its arrays say where they come from. What is neither memory nor a launch
refuses the capture: it cannot be done again without the call.
"""

from __future__ import annotations

from collections.abc import Iterator, Mapping, Sequence
from contextlib import contextmanager
from threading import local
from typing import TYPE_CHECKING, Any

if TYPE_CHECKING:
    from tapwise.cuda.jit.launch import Launch

_here = local()


class Address(int):
    """An address in array number `array` of a capture, `offset` bytes behind its first element."""

    array: int
    offset: int

    def __new__(cls, value: int, array: int, offset: int = 0) -> Address:
        made = super().__new__(cls, value)
        made.array, made.offset = array, offset
        return made

    def __add__(self, other: int) -> Address:
        return Address(int(self) + other, self.array, self.offset + other)

    __radd__ = __add__


class Capture:
    """The memory and the launches of one call. Arrays are numbered: the inputs, then new ones as they come.

    `owners`: the library's objects. They are kept, so that no address is of two arrays.
    """

    def __init__(self, inputs: Sequence[Any]) -> None:
        self.owners = list(inputs)
        self.inputs = len(self.owners)
        self.launches: list[tuple[Launch, dict[str, int]]] = []
        # What the call gave to its user: (the library's object, the number of the array whose memory it has).
        self.given: list[tuple[Any, int]] = []
        self.refused = False

    def address(self, owner: Any, value: int) -> int:
        """The address of an input."""
        for number, one in enumerate(self.owners[: self.inputs]):
            if one is owner:
                return Address(value, number)
        self.refused = True
        return value

    def new(self, owner: Any, value: int) -> Address:
        """The address of new memory."""
        self.owners.append(owner)
        return Address(value, len(self.owners) - 1)

    def give(self, given: Any, address: int) -> None:
        if isinstance(address, Address):
            self.given.append((given, address.array))

    def launched(self, launch: Launch, addresses: Mapping[str, int]) -> None:
        self.launches.append((launch, dict(addresses)))


def active() -> Capture | None:
    """The capture of this thread."""
    return getattr(_here, "capture", None)


def refuse() -> None:
    """Called by what is neither new memory of the user's library nor a launch."""
    if (seen := active()) is not None:
        seen.refused = True


@contextmanager
def capturing(inputs: Sequence[Any]) -> Iterator[Capture]:
    """What this thread asks of a GPU is captured meanwhile."""
    # What is captured within another call, or done again, that call's own capture does not see.
    refuse()
    before, _here.capture = active(), Capture(inputs)
    try:
        yield _here.capture
    finally:
        _here.capture = before


@contextmanager
def aside() -> Iterator[None]:
    """What is made meanwhile stays when the call has ended: its memory is no part of a capture."""
    before, _here.capture = active(), None
    try:
        yield
    finally:
        _here.capture = before
