"""What a peer is: something that may convert a folder once and then serves passes over it.

A pass is one `iter()` over what `open` returned: batches, whose first part are the pictures, in a
fresh order with fresh randomness. Nothing may be decoded, started or imported by the constructor;
the file of a peer imports its package at the top, which is how a missing one is noticed.
"""

from abc import ABC, abstractmethod
from collections.abc import Iterable, Mapping
from dataclasses import dataclass
from pathlib import Path
from typing import Any


@dataclass(frozen=True, slots=True)
class Job:
    """What every peer of a run is asked for."""

    folder: Path
    """FOLDER/CLASS/*.jpg"""
    pictures: int
    """So many of them; the folder holds no more."""
    batch: int
    workers: int
    crop: int
    seed: int


Batches = Iterable[Any]  # of (pictures, labels): arrays or tensors, each peer has its own


class Peer(ABC):
    output = "uint8 HWC"
    """Type and layout of its pictures, and how they were resized."""

    def prepare(self, job: Job, work: Path) -> None:  # noqa: B027
        """Convert the folder into `work`, a folder of its own, where the peer wants that."""

    @abstractmethod
    def open(self, job: Job, work: Path) -> Batches: ...


@dataclass(frozen=True, slots=True)
class Row:
    """A line of the table."""

    key: str
    """What `--only` calls it."""
    name: str
    peer: str
    """module:class of a Peer"""
    options: Mapping[str, Any]  # the constructor's arguments: of JSON's types
    packages: tuple[str, ...]
    """Distributions whose versions are reported."""
    install: str = ""
    """How to get what it imports, beyond this project's own dependencies."""
    serves: int = 1
    """How often a pass serves a picture."""
    converts: bool = False
    smoke: bool = False
    """Part of the smoke preset."""
    asked: bool = False
    """Part of the table of what was asked."""
    large: bool = False
    """Over pictures of 1920x1440."""
