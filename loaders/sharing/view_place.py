"""Where a consumer of a shared stream stands: all that its loader would answer, as plain values.

A view of this process makes it, and one of another process has it after every batch.
"""

from dataclasses import dataclass
from typing import Any

from loaders.errors import PassEnded
from loaders.pass_position import PassPosition
from loaders.sharing.batch_source import Identity
from loaders.stats import BatchInfo, LoaderStats


@dataclass(frozen=True, slots=True)
class ViewPlace:
    """Nobody changes it, nor the position in it."""

    position: PassPosition
    """It counts the batches of the view."""
    identity: Identity
    counters: LoaderStats
    last_batch: BatchInfo | None

    def state(self, constants: dict[str, Any], pieces: int) -> dict[str, Any]:
        """Return the state of a `ReuseLoader` at this place. `constants`: that of the stream's."""
        identity = dict(self.identity)
        if not self.position.served:
            identity.pop("order", None)
        stats = self.counters.saved()
        own = {**self.position.state(), "identity": identity, "stats": stats}
        return constants | own | ({"pieces": pieces} if pieces > 1 else {})


def replaced_iterator(name: str) -> PassEnded:
    """Return the error of an iterator that its view has replaced."""
    return PassEnded(
        f"this pass has ended because {name} began another one, loaded a state or was closed: use"
        " one iterator at a time"
    )
