"""NVRTC in processes of its own, which nobody else's compiles touch.

NVRTC keeps some options of a compile for all later ones of its process, whoever asks: behind one with -G the same
source and options give other code, in 13.0 and in 13.5. Behind convolutions of PyTorch and cuDNN in the process,
kernels of cuda.few_channels compiled with 13.0 took 2.1 to 3.5 times as long on an H200, with as many registers and no
spill.

This file is run as a script, too: the other side. It imports nothing of tapwise.
"""

from __future__ import annotations

import atexit
import os
import pickle
import signal
import subprocess
import sys
import threading
from contextlib import suppress
from pathlib import Path
from typing import Any, Final, NamedTuple

# A process that is not asked for so long ends. Each takes some 130 MB, so there are not many.
IDLE_SECONDS: Final = 60.0
MOST: Final = min(16, os.cpu_count() or 1)


class Result(NamedTuple):
    """`code` is empty where NVRTC refuses; `log` has its messages and ptxas' report."""

    code: bytes
    log: str


class _Process:
    """The other side, and the pipes to it."""

    def __init__(self) -> None:
        # With -P the folder of this file, whose names are others' too, is not searched.
        command = [sys.executable, "-P", __file__]
        self._process = subprocess.Popen(command, stdin=subprocess.PIPE, stdout=subprocess.PIPE)
        assert self._process.stdin and self._process.stdout
        self._questions, self._answers = self._process.stdin, self._process.stdout
        self._first: tuple[object, ...] = (sys.path,)

    def ask(self, text: str, options: tuple[str, ...]) -> Result:
        """Raises EOFError, OSError where the process has ended."""
        for one in (*self._first, (text, options)):
            pickle.dump(one, self._questions)
        self._questions.flush()
        self._first = ()
        return Result(*pickle.load(self._answers))

    def end(self, wait_s: float = 0.0) -> int:
        """Its status. Killed where it does not end by itself for so long."""
        with suppress(subprocess.TimeoutExpired):
            self._process.wait(wait_s)
        self._process.kill()
        with suppress(OSError):
            # What the other side has not read is written when the pipe is closed.
            self._process.communicate()
        return self._process.wait()


# Processes that wait to be asked, and turns to ask one.
_free: list[_Process] = []
_turns = threading.Semaphore(MOST)


@atexit.register
def _at_exit() -> None:
    while _free:
        _free.pop().end()


def _in_child() -> None:
    global _turns
    # They are the parent's, as are the threads whose turn it is.
    _free.clear()
    _turns = threading.Semaphore(MOST)


if hasattr(os, "register_at_fork"):
    os.register_at_fork(after_in_child=_in_child)


def compile_cubin(text: str, options: tuple[str, ...]) -> Result:
    """CUDA C++ compiled with NVRTC's options, for several threads at once.

    Where Python is part of another program or may start no process, in this one. Raises OSError where NVRTC takes its
    process down; in this process ImportError and RuntimeError, too.
    """
    if not Path(sys.executable or "").name.lower().startswith("python"):
        return compile_here(text, options)
    with _turns:
        return _asked(text, options)


def _asked(text: str, options: tuple[str, ...]) -> Result:
    while True:
        known = bool(_free)
        try:
            process = _free.pop() if known else _Process()
        except IndexError:
            # Another thread was faster.
            continue
        except OSError:
            return compile_here(text, options)
        try:
            result = process.ask(text, options)
        except (EOFError, OSError, pickle.UnpicklingError) as error:
            # Its pipes were closed a moment ago.
            status = process.end(1.0)
            # One that was there before was idle for too long.
            if not known:
                raise OSError(f"NVRTC's process ended with status {status}") from error
        except BaseException:
            process.end()
            raise
        else:
            _free.append(process)
            return result


def compile_here(text: str, options: tuple[str, ...]) -> Result:
    """The same in this process."""
    from cuda.bindings import nvrtc

    def check(result: tuple[Any, ...]) -> Any:
        status, *values = result
        if status:
            raise RuntimeError(f"NVRTC gives {nvrtc.nvrtcGetErrorString(status)[1].decode()}")
        return values[0] if values else None

    program = check(nvrtc.nvrtcCreateProgram(text.encode(), b"", 0, [], []))
    try:
        (status,) = nvrtc.nvrtcCompileProgram(program, len(options), [option.encode() for option in options])
        log = bytearray(check(nvrtc.nvrtcGetProgramLogSize(program)))
        check(nvrtc.nvrtcGetProgramLog(program, log))
        code = bytearray()
        if not status:
            code = bytearray(check(nvrtc.nvrtcGetCUBINSize(program)))
            check(nvrtc.nvrtcGetCUBIN(program, code))
    finally:
        check(nvrtc.nvrtcDestroyProgram(program))
    return Result(bytes(code), log.rstrip(b"\0").decode(errors="replace"))


def _answer() -> None:
    """Answer until the other side closes its pipe, or is silent for too long."""
    # Ctrl-C is for the other side.
    signal.signal(signal.SIGINT, signal.SIG_IGN)
    answers, questions = os.fdopen(os.dup(1), "wb"), sys.stdin.buffer
    # What libraries print is no answer.
    os.dup2(2, 1)
    try:
        sys.path[:] = pickle.load(questions)
    except EOFError:
        return
    while True:
        idle = threading.Timer(IDLE_SECONDS, os._exit, (0,))
        idle.daemon = True
        idle.start()
        try:
            text, options = pickle.load(questions)
        except EOFError:
            return
        idle.cancel()
        try:
            result = compile_here(text, options)
        except Exception as error:
            result = Result(b"", f"{type(error).__name__}: {error}")
        pickle.dump(tuple(result), answers)
        answers.flush()


if __name__ == "__main__":
    _answer()
