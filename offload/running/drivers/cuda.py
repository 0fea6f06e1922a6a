"""The streams and events of one CUDA device.

    host             enqueue(compute, F1) record(e) wait(h2d, e) enqueue(h2d, W2)   at once
    compute          [ F1 ....... ] e
    h2d                              `-> [ W2 .. ]
    current stream   caller's | compute | h2d | compute ......... | caller's
              begin: fence before all of ours        end: fence before the caller's

A stream runs what is enqueued on it in order; only events order two streams. Errors of the device
are reported late: by `is_done`, by `synchronize`, or by any later call.

A copy is `copy_` of bytes between two tensors. For contiguous ones of one dtype, torch makes it a
single cudaMemcpyAsync on the current stream, which may be captured. (`torch.cuda.cudart()` has no
memcpy, and only torch knows which libcudart the process has loaded.) It is asynchronous if the
host's memory is page-locked.

Copies have the higher priority: a weight that comes in must not queue behind a kernel's blocks.
"""

from collections.abc import Callable, Iterator
from contextlib import contextmanager
from functools import partial

import torch

from offload.errors import OffloadError

Run = Callable[[], object]
COMPUTE = "compute"
LANES = (COMPUTE, "h2d", "d2h")
USUAL, HIGH = 0, -1
"""Priorities of streams. CUDA takes the nearest one that the device has."""


class CudaEvent(torch.cuda.Event):
    """A mark on a stream. An event that was never recorded is done; recording it again moves it."""

    def is_done(self) -> bool:
        return self.query()

    def seconds_since(self, earlier: torch.cuda.Event) -> float:
        """Seconds of the device's clock. Both events were made with `timing` and are done."""
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
    """Use it from one thread at a time. `high`: its kernels run before those of other drivers; a
    running block of another kernel ends first."""

    def __init__(self, device: torch.device, *, high: bool = False) -> None:
        self.device = check_cuda(device)
        self._usual = HIGH if high else USUAL
        self._streams: dict[str, torch.cuda.Stream] = {}
        self._fences: dict[str, CudaEvent] = {}
        self._begun = self.event()
        self._caller: torch.cuda.Stream | None = None
        self._current: torch.cuda.Stream | None = None
        self._device_before = self.device.index

    def stream(self, lane: str) -> torch.cuda.Stream:
        """The stream of a lane: the same one at every call."""
        stream = self._streams.get(lane)
        if stream is None:
            if lane not in LANES:
                raise OffloadError(
                    f"lane {lane} has no stream on {self.device}: the graph is for one device"
                )
            priority = self._usual if lane == COMPUTE else HIGH
            stream = torch.cuda.Stream(self.device, priority=priority)
            self._fences[lane] = self.event()
            if self._caller is not None:
                stream.wait_event(self._begun)
            self._streams[lane] = stream
        return stream

    def event(self, timing: bool = False) -> CudaEvent:
        return CudaEvent(enable_timing=timing)

    def wait(self, stream: torch.cuda.Stream, event: CudaEvent) -> None:
        """Let what is enqueued on the stream from now on wait for the last record of the event."""
        event.wait(stream)

    def enqueue(self, stream: torch.cuda.Stream, run: Run) -> None:
        """Call `run()` with this stream as the current one: kernels and copies that it starts go
        there. Its exception may be raised here, or late, as one of the device."""
        if stream is not self._current:
            torch.cuda.set_stream(stream)
            self._current = stream
        run()

    def copy(self, target: torch.Tensor, source: torch.Tensor) -> Run:
        """A function that starts a copy of bytes on the current stream; one side is on the host."""
        return partial(target.copy_, source, non_blocking=True)

    def begin(self) -> None:
        """Make all streams wait for what the caller's current stream has in its queue."""
        self._device_before = torch.cuda.current_device()
        self._current = None
        self._caller = torch.cuda.current_stream(self.device)
        self._begun.record(self._caller)
        for stream in self._streams.values():
            stream.wait_event(self._begun)

    def end(self) -> None:
        """Make the caller's current stream, the same as at `begin`, wait for all streams. It may be
        called without a `begin`, and again."""
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
        """Let another thread begin and end steps in this block, in the middle of one between
        `begin` and `end`. Nothing runs on the streams when the block begins."""
        caller, device_before = self._caller, self._device_before
        self._caller = self._current = None
        try:
            yield
        finally:
            # Current streams belong to threads, so this step's is set again at its next node.
            self._caller, self._current, self._device_before = caller, None, device_before

    def synchronize(self) -> None:
        """Make the host wait for all streams. Raises each error of theirs once."""
        for stream in self._streams.values():
            stream.synchronize()

    def close(self) -> None:
        """There is nothing to free: torch keeps the streams in its pool."""
        self.end()
        self.synchronize()
        self._streams.clear()
