"""Copies and kernels of a GPU or of this CPU, and how they are timed.

    Gpu   begin.record() run() end.record()    events on the streams that the work runs on
    Cpu   clock() run() clock()                one memory as if it were two: copies are memmove

The CPU is a GPU's twin: whatever is measured on one can be measured on the other (calibration.py).
"""

import ctypes
import functools
import logging
import time
from collections.abc import Callable, Sequence
from concurrent.futures import ThreadPoolExecutor
from threading import Barrier
from typing import Protocol

import torch

from offload.torch_seams import clear_cublas_workspaces, empty_host_cache

log = logging.getLogger(__name__)

Run = Callable[[], object]
DeviceRun = tuple[torch.device, Run]
"""Where it runs, and what."""
Clock = Callable[[], float]


class TimedDevice(Protocol):
    """What is timed, and how: a GPU, or this CPU as if it were one."""

    device: torch.device

    def time_once(self, run: Run) -> float:
        """Seconds that the device takes for `run`."""
        ...

    def host_memory(self, nbytes: int) -> torch.Tensor:
        """Host memory for copies to and from the device."""
        ...

    def copy(self, to: torch.Tensor, source: torch.Tensor) -> Run: ...

    def time_at_once(self, copies: Sequence[DeviceRun], times: int) -> Sequence[float]:
        """Seconds of each copy while the other ones run too, `times` in a row."""
        ...

    def close(self) -> None:
        """Give back memory that torch keeps for later."""
        ...


def run_in_a_row(run: Run, times: int) -> None:
    for _ in range(times):
        run()


class Cpu:
    """This machine as if its memory were two: a CPU's plan runs on it."""

    def __init__(self, clock: Clock = time.perf_counter) -> None:
        self.device = torch.device("cpu")
        self._clock = clock

    def time_once(self, run: Run) -> float:
        begin = self._clock()
        run()
        return self._clock() - begin

    def host_memory(self, nbytes: int) -> torch.Tensor:
        return torch.ones(nbytes, dtype=torch.uint8)

    def copy(self, to: torch.Tensor, source: torch.Tensor) -> Run:
        return functools.partial(_move_bytes, to, source)

    def time_at_once(self, copies: Sequence[DeviceRun], times: int) -> Sequence[float]:
        start = Barrier(len(copies))

        def lane(copy: DeviceRun) -> float:
            start.wait()
            return self.time_once(functools.partial(run_in_a_row, copy[1], times)) / times

        with ThreadPoolExecutor(len(copies), "calibrate-copies") as pool:
            return [*pool.map(lane, copies)]

    def close(self) -> None:
        """There is nothing to give back."""


def _move_bytes(to: torch.Tensor, source: torch.Tensor) -> None:
    ctypes.memmove(to.data_ptr(), source.data_ptr(), to.numel())


class Gpu:
    """A GPU, timed by events on its streams, so the host's own time does not count."""

    def __init__(self, device: torch.device) -> None:
        if not torch.cuda.is_available():
            raise ValueError(f"device={str(device)!r}: there is no CUDA here; use device='cpu'")
        self.device = torch.device(
            "cuda", torch.cuda.current_device() if device.index is None else device.index
        )

    def time_once(self, run: Run) -> float:
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
            log.warning("copies are measured with memory that is not pinned: %s", error)
            return torch.ones(nbytes, dtype=torch.uint8)

    def copy(self, to: torch.Tensor, source: torch.Tensor) -> Run:
        return functools.partial(to.copy_, source, non_blocking=True)

    def time_at_once(self, copies: Sequence[DeviceRun], times: int) -> Sequence[float]:
        lanes = [torch.cuda.Stream(device, priority=-1) for device, _ in copies]
        begins = [torch.cuda.Event(enable_timing=True) for _ in lanes]
        ends = [torch.cuda.Event(enable_timing=True) for _ in lanes]
        for begin, stream in zip(begins, lanes, strict=True):
            begin.record(torch.cuda.current_stream(stream.device))
            stream.wait_event(begin)
        for _ in range(times):  # alternate, so that all begin at once
            for stream, (_, run) in zip(lanes, copies, strict=True):
                with torch.cuda.stream(stream):
                    run()
        for stream, end in zip(lanes, ends, strict=True):
            end.record(stream)
        for end in ends:
            end.synchronize()
        return [b.elapsed_time(e) / 1e3 / times for b, e in zip(begins, ends, strict=True)]

    def close(self) -> None:
        """Give back all memory, because the next plan counts what is taken of the device."""
        torch.cuda.synchronize(self.device)
        clear_cublas_workspaces()
        torch.cuda.empty_cache()
        empty_host_cache()
