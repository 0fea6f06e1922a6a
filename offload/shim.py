"""The allocator of csrc/placed_allocator.cpp: built at first use, kept for the next process.

    load() -> Shim     bind(call, slots, settle) -> run     an op's memory at planned addresses
                       record(call, look) -> seen, log      what an op allocates and frees
                       counting() -> Passed                 what was allocated outside of them

Needs a C++ compiler, and nothing else that PyTorch does not bring. Without one there is no shim:
`available()` is None, `describe()` says why, and placement.py copies instead.

Invariant: a thread that is inside no bound call allocates as if the shim were not there.
"""

import ctypes
import functools
import hashlib
import os
import shutil
import subprocess
import sys
import tempfile
import threading
from collections.abc import Callable, Iterator, Sequence
from contextlib import contextmanager
from dataclasses import dataclass
from pathlib import Path
from typing import Any, TypeVar

import torch

from offload.errors import OffloadError

SOURCE = Path(__file__).parent / "csrc" / "placed_allocator.cpp"
COMPILERS = ("c++", "g++", "clang++")
PATIENCE = 300
"""Seconds that a compiler may take; it takes one or two."""

Run = Callable[[], object]
T = TypeVar("T")
_loading = threading.Lock()


@dataclass(frozen=True, slots=True)
class Event:
    """An allocation, or the free of it."""

    address: int
    nbytes: int
    """0: freed."""


@dataclass(frozen=True, slots=True)
class Log:
    """What a call allocated and freed, in order, on its own thread."""

    events: tuple[Event, ...]
    returned: int
    """How many of them there were when it returned; the rest is the end of its results."""
    elsewhere: int
    """Bytes that other threads allocated meanwhile: those cannot be placed."""


class _Slot(ctypes.Structure):
    _fields_ = [("nbytes", ctypes.c_uint64), ("address", ctypes.c_void_p)]


class Passed:
    """What the base allocator gave out, to all threads, since the counting began."""

    def __init__(self, library: ctypes.PyDLL) -> None:
        self._library = library
        self._numbers = (ctypes.c_uint64 * 3)()

    def _now(self, which: int) -> int:
        self._library.placed_count(self._numbers)
        return int(self._numbers[which])

    @property
    def peak(self) -> int:
        """The most bytes that lived at once."""
        return self._now(0)

    @property
    def live(self) -> int:
        return self._now(1)

    @property
    def allocations(self) -> int:
        return self._now(2)


class Shim:
    """The installed allocator."""

    def __init__(self, library: ctypes.PyDLL, path: Path) -> None:
        self._library = library
        self.path = path
        library.placed_install.restype = None
        library.placed_bind.restype = ctypes.py_object
        library.placed_bind.argtypes = (
            ctypes.py_object,
            ctypes.py_object,
            ctypes.POINTER(_Slot),
            ctypes.c_uint64,
        )
        library.placed_record_begin.restype = None
        library.placed_record_end.restype = ctypes.c_uint64
        library.placed_record_end.argtypes = (
            ctypes.POINTER(_Slot),
            ctypes.c_uint64,
            ctypes.POINTER(ctypes.c_uint64),
        )
        for name in ("placed_count_begin", "placed_count", "placed_count_end"):
            getattr(library, name).restype = None
        library.placed_install()

    def bind(
        self, call: Run, slots: Sequence[tuple[int, int]], settle: Callable[[Any], bool]
    ) -> Run:
        """`call()` whose k-th allocation lies at `slots[k] = (bytes, address)`; address 0: where
        the base puts it. `settle(result)` is called after the first run, after every one that did
        not allocate just so, and after the next for as long as it returns true. The addresses must
        stay memory of the caller's for as long as what is returned here lives."""
        table = (_Slot * len(slots))(*(_Slot(nbytes, address or None) for nbytes, address in slots))
        return self._library.placed_bind(call, settle, table, len(slots))

    def record(self, call: Run, look: Callable[[Any], T]) -> tuple[T, Log]:
        """`look(result)` of what `call()` returned, which is dropped then; and what happened."""
        library = self._library
        elsewhere = ctypes.c_uint64()
        returned = 0
        library.placed_record_begin()
        try:
            result = call()
            returned = library.placed_record_end(None, 0, None)
            seen = look(result)
            del result
        finally:
            room = library.placed_record_end(None, 0, None)
            table = (_Slot * max(room, 1))()
            library.placed_record_end(table, room, ctypes.byref(elsewhere))
        events = tuple(Event(slot.address or 0, slot.nbytes) for slot in table[:room])
        return seen, Log(events, returned, elsewhere.value)

    @contextmanager
    def counting(self) -> Iterator[Passed]:
        """One at a time in a process."""
        self._library.placed_count_begin()
        try:
            yield Passed(self._library)
        finally:
            self._library.placed_count_end()


