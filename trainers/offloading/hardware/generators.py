"""The states of the random generators that a step draws from: the CPU's and the device's.

cpu    | default generator |              loaders draw from it, and so do steps on the CPU
cuda   | default generator | device's |   loaders draw from the first, steps from the second
own    | after these, what the step's ops are given: torch.randn(..., generator=mine)
"""

from collections.abc import Sequence

import torch

from offload.program.generators import generators_of

__all__ = ["States", "drawn", "drawn_by_steps", "generators_of", "put_back", "same"]

States = tuple[torch.Tensor, ...]


def drawn(device: torch.device, own: Sequence[torch.Generator] = ()) -> States:
    """Return the present state of all generators. `own`: those that the step's ops are given."""
    defaults = [] if device.type == "cpu" else [drawn_by_steps(device)]
    return (torch.get_rng_state(), *defaults, *(generator.get_state() for generator in own))


def drawn_by_steps(device: torch.device) -> torch.Tensor:
    """Return the present state of the generator that steps draw from."""
    if device.type == "cpu":
        return torch.get_rng_state()
    return torch.cuda.get_rng_state(device)


def put_back(states: States, device: torch.device, own: Sequence[torch.Generator] = ()) -> None:
    for generator, state in zip(own, states[len(states) - len(own) :], strict=True):
        generator.set_state(state)
    torch.set_rng_state(states[0])
    if device.type != "cpu":
        torch.cuda.set_rng_state(states[1], device)


def same(one: States, other: States) -> bool:
    return all(torch.equal(a, b) for a, b in zip(one, other, strict=True))
