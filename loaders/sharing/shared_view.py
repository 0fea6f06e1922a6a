"""`SharedView`: what one consumer of a shared stream has as its loader, in whatever process it is.

It serves what a `ReuseLoader` with the same arguments and state would serve: the same batches, the
same state after each, the same errors. What the other views do changes only how long it takes.

    LocalView    in the process of the stream
    RemoteView   in another process of the machine
"""

from abc import ABC, abstractmethod
from collections.abc import Iterator
from dataclasses import dataclass
from typing import Any, Self

from loaders.loader import ReuseLoader
from loaders.order.reuse import Mode
from loaders.pass_position import PassPosition
from loaders.sharing.cut_batches import pieces_per_pass
from loaders.stats import BatchInfo, LoaderStats


@dataclass(frozen=True, slots=True)
class ViewFacts:
    """What never changes of a view."""

    name: str
    pieces: int
    """A batch of the stream is cut into so many."""
    mode: Mode
    drop_last: bool
    seed: int
    rank: int
    world_size: int
    share: int
    """The number of samples that its rank serves in a pass."""
    constants: dict[str, Any]
    """A state of the stream's loader."""

    @classmethod
    def of(cls, name: str, pieces: int, loader: ReuseLoader) -> "ViewFacts":
        """Return the facts of a view of this loader's stream."""
        own = (loader.mode, loader.drop_last, loader.seed, loader.rank, loader.world_size)
        return cls(name, pieces, *own, loader.share, loader.state_dict())


class SharedView(ABC):
    """A view, wherever it is. One consumer iterates it, one iterator at a time."""

    last_batch: BatchInfo | None

    def __init__(self, facts: ViewFacts, dataset: Any) -> None:
        self.facts = facts
        self.dataset = dataset
        self.pieces = facts.pieces
        self.mode: Mode = facts.mode
        self.drop_last = facts.drop_last
        self.seed = facts.seed
        self.rank = facts.rank
        self.world_size = facts.world_size

    @property
    def name(self) -> str:
        return self.facts.name

    def __len__(self) -> int:
        """The number of batches in the pass that the next iter() starts or continues."""
        serving, share = self._where().serving, self.facts.share
        return pieces_per_pass(share, serving, self.pieces, self.mode, self.drop_last)

    @property
    def reuse(self) -> int:
        return self._where().next.reuse

    @property
    def reaugment(self) -> bool:
        return self._where().next.reaugment

    @property
    def batch_size(self) -> int:
        return self._where().next.batch_size // self.pieces

    def __enter__(self) -> Self:
        return self

    def __exit__(self, *_: object) -> None:
        self.close()

    @abstractmethod
    def _where(self) -> PassPosition:
        """Return where its consumer is. It counts the batches of the view."""

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
