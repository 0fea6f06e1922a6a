"""Measures the links of several devices: each alone, two and all at the same time, and copies from
one device to another. `graph/wiring.py` makes a topology of what is found.

On a CPU the devices are parts of one memory, which all their copies share.
"""

import logging
from collections.abc import Callable, Sequence
from itertools import combinations
from statistics import median

import torch

from offload.graph.wiring import LinkRates, Way, list_at_once
from offload.measuring.stopwatch import DeviceRun, TimedDevice
from offload.memory.device_memory import measuring

log = logging.getLogger(__name__)

TIMES = 2
"""How often copies run in a row, so that it matters little that one begins a little earlier."""

Repeat = Callable[[Callable[[], Sequence[float]], float], Sequence[Sequence[float]]]


def measure_links(
    bench: TimedDevice, devices: int, nbytes: int, seconds: float, repeat: Repeat
) -> LinkRates:
    """Measure copies of so many bytes in about `seconds`. `repeat(run, seconds)`: results of many
    runs."""
    copies = dict[Way, DeviceRun]()
    rooms = list[tuple[torch.device, torch.Tensor]]()
    for number, device in enumerate(_list_devices(bench.device, devices)):
        with measuring("its links", device):
            into, out = (torch.ones(nbytes, dtype=torch.uint8, device=device) for _ in range(2))
        sources = [bench.host_memory(nbytes) for _ in range(2)]
        copies["h2d", number] = device, bench.copy(into, sources[0])
        copies["d2h", number] = device, bench.copy(sources[1], out)
        rooms.append((device, into))
    sets, pairs = [*list_at_once(devices)], [*combinations(range(devices), 2)]
    share = seconds / (len(copies) + len(sets) + len(pairs))

    def measure(*runs: DeviceRun) -> Sequence[float]:
        took = repeat(lambda: bench.time_at_once(runs, TIMES), share)
        return [nbytes / median(each) for each in zip(*took, strict=True)]

    def send(source: int, target: int) -> DeviceRun:
        device, bytes_there = rooms[source]
        return device, bench.copy(rooms[target][1], bytes_there)

    found = LinkRates(
        {way: measure(copy)[0] for way, copy in copies.items()},
        [dict(zip(ways, measure(*(copies[w] for w in ways)), strict=True)) for ways in sets],
        {pair: measure(send(*pair))[0] for pair in pairs},
    )
    told = [f"{name} {device}: {r / 1e9:.3g}" for (name, device), r in found.alone.items()]
    log.info("links, in GB/s: %s; plans reckon with the slowest", ", ".join(told))
    return found


def _list_devices(first: torch.device, count: int) -> Sequence[torch.device]:
    """This device and the next ones."""
    if first.type != "cuda":
        return [first] * count
    begin, there = first.index or 0, torch.cuda.device_count()
    if begin + count > there:
        raise ValueError(f"devices={count}: from {first} on this process sees {there - begin}")
    return [torch.device("cuda", begin + number) for number in range(count)]
