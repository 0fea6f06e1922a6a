"""Batches are sent to the training device one ahead: the copy runs during the step before it.

    host     | take k+1 | .............. | take k+2 |
    copies            | k+1 -> device |            | k+2 -> device |      a stream of its own
    compute  |------- step k -------|------- step k+1 -------|            waits for its copy alone

With `Device(augments=True)` the batch is copied as bytes and augmented on the device, on the stream
of the copy. For a CPU as the device, the same code passes batches on without a stream.
"""

from collections.abc import Callable, Iterator, Mapping
from dataclasses import dataclass
from typing import Any

import torch

# A batch is nested as the user's samples are: only its leaves have types here.
Batch = Any


@dataclass(frozen=True, slots=True)
class SentBatch:
    """A batch on its way to the device."""

    batch: Batch
    event: torch.cuda.Event | None
    """It is recorded when the batch has arrived. None: the batch is there."""
    source: Batch
    """The batch in pinned memory, which must not be used again before the copy is done."""


class DeviceFeed:
    """Sends batches to `device` on a stream of its own."""

    def __init__(self, device: torch.device) -> None:
        self.device = device
        self._stream = torch.cuda.Stream(device) if device.type == "cuda" else None

    def send(self, batch: Batch, change: Callable[[Batch], Batch]) -> SentBatch:
        """Begin to copy `batch`; `change` is applied to it on the device."""
        if self._stream is None:
            return SentBatch(change(moved(batch, self.device)), None, None)
        with torch.cuda.stream(self._stream):
            there = change(moved(batch, self.device))
            event = torch.cuda.Event()
            event.record(self._stream)
        return SentBatch(there, event, batch)

    def receive(self, sent: SentBatch) -> Batch:
        """The batch that was sent, safe to use on the current stream."""
        if sent.event is not None:
            current = torch.cuda.current_stream(self.device)
            current.wait_event(sent.event)
            for tensor in tensors_of(sent.batch):
                # Its memory was allocated on the copy's stream. It must not be used again before
                # the current stream has passed this point.
                tensor.record_stream(current)
        return sent.batch


def moved(batch: Batch, device: torch.device) -> Batch:
    if isinstance(batch, torch.Tensor):
        return batch.to(device, non_blocking=True)
    if isinstance(batch, Mapping):
        return {key: moved(part, device) for key, part in batch.items()}
    if isinstance(batch, tuple) and hasattr(batch, "_fields"):
        return type(batch)(*(moved(part, device) for part in batch))
    if isinstance(batch, tuple | list):
        return type(batch)(moved(part, device) for part in batch)
    return batch


def tensors_of(batch: Batch) -> Iterator[torch.Tensor]:
    if isinstance(batch, torch.Tensor):
        yield batch
    elif isinstance(batch, Mapping):
        for part in batch.values():
            yield from tensors_of(part)
    elif isinstance(batch, tuple | list):
        for part in batch:
            yield from tensors_of(part)
