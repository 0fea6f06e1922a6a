"""torch.cuda's streams and events as a `Driver`.

    current stream   caller's | compute | h2d | compute ......... | caller's
              begin: fence before all of ours        end: fence before the caller's

A copy is `copy_` of bytes between two tensors. For contiguous ones of one dtype, torch makes it a
single cudaMemcpyAsync on the current stream, which may be captured. (`torch.cuda.cudart()` has no
memcpy, and only torch knows which libcudart the process has loaded.) It is asynchronous if the
host's memory is page-locked.

Copies have the higher priority: a weight that comes in must not queue behind a kernel's blocks.
"""

from collections.abc import Iterator, Mapping
from contextlib import contextmanager
from functools import partial

import torch

from offload.errors import OffloadError
from offload.running.drivers.driver import Run
from offload.torch_seams import spin

COMPUTE = "compute"
LANES = (COMPUTE, "h2d", "d2h")
USUAL, HIGH = 0, -1
"""Priorities of streams. CUDA takes the nearest one that the device has."""


class CudaStream(torch.cuda.Stream):
    """A stream that knows its lane."""

    lane: str = ""
    spin: int = 0


class CudaEvent(torch.cuda.Event):
    """torch's event, with the names of our protocol."""

    def done(self) -> bool:
        return self.query()

    def seconds_since(self, earlier: torch.cuda.Event) -> float:
        return earlier.elapsed_time(self) / 1e3


def check_cuda(device: torch.device) -> torch.device:
    """The device with its number. Raises if there is no such device."""
    if device.type != "cuda":
        raise OffloadError(
            f"engine cuda runs steps that were captured on a cuda device, not on {device}. Use"
            " engine threads"
        )
    if not torch.backends.cuda.is_built():
        raise OffloadError(
            f"this PyTorch ({torch.__version__}) is built without CUDA. Install one that has it, or"
            " train on the CPU (engine threads)"
        )
    if not torch.cuda.is_available():
        raise OffloadError(
            f"PyTorch {torch.__version__}, built for CUDA {torch.version.cuda}, finds no device:"
            " the driver is missing or too old for it (see nvidia-smi), or CUDA_VISIBLE_DEVICES"
            " hides the devices"
        )
    index = torch.cuda.current_device() if device.index is None else device.index
    count = torch.cuda.device_count()
    if index >= count:
        raise OffloadError(f"there is no {device}: this process sees {count} devices")
    return torch.device("cuda", index)


class Cuda:
    """`spin`: by lane, the cycles for which the device idles before each of its nodes. `high`: its
    kernels come before those of other drivers, whose blocks end first."""

    def __init__(
        self, device: torch.device, spin: Mapping[str, int] | None = None, *, high: bool = False
    ) -> None:
        self.device = check_cuda(device)
        self._usual = HIGH if high else USUAL
        self._spin = dict(spin or {})
        self._streams: dict[str, CudaStream] = {}
        self._fences: dict[str, CudaEvent] = {}
        self._begun = self.event()
        self._caller: torch.cuda.Stream | None = None
        self._current: CudaStream | None = None
        self._device_before = self.device.index

    def stream(self, lane: str) -> CudaStream:
        found = self._streams.get(lane)
        if found is None:
            if lane not in LANES:
                raise OffloadError(
                    f"lane {lane} has no stream on {self.device}: the graph is for one device"
                )
            found = CudaStream(self.device, priority=self._usual if lane == COMPUTE else HIGH)
            found.lane, found.spin = lane, self._spin.get(lane, 0)
            self._fences[lane] = self.event()
            if self._caller is not None:
                found.wait_event(self._begun)
            self._streams[lane] = found
        return found

    def event(self, timing: bool = False) -> CudaEvent:
        return CudaEvent(enable_timing=timing)

    def wait(self, stream: CudaStream, event: CudaEvent) -> None:
        event.wait(stream)

    def enqueue(self, stream: CudaStream, run: Run) -> None:
        if stream is not self._current:
            torch.cuda.set_stream(stream)
            self._current = stream
        if stream.spin:
            spin(stream.spin)
        run()

    def copy(self, target: torch.Tensor, source: torch.Tensor) -> Run:
        return partial(target.copy_, source, non_blocking=True)

    def begin(self) -> None:
        self._device_before = torch.cuda.current_device()
        self._current = None
        self._caller = torch.cuda.current_stream(self.device)
        self._begun.record(self._caller)
        for stream in self._streams.values():
            stream.wait_event(self._begun)

    def end(self) -> None:
        caller = self._caller
        if caller is None:
            return
        torch.cuda.set_stream(caller)  # this also makes the device of the stream the current one
        if self._device_before != self.device.index:
            torch.cuda.set_device(self._device_before)
        for lane, stream in self._streams.items():
            fence = self._fences[lane]
            fence.record(stream)
            caller.wait_event(fence)
        # Last, so that after a Ctrl-C before this line it is done again.
        self._caller = self._current = None

    @contextmanager
    def paused(self) -> Iterator[None]:
        caller, device_before = self._caller, self._device_before
        self._caller = self._current = None
        try:
            yield
        finally:
            # Current streams belong to threads, so this step's is set again at its next node.
            self._caller, self._current, self._device_before = caller, None, device_before

    def synchronize(self) -> None:
        for stream in self._streams.values():
            stream.synchronize()

    def drain(self) -> None:
        torch.cuda.current_stream(self.device).synchronize()

    def close(self) -> None:
        """There is nothing to free: torch keeps the streams in its pool."""
        self.end()
        self.synchronize()
        self._streams.clear()
