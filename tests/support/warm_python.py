"""Python processes that a test starts are forked from one that has imported torch: warm_server.py.

An import of torch and Lightning takes seconds of a CPU, and a fork takes none of them. Nothing else
changes: `subprocess` and `multiprocessing` (spawn, fork server) start processes by one function of
CPython's; where that is asked for this interpreter, `WarmPython` does it. The new process has the
files, folder, environment, arguments, parent, signals and end that it would have otherwise.

A process is started as ever where it could tell a difference: it has flags (`-S`), or an
environment that is read at a start or at imports; another `perfect` is in its path; a test is
marked `cold`, because it looks at imports or at memory.
"""

import _posixsubprocess
import ctypes
import dataclasses
import json
import os
import signal
import socket
import subprocess
import sys
import threading
from collections.abc import Mapping, Sequence
from pathlib import Path
from typing import Any

from support.warm_server import LARGEST, Job

ROOT = Path(__file__).parents[2]
SERVER = Path(__file__).with_name("warm_server.py")
PACKAGES = ("loaders", "offload", "perfect", "trainers")
READ_AT_START = (
    "CUDA", "KMP", "LD_", "MALLOC", "MKL", "OMP", "OPENBLAS", "PYTHON", "PYTORCH", "TORCH",
)  # fmt: skip
PR_SET_CHILD_SUBREAPER = 36

start_cold = _posixsubprocess.fork_exec


class WarmPython:
    """A context manager: within it, this process starts Python by a fork. The first start takes as
    long as the imports."""

    def __init__(self) -> None:
        self.cold = False
        """Whether a test wants real starts."""
        self._lock = threading.Lock()
        self._owner = os.getpid()
        self._server: subprocess.Popen[bytes] | None = None
        self._line: socket.socket | None = None
        self._control = ctypes.CDLL(None).prctl

    def __enter__(self) -> "WarmPython":
        # Processes that run on more than one thread must not be forked.
        if sys.platform == "linux" and os.environ.get("OMP_NUM_THREADS") == "1":
            self._replace(self.start)
        return self

    def __exit__(self, *_: object) -> None:
        self._replace(start_cold)
        if self._server is not None and self._line is not None:
            self._line.close()
            self._server.wait()

    def _replace(self, start: Any) -> None:
        _posixsubprocess.fork_exec = start
        subprocess._fork_exec = start  # pyright: ignore[reportAttributeAccessIssue]

    def start(self, *asked: Any) -> int:
        """Return the id of the new process. Arguments of `_posixsubprocess.fork_exec`."""
        if self.cold or os.getpid() != self._owner or (job := job_of(asked)) is None:
            return start_cold(*asked)
        files = [own if file < 0 else file for own, file in enumerate(pick(asked, 6, 9, 11))]
        files += job.files[3:]
        with self._lock:
            line = self._line or self._begin()
            self._control(PR_SET_CHILD_SUBREAPER, 1, 0, 0, 0)
            try:
                socket.send_fds(line, [json.dumps(dataclasses.asdict(job)).encode()], files)
                if not (answer := line.recv(LARGEST)):
                    raise RuntimeError("the process that forks Python processes has ended")
            finally:
                self._control(PR_SET_CHILD_SUBREAPER, 0, 0, 0, 0)
        return int(answer)

    def _begin(self) -> socket.socket:
        line, theirs = socket.socketpair(socket.AF_UNIX, socket.SOCK_SEQPACKET)
        self._replace(start_cold)
        self._server = subprocess.Popen(
            [sys.executable, str(SERVER), str(theirs.fileno())],
            env={name: it for name, it in os.environ.items() if name != "PYTHONPATH"},
            cwd="/", stdin=subprocess.DEVNULL, pass_fds=[theirs.fileno()],
        )  # fmt: skip
        self._replace(self.start)
        theirs.close()
        assert line.recv(LARGEST) == b"ready", "the process that forks others has not started"
        self._line = line
        return line


def pick(asked: Sequence[Any], *places: int) -> list[Any]:
    return [asked[place] for place in places]


def job_of(asked: Sequence[Any]) -> Job | None:
    """Return what is to be forked, or None if a process could tell that from a start."""
    argv, programs, closes, files, cwd, environment = asked[:6]
    told_errors, _, session, group, *rights, before, _ = asked[13:]
    name, *argv = map(os.fsdecode, argv)
    flags = subprocess._args_from_interpreter_flags()  # pyright: ignore[reportAttributeAccessIssue]
    if argv[: len(flags)] == flags:  # our own, as multiprocessing passes them on
        argv = argv[len(flags) :]
    folder = os.fsdecode(cwd or os.getcwd())
    if environment is None:
        given = dict(os.environ)
    else:
        given = dict(os.fsdecode(each).split("=", 1) for each in environment)
    is_plain = (
        name == sys.executable
        and [*map(os.fsdecode, programs)] == [name]
        and closes
        and before is None
        and rights in ([None, None, None, -1], [-1, None, -1, -1])
    )
    if not is_plain or not can_run(argv, folder, given):
        return None
    group = group if group >= 0 else os.getpgrp()
    kept = [0, 1, 2, *(file for file in files if file != told_errors)]
    blocked = [*map(int, signal.pthread_sigmask(signal.SIG_BLOCK, ()))]
    return Job(argv, folder, given, kept, os.getpid(), group, bool(session), blocked)


def can_run(argv: Sequence[str], folder: str, environment: Mapping[str, str]) -> bool:
    """Whether a program is run as it would be by an interpreter that starts."""
    if not argv or not os.path.isdir(folder):
        return False
    has_flag = argv[0].startswith("-")
    if has_flag and argv[0] not in ("-c", "-m"):
        return False
    first = folder if has_flag else os.path.join(folder, os.path.dirname(argv[0]))
    paths = [first, *environment.get("PYTHONPATH", "").split(os.pathsep)]
    found = [Path(folder, path, name) for path in paths for name in PACKAGES]
    others = [path for path in found if path.exists() and path.parent.resolve() != ROOT]
    return not others and read_at_start(environment) == read_at_start(os.environ)


def read_at_start(environment: Mapping[str, str]) -> dict[str, str]:
    return {
        name: value
        for name, value in environment.items()
        if name.startswith(READ_AT_START) and name != "PYTHONPATH"
    }
