"""The generators that a graph's tasks draw from: the default one, and those that they are given.

torch.randn(4, generator=mine)    an argument of the call: each run draws from `mine` itself
"""

from typing import Any

import torch

from offload.program.kernels import Call, Calls
from offload.torch_seams import generator_key


def default_generator(device: torch.device) -> torch.Generator:
    """The generator that an op on this device draws from by default."""
    if device.type != "cuda" or not torch.cuda.is_available():
        return torch.default_generator
    torch.cuda.init()  # this makes the generators
    return torch.cuda.default_generators[device.index or 0]


def generators_in(call: Call) -> list[torch.Generator]:
    """The generators among a call's arguments; there is one at most."""
    return [one for one in (*call.args, *call.kwargs.values()) if isinstance(one, torch.Generator)]


def generators_of(graph: Any) -> tuple[torch.Generator, ...]:
    """The generators that the tasks of a TaskGraph are given, each once."""
    found: dict[int, torch.Generator] = {}
    for task in graph.tasks:
        for call in task.kernel.calls if isinstance(task.kernel, Call | Calls) else ():
            found.update((generator_key(one), one) for one in generators_in(call))
    return tuple(found.values())
