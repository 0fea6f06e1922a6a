"""One surveyed pipeline: its DataLoader, and the changes with which the docs plug it in.

as it is         ReuseLoader.from_dataloader(dataloader(folder, random), reuse)
first change     tried where that raises, then the next one, ...

`random=False` asks for the same pipeline with fixed steps in place of its random ones, so that what
it serves can be compared with what the data set gives.
"""

import importlib
from collections.abc import Callable, Iterable, Sequence
from dataclasses import dataclass
from pathlib import Path
from typing import Any

from torch.utils.data import DataLoader

COUNT = 22
"""Samples of a pipeline, unless it says otherwise."""
BATCH = 4
SIDE = 32
"""Of the pictures in a batch."""

Loader = Any  # loaders.ReuseLoader of the code under test
Make = Callable[[Path, bool, int], Loader]


@dataclass(frozen=True, slots=True)
class Form:
    """One way in which a pipeline is given to the loader."""

    change: str
    """What the user writes otherwise. Empty: nothing."""
    loader: Make
    """(folder, random, reuse) -> ReuseLoader."""
    redrawn: bool = True
    """Whether a sample's serves differ, where the pipeline is random."""


def library(name: str) -> Any:
    """The package, imported where it is needed: the survey runs without those that are missing."""
    return importlib.import_module(name)


def first(batch: Any) -> Any:
    return batch[0]


def second_as_ids(batch: Any) -> list[int]:
    return [int(one) for one in batch[1]]


@dataclass(frozen=True, slots=True)
class Pipeline:
    name: str
    source: str
    """Whose tutorial or repository has this shape."""
    prepare: Callable[[Path], None]
    """Writes the made-up data."""
    dataloader: Callable[[Path, bool], DataLoader[Any]]
    """(folder, random) -> the pipeline as its source writes it."""
    changes: tuple[Form, ...] = ()
    packages: tuple[str, ...] = ()
    """Beyond ours: `import PACKAGE`, `pip install PACKAGE`."""
    ids: Callable[[Any], Sequence[int]] = second_as_ids
    """The samples of a batch, by a number that survives: mostly the label."""
    content: Callable[[Any], Iterable[Any]] | None = first
    """What of a batch shows the draws of each sample, in the order of `ids`. None: nothing does."""
    random: bool = True
    varying: bool = False
    """Whether batches differ in shape, as padded ones do."""
    with_replacement: bool = False
    """Whether a sampler draws a sample several times, or not at all."""
    samples: Callable[[Path], list[Any]] | None = None
    """The samples without random steps, one by one. None: those of the DataLoader's data set."""
    collate: Callable[[list[Any]], Any] | None = None
    """What makes a batch of `samples`. None: what the DataLoader has."""
    count: int = COUNT

    def forms(self) -> tuple[Form, ...]:
        return Form("", self._as_it_is), *self.changes

    def _as_it_is(self, folder: Path, random: bool, reuse: int) -> Loader:
        return adopted(self.dataloader(folder, random), reuse)


def adopted(dataloader: DataLoader[Any], reuse: int, **changes: Any) -> Loader:
    from loaders import ReuseLoader

    return ReuseLoader.from_dataloader(dataloader, reuse=reuse, **changes)


class InCollate:
    """A collate function that transforms each sample first."""

    def __init__(self, function: Callable[[Any], Any], collate: Callable[[list[Any]], Any]) -> None:
        self.function = function
        self.collate = collate

    def __call__(self, samples: list[Any]) -> Any:
        return self.collate([self.function(sample) for sample in samples])


def whole_sample(
    fixed: Callable[[Path], DataLoader[Any]],
    redone: Callable[[bool], Callable[[Any], Any]],
    **changes: Any,
) -> tuple[Form, Form]:
    """The random part is taken out of the data set and given as augment=WholeSample(f); older code
    has no such thing, and its docs ask for a collate function.

    `fixed(folder)`: the DataLoader without that part. `redone(random)`: that part. `changes`: what
    else is given to the loader."""

    def augmented(folder: Path, random: bool, reuse: int) -> Loader:
        augment = library("loaders.augment").WholeSample(redone(random))
        return adopted(fixed(folder), reuse, augment=augment, **changes)

    def collated(folder: Path, random: bool, reuse: int) -> Loader:
        dataloader = fixed(folder)
        assert dataloader.collate_fn is not None
        collate = InCollate(redone(random), dataloader.collate_fn)
        return adopted(dataloader, reuse, collate=collate, **changes)

    more = "".join(f", `{name}={value!r}`" for name, value in changes.items())
    return (
        Form(f"`augment=WholeSample(f)`{more}", augmented),
        Form(f"`collate=`, which calls f{more}", collated),
    )


def each_picture(
    fixed: Callable[[Path], DataLoader[Any]],
    redone: Callable[[bool], Callable[[Any], Any]],
    named: str,
) -> tuple[Form]:
    """The random part is taken out of the data set and given as augment=, for its picture."""

    def augmented(folder: Path, random: bool, reuse: int) -> Loader:
        return adopted(fixed(folder), reuse, augment=redone(random))

    return (Form(f"`augment={named}`", augmented),)
