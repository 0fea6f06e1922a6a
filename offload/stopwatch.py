"""Copies and kernels of a device, and the clock that times them: of a GPU, or of this CPU.

    Gpu   begin.record() run() end.record()    events on the streams that the work runs on
    Cpu   clock() run() clock()                this memory as if it were two: copies are memmove

The CPU is a GPU's twin: what is measured on one can be measured on the other (calibration.py).
"""

import ctypes
import functools
import time
from collections.abc import Callable
from concurrent.futures import ThreadPoolExecutor
from threading import Barrier
from typing import Protocol

import torch

Run = Callable[[], object]
Clock = Callable[[], float]


class Device(Protocol):
    """What is timed, and by which clock. Two kinds: a GPU, and this CPU as if it were one."""

    device: torch.device
    notes: list[str]

    def timed(self, run: Run) -> float:
        """Seconds of the device."""
        ...

    def host_memory(self, nbytes: int) -> torch.Tensor:
        """What copies go to and come from."""
        ...

    def copy(self, to: torch.Tensor, source: torch.Tensor) -> Run: ...

    def both(self, into: Run, out: Run, times: int) -> tuple[float, float]:
        """Seconds of each while the other runs too, side by side, `times` in a row."""
        ...

    def close(self) -> None:
        """Give back what torch keeps for later."""
        ...


def in_a_row(run: Run, times: int) -> None:
    for _ in range(times):
        run()


class Cpu:
    """This machine as if its memory were two: what a CPU's plan runs on."""

    def __init__(self, clock: Clock = time.perf_counter) -> None:
        self.device = torch.device("cpu")
        self.notes = ["no GPU: links are memmove, and share the memory with the kernels"]
        self._clock = clock

    def timed(self, run: Run) -> float:
        begin = self._clock()
        run()
        return self._clock() - begin

    def host_memory(self, nbytes: int) -> torch.Tensor:
        return torch.ones(nbytes, dtype=torch.uint8)

    def copy(self, to: torch.Tensor, source: torch.Tensor) -> Run:
        return functools.partial(_moved, to, source)

    def both(self, into: Run, out: Run, times: int) -> tuple[float, float]:
        start = Barrier(2)

        def lane(run: Run) -> float:
            start.wait()
            return self.timed(functools.partial(in_a_row, run, times)) / times

        with ThreadPoolExecutor(1, "calibrate-d2h") as pool:
            other = pool.submit(lane, out)
            return lane(into), other.result()

    def close(self) -> None:
        """Nothing is kept."""


def _moved(to: torch.Tensor, source: torch.Tensor) -> None:
    ctypes.memmove(to.data_ptr(), source.data_ptr(), to.numel())


class Gpu:
    """Timed by events on its streams: what the host does meanwhile does not count."""

    def __init__(self, device: torch.device) -> None:
        if not torch.cuda.is_available():
            raise ValueError(f"device={str(device)!r}: there is no CUDA here; take device='cpu'")
        self.device = torch.device(
            "cuda", torch.cuda.current_device() if device.index is None else device.index
        )
        self.notes: list[str] = []

    def timed(self, run: Run) -> float:
        stream = torch.cuda.current_stream(self.device)
        begin, end = torch.cuda.Event(enable_timing=True), torch.cuda.Event(enable_timing=True)
        begin.record(stream)
        run()
        end.record(stream)
        end.synchronize()
        return begin.elapsed_time(end) / 1e3

    def host_memory(self, nbytes: int) -> torch.Tensor:
        try:
            return torch.ones(nbytes, dtype=torch.uint8).pin_memory()
        except RuntimeError as error:
            self.notes.append(f"links are of memory that is not pinned: {error}".splitlines()[0])
            return torch.ones(nbytes, dtype=torch.uint8)

    def copy(self, to: torch.Tensor, source: torch.Tensor) -> Run:
        return functools.partial(to.copy_, source, non_blocking=True)

    def both(self, into: Run, out: Run, times: int) -> tuple[float, float]:
        lanes = [torch.cuda.Stream(self.device, priority=-1) for _ in range(2)]
        begin = torch.cuda.Event(enable_timing=True)
        ends = [torch.cuda.Event(enable_timing=True) for _ in lanes]
        begin.record(torch.cuda.current_stream(self.device))
        for stream in lanes:
            stream.wait_event(begin)
        for _ in range(times):  # in turn, so that both begin at once
            for stream, run in zip(lanes, (into, out), strict=True):
                with torch.cuda.stream(stream):
                    run()
        for stream, end in zip(lanes, ends, strict=True):
            end.record(stream)
            end.synchronize()
        seconds = [begin.elapsed_time(end) / 1e3 / times for end in ends]
        return seconds[0], seconds[1]

    def close(self) -> None:
        """Whoever plans next counts every byte of the device that is taken."""
        torch.cuda.synchronize(self.device)
        torch._C._cuda_clearCublasWorkspaces()
        torch.cuda.empty_cache()
        torch._C._host_emptyCache()
