"""The host's arena for a device: one mapping of its very size, page-locked, so copies are async.

    mmap |......................|    nbytes: no allocator rounds it up to a power of two
         |<-- cudaHostRegister ->|    one registration, so that a copy may span all of it
                 |<- view ->|         keeps the mapping, not the lock

A system may refuse to lock so much. The memory is there all the same then, copies are slower, the
host waits for them, and one warning says why and what to do.

A process that is forked while the memory is locked does not have it: to read it there ends that
process. Locked pages cannot be shared until somebody writes, so the system would copy all of them
at every fork. What a step keeps there belongs to the process that trains, as if it were on the
device; zeros in its place, which Linux offers too, would be wrong in silence.

Invariant: `close()` gives the lock back once; the bytes stay until the last view of them is gone.
"""

import ctypes
import mmap
import warnings
import weakref
from collections.abc import Callable
from contextlib import suppress
from dataclasses import dataclass
from typing import Any, Protocol

import torch

from offload.errors import MemoryTooSmall
from offload.sizes import say_size

PORTABLE = 1
"""cudaHostRegisterPortable: locked for every device of this process."""


class Left(Protocol):
    """Of machine.py."""

    @property
    def nbytes(self) -> int: ...

    @property
    def where(self) -> str: ...


@dataclass(frozen=True, slots=True)
class Runtime:
    """What is needed of CUDA's runtime. All but the last return its error code."""

    register: Callable[[int, int, int], int]
    """Address, bytes, flags."""
    unregister: Callable[[int], int]
    say: Callable[[int], str]
    """An error code in words."""
    forget: Callable[[], None]
    """The runtime remembers an error of ours, and the next kernel would be blamed for it."""


def cuda_runtime(device: torch.device) -> Runtime:
    """PyTorch's."""
    cudart: Any = torch.cuda.cudart()

    def forget() -> None:
        try:
            torch.zeros(1, device=device)
        except RuntimeError:
            return  # that was it

    return Runtime(
        register=lambda address, nbytes, flags: int(
            cudart.cudaHostRegister(address, nbytes, flags)
        ),
        unregister=lambda address: int(cudart.cudaHostUnregister(address)),
        say=lambda code: str(cudart.cudaGetErrorString(cudart.cudaError(code))),
        forget=forget,
    )


class Pinned:
    """`nbytes` of host memory."""

    def __init__(self, nbytes: int, runtime: Runtime, left: Callable[[], Left]) -> None:
        """`left`: what this process may still take; it is asked before anything is mapped."""
        self.nbytes = nbytes
        self.why_not = ""
        """Why it is not page-locked; empty: it is."""
        self._memory = _mapped(nbytes, left()) if nbytes else None
        view = memoryview(self._memory or b"")
        self.bytes = view[:nbytes]
        """Views of it keep the mapping."""
        self._closing: Any = None
        if self._memory is None:
            return
        address = torch.frombuffer(self.bytes, dtype=torch.uint8).data_ptr()
        code = runtime.register(address, len(self._memory), PORTABLE)
        if code:
            runtime.forget()
            self.why_not = _refused(nbytes, code, runtime.say(code))
            warnings.warn(self.why_not, RuntimeWarning, stacklevel=3)
            return
        _advise(self._memory, "MADV_DONTFORK")
        # It holds the mapping: locked pages are not given back to the machine.
        self._closing = weakref.finalize(self, _unlock, address, self._memory, runtime)

    @property
    def locked(self) -> bool:
        return self._closing is not None and self._closing.alive

    def close(self) -> None:
        """When no copy runs. Safe to call again. The bytes stay, as ordinary memory."""
        if self._closing is not None:
            self._closing()


def _mapped(nbytes: int, left: Left) -> mmap.mmap:
    if nbytes > left.nbytes:
        raise MemoryTooSmall(
            f"{say_size(nbytes)} of page-locked memory are needed for the arena of the host, and"
            f" {say_size(left.nbytes)} can be had: {left.where}. Give a host_budget, make the batch"
            " smaller, or raise the limit",
            needed=nbytes,
            left=left.nbytes,
        )
    try:
        memory = mmap.mmap(-1, nbytes, flags=mmap.MAP_PRIVATE | mmap.MAP_ANONYMOUS)
    except OSError as error:
        raise MemoryTooSmall(
            f"{say_size(nbytes)} for the arena of the host were refused by this machine ({error}):"
            " give a host_budget, make the batch smaller, or end what else uses memory",
            needed=nbytes,
            left=left.nbytes,
        ) from error
    _advise(memory, "MADV_HUGEPAGE")  # locking large pages takes a fraction of the time
    return memory


def _advise(memory: mmap.mmap, advice: str) -> None:
    """A system that does not know it needs more time or memory, and no more than that."""
    if hasattr(mmap, advice):
        with suppress(OSError):
            memory.madvise(getattr(mmap, advice))


def _refused(nbytes: int, code: int, words: str) -> str:
    return (
        f"{say_size(nbytes)} of host memory could not be page-locked (CUDA error {code}: {words}):"
        " copies between host and device are slower, and the host waits for each. Raise the limit"
        " of locked memory (`ulimit -l unlimited`; in a container `--ulimit memlock=-1`), give the"
        " container more memory, or give a smaller host_budget"
    )


def _unlock(address: int, memory: mmap.mmap, runtime: Runtime) -> None:
    code = runtime.unregister(address)
    if code:
        runtime.forget()
        warnings.warn(
            f"{say_size(len(memory))} of page-locked memory could not be unlocked (CUDA error"
            f" {code}: {runtime.say(code)}): they stay locked until this process ends",
            RuntimeWarning,
            stacklevel=2,
        )
        ctypes.pythonapi.Py_IncRef(ctypes.py_object(memory))  # nobody else may get these pages
        return
    _advise(memory, "MADV_DOFORK")
