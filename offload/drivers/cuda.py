"""torch.cuda's streams and events as a `Driver`.

    current stream   caller's | compute | h2d | compute ......... | caller's
              begin: a fence to all of ours          end: fences back to the caller's

Copies are `copy_` of bytes between two tensors: of contiguous ones of one type it is a single
cudaMemcpyAsync on the current stream, by torch's own bookkeeping, and it may be captured. (The
runtime that torch exposes as `torch.cuda.cudart()` has no memcpy, and which libcudart a process has
loaded is for torch to know.) It is asynchronous where the host's side is page-locked.

Copies have the higher priority: a weight that comes in must not queue behind a kernel's blocks.
"""

from collections.abc import Mapping
from functools import partial

import torch

from offload.drivers import Run
from offload.errors import OffloadError

COMPUTE = "compute"
ENGINES = (COMPUTE, "h2d", "d2h")
USUAL, HIGH = 0, -1
"""Priorities of streams; CUDA takes the nearest that the device has."""


class CudaStream(torch.cuda.Stream):
    """Whose it is stands on it."""

    engine: str = ""
    spin: int = 0


class CudaEvent(torch.cuda.Event):
    """torch's, by our names."""

    def done(self) -> bool:
        return self.query()

    def seconds_since(self, earlier: torch.cuda.Event) -> float:
        return earlier.elapsed_time(self) / 1e3


def check_cuda(device: torch.device) -> torch.device:
    """The device with its number; raises where there is none."""
    if device.type != "cuda":
        raise OffloadError(
            f"engine cuda runs steps that were captured on a cuda device; this is one for {device}"
        )
    if not torch.backends.cuda.is_built():
        raise OffloadError(
            f"this PyTorch ({torch.__version__}) is built without CUDA: install one that has it, or"
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
    """`spin`: by engine, for how many cycles the device does nothing before each of its nodes."""

    def __init__(self, device: torch.device, spin: Mapping[str, int] | None = None) -> None:
        self.device = check_cuda(device)
        self._spin = dict(spin or {})
        self._streams: dict[str, CudaStream] = {}
        self._fences: dict[str, CudaEvent] = {}
        self._begun = self.event()
        self._caller: torch.cuda.Stream | None = None
        self._current: CudaStream | None = None
        self._device_before = self.device.index

    def stream(self, engine: str) -> CudaStream:
        found = self._streams.get(engine)
        if found is None:
            if engine not in ENGINES:
                raise OffloadError(
                    f"engine {engine} has no stream on {self.device}: the graph is for one device"
                )
            found = CudaStream(self.device, priority=USUAL if engine == COMPUTE else HIGH)
            found.engine, found.spin = engine, self._spin.get(engine, 0)
            self._fences[engine] = self.event()
            if self._caller is not None:
                found.wait_event(self._begun)
            self._streams[engine] = found
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
            torch.cuda._sleep(stream.spin)
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
        torch.cuda.set_stream(caller)  # makes the device of this stream the current one, too
        if self._device_before != self.device.index:
            torch.cuda.set_device(self._device_before)
        for engine, stream in self._streams.items():
            fence = self._fences[engine]
            fence.record(stream)
            caller.wait_event(fence)
        self._caller = self._current = None  # last: a Ctrl-C before has it done once more

    def synchronize(self) -> None:
        for stream in self._streams.values():
            stream.synchronize()

    def drain(self) -> None:
        torch.cuda.current_stream(self.device).synchronize()

    def close(self) -> None:
        """torch keeps the streams in its pool."""
        self.end()
        self.synchronize()
        self._streams.clear()
