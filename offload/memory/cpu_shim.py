"""The allocator of csrc/placed_allocator.cpp, and the calls of every allocator of csrc/placed.h.

    load() -> Shim     bind(call, slots, settle) -> run     an op's memory at planned addresses
                       record(call, look) -> seen, log      what an op allocates and frees
                       counting() -> AllocationCount        what calls allocate without a place

It needs a C++ compiler and nothing else beside PyTorch. Without a compiler there is no shim:
`available()` is None, `why_not()` says why, and placement.py copies outputs instead.

cuda_shim.py does the same for CUDA, with another library and the same `Shim`.

Invariant: a thread outside of bound calls allocates as if there were no shim.
"""

import ctypes
from collections.abc import Callable, Iterator, Sequence
from contextlib import contextmanager
from dataclasses import dataclass
from pathlib import Path
from typing import Any, TypeVar

from offload.errors import OffloadError
from offload.memory import compilation
from offload.memory.compilation import COMPILERS, CSRC, BuildRecipe, LazyLibrary

RECIPE = BuildRecipe(CSRC / "placed_allocator.cpp", ("c10",))

Run = Callable[[], object]
T = TypeVar("T")


@dataclass(frozen=True, slots=True)
class AllocatorEvent:
    """One allocation or free."""

    address: int
    nbytes: int
    """0: a free."""


@dataclass(frozen=True, slots=True)
class Log:
    """What a call allocated and freed on its own thread, in order."""

    events: tuple[AllocatorEvent, ...]
    returned: int
    """The number of events before the call returned; later ones belong to the end of its
    results."""
    elsewhere: int
    """Bytes that other threads allocated meanwhile. Those cannot be placed."""


class _ShimSlot(ctypes.Structure):
    _fields_ = [("nbytes", ctypes.c_uint64), ("address", ctypes.c_void_p)]


class AllocationCount:
    """What the base allocator gave to all threads since the counting began."""

    def __init__(self, library: ctypes.PyDLL) -> None:
        self._library = library
        self._numbers = (ctypes.c_uint64 * 3)()

    def _now(self, which: int) -> int:
        self._library.placed_count(self._numbers)
        return int(self._numbers[which])

    @property
    def peak(self) -> int:
        """The most bytes that were live at once."""
        return self._now(0)

    @property
    def live(self) -> int:
        return self._now(1)

    @property
    def allocations(self) -> int:
        return self._now(2)


class Shim:
    """The installed allocator shim."""

    def __init__(self, library: ctypes.PyDLL, path: Path) -> None:
        self._library = library
        self.path = path
        library.placed_install.restype = ctypes.c_int
        library.placed_bind.restype = ctypes.py_object
        library.placed_bind.argtypes = (
            ctypes.py_object,
            ctypes.py_object,
            ctypes.POINTER(_ShimSlot),
            ctypes.c_uint64,
            ctypes.c_int,
        )
        library.placed_record_begin.restype = None
        library.placed_record_end.restype = ctypes.c_uint64
        library.placed_record_end.argtypes = (
            ctypes.POINTER(_ShimSlot),
            ctypes.c_uint64,
            ctypes.POINTER(ctypes.c_uint64),
        )
        for name in ("placed_count_begin", "placed_count", "placed_count_end"):
            getattr(library, name).restype = None
        if not self.install():
            raise OffloadError(
                "PyTorch's caching allocator is not in use here (another backend in"
                " PYTORCH_CUDA_ALLOC_CONF, or a pluggable allocator). The shim can only wrap that"
                " one"
            )

    def bind(
        self,
        call: Run,
        slots: Sequence[tuple[int, int]],
        settle: Callable[[Any], bool],
        device: int = 0,
    ) -> Run:
        """`call()`, with its k-th allocation at `slots[k] = (bytes, address)`. Address 0: the base
        allocator chooses.

        `settle(result)` is called after the first run, after every run that allocated differently,
        and after the next run as long as it returns true. The addresses must stay the caller's
        memory as long as the returned function lives. `device`: the number of the device with the
        addresses."""
        table = (_ShimSlot * len(slots))(
            *(_ShimSlot(nbytes, address or None) for nbytes, address in slots)
        )
        return self._library.placed_bind(call, settle, table, len(slots), device)

    def record(self, call: Run, look: Callable[[Any], T]) -> tuple[T, Log]:
        """Call `call()` and `look(result)`, drop the result, and return what was seen and the
        log."""
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
            table = (_ShimSlot * max(room, 1))()
            library.placed_record_end(table, room, ctypes.byref(elsewhere))
        events = tuple(AllocatorEvent(slot.address or 0, slot.nbytes) for slot in table[:room])
        return seen, Log(events, returned, elsewhere.value)

    @property
    def recorders(self) -> tuple[int, int]:
        """The addresses of the functions that begin and end a recording."""
        names = "placed_record_begin", "placed_record_end"
        begin, end = (ctypes.cast(getattr(self._library, n), ctypes.c_void_p) for n in names)
        return begin.value or 0, end.value or 0

    @property
    def reuser(self) -> int:
        """The address of the function by which a thread says whether its large blocks are kept."""
        return ctypes.cast(self._library.placed_reuse, ctypes.c_void_p).value or 0

    def install(self) -> bool:
        """Put it over PyTorch's allocator, if it is not there. False: another allocator is in use,
        which it cannot wrap."""
        return not self._library.placed_install()

    @contextmanager
    def counting(self) -> Iterator[AllocationCount]:
        """Count allocations. A process can count only once at a time."""
        self._library.placed_count_begin()
        try:
            yield AllocationCount(self._library)
        finally:
            self._library.placed_count_end()


def available() -> Shim | None:
    """The shim; None if it cannot be built, and `why_not()` says why."""
    return LIBRARY.get()


def load() -> Shim:
    """The shim, or an error that says why there is none."""
    return LIBRARY.load("the allocator cannot place outputs")


def why_not() -> str:
    """Why there is no shim; empty if there is one."""
    return LIBRARY.why_missing()


def build_shim(compilers: Sequence[str], folder: Path | None) -> Shim | str:
    """The shim, from `folder` if the same source was built before; or why there is none."""
    return compilation.build_and_load(RECIPE, open_shim, compilers, folder)


def open_shim(path: Path) -> Shim:
    return Shim(ctypes.PyDLL(str(path)), path)


LIBRARY = LazyLibrary(lambda: build_shim(COMPILERS, compilation.cache_folder()))
