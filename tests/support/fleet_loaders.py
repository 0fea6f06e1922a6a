"""Loaders of jobs that are sent to processes, and whose reads are counted in a file."""

import os
from dataclasses import dataclass
from pathlib import Path
from typing import Any

import torch

from benchmarks.jobs.fleet_jobs import BATCH, JobKind, samples
from loaders import ReuseLoader, Workers

COUNT = 48


class Counted:
    """Samples whose every read is a byte of a file, by all processes together."""

    def __init__(self, file: Path, broken: int | None = None) -> None:
        self._samples = samples(COUNT)
        self._file = file
        self._broken = broken

    def __len__(self) -> int:
        return COUNT

    def __getitem__(self, index: int) -> tuple[torch.Tensor, ...]:
        if index == self._broken:
            raise OSError(f"sample {index} is broken")
        file = os.open(self._file, os.O_WRONLY | os.O_APPEND | os.O_CREAT)
        os.write(file, b".")
        os.close(file)
        return self._samples[index]


class NotSent(Counted):
    """Can be sent to the process of a device, and not on from there."""

    received = 0

    def __setstate__(self, state: dict[str, Any]) -> None:
        self.__dict__ = {**state, "received": state.get("received", 0) + 1}

    def __getstate__(self) -> dict[str, Any]:
        if self.received:
            raise TypeError("this stays where it is")
        return self.__dict__


@dataclass(frozen=True, slots=True)
class Counting(JobKind):
    """A job with a `ReuseLoader`, which it makes itself."""

    file: Path = Path()
    broken: int | None = None
    kind: type[Counted] = Counted
    workers: int = 1

    def train(self) -> ReuseLoader:  # type: ignore[override]
        data = self.kind(self.file, self.broken)
        return ReuseLoader(data, BATCH, workers=Workers(self.workers, "thread"), reuse=1, seed=3)


def reads(file: Path) -> int:
    """Return how often a sample was read."""
    return file.stat().st_size if file.exists() else 0
