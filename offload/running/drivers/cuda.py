"""The streams and events of CUDA devices: one, or several with numbers in a row.

    host             enqueue(compute, F1) record(e) wait(h2d, e) enqueue(h2d, W2)   at once
    compute          [ F1 ....... ] e
    h2d                              `-> [ W2 .. ]
    current stream   caller's | compute | h2d | compute ......... | caller's
              begin: fence before all of ours        end: fence before the caller's

A stream runs what is enqueued on it in order; only events order two streams. Errors of the device
are reported late: by `is_done`, by `synchronize`, or by any later call. A lane's name says whose
stream it is: `compute1` is of the second device, `d2d1-0` of the second one, which sends.

A copy is `copy_` of bytes between two tensors. For contiguous ones of one dtype, torch makes it a
single cudaMemcpyAsync on the current stream, which may be captured. (`torch.cuda.cudart()` has no
memcpy, and only torch knows which libcudart the process has loaded.) It is asynchronous if the
host's memory is page-locked.

Copies have the higher priority: a weight that comes in must not queue behind a kernel's blocks.
"""

import re
from collections.abc import Callable, Iterator
from contextlib import contextmanager
from functools import partial

import torch

from offload.errors import OffloadError
from offload.sizes import format_size

Run = Callable[[], object]
COMPUTE = "compute"
LANE = re.compile(r"(?:(compute)|h2d|d2h|d2d)(\d*)(?:-\d+)?")
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


def check_devices(first: torch.device, count: int) -> tuple[torch.device, ...]:
    """So many devices, from the first one on. Raises unless all are there, and are of one kind."""
    devices = tuple(torch.device("cuda", first.index + number) for number in range(count))
    there = torch.cuda.device_count()
    if devices[-1].index >= there:
        raise OffloadError(
            f"the plan is for {count} devices, {first} to {devices[-1]}, and this process sees"
            f" {there}: plan for fewer devices, or show it more (CUDA_VISIBLE_DEVICES)"
        )
    kinds = [_describe_kind(device) for device in devices]
    for device, kind in zip(devices, kinds, strict=True):
        if kind != kinds[0]:
            raise OffloadError(
                f"{first} is {kinds[0]} and {device} is {kind}: the bits of a step are those of one"
                " kind of device, so a plan for several needs equal ones"
            )
    return devices


def _describe_kind(device: torch.device) -> str:
    told = torch.cuda.get_device_properties(device)
    return f"a {told.name} with {format_size(told.total_memory)}"


class Cuda:
    """Use it from one thread at a time. `high`: its kernels run before those of other drivers; a
    running block of another kernel ends first."""

    def __init__(self, device: torch.device, *, high: bool = False) -> None:
        self.device = check_cuda(device)
        self.devices = (self.device,)
        self._usual = HIGH if high else USUAL
        self._streams: dict[str, torch.cuda.Stream] = {}
        self._fences: dict[str, CudaEvent] = {}
        self._begun = [self.event()]
        self._idle: dict[tuple[torch.device, torch.device], torch.cuda.Stream] = {}
        """Streams that have nothing to do but to wait: of what one device sends another, or for
        itself."""
        self._callers: tuple[torch.cuda.Stream, ...] = ()
        """The caller's current stream on every device; empty outside of a step."""
        self._current: torch.cuda.Stream | None = None
        self._device_before = self.device.index

    def drive(self, count: int) -> None:
        """Have at least so many devices, from the first one on. No step is under way."""
        if count > len(self.devices):
            self.devices = check_devices(self.device, count)
            self._begun = [self.event() for _ in self.devices]

    def stream(self, lane: str) -> torch.cuda.Stream:
        """The stream of a lane: the same one at every call."""
        stream = self._streams.get(lane)
        if stream is None:
            found = LANE.fullmatch(lane)
            number = int(found[2] or 0) if found else len(self.devices)
            if found is None or number >= len(self.devices):
                on = ", ".join(map(str, self.devices))
                raise OffloadError(f"lane {lane} has no stream: this driver has {on}")
            priority = self._usual if found[1] == COMPUTE else HIGH
            stream = torch.cuda.Stream(self.devices[number], priority=priority)
            self._fences[lane] = self.event()
            if self._callers:
                self._wait_for_callers(stream)
            self._streams[lane] = stream
        return stream

    def _wait_for_callers(self, stream: torch.cuda.Stream) -> None:
        """The caller may have work in the queues of any of the devices."""
        for begun in self._begun:
            stream.wait_event(begun)

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
        """A function that starts a copy of bytes on the current stream, which is of a device that
        has one side. The other side is on the host or on another device."""
        if "cpu" in (source.device.type, target.device.type):
            return partial(target.copy_, source, non_blocking=True)
        return partial(_send, target, source, self._idle_stream(source.device, target.device))

    def _idle_stream(self, of: torch.device, on: torch.device) -> torch.cuda.Stream:
        if (of, on) not in self._idle:
            self._idle[of, on] = torch.cuda.Stream(on, priority=HIGH)
        return self._idle[of, on]

    def begin(self) -> None:
        """Make all streams wait for what the caller's current streams have in their queues."""
        self._device_before = torch.cuda.current_device()
        self._current = None
        self._callers = tuple(torch.cuda.current_stream(device) for device in self.devices)
        for begun, caller in zip(self._begun, self._callers, strict=True):
            begun.record(caller)
        for stream in self._streams.values():
            self._wait_for_callers(stream)

    def end(self) -> None:
        """Make the caller's current streams, the same as at `begin`, wait for all streams. It may
        be called without a `begin`, and again."""
        if not self._callers:
            return
        for caller in self._callers:
            torch.cuda.set_stream(caller)  # this also makes its device the current one
        if self._device_before != self.devices[-1].index:
            torch.cuda.set_device(self._device_before)
        for lane, stream in self._streams.items():
            fence = self._fences[lane]
            fence.record(stream)
            for caller in self._callers:
                caller.wait_event(fence)
        # Last, so that after a Ctrl-C before this line it is done again.
        self._callers, self._current = (), None

    def bases(self, first: CudaEvent, device: torch.device) -> dict[torch.device, CudaEvent]:
        """By device, an event that its times are counted from: this one, which has been recorded,
        and those that the other devices record as soon as it is done."""
        bases = {device: first}
        for other in self.devices:
            if other != device:
                idle = self._idle_stream(other, other)
                idle.wait_event(first)
                bases[other] = self.event(timing=True)
                bases[other].record(idle)
        return bases

    @contextmanager
    def paused(self) -> Iterator[None]:
        """Let another thread begin and end steps in this block, in the middle of one between
        `begin` and `end`. Nothing runs on the streams when the block begins."""
        callers, device_before = self._callers, self._device_before
        self._callers, self._current = (), None
        try:
            yield
        finally:
            # Current streams belong to threads, so this step's is set again at its next node.
            self._callers, self._current, self._device_before = callers, None, device_before

    def synchronize(self) -> None:
        """Make the host wait for all streams. Raises each error of theirs once."""
        for stream in (*self._streams.values(), *self._idle.values()):
            stream.synchronize()

    def close(self) -> None:
        """There is nothing to free: torch keeps the streams in its pool."""
        self.end()
        self.synchronize()
        self._streams.clear()
        self._idle.clear()


def _send(target: torch.Tensor, source: torch.Tensor, landing: torch.cuda.Stream) -> None:
    """Copy from one device to another. torch has the copy wait for the current stream of the
    target's device, too, and that stream for the copy. So it is one that has nothing else to do."""
    with torch.cuda.stream(landing):
        target.copy_(source, non_blocking=True)
