"""Forks a process for each line that it reads: `{"program": "peer", "out": FOLDER, ...}`.

    stdin    a line of settings          -> a child, whose output is FOLDER/said.txt
    stdout   {"pid": 123}                   the answer to each line, in turn
    FOLDER/ended.json                       how the child has ended: its exit code, -9 for SIGKILL

A peer's imports take seconds of a CPU, and a fork takes none of them. This process has one thread
and has run nothing yet when it forks. At the end of its input it kills its children.
"""

import json
import os
import selectors
import signal
import sys
import threading
import traceback
from collections.abc import Callable, Mapping
from importlib import import_module
from pathlib import Path
from typing import Any

from benchmarks.swarms import anchor, network, peer


def call(settings: dict[str, Any]) -> None:
    """`"function": "module:name"` is called with the settings."""
    module, name = settings["function"].split(":")
    getattr(import_module(module), name)(settings)


PROGRAMS: Mapping[str, Callable[[dict[str, Any]], None]] = {
    "peer": peer.main,
    "anchor": anchor.main,
    "call": call,
}


def child(settings: dict[str, Any]) -> int:
    """Be that process. Returns its exit code."""
    signal.set_wakeup_fd(-1)
    signal.signal(signal.SIGCHLD, signal.SIG_DFL)
    signal.signal(signal.SIGINT, signal.default_int_handler)
    out = Path(settings["out"])
    said = os.open(out / "said.txt", os.O_WRONLY | os.O_CREAT | os.O_APPEND, 0o644)
    nothing = os.open(os.devnull, os.O_RDONLY)
    os.dup2(nothing, 0)
    os.dup2(said, 1)
    os.dup2(said, 2)
    try:
        if "namespace" in settings:
            network.enter(settings["namespace"])
        PROGRAMS[settings["program"]](settings)
        threading._shutdown()  # pyright: ignore[reportAttributeAccessIssue] # as an end does
        return 0
    except BaseException:
        traceback.print_exc()
        return 1
    finally:
        sys.stdout.flush()
        sys.stderr.flush()


def reap(children: dict[int, Path]) -> None:
    for pid in list(children):
        found, status = os.waitpid(pid, os.WNOHANG)
        if found:
            told = children.pop(pid) / "ended.json"
            part = told.with_suffix(".part")
            part.write_text(json.dumps({"code": os.waitstatus_to_exitcode(status)}))
            part.rename(told)


def main() -> None:
    wakes, woken = os.pipe()
    for end in (wakes, woken):
        os.set_blocking(end, False)
    signal.signal(signal.SIGCHLD, lambda *_: None)
    signal.signal(signal.SIGINT, signal.SIG_IGN)  # Ctrl-C is for whoever has begun this.
    signal.set_wakeup_fd(woken)
    children: dict[int, Path] = {}
    selector = selectors.DefaultSelector()
    selector.register(0, selectors.EVENT_READ)
    selector.register(wakes, selectors.EVENT_READ)
    print(json.dumps({"tasks": len(os.listdir("/proc/self/task"))}), flush=True)
    rest = b""
    while True:
        ready = {key.fd for key, _ in selector.select()}
        if wakes in ready:
            os.read(wakes, 4096)
        reap(children)
        if 0 not in ready:
            continue
        data = os.read(0, 1 << 16)
        if not data:
            break
        *lines, rest = (rest + data).split(b"\n")
        for line in lines:
            settings = json.loads(line)
            if (pid := os.fork()) == 0:
                os._exit(child(settings))
            children[pid] = Path(settings["out"])
            print(json.dumps({"pid": pid}), flush=True)
    for pid in children:
        os.kill(pid, signal.SIGKILL)


if __name__ == "__main__":
    main()
