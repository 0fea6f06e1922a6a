"""Random numbers that a step draws: the state of the CPU's generator, and of the device's own.

cpu    | default generator |              what loaders draw from, and steps on the CPU
cuda   | default generator | device's |   the first as above; steps there the second
"""

import torch

States = tuple[torch.Tensor, ...]


def drawn(device: torch.device) -> States:
    """What both of them are at now."""
    return (torch.get_rng_state(), *([] if device.type == "cpu" else [drawn_by_steps(device)]))


def drawn_by_steps(device: torch.device) -> torch.Tensor:
    if device.type == "cpu":
        return torch.get_rng_state()
    return torch.cuda.get_rng_state(device)


def put_back(states: States, device: torch.device) -> None:
    torch.set_rng_state(states[0])
    if device.type != "cpu":
        torch.cuda.set_rng_state(states[1], device)


def same(one: States, other: States) -> bool:
    return all(torch.equal(a, b) for a, b in zip(one, other, strict=True))
