"""Snapshots of the optimizer's numbers at a step's end, for updates that run in the next step.

step 7 ends --keep()--> lr, betas, .. and the counters of step 7     scheduler, counters: go on
step 8 begins           late updates of step 7 read the snapshot
"""

from typing import Any

import torch
from torch.optim import Optimizer


class SettingsSnapshot:
    """The settings and counters of one step. Call `keep` before anything counts the step or changes
    the learning rate."""

    def __init__(self) -> None:
        self._groups: dict[tuple[Optimizer, int], dict[str, Any]] = {}
        self._counters: dict[torch.nn.Parameter, tuple[Optimizer, torch.Tensor | None]] = {}

    def watch(self, optimizer: Optimizer, group: int, parameter: torch.nn.Parameter) -> None:
        """Include the settings and the counter of an update in the snapshot."""
        self._groups[optimizer, group] = {}
        self._counters[parameter] = (optimizer, None)

    def keep(self) -> None:
        for optimizer, group in self._groups:
            now = optimizer.param_groups[group]
            self._groups[optimizer, group] = {
                name: _copied(value) for name, value in now.items() if name != "params"
            }
        for parameter, (optimizer, _) in self._counters.items():
            counter = optimizer.state.get(parameter, {}).get("step")
            self._counters[parameter] = (optimizer, _copied(counter))

    def group(self, optimizer: Optimizer, group: int) -> dict[str, Any]:
        return self._groups[optimizer, group]

    def counter(self, parameter: torch.nn.Parameter) -> torch.Tensor:
        _, counter = self._counters[parameter]
        assert counter is not None
        return counter


def _copied(value: Any) -> Any:
    return value.detach().clone() if isinstance(value, torch.Tensor) else value
