"""The host's arena for a device: one page-locked mapping of its exact size, so copies are async.

    mmap |......................|    nbytes: no allocator rounds it up to a power of two
         |<-- cudaHostRegister ->|    one registration, so a copy may span all of it
                 |<- view ->|         keeps the mapping alive, not the lock

A system may refuse to lock so much. Then the memory is there but copies are slower and the host
waits for them; one warning says why and what to do.

A process that is forked while the memory is locked does not get it: reading it there ends that
process. The kernel cannot share locked pages until somebody writes, so every fork would copy all of
them. What a step keeps in this arena belongs to the training process, as if it were on the device.
Linux could give the fork zeros instead, but then it would silently compute with wrong values.

Invariant: `close()` unlocks once; the bytes stay until the last view of them is gone.
"""

import ctypes
import mmap
import warnings
import weakref
from collections.abc import Callable
from contextlib import suppress
from dataclasses import dataclass
from typing import Any

import torch

from offload.errors import MemoryTooSmall
from offload.memory.host_memory import memory_left
from offload.sizes import format_size

PORTABLE = 1
"""cudaHostRegisterPortable: the memory is locked for every device of this process."""


@dataclass(frozen=True, slots=True)
class Runtime:
    """The functions of CUDA's runtime that are used here. `register` and `unregister` return error
    codes."""

    register: Callable[[int, int, int], int]
    """Takes address, bytes and flags."""
    unregister: Callable[[int], int]
    describe: Callable[[int], str]
    """Describes an error code in words."""
    forget: Callable[[], None]
    """Clears the runtime's last error. Otherwise the next kernel would be blamed for it."""


def cuda_runtime(device: torch.device) -> Runtime:
    """The runtime that PyTorch uses."""
    cudart: Any = torch.cuda.cudart()

    def forget() -> None:
        try:
            torch.zeros(1, device=device)
        except RuntimeError:
            return  # this was the error to clear

    return Runtime(
        register=lambda address, nbytes, flags: int(
            cudart.cudaHostRegister(address, nbytes, flags)
        ),
        unregister=lambda address: int(cudart.cudaHostUnregister(address)),
        describe=lambda code: str(cudart.cudaGetErrorString(cudart.cudaError(code))),
        forget=forget,
    )


class PinnedArena:
    """`nbytes` of page-locked host memory."""

    def __init__(self, nbytes: int, runtime: Runtime) -> None:
        self.nbytes = nbytes
        self.why_not = ""
        """Why the memory is not page-locked; empty if it is."""
        self._memory = _map_memory(nbytes) if nbytes else None
        view = memoryview(self._memory or b"")
        self.bytes = view[:nbytes]
        """Views of it keep the mapping alive."""
        self._closing: Any = None
        if self._memory is None:
            return
        address = torch.frombuffer(self.bytes, dtype=torch.uint8).data_ptr()
        code = runtime.register(address, len(self._memory), PORTABLE)
        if code:
            runtime.forget()
            self.why_not = _describe_refusal(nbytes, code, runtime.describe(code))
            warnings.warn(self.why_not, RuntimeWarning, stacklevel=3)
            return
        _advise(self._memory, "MADV_DONTFORK")
        # The finalizer holds the mapping, because locked pages must not be given back to the
        # machine.
        self._closing = weakref.finalize(self, _unlock, address, self._memory, runtime)

    @property
    def locked(self) -> bool:
        return self._closing is not None and self._closing.alive

    def close(self) -> None:
        """Unlock the memory once no copy runs; further calls do nothing. The bytes stay as ordinary
        memory."""
        if self._closing is not None:
            self._closing()


def _map_memory(nbytes: int) -> mmap.mmap:
    left = memory_left()
    if nbytes > left.nbytes:
        raise MemoryTooSmall(
            f"{format_size(nbytes)} of page-locked memory are needed for the arena of the host, but"
            f" only {format_size(left.nbytes)} are left: {left.where}. Give a host_budget, make the"
            " batch smaller, or raise the limit",
            needed=nbytes,
            left=left.nbytes,
        )
    try:
        memory = mmap.mmap(-1, nbytes, flags=mmap.MAP_PRIVATE | mmap.MAP_ANONYMOUS)
    except OSError as error:
        raise MemoryTooSmall(
            f"this machine refused {format_size(nbytes)} for the arena of the host ({error})."
            " Give a host_budget, make the batch smaller, or end other programs that use memory",
            needed=nbytes,
            left=left.nbytes,
        ) from error
    _advise(memory, "MADV_HUGEPAGE")  # large pages are locked in a fraction of the time
    return memory


def _advise(memory: mmap.mmap, advice: str) -> None:
    """Give the kernel a hint. One that does not know it only needs more time or memory."""
    if hasattr(mmap, advice):
        with suppress(OSError):
            memory.madvise(getattr(mmap, advice))


def _describe_refusal(nbytes: int, code: int, words: str) -> str:
    return (
        f"{format_size(nbytes)} of host memory could not be page-locked (CUDA error {code}:"
        f" {words}): copies between host and device are slower, and the host waits for each. Raise"
        " the limit of locked memory (`ulimit -l unlimited`; in a container `--ulimit memlock=-1`),"
        " give the container more memory, or give a smaller host_budget"
    )


def _unlock(address: int, memory: mmap.mmap, runtime: Runtime) -> None:
    code = runtime.unregister(address)
    if code:
        runtime.forget()
        warnings.warn(
            f"{format_size(len(memory))} of page-locked memory could not be unlocked (CUDA error"
            f" {code}: {runtime.describe(code)}). They stay locked until this process ends",
            RuntimeWarning,
            stacklevel=2,
        )
        ctypes.pythonapi.Py_IncRef(ctypes.py_object(memory))  # these pages must not be reused
        return
    _advise(memory, "MADV_DOFORK")
