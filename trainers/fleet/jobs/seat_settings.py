"""What all jobs of one device have in common."""

from dataclasses import dataclass
from pathlib import Path

import torch

from trainers.fleet.inputs.input_link import InputAddress


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
    plans: Path | None = None
    """Where jobs whose steps are equal find one another's plans and measurements."""
    inputs: InputAddress | None = None
    """Where jobs of several processes read their input together. None: there is one process."""
