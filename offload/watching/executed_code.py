"""Notes which functions of the user, and of the libraries that the user installed, a step calls.

call of a function  -->  its code object and its globals, the first time it is called
libraries that every program has (torch, lightning, numpy, Python's own) are left out
"""

import sys
import sysconfig
from collections.abc import Callable, Iterator
from contextlib import contextmanager
from functools import cache
from os.path import sep
from types import CodeType, FrameType
from typing import Any

from offload.program.frames import INSTALLED, OUR_TRAINERS, OURS, TORCH

Globals = dict[str, Any]
LIBRARIES = ("lightning", "lightning_fabric", "pytorch_lightning", "lightning_utilities", "numpy")
"""Installed libraries, besides torch, whose own globals no step depends on."""
STANDARD = sysconfig.get_paths()["stdlib"] + sep


@cache
def is_read(file: str) -> bool:
    """Whether the globals of this file's functions may change what a step does."""
    if file.startswith((TORCH, OURS, OUR_TRAINERS, "<frozen")):
        return False
    if INSTALLED in file:
        return not file.split(INSTALLED, 1)[1].startswith(tuple(f"{n}{sep}" for n in LIBRARIES))
    return not file.startswith(STANDARD)


@cache
def has_closures(file: str) -> bool:
    """Whether closures of this file's functions may hold what a user gave to them."""
    return is_read(file) or (INSTALLED not in file and file.startswith(STANDARD))


@contextmanager
def calls_noted(met: Callable[[CodeType, Globals], None]) -> Iterator[None]:
    """Call `met` when a function is called for the first time in this block, before it runs."""
    known: set[CodeType] = set()
    files: dict[str, bool] = {}
    before = sys.getprofile()

    def note(frame: FrameType, event: str, _: Any) -> None:
        if event != "call":
            return
        code = frame.f_code
        file = code.co_filename
        wanted = files.get(file)
        if wanted is None:
            wanted = files[file] = is_read(file)
        if wanted and code not in known:
            known.add(code)
            met(code, frame.f_globals)

    sys.setprofile(note)
    try:
        yield
    finally:
        sys.setprofile(None)
        if before is not None:
            # cProfile's profiler cannot be given to setprofile; it is switched on by itself.
            getattr(before, "enable", lambda: sys.setprofile(before))()


class calls_unnoted:
    """Leave out the calls of this block, in which no code of the user runs."""

    __slots__ = ("_noting",)

    def __enter__(self) -> None:
        noting = sys.getprofile()
        self._noting = noting if getattr(noting, "__module__", "") == __name__ else None
        if self._noting is not None:
            sys.setprofile(None)

    def __exit__(self, *_: object) -> None:
        if self._noting is not None:
            sys.setprofile(self._noting)


def names_of(code: CodeType) -> frozenset[str]:
    """The names that this code may look up: globals, attributes, and texts given to getattr."""
    texts = [text for text in code.co_consts if isinstance(text, str) and text.isidentifier()]
    return frozenset((*code.co_names, *texts))
