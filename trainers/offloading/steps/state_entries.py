"""What an optimizer's state has at a step's start: which entries, and those that are no tensors.

start   {}  or  {"step": 4, "mean": tensor}      a step may add entries, and count in numbers
after   {"step": 5, "mean": tensor}  --restore-->  as at the start; tensors have their values
                                                   restored elsewhere (comparison.py)
"""

from collections.abc import Mapping
from dataclasses import dataclass
from typing import Any

import torch
from torch.optim import Optimizer


@dataclass(frozen=True, slots=True, eq=False)
class StateEntries:
    """The entries of an optimizer's state by parameter."""

    optimizer: Optimizer
    entries: Mapping[torch.Tensor, Mapping[str, Any]]

    @classmethod
    def of(cls, optimizer: Optimizer) -> "StateEntries":
        return cls(optimizer, {p: dict(state) for p, state in optimizer.state.items()})

    def restore(self) -> None:
        """Give the state the entries that it had, in the same dicts."""
        state = self.optimizer.state
        for p in [p for p in state if p not in self.entries]:
            del state[p]
        for p, entries in self.entries.items():
            state[p].clear()
            state[p].update(entries)
