"""The most memory of a device that is taken at any moment, as its driver counts it.

    begin() -> a thread: used? used? used? ... every `period` seconds -> most()

NVML counts all of the device: contexts, libraries, other processes. So what counts is the rise
over what was taken before, and nothing else may run there meanwhile. On a CPU it is the process's
resident set. Between two looks more may have been taken: `looks` says how many there were.
"""

import ctypes
import gc
import importlib.util
import threading
from collections.abc import Callable
from types import TracebackType

import torch

from benchmarks.harness.process import read_memory_mib

NVML = "libnvidia-ml.so.1"


def counter(device: str) -> tuple[str, Callable[[], int]]:
    """Who counts, and how many bytes are taken now."""
    if device != "cuda":
        return "resident set", lambda: round(read_memory_mib(peak=False) * 1024**2)
    if importlib.util.find_spec("pynvml") is not None and _is_there(NVML):
        return "NVML", lambda: int(torch.cuda.device_memory_used())
    return "cudaMemGetInfo", _taken


def _is_there(library: str) -> bool:
    try:
        ctypes.CDLL(library)
    except OSError:
        return False
    return True


def _taken() -> int:
    free, total = torch.cuda.mem_get_info()
    return total - free


class MemoryWatch:
    """A context manager."""

    def __init__(self, used: Callable[[], int], period: float = 0.001) -> None:
        self.looks = 0
        self._used, self._period = used, period
        self._most = 0
        self._lock = threading.Lock()
        self._over = threading.Event()
        self._problem: BaseException | None = None
        self._thread = threading.Thread(target=self._run, name="memory-watch", daemon=True)

    def begin(self) -> int:
        """Forgets what was; the bytes that are taken now."""
        with self._lock:
            self._most, self.looks = self._used(), 1
            return self._most

    def most(self) -> int:
        """Since `begin`, now included."""
        if self._problem is not None:
            raise RuntimeError("the memory could not be watched") from self._problem
        with self._lock:
            self._look()
            return self._most

    def _look(self) -> None:
        self._most = max(self._most, self._used())
        self.looks += 1

    def _run(self) -> None:
        try:
            while not self._over.wait(self._period):
                with self._lock:
                    self._look()
        except Exception as error:  # told by `most`: a thread has nobody to tell
            self._problem = error

    def __enter__(self) -> "MemoryWatch":
        self.begin()
        self._thread.start()
        return self

    def __exit__(
        self,
        kind: type[BaseException] | None,
        error: BaseException | None,
        trace: TracebackType | None,
    ) -> None:
        self._over.set()
        self._thread.join()


def settled(device: str, used: Callable[[], int]) -> int:
    """Taken, after all that nobody holds was given back: cuBLAS's workspaces, too."""
    gc.collect()
    if device == "cuda":
        torch.cuda.synchronize()
        torch._C._cuda_clearCublasWorkspaces()
        torch.cuda.empty_cache()
    return used()