def available() -> Shim | None:
    """None where it cannot be built: `describe()` says why."""
    found = _once()
    return found if isinstance(found, Shim) else None


def load() -> Shim:
    """The shim, or an error that says why there is none."""
    found = _once()
    if isinstance(found, Shim):
        return found
    raise OffloadError(f"outputs cannot be placed by the allocator: {found}")


def why_not() -> str:
    """Why there is no shim; empty where there is one."""
    found = _once()
    return "" if isinstance(found, Shim) else found


def describe() -> str:
    """One line for people."""
    found = _once()
    if isinstance(found, Shim):
        return "outputs are placed by the allocator"
    return f"outputs are copied to their places: {found}"


def _once() -> Shim | str:
    with _loading:
        return _loaded()


@functools.cache
def _loaded() -> Shim | str:
    return built(COMPILERS, _cache_folder())


def built(compilers: Sequence[str], folder: Path | None) -> Shim | str:
    """The shim, from `folder` if one of the same source lies there; or why there is none."""
    compiler = next(filter(None, map(shutil.which, compilers)), None)
    if compiler is None:
        return f"no C++ compiler was found ({', '.join(compilers)}); install one"
    command = _command(compiler)
    if folder is not None:
        return _load(command, folder)
    with tempfile.TemporaryDirectory(prefix="perfect-training-") as instead:
        return _load(command, Path(instead))  # it stays mapped when its file is gone


def _load(command: Sequence[str], folder: Path) -> Shim | str:
    key = "\0".join((SOURCE.read_text(encoding="utf-8"), torch.__version__, *command))
    path = folder / f"placed-{hashlib.sha256(key.encode()).hexdigest()[:16]}.so"
    try:
        if not path.exists():
            _compile(command, path)
        return Shim(ctypes.PyDLL(str(path)), path)
    except OSError as error:
        return f"{path} cannot be built or loaded: {error}; remove it and try again"
    except subprocess.TimeoutExpired:
        return f"{command[0]} took more than {PATIENCE} seconds"
    except subprocess.CalledProcessError as error:
        lines = str(error.stderr).strip().splitlines()
        wrong = next((line for line in lines if "error" in line), lines[0] if lines else "")
        return f"{command[0]} failed with exit code {error.returncode}: {wrong}"


def _compile(command: Sequence[str], path: Path) -> None:
    """Under a name of its own first: several processes may build at once."""
    handle, unfinished = tempfile.mkstemp(".so", path.stem, path.parent)
    os.close(handle)
    try:
        subprocess.run(
            [*command, "-o", unfinished],
            check=True,
            capture_output=True,
            text=True,
            timeout=PATIENCE,
        )
        os.replace(unfinished, path)
    finally:
        Path(unfinished).unlink(missing_ok=True)


def _command(compiler: str) -> tuple[str, ...]:
    home = Path(torch.__file__).parent
    return (
        compiler,
        "-std=c++20",
        "-O2",
        "-fPIC",
        "-shared",
        f"-D_GLIBCXX_USE_CXX11_ABI={int(torch.compiled_with_cxx11_abi())}",
        f"-I{home / 'include'}",
        str(SOURCE),
        f"-L{home / 'lib'}",
        "-lc10",
        # Python's own functions are in the process already.
        *(("-undefined", "dynamic_lookup") if sys.platform == "darwin" else ()),
    )


def _cache_folder() -> Path | None:
    """None where the home folder does not exist or cannot be written."""
    try:
        folder = Path.home() / ".cache" / "perfect-training"
        folder.mkdir(parents=True, exist_ok=True)
    except (OSError, RuntimeError):
        return None
    return folder if os.access(folder, os.W_OK) else None
