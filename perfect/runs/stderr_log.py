"""Keeps what C++ libraries write to stderr out of the terminal, and in a file of the run folder.

Gloo writes lines about each member that has died, also where the swarm goes on without it. Nobody
can tell it not to, and it knows no stderr but the file descriptor.

    python   -- sys.stderr ------------------------> the terminal
    C++      -- descriptor 2 --> stderr.log -- end --> the terminal, but for gloo's lines
"""

import faulthandler
import os
import re
import sys
from collections.abc import Iterator
from contextlib import contextmanager
from io import UnsupportedOperation
from pathlib import Path

STDERR = 2
OF_GLOO = re.compile(rb"/gloo/|ProcessGroupGloo\.cpp")


@contextmanager
def gloo_apart(log: Path) -> Iterator[None]:
    """Send what is not Python's to `log` in this block, and show at its end what is not gloo's. If
    the process dies in the block, Python says where on the terminal, and `log` has the rest."""
    before = sys.stderr
    terminal = os.fdopen(os.dup(STDERR), "w", buffering=1)
    reports = faulthandler.is_enabled()
    with terminal, log.open("ab+") as file:
        begin = file.tell()
        if _descriptor(before) == STDERR:
            sys.stderr = terminal
        if not reports:
            faulthandler.enable(terminal)
        os.dup2(file.fileno(), STDERR)
        try:
            yield
        finally:
            os.dup2(terminal.fileno(), STDERR)
            sys.stderr = before
            if not reports:
                faulthandler.disable()
            file.seek(begin)
            for line in file:
                if not OF_GLOO.search(line):
                    os.write(STDERR, line)
            if not file.tell():
                log.unlink()


def _descriptor(stream: object) -> int | None:
    """Return the descriptor that a stream writes to; None if it writes to none."""
    try:
        return stream.fileno()  # pyright: ignore[reportAttributeAccessIssue]
    except (AttributeError, UnsupportedOperation, ValueError):
        return None
