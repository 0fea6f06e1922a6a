"""Forks Python processes that have imported torch, Lightning and our packages already.

python warm_server.py SOCKET      each message of the socket is a `Job`, with its open files

    test's process                this process               between
    message  ------------------>  fork  ------------------>  fork  -->  the process of the job
             <--- its id -----------------------------------------------/
                                                             ends

As the one between ends, the kernel gives the new process to the test's process, which has asked for
that (PR_SET_CHILD_SUBREAPER): it has the parent, the id and the end that it would have otherwise.
This process has one thread, and has run nothing but imports.
"""

import atexit
import fcntl
import gc
import importlib
import json
import os
import runpy
import signal
import socket
import sys
import threading
import time
from collections.abc import Callable
from contextlib import suppress
from dataclasses import dataclass
from pathlib import Path
from types import ModuleType, TracebackType
from typing import Any, NoReturn

IMPORTED = (
    "lightning", "loaders.workers.worker", "matplotlib.pyplot", "perfect.anchor", "perfect.compare",
    "perfect.public_names", "perfect.replay", "perfect.train", "torch.export", "torchvision",
    "trainers.fleet.hosting.device_process",
)  # fmt: skip
LARGEST = 1 << 20
MOST_FILES = 250
FIRST_COPY = 512
"""Files of this process are at this number or above, where no job wants one."""


@dataclass(frozen=True, slots=True)
class Job:
    """What `_posixsubprocess.fork_exec` was asked for."""

    argv: list[str]
    """After the name of the interpreter."""
    cwd: str
    environment: dict[str, str]
    files: list[int]
    """The numbers that the files which come with it have in the new process."""
    parent: int
    group: int
    session: bool
    """Whether it leads a session of its own."""
    blocked: list[int]
    """The signals that its parent does not receive now, and so neither does it."""


def serve(line: socket.socket) -> Job:
    """Fork for each message. Return in the new processes only."""
    while True:
        data, files, _, _ = socket.recv_fds(line, LARGEST, MOST_FILES)
        if not data:
            os._exit(0)
        if (between := os.fork()) == 0:
            if os.fork():
                os._exit(0)
            job = Job(**json.loads(data))
            become(job, files)
            line.send(str(os.getpid()).encode())
            line.close()
            return job
        for file in files:
            os.close(file)
        os.waitpid(between, 0)


def become(job: Job, files: list[int]) -> None:
    """Have the surroundings that a process of that job has when it begins."""
    while os.getppid() != job.parent:
        time.sleep(0.001)
    signal.signal(signal.SIGINT, signal.default_int_handler)
    signal.pthread_sigmask(signal.SIG_SETMASK, job.blocked)
    if job.session:
        os.setsid()
    elif job.group >= 0:
        os.setpgid(0, job.group)
    place(files, job.files)
    os.chdir(job.cwd)
    os.environ.clear()
    os.environ.update(job.environment)


def place(files: list[int], numbers: list[int]) -> None:
    """Give each file its number."""
    copies = [fcntl.fcntl(file, fcntl.F_DUPFD_CLOEXEC, FIRST_COPY) for file in files]
    for file in files:
        os.close(file)
    for copy, number in zip(copies, numbers, strict=True):
        os.dup2(copy, number)
        os.close(copy)


def program(argv: list[str], paths: list[str]) -> Callable[[], Any]:
    """Make `__main__` and the paths as an interpreter does; return what runs it."""
    main = ModuleType("__main__")
    sys.modules["__main__"] = main
    sys.orig_argv = [sys.executable, *argv]
    if argv[0] == "-m":
        sys.path[:] = [os.getcwd(), *paths]
        sys.argv = argv[1:]
        sys.modules.pop(argv[1], None)  # it is imported as a library; run it anew
        # What the interpreter itself calls for -m.
        return lambda: runpy._run_module_as_main(argv[1])  # pyright: ignore[reportAttributeAccessIssue]
    if argv[0] == "-c":
        sys.path[:] = ["", *paths]
        sys.argv = ["-c", *argv[2:]]
        code = compile(argv[1], "<string>", "exec")
    else:
        sys.path[:] = [os.path.dirname(os.path.realpath(argv[0])), *paths]
        sys.argv = argv
        main.__file__ = argv[0]
        with open(argv[0], "rb") as file:
            code = compile(file.read(), argv[0], "exec")
    return lambda: exec(code, main.__dict__)


def show(kind: type[BaseException], error: BaseException, trace: TracebackType | None) -> None:
    """Print a traceback without the frames of this file."""
    while trace is not None and trace.tb_frame.f_code.co_filename == __file__:
        trace = trace.tb_next
    sys.__excepthook__(kind, error.with_traceback(trace), trace)


def end(run: Callable[[], Any]) -> NoReturn:
    """Run a program, and end as an interpreter does: threads, exit handlers, the program's own
    objects. What was imported before the fork is left alone: taking that apart takes a second."""
    code = 0
    try:
        run()
    except SystemExit as error:
        code = exit_code(error.code)
    except BaseException as error:
        sys.excepthook(type(error), error, error.__traceback__)
        code = -signal.SIGINT if isinstance(error, KeyboardInterrupt) else 1
    del run
    threading._shutdown()  # pyright: ignore[reportAttributeAccessIssue]
    atexit._run_exitfuncs()
    names = sys.modules["__main__"].__dict__
    names.update({name: None for name in names if name != "__builtins__"})
    gc.collect()
    for stream in (sys.stdout, sys.stderr):
        with suppress(BrokenPipeError):
            if not stream.closed:
                stream.flush()
    if code < 0:
        signal.signal(-code, signal.SIG_DFL)
        os.kill(os.getpid(), -code)
    os._exit(code)


def exit_code(said: Any) -> int:
    if said is None or isinstance(said, int):
        return (said or 0) & 0xFF
    print(said, file=sys.stderr)
    return 1


def main() -> None:
    paths = sys.path[1:]
    sys.path[0] = str(Path(__file__).resolve().parents[2])  # the packages beside these tests
    given = int(sys.argv[1])
    line = socket.socket(fileno=fcntl.fcntl(given, fcntl.F_DUPFD_CLOEXEC, FIRST_COPY))
    os.close(given)
    signal.signal(signal.SIGINT, signal.SIG_IGN)  # Ctrl-C is for whoever has begun this
    for name in IMPORTED:
        importlib.import_module(name)
    threads = len(os.listdir("/proc/self/task"))
    assert threads == 1, f"a process of {threads} threads must not be forked"
    gc.collect()
    gc.freeze()
    line.send(b"ready")
    job = serve(line)
    sys.modules["numpy"].random.seed()  # as at its import
    own = filter(None, job.environment.get("PYTHONPATH", "").split(os.pathsep))
    sys.excepthook = show
    end(program(job.argv, [*map(os.path.abspath, own), *paths]))


if __name__ == "__main__":
    main()
