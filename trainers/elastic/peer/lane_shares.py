"""The train loader as Lightning sees it: one batch is this peer's share of a global step.

A share holds no samples. The strategy takes the lanes' micro-batches that fall to this peer, and
only then is it known which. The number of batches, the place in the pass and the state are those of
the lanes, so every peer counts steps alike.
"""

from collections.abc import Iterator
from dataclasses import dataclass
from typing import Any

from loaders import ReuseLoader
from loaders.lanes.lane_loader import LaneLoader
from trainers.elastic.errors import CannotBeElastic


@dataclass(frozen=True, slots=True)
class LaneShare:
    """A batch of Lightning's: which step of which pass."""

    pass_index: int
    step: int


class LaneShares:
    """Iterates over the steps of a pass. All else that it is asked for is the loader's own."""

    def __init__(self, loader: ReuseLoader, lanes: int, global_batch: int | None) -> None:
        """`loader.batch_size` is the global batch if `global_batch` is not given."""
        whole = loader.batch_size if global_batch is None else global_batch
        if lanes < 1 or whole % lanes:
            raise CannotBeElastic(
                f"a global batch of {whole} cannot be divided into {lanes} equal lanes: choose"
                " lanes= so that it divides global_batch="
            )
        self.micro = whole // lanes
        """The samples of a lane at a step."""
        loader.set_reuse(loader.reuse, batch_size=self.micro)
        self.loader = loader
        self.lanes = LaneLoader(loader, lanes)

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

    def state_dict(self) -> dict[str, Any]:
        return self.lanes.state_dict()

    def load_state_dict(self, state: dict[str, Any]) -> None:
        self.lanes.load_state_dict(state)

    def close(self) -> None:
        self.lanes.close()


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
