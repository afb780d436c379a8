"""Errors that tapwise raises on purpose; each message names the argument, its value and what is allowed."""

from __future__ import annotations


class TapwiseError(Exception):
    """Base of every error raised on purpose."""


class InvalidProblem(TapwiseError, ValueError):
    """A bad argument or problem string."""


class InvalidPicture(InvalidProblem, RuntimeError, TypeError):
    """A bad argument of a function of tapwise.image, where scipy.ndimage raises one of the three for the same."""


class NotApplicable(TapwiseError, ValueError):
    """An algorithm was asked for by name and does not apply, or none applies."""


class CompileError(TapwiseError, RuntimeError):
    """A generated kernel did not compile."""


class DeviceUnavailable(TapwiseError, RuntimeError):
    """No GPU, no driver, or a GPU that is too old; or the driver refused a call."""


class PeerUnavailable(TapwiseError, RuntimeError):
    """A library to measure against is not installed or does not take the problem."""
