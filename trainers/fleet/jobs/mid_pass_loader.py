"""A train loader that can resume in the middle of a pass, for any loader.

    first run   iter() in state S0 | b0 b1 b2 | checkpoint: S0, 3 batches taken, state S3
    resumed     S0, iter(), b0 b1 b2 thrown away, S3                    | b3 b4 ...

S0 and S3 are states of the random generators. A loader with a state of its own is asked for that.
Any other one reads the batches of the pass again up to its place, so its batches must depend on
nothing but the random generators.
"""

from collections.abc import Callable, Iterator
from typing import Any

import torch
from torch.utils.data import DataLoader

from trainers.random_state import RandomState


class MidPassLoader:
    """Wraps one loader. Everything but its iterator and its state is the loader's own."""

    def __init__(self, loader: Any, device: torch.device, between: Callable[[int], None]) -> None:
        """`between` is called with the number of taken batches, before each batch but the first of
        a pass."""
        self._loader = loader
        self._device = device
        self._between = between
        self._own_state = hasattr(loader, "state_dict") and hasattr(loader, "load_state_dict")
        self._began: RandomState | None = None
        """The random state when the pass began."""
        self._taken = 0
        """The batches of the pass that were taken."""
        self._resume_state: dict[str, Any] | None = None
        """The state with which the next pass begins."""

    def __iter__(self) -> Iterator[Any]:
        state, self._resume_state = self._resume_state, None
        if state is None:
            self._began, self._taken = RandomState.capture(self._device), 0
            batches = iter(self._loader)
        else:
            batches = self._replayed(state)
        return self._counted(batches)

    def _replayed(self, state: dict[str, Any]) -> Iterator[Any]:
        settings = RandomState.capture(self._device).settings
        self._began = RandomState.from_plain(state["began"])
        self._began.restore(self._device)
        batches = iter(self._loader)
        if not self._own_state:
            for _ in range(state["taken"]):
                next(batches)
        self._taken = state["taken"]
        RandomState.from_plain(state["dice"]).restore(self._device)
        settings.apply()
        return batches

    def _counted(self, batches: Iterator[Any]) -> Iterator[Any]:
        while True:
            if self._taken:
                self._between(self._taken)
            try:
                batch = next(batches)
            except StopIteration:
                return
            self._taken += 1
            yield batch

    def call_between(self) -> None:
        """Call `between` while the loader waits for its next batch, but not at the beginning of a
        pass."""
        if self._taken:
            self._between(self._taken)

    def __len__(self) -> int:
        return len(self._loader)

    def __getattr__(self, name: str) -> Any:
        if name.startswith("__"):  # copying and pickling ask for these before there is a loader
            raise AttributeError(name)
        return getattr(self._loader, name)

    def state_dict(self) -> dict[str, Any]:
        assert self._began is not None
        return {
            "began": self._began.to_plain(),
            "taken": self._taken,
            "dice": RandomState.capture(self._device).to_plain(),
            "loader": self._loader.state_dict() if self._own_state else None,
        }

    def load_state_dict(self, state: dict[str, Any]) -> None:
        self._resume_state = state
        if self._own_state:
            self._loader.load_state_dict(state["loader"])


class MidPassDataLoader(MidPassLoader, DataLoader[Any]):
    """Lightning does not try the iterator of a DataLoader beforehand, which would draw a random
    number. The methods of DataLoader read the attributes of the wrapped loader."""


def make_resumable(
    loader: Any, device: torch.device, between: Callable[[int], None]
) -> MidPassLoader:
    """Return the loader so that it can resume in the middle of a pass."""
    kind = MidPassDataLoader if isinstance(loader, DataLoader) else MidPassLoader
    return kind(loader, device, between)
