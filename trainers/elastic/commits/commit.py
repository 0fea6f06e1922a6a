"""What a step comes to. Every peer applies the same commit, so their weights stay equal.

Commits.next(work)   <- SwarmCommits    a member computes its lanes, and reduces with others
                     <- DonorCommits    a newcomer is told by a member, until it is one
                     <- LoggedCommits   a replay computes all lanes as the log says
"""

from collections.abc import Sequence
from dataclasses import dataclass
from typing import Protocol

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


class LaneWork(Protocol):
    """What a peer can be asked for in a step."""

    def begin(self, step: int) -> None:
        """Begin a step: no lane is added yet."""
        ...

    def lanes(self) -> Sequence[int]:
        """Return the lanes that have samples in this step."""
        ...

    def expect(self, lanes: Sequence[int]) -> None:
        """Prepare for these lanes, in this and the next steps, and for no others."""
        ...

    def compute(self, lanes: Sequence[int]) -> int:
        """Add the gradients of the first of these lanes to the sums, of one lane or of several in
        their order. Return of how many. `lanes`: all that this peer has still to compute."""
        ...

    @property
    def sums(self) -> Tensor:
        """The sums of the lanes that were computed, flat, on the host."""
        ...

    def as_floats(self, total: Tensor) -> Tensor:
        """Return the gradients that a total of such sums stands for."""
        ...

    @property
    def logs(self) -> LaneLogs:
        """What the lanes gave that were computed."""
        ...

    def buffers(self) -> tuple[Tensor, ...]:
        """Return the buffers after the step's first lane, which was computed here."""
        ...

    def buffer_forms(self) -> Sequence[Tensor]:
        """Return tensors of the types and shapes of the module's buffers."""
        ...

    def weights_digest(self, step: int) -> str:
        """Return the digest of the part of the weights that is due in a step."""
        ...

    def trouble(self) -> str:
        """Say which lane's numbers are not finite; "" if all are."""
        ...


class Commits(Protocol):
    """Where commits come from."""

    def next(self, work: LaneWork) -> Commit:
        """Return the next commit. The caller applies it before it asks again."""
        ...

    def applied(self, commit: Commit) -> None:
        """Note that the commit is in the weights."""
        ...

    def ended(self) -> None:
        """Note that the whole run has come to its end."""
        ...

    def close(self) -> None:
        """End everything. It is safe to call again."""
        ...
