"""Reads what an allocator logged during a call: where its allocations may lie, and the peak.

    allocate 64 ........ free              hidden: a place in the task's workspace while it lives
          allocate 128 ..................  an output: the LAST allocation at its address
    ------------------------------> t      (an op may get an address again that it has freed)

Hidden allocations that do not live at the same time share their places.
"""

from collections.abc import Mapping, Sequence
from typing import Any

from offload.graph.packing import pack_blocks
from offload.memory.cpu_shim import AllocatorEvent, Log
from offload.memory.placement import Allocation

MARK = "perfect-training: another call"
"""Marks the beginning of a call in the events of PyTorch's profiler."""


def allocations_of(log: Log, outputs: Mapping[int, int], alignment: int) -> tuple[Allocation, ...]:
    """The call's allocations. `outputs`: addresses by position.

    What outlives the call and its results has no place, because the op keeps it."""
    sizes: list[int] = []
    ends: list[int | None] = []
    begins: list[int] = []
    live: dict[int, int] = {}
    owner: dict[int, int] = {}
    for moment, event in enumerate((*log.events, AllocatorEvent(0, 0))):
        if moment == log.returned:
            owner = {live[a]: n for n, a in outputs.items() if a in live}
        if event.nbytes:
            live[event.address] = len(sizes)
            sizes.append(event.nbytes)
            begins.append(moment)
            ends.append(None)
        elif event.address in live:
            ends[live.pop(event.address)] = moment
    hidden = {
        n: (sizes[n], begins[n], end)
        for n, end in enumerate(ends)
        if end is not None and n not in owner
    }
    offsets = dict(zip(hidden, pack_blocks([*hidden.values()], alignment), strict=True))
    return tuple(
        Allocation(nbytes, output=owner.get(n), offset=offsets.get(n))
        for n, nbytes in enumerate(sizes)
    )


def peak_of(log: Log) -> int:
    """The most bytes that were live at once, without frees of what others allocated."""
    live: dict[int, int] = {}
    now = peak = 0
    for event in log.events:
        if event.nbytes:
            live[event.address] = event.nbytes
            now += event.nbytes
            peak = max(peak, now)
        else:
            now -= live.pop(event.address, 0)
    return peak


def peaks_of(events: Sequence[Any]) -> list[int]:
    """The peak of every call in the events of PyTorch's profiler, from its mark to the next one."""
    peaks: list[int] = []
    live = 0
    for event in sorted(events, key=lambda event: event.start_ns()):
        if event.name() == MARK:
            peaks.append(0)
            live = 0
        elif event.name() == "[memory]" and peaks:
            live += event.nbytes()
            peaks[-1] = max(peaks[-1], live)
    return peaks


def round_up(nbytes: int, alignment: int) -> int:
    return -(-nbytes // alignment) * alignment
