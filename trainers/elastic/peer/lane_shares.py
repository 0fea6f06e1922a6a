"""The train loader as Lightning sees it: one batch is this peer's share of a global step.

A share has no samples: which lanes fall to this peer is known only when the strategy takes their
micro-batches. The number of batches, the place in the pass, the latest batch and the state are
those of all lanes together, so every peer counts steps and samples alike.
"""

from collections.abc import Iterator
from dataclasses import dataclass
from typing import Any

import numpy as np

from loaders import ReuseLoader
from loaders.lanes.lane_loader import LaneLoader
from loaders.order.reuse import batches_per_pass
from loaders.stats import LoaderStats
from trainers.elastic.errors import CannotBeElastic


@dataclass(frozen=True, slots=True)
class LaneShare:
    """A batch of Lightning's: a step of a pass."""

    pass_index: int
    step: int


@dataclass(frozen=True, slots=True)
class WholeStep:
    """What all lanes together served at a committed step."""

    ids: np.ndarray
    serves: np.ndarray
    """The number of each serve: 0 for a sample's first in the pass, 1 for its second, ..."""


class LaneShares:
    """Iterates over the steps of a pass. All other attributes are those of the loader."""

    def __init__(self, loader: ReuseLoader, lanes: int, global_batch: int | None) -> None:
        """`loader.batch_size` is the global batch if `global_batch` is not given."""
        whole = loader.batch_size if global_batch is None else global_batch
        if lanes < 1:
            raise CannotBeElastic(f"lanes={lanes}: a step has at least one lane")
        self._count = lanes
        loader.set_reuse(loader.reuse, batch_size=self._micro_of(whole))
        self.loader = loader
        self.lanes = LaneLoader(loader, lanes)
        self.last_batch: WholeStep | None = None
        self.first_serves = 0
        """How many samples the whole swarm has served for the first time in a pass."""

    @property
    def micro(self) -> int:
        """The samples of a lane at a step."""
        return self.loader.batch_size

    @property
    def batch_size(self) -> int:
        """The samples of a step."""
        return self.loader.batch_size * self._count

    def set_reuse(
        self, reuse: int, *, reaugment: bool | None = None, batch_size: int | None = None
    ) -> None:
        """Set how the loader serves, from the next pass on."""
        micro = None if batch_size is None else self._micro_of(batch_size)
        self.loader.set_reuse(reuse, reaugment=reaugment, batch_size=micro)

    def batches_of(self, batch_size: int, reuse: int) -> int:
        """The steps of a whole pass that is served like this."""
        return steps_of_pass(self.loader, self._count, self._micro_of(batch_size), reuse)

    def _micro_of(self, whole: int) -> int:
        if whole % self._count:
            raise CannotBeElastic(
                f"a global batch of {whole} cannot be divided into {self._count} equal lanes:"
                " choose lanes= so that it divides global_batch="
            )
        return whole // self._count

    def __len__(self) -> int:
        return len(self.lanes)

    def __iter__(self) -> Iterator[LaneShare]:
        pass_index, first = self.lanes.position
        for step in range(first, len(self.lanes)):
            yield LaneShare(pass_index, step)

    def __getattr__(self, name: str) -> Any:
        if name.startswith("__"):  # copying and pickling ask for these before there is a loader
            raise AttributeError(name)
        return getattr(self.loader, name)

    def advance(self) -> None:
        """Go on to the next step, because this one is committed."""
        lanes = self.lanes
        sizes = lanes.sizes(lanes.position[1])
        served = [lanes.ids(lane) for lane, size in enumerate(sizes) if size]
        self.last_batch = WholeStep(
            np.concatenate([lane.ids for lane in served]),
            np.concatenate([lane.serves for lane in served]),
        )
        self.first_serves += int((self.last_batch.serves == 0).sum())
        lanes.advance()

    @property
    def stats(self) -> LoaderStats:
        """What this peer has decoded and served."""
        return self.lanes.stats

    @property
    def in_a_pass(self) -> bool:
        """Whether a step of the present pass is committed, and another one is left."""
        return self.lanes.position[1] > 0

    def state_dict(self) -> dict[str, Any]:
        return {"lanes": self.lanes.state_dict(), "first_serves": self.first_serves}

    def load_state_dict(self, state: dict[str, Any]) -> None:
        self.lanes.load_state_dict(state["lanes"])
        self.first_serves = state["first_serves"]

    def close(self) -> None:
        self.lanes.close()


def steps_of_pass(loader: ReuseLoader, lanes: int, micro: int, reuse: int) -> int:
    """The steps of a pass over the loader's samples, in lanes of `micro` samples a step."""
    samples = len(loader.dataset)
    share = samples // lanes if loader.drop_last else -(-samples // lanes)
    return batches_per_pass(share, micro, reuse, loader.mode, loader.drop_last)


def lane_shares(loader: Any, lanes: int, global_batch: int | None) -> LaneShares:
    """Return the shares of what a user gave as train loader."""
    if isinstance(loader, LaneShares):
        return loader
    if isinstance(loader, ReuseLoader):
        return LaneShares(loader, lanes, global_batch)
    if hasattr(loader, "dataset") and hasattr(loader, "batch_sampler"):
        return LaneShares(ReuseLoader.from_dataloader(loader, reuse=1), lanes, global_batch)
    raise CannotBeElastic(
        f"the train loader is a {type(loader).__name__}, and a swarm deals the samples of a"
        " ReuseLoader or of a DataLoader over a map-style data set"
    )
