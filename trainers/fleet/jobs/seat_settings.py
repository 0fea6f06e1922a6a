"""What all jobs of one device have in common."""

from dataclasses import dataclass

import torch


@dataclass(frozen=True, slots=True)
class SeatSettings:
    """What all seats of one device have in common."""

    device: torch.device
    number: int
    """The device's number in the fleet."""
    budget: str | int | None
    metric: str | None
    """The metric that the fleet watches."""
    checkpoint_seconds: float
    """A job's checkpoint is renewed when it is so old."""
