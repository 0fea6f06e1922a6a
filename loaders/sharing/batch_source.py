"""Reads a loader batch by batch, from any place, on the thread of whoever needs the next batch.

read (3, 7), read (3, 8), ...   the running pass goes on
read (4, 0) after its last      the next pass begins as the loader would begin it
any other place                 the loader resumes there, as from a saved state
"""

import copy
from collections.abc import Iterator
from dataclasses import asdict, dataclass, field, replace
from typing import TYPE_CHECKING, Any

import torch

from loaders.arguments import Serving
from loaders.batching.device import tensors_of
from loaders.errors import PassEnded, SharingError, StateError
from loaders.sharing.lockstep import Mark
from loaders.stats import BatchInfo, LoaderStats

if TYPE_CHECKING:
    from loaders.loader import ReuseLoader
    from loaders.sharing.shared_view import SharedView

Identity = dict[str, str]


@dataclass(frozen=True, slots=True)
class PassServing:
    """How a pass is served, and whose order it has."""

    serving: Serving
    """A view may end a pass early. The source serves it whole: there is no limit here."""
    identity: Identity
    """The identity of a loader's state in this pass."""


@dataclass(slots=True, eq=False)
class SharedBatch:
    """A batch that was read, or the error that reading it raised."""

    mark: Mark
    following: Mark
    """The mark of the batch after it."""
    before: LoaderStats
    after: LoaderStats
    """The counters of the loader before and after this batch."""
    identity: Identity
    """The identity of the loader's state after this batch."""
    batch: Any = None
    info: BatchInfo | None = None
    error: Exception | None = None
    copying: int = 0
    """So many views are making a copy of it at the moment."""
    nbytes: int = field(init=False)

    def __post_init__(self) -> None:
        self.nbytes = sum(tensor.nbytes for tensor in tensors_of(self.batch))

    @property
    def stall_seconds(self) -> float:
        return self.after.stall_seconds - self.before.stall_seconds


class BatchSource:
    """Reads one loader, which nobody else reads meanwhile. One thread at a time calls it."""

    def __init__(self, loader: "ReuseLoader | SharedView") -> None:
        self.loader = loader
        self._batches: Iterator[Any] | None = None
        self._at: Mark | None = None
        """The next batch of the open iterator. None: it is not known."""
        self._decoded_before = self._decoded

    def read(self, mark: Mark, wanted: PassServing) -> SharedBatch:
        """Read the batch at `mark`. An exception of the data set is part of what is returned."""
        loader, before = self.loader, self.loader.stats
        if self._batches is None or self._at != mark:
            self._begin(mark, wanted)
        batches, self._at = self._batches, None
        assert batches is not None
        error = batch = None
        try:
            # A view that is read in inference mode must not hand its tensors to one that trains.
            with torch.inference_mode(False):
                batch = next(batches)
        except PassEnded:
            self.leave()
            raise
        except StopIteration:
            error = StateError(
                f"pass {mark[0]} ends before batch {mark[1]}: the state is not of it"
            )
        except Exception as raised:
            error = raised
        identity = loader.state_dict()["identity"]
        if error is not None:
            self.leave()
            after, following = loader.stats, (mark[0] + 1, 0)
            return SharedBatch(mark, following, before, after, identity, error=error)
        following = loader.position.pass_index, loader.position.served
        if following[1] == 0:
            self.leave()
        self._at = following
        return SharedBatch(
            mark, following, before, loader.stats, identity, batch, loader.last_batch
        )

    def leave(self) -> None:
        """Leave the pass that is being read."""
        batches, self._batches, self._at = self._batches, None, None
        if batches is not None:
            batches.close()  # type: ignore[attr-defined]

    def close(self) -> None:
        """End the workers and free memory."""
        self.loader.close()

    @property
    def decodes(self) -> int:
        """The number of samples that were decoded here."""
        return self._decoded - self._decoded_before

    @property
    def _decoded(self) -> int:
        stats = self.loader.stats
        return stats.decoded + stats.extra_decodes

    def _begin(self, mark: Mark, wanted: PassServing) -> None:
        _check_group(self.loader)
        self.leave()
        loader, serving = self.loader, wanted.serving
        coming = copy.copy(loader.position)
        coming.begin()
        goes_on = mark[1] == 0 or coming.running == serving
        if goes_on and (coming.pass_index, coming.served) == mark:
            loader.limit_pass(None)
            if loader.position.next != serving:
                loader.set_reuse(
                    serving.reuse, reaugment=serving.reaugment, batch_size=serving.batch_size
                )
        else:
            place = {"pass": mark[0], "served_batches": mark[1], "identity": wanted.identity}
            servings = dict.fromkeys(("running", "next"), asdict(serving))
            loader.load_state_dict(loader.state_dict() | place | servings)
        self._batches = iter(loader)


def without_limit(serving: Serving) -> Serving:
    """Return how a pass is served, without what only one view has: the end of its pass."""
    return replace(serving, pass_limit=None)


def _check_group(loader: "ReuseLoader | SharedView") -> None:
    """Refuse a loader that begins its passes together with those of other processes."""
    group = torch.distributed
    processes = group.get_world_size() if group.is_available() and group.is_initialized() else 1
    if processes > 1 and loader.world_size == processes:
        raise SharingError(
            f"the loader begins every pass together with {processes - 1} other processes, but views"
            " may begin at other times than theirs: share a loader with rank=(0, 1)"
        )
