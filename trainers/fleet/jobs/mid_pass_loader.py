"""A train loader that goes on in mid-pass, whatever loader it was.

    first run   iter() with dice D0 | b0 b1 b2 | checkpoint: D0, 3 batches taken, dice D3
    resumed     D0, iter(), b0 b1 b2 thrown away, D3                    | b3 b4 ...

A loader that has a state of its own is asked for it, and only the dice are added. Any other loader
reads the batches of the pass again up to its place, under the dice that it began the pass with. So
it yields what it would have yielded, if its batches depend on nothing but the dice.
"""

from collections.abc import Callable, Iterator
from typing import Any

import torch
from torch.utils.data import DataLoader

from trainers.dice import Dice


class MidPassLoader:
    """Wraps one loader. Everything but its iterator and its state is the loader's own."""

    def __init__(self, loader: Any, device: torch.device, between: Callable[[int], None]) -> None:
        """`between` is called before each batch but the first of a pass, with the number of batches
        that were taken. Nothing of the next step has happened then."""
        self._loader = loader
        self._device = device
        self._between = between
        self._own_state = hasattr(loader, "state_dict") and hasattr(loader, "load_state_dict")
        self._began: Dice | None = None
        """The dice when the pass began."""
        self._taken = 0
        """The batches of the pass that were taken."""
        self._to_go: dict[str, Any] | None = None
        """The state that the next pass begins with."""

    def __iter__(self) -> Iterator[Any]:
        state, self._to_go = self._to_go, None
        if state is None:
            self._began, self._taken = Dice.now(self._device), 0
            batches = iter(self._loader)
        else:
            batches = self._replayed(state)
        return self._counted(batches)

    def _replayed(self, state: dict[str, Any]) -> Iterator[Any]:
        settings = Dice.now(self._device).settings
        self._began = Dice.of_plain(state["began"])
        self._began.roll(self._device)
        batches = iter(self._loader)
        if not self._own_state:
            for _ in range(state["taken"]):
                next(batches)
        self._taken = state["taken"]
        Dice.of_plain(state["dice"]).roll(self._device)
        settings.set()
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

    def ask_between(self) -> None:
        """Call `between` where the loader waits inside of a call for its next batch: nothing of it
        has happened. At the beginning of a pass it is not called."""
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
            "began": self._began.plain(),
            "taken": self._taken,
            "dice": Dice.now(self._device).plain(),
            "loader": self._loader.state_dict() if self._own_state else None,
        }

    def load_state_dict(self, state: dict[str, Any]) -> None:
        self._to_go = state
        if self._own_state:
            self._loader.load_state_dict(state["loader"])


class MidPassDataLoader(MidPassLoader, DataLoader[Any]):
    """Lightning treats a DataLoader in ways of its own: it does not try an iterator beforehand,
    which would draw a random number. What DataLoader's methods read is the wrapped loader's."""


def in_mid_pass(loader: Any, device: torch.device, between: Callable[[int], None]) -> MidPassLoader:
    """Return the loader so that it can go on in mid-pass."""
    kind = MidPassDataLoader if isinstance(loader, DataLoader) else MidPassLoader
    return kind(loader, device, between)
