"""What the tests import as torchdata's StatefulDataLoader: torch's DataLoader, adopted by us.

With OURS=0 in the environment it is torch's DataLoader itself.
"""

import copy
import os
from collections.abc import Iterator
from typing import Any, TypeVar

from torch.utils.data import DataLoader

from loaders import ReuseLoader

Sample = TypeVar("Sample", covariant=True)


class AdoptedDataLoader(DataLoader[Sample]):
    """A DataLoader that is adopted with reuse=1 when it is first iterated. Its state may be asked
    for at any batch, so `snapshot_every_n_steps` says nothing."""

    def __init__(self, *args: Any, snapshot_every_n_steps: int = 1, **kwargs: Any) -> None:
        super().__init__(*args, **kwargs)

    @property
    def ours(self) -> ReuseLoader:
        if "ours_" not in self.__dict__:
            plain = copy.copy(self)
            plain.__class__ = DataLoader  # pyright: ignore[reportAttributeAccessIssue]
            object.__setattr__(self, "ours_", ReuseLoader.from_dataloader(plain, reuse=1))
        return self.__dict__["ours_"]

    def __iter__(self) -> Iterator[Any]:  # pyright: ignore[reportIncompatibleMethodOverride]
        return iter(self.ours)

    def state_dict(self) -> dict[str, Any]:
        return self.ours.state_dict()

    def load_state_dict(self, state: dict[str, Any]) -> None:
        self.ours.load_state_dict(state)


StatefulDataLoader = DataLoader if os.environ.get("OURS") == "0" else AdoptedDataLoader


class Stateful:
    """The tests' data sets inherit from it."""
