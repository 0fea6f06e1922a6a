"""What people are told of the members of a swarm: lanes, samples a second, bytes.

Each member counts its own, and its header carries them to all others (deciding/header.py).
"""

from collections.abc import Sequence
from dataclasses import dataclass

from trainers.elastic.deciding.header import Header


@dataclass(frozen=True, slots=True)
class PeerFigures:
    """One member's, at one step."""

    name: str
    lanes: int
    """So many of this step are in its sums."""
    samples: int
    """In these lanes."""
    seconds: float
    """How long it computed at them. It includes the time that it waited for their samples."""
    sent: int
    """Bytes of sums that it has sent to other members since it joined. Those of this step are not
    among them, because headers travel before the reduce."""
    announced: bool = False
    """Whether it has heard that this generation shall change."""

    @property
    def samples_per_second(self) -> float:
        """While it computes; 0 where it had no lane."""
        return self.samples / self.seconds if self.seconds else 0.0


def peer_figures(headers: Sequence[Header]) -> tuple[PeerFigures, ...]:
    """Return the figures of all members, in the order of their headers."""
    return tuple(
        PeerFigures(h.name, len(h.done), h.logs.samples, h.seconds, h.sent, h.announced)
        for h in headers
    )
