"""The allocator of csrc/placed_allocator.cpp, and what one of csrc/placed.h can do.

    load() -> Shim     bind(call, slots, settle) -> run     an op's memory at planned addresses
                       record(call, look) -> seen, log      what an op allocates and frees
                       counting() -> Passed                 what was allocated outside of them

Needs a C++ compiler, and nothing else that PyTorch does not bring. Without one there is no shim:
`available()` is None, `why_not()` says why, and placement.py copies instead.

The same for CUDA is cuda_shim.py's: another library, the same `Shim`.

Invariant: a thread that is inside no bound call allocates as if the shim were not there.
"""

import ctypes
import functools
import threading
from collections.abc import Callable, Iterator, Sequence
from contextlib import contextmanager
from dataclasses import dataclass
from pathlib import Path
from typing import Any, TypeVar

from offload import compiled
from offload.compiled import COMPILERS, CSRC, Recipe
from offload.errors import OffloadError

RECIPE = Recipe(CSRC / "placed_allocator.cpp", ("c10",))

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
        library.placed_install.restype = ctypes.c_int
        library.placed_bind.restype = ctypes.py_object
        library.placed_bind.argtypes = (
            ctypes.py_object,
            ctypes.py_object,
            ctypes.POINTER(_Slot),
            ctypes.c_uint64,
            ctypes.c_int,
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
        if library.placed_install():
            raise OffloadError(
                "PyTorch's caching allocator is not in use here (another backend in"
                " PYTORCH_CUDA_ALLOC_CONF, or a pluggable allocator): only that one can be wrapped"
            )

    def bind(
        self,
        call: Run,
        slots: Sequence[tuple[int, int]],
        settle: Callable[[Any], bool],
        device: int = 0,
    ) -> Run:
        """`call()` whose k-th allocation lies at `slots[k] = (bytes, address)`; address 0: where
        the base puts it. `settle(result)` is called after the first run, after every one that did
        not allocate just so, and after the next for as long as it returns true. The addresses must
        stay memory of the caller's for as long as what is returned here lives. `device`: the number
        of the one that they are on."""
        table = (_Slot * len(slots))(*(_Slot(nbytes, address or None) for nbytes, address in slots))
        return self._library.placed_bind(call, settle, table, len(slots), device)

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

    def ask(self, name: str) -> int:
        """A function of the library without arguments."""
        return int(getattr(self._library, name)())

    @contextmanager
    def counting(self) -> Iterator[Passed]:
        """One at a time in a process."""
        self._library.placed_count_begin()
        try:
            yield Passed(self._library)
        finally:
            self._library.placed_count_end()


def available() -> Shim | None:
    """None where it cannot be built: `why_not()` says why."""
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


def _once() -> Shim | str:
    with _loading:
        return _loaded()


@functools.cache
def _loaded() -> Shim | str:
    return built(COMPILERS, compiled.cache_folder())


def built(compilers: Sequence[str], folder: Path | None) -> Shim | str:
    """The shim, from `folder` if one of the same source lies there; or why there is none."""
    return compiled.built(RECIPE, opened, compilers, folder)


def opened(path: Path) -> Shim:
    return Shim(ctypes.PyDLL(str(path)), path)
