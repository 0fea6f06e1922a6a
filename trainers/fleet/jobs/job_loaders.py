"""The loaders of a job, which give way to others' while it waits for its turn."""

from collections.abc import Iterator
from typing import Any

import lightning as L

from loaders.workers.precedence import Precedence


def put_behind(trainer: L.Trainer | None, behind: bool) -> None:
    """Have the loaders of a job decode behind those of other jobs, or in front again. A loader that
    is not ours stands where it stood."""
    if trainer is None:
        return
    for loader in (*_each(trainer.train_dataloader), *_each(trainer.val_dataloaders)):
        precedence = getattr(loader, "precedence", None)
        if isinstance(precedence, Precedence):
            precedence.gives_way = behind


def _each(loaders: Any) -> Iterator[Any]:
    """Yield the loaders of what Lightning was given: one, or several in lists and dicts."""
    if isinstance(loaders, dict):
        loaders = list(loaders.values())
    if not isinstance(loaders, list | tuple):
        yield loaders
        return
    for one in loaders:
        yield from _each(one)
