"""The states of the random generators that a step draws from: the CPU's and the device's.

cpu    | default generator |              loaders draw from it, and so do steps on the CPU
cuda   | default generator | device's |   loaders draw from the first, steps from the second
own    | after these, what the step's ops are given: torch.randn(..., generator=mine)
"""

from collections.abc import Sequence

import torch

from offload.program.generators import generators_of

__all__ = ["States", "drawn", "drawn_by_steps", "generators_of", "hand_over", "put_back", "same"]

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


def hand_over(old: torch.device, new: torch.device) -> None:
    """Have steps on the new device draw what they would have drawn on the old one. The generators
    of a GPU and of the CPU differ in kind, so each goes on from where it is: that of a device on
    which nothing was drawn yet, from the seed of the run."""
    if old != new and old.type == new.type == "cuda":
        torch.cuda.set_rng_state(torch.cuda.get_rng_state(old), new)


def same(one: States, other: States) -> bool:
    return all(torch.equal(a, b) for a, b in zip(one, other, strict=True))
