"""Refuses jobs that share what only one may have: a module, weights, a callback, a loader."""

from collections.abc import Iterator, Mapping
from typing import Any

import lightning as L
import torch

from loaders import ReuseLoader
from trainers.fleet.deciding.fleet_error import FleetError
from trainers.fleet.jobs.job_program import JobProgram
from trainers.fleet.jobs.lightning_job import LightningJob


def check_apart(name: str, program: JobProgram, others: Mapping[str, JobProgram]) -> None:
    """Raise `FleetError` if this job shares an object with another one that both would change."""
    mine = dict(_owned(program))
    for other, theirs in others.items():
        for key, what in _owned(theirs):
            if key in mine:
                raise FleetError(
                    f"jobs {other} and {name} share {what}: give each its own, or a function that"
                    " makes it"
                )


def _owned(program: JobProgram) -> Iterator[tuple[int, str]]:
    """Yield what a job changes: the identity of each object, and what it is."""
    if not isinstance(program, LightningJob):
        return
    if isinstance(program.module, L.LightningModule):
        yield id(program.module), f"a module ({type(program.module).__name__})"
        for key, parameter in program.module.named_parameters():
            yield parameter.untyped_storage().data_ptr(), f"the weights of parameter {key}"
    callbacks = program.trainer.get("callbacks") or []
    for callback in callbacks if isinstance(callbacks, list) else [callbacks]:
        yield id(callback), f"a callback ({type(callback).__name__})"
    for loader in (program.train, program.val):
        if isinstance(loader, ReuseLoader):
            yield id(loader), "a ReuseLoader, which serves one reader at a time"
        generator: Any = getattr(loader, "generator", None)
        if isinstance(generator, torch.Generator):
            yield id(generator), "a loader's random generator"
