"""The settings of all jobs of one device."""

from dataclasses import dataclass
from pathlib import Path

import torch

from trainers.fleet.inputs.input_link import InputAddress


@dataclass(frozen=True, slots=True)
class SeatSettings:
    """The settings of all jobs of one device."""

    device: torch.device
    number: int
    """The device's number in the fleet."""
    budget: str | int | None
    metric: str | None
    """The metric that the fleet watches."""
    checkpoint_seconds: float
    """The age at which a job's checkpoint is replaced."""
    plans: Path | None = None
    """The folder in which jobs of equal steps share plans and measurements."""
    inputs: InputAddress | None = None
    """The process that reads for the jobs of several processes; None if there is one process."""
