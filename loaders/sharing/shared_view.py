"""`SharedView`: what one consumer of a shared stream has as its loader, in whatever process it is.

It serves what a `ReuseLoader` with the same arguments and state would serve: the same batches, the
same state after each, the same errors. What the other views do changes only how long it takes.
"""

from abc import ABC, abstractmethod
from collections.abc import Iterator
from dataclasses import dataclass
from typing import Any

from loaders.arguments import PassPosition
from loaders.closing import ClosedAtEnd
from loaders.errors import PassEnded
from loaders.loader import ReuseLoader
from loaders.order.reuse import Mode
from loaders.sharing.batch_source import Identity
from loaders.sharing.view_batches import pieces_per_pass
from loaders.stats import BatchInfo, LoaderStats


@dataclass(frozen=True, slots=True)
class ViewPlace:
    """Where a consumer stands: all that its loader would answer. Nobody changes it."""

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
        fields = {**self.position.state(), "identity": identity, "stats": stats}
        return constants | fields | ({"pieces": pieces} if pieces > 1 else {})


def replaced_iterator(name: str) -> PassEnded:
    """Return the error of an iterator that its view has replaced."""
    return PassEnded(
        f"this pass has ended because {name} began another one, loaded a state or was closed: use"
        " one iterator at a time"
    )


@dataclass(frozen=True, slots=True)
class ViewFacts:
    """What never changes of a view."""

    name: str
    pieces: int
    """A batch of the stream is cut into so many."""
    rank: int
    share: int
    """The number of samples that its rank serves in a pass."""
    constants: dict[str, Any]
    """A state of the stream's loader."""

    @classmethod
    def from_loader(cls, name: str, pieces: int, loader: ReuseLoader) -> "ViewFacts":
        """Return the facts of a view of this loader's stream."""
        return cls(name, pieces, loader.rank, loader.share, loader.state_dict())


class SharedView(ClosedAtEnd, ABC):
    """A view, wherever it is. One consumer iterates it, one iterator at a time."""

    last_batch: BatchInfo | None

    def __init__(self, facts: ViewFacts, dataset: Any) -> None:
        self.facts = facts
        self.dataset = dataset
        self.pieces = facts.pieces
        self.rank = facts.rank
        self.mode: Mode = facts.constants["mode"]
        self.drop_last: bool = facts.constants["drop_last"]
        self.seed: int = facts.constants["seed"]
        self.world_size: int = facts.constants["world_size"]

    @property
    def name(self) -> str:
        return self.facts.name

    def __len__(self) -> int:
        """The number of batches in the pass that the next iter() starts or continues."""
        serving, share = self.position.serving, self.facts.share
        return pieces_per_pass(share, serving, self.pieces, self.mode, self.drop_last)

    @property
    def reuse(self) -> int:
        return self.position.next.reuse

    @property
    def reaugment(self) -> bool:
        return self.position.next.reaugment

    @property
    def batch_size(self) -> int:
        return self.position.next.batch_size // self.pieces

    @property
    @abstractmethod
    def position(self) -> PassPosition:
        """Where its consumer is. It counts the batches of the view."""

    @abstractmethod
    def __iter__(self) -> Iterator[Any]: ...

    @property
    @abstractmethod
    def stats(self) -> LoaderStats:
        """What this view was served."""

    @abstractmethod
    def set_reuse(
        self, reuse: int, *, reaugment: bool | None = None, batch_size: int | None = None
    ) -> None:
        """Serve each sample `reuse` times from the next pass on. Views whose passes are served
        alike share them; a view that is alone with its wish reads the pass alone."""

    @abstractmethod
    def limit_pass(self, batches: int | None) -> None:
        """End passes after `batches` batches, from the next pass on. None: serve them whole."""

    @abstractmethod
    def state_dict(self) -> dict[str, Any]:
        """The state of a `ReuseLoader` at the same place: each can load that of the other."""

    @abstractmethod
    def load_state_dict(self, state: dict[str, Any]) -> None:
        """Continue after the last batch that was served when `state` was taken."""

    @abstractmethod
    def close(self) -> None:
        """Leave the stream, so that nobody waits for this view. It is safe to call this again, and
        to use the view again: then it goes on where it stands."""
