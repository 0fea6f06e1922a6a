"""What a step does outside of the process or on the screen while it is traced.

    print, logging     held back: said once if only the first trace says it, else refused
    a file is written  refused before it happens; so is a program that is started, or a connection
    a file is read     refused if the second trace reads one, too: its content may change

A graph runs no Python, so whatever a step does in every call would happen in traces only.
"""

import logging
import os
import sys
from collections.abc import Callable, Iterator
from contextlib import contextmanager
from threading import get_ident
from types import FrameType
from typing import Any, TextIO

from offload.errors import CaptureError
from offload.program.frames import TORCH, say_frame, user_frame

CHANGING = frozenset(
    {"os.remove", "os.rename", "os.mkdir", "os.rmdir", "os.link", "os.symlink", "os.truncate"}
    | {"os.system", "os.exec", "os.fork", "os.posix_spawn", "subprocess.Popen"}
    | {"shutil.copyfile", "shutil.move", "shutil.rmtree", "socket.connect", "sqlite3.connect"}
)
"""Audit events of what changes the world outside of the process."""
WRITING = os.O_WRONLY | os.O_RDWR | os.O_CREAT | os.O_APPEND
CODE = (".py", ".pyc", ".so")
COMPILERS = tuple(f"{TORCH}{name}" for name in ("_inductor", "_dynamo", "_functorch"))
HANDLES = "callHandlers"
ADVICE = "and a captured step runs no python. Do it in a hook (on_train_batch_end)"


class StepEffects:
    """What the traces of one step did."""

    def __init__(self) -> None:
        self._held: list[Callable[[], Any]] = []
        """Functions that say what the first trace said."""
        self._said: list[list[str]] = []
        """By trace: what it said or read."""
        self._refused = ""
        self._thread = 0

    @contextmanager
    def noted(self) -> Iterator[None]:
        """Hold back and note what the step does in this block, which is one trace."""
        global _now
        _install()
        self._said.append([])
        self._thread = get_ident()
        streams = sys.stdout, sys.stderr
        handle = logging.Logger.callHandlers
        sys.stdout, sys.stderr = (_Held(stream, self) for stream in streams)  # type: ignore[assignment]
        setattr(logging.Logger, HANDLES, self._holding(handle))
        before, _now = _now, self
        try:
            yield
        finally:
            _now = before
            setattr(logging.Logger, HANDLES, handle)
            sys.stdout, sys.stderr = streams
        if self._refused:  # the user's code may have caught the exception
            raise CaptureError(self._refused)

    def repeated(self) -> str:
        """Say what the last trace did outside of the process; empty if nothing."""
        if self._said[-1]:
            return f"{self._said[-1][0]} in every call, {ADVICE}"
        return ""

    def say(self) -> None:
        """Say what the first trace has said."""
        held, self._held = self._held, []
        for each in held:
            each()

    def _holding(self, handle: Callable[..., Any]) -> Callable[..., Any]:
        def hold(logger: logging.Logger, record: logging.LogRecord) -> None:
            if get_ident() != self._thread or logger.name.split(".", 1)[0] == "torch":
                handle(logger, record)
            else:
                self.hold(f"the step logs {record.getMessage()!r}", lambda: handle(logger, record))

        return hold

    def hold(self, what: str, say: Callable[[], Any]) -> None:
        self._said[-1].append(what)
        if len(self._said) == 1:
            self._held.append(say)

    def audited(self, event: str, args: tuple[Any, ...]) -> None:
        """Judge an audit event of Python's."""
        if get_ident() != self._thread or _by_a_compiler(sys._getframe(2)):
            return
        if event == "open":
            path, mode, flags = args
            name = os.fsdecode(path) if isinstance(path, str | bytes) else str(path)
            if name.endswith(CODE) or ".pyc." in name or name == os.devnull:
                return
            if {*(mode or "")} & {*"wax+"} or (mode is None and flags & WRITING):
                self._refuse(f"the step writes to {name}")
            self._said[-1].append(f"the step reads {name}")
        elif event in CHANGING:
            self._refuse(f"the step does {event}{args[:1]!r}")

    def _refuse(self, what: str) -> None:
        line = say_frame(user_frame(sys._getframe(1)))
        self._refused = f"{line}: {what}, {ADVICE}"
        raise CaptureError(self._refused)


def _by_a_compiler(frame: FrameType | None) -> bool:
    """Whether torch compiles something, which is refused by itself."""
    while frame is not None:
        if frame.f_code.co_filename.startswith(COMPILERS):
            return True
        frame = frame.f_back
    return False


class _Held:
    """A stream of text that notes what the tracing thread writes to it."""

    def __init__(self, stream: TextIO, effects: StepEffects) -> None:
        self._stream = stream
        self._effects = effects
        self._thread = get_ident()

    def write(self, text: str) -> int:
        by_warnings = sys._getframe(1).f_code.co_filename.endswith("warnings.py")
        if get_ident() != self._thread or by_warnings:
            return self._stream.write(text)
        self._effects.hold(f"the step prints {text!r}", lambda: self._stream.write(text))
        return len(text)

    def writelines(self, lines: Any) -> None:
        for line in lines:
            self.write(line)

    def __getattr__(self, name: str) -> Any:
        return getattr(self._stream, name)


_now: StepEffects | None = None
"""Whose trace it is."""
_installed = False


def _install() -> None:
    """Install the audit hook. Python keeps it for ever; without a trace it does nothing."""
    global _installed
    if not _installed:
        _installed = True
        sys.addaudithook(_hook)


def _hook(event: str, args: tuple[Any, ...]) -> None:
    if _now is not None and (event == "open" or event in CHANGING):
        _now.audited(event, args)
