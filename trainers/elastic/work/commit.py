"""What a step comes to. Every peer applies the same commit, so their weights stay equal."""

from dataclasses import dataclass

from torch import Tensor

from trainers.elastic.deciding.header import LaneLogs
from trainers.elastic.deciding.view import Added


@dataclass(frozen=True, slots=True, eq=False)
class Commit:
    """One step's."""

    step: int
    """So many steps were applied before it."""
    added: Added
    total: Tensor
    """The sum of all gradients, flat, on the host."""
    logs: LaneLogs
    """Of all lanes together."""
    buffers: tuple[Tensor, ...]
    """The module's buffers after the step's first lane."""
    digest: str
    """Of the total and the buffers."""
