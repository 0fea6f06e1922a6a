"""Refuses jobs that share what only one may have: a module, weights, a callback, a loader.

A `ReuseLoader` is no such thing as a train loader: jobs read it together. One that cannot be read
together is refused with the reason.
"""

from collections.abc import Iterable, Iterator, Mapping
from typing import Any

import lightning as L
import torch

from loaders import ReuseLoader
from trainers.fleet.deciding.fleet_error import FleetError
from trainers.fleet.inputs.same_input import shareable, why_not
from trainers.fleet.jobs.job_program import JobProgram
from trainers.fleet.jobs.lightning_job import LightningJob
from trainers.torch_seams import storage_id


def check_apart(name: str, program: JobProgram, others: Mapping[str, JobProgram]) -> None:
    """Raise `FleetError` if this job shares an object with another one that both would change."""
    mine, reads = dict(_owned(program)), _read_together(program)
    for other, theirs in others.items():
        owned, read = dict(_owned(theirs)), _read_together(theirs)
        for key, what in (mine | owned).items():
            if (key in mine and key in owned) or key in (reads if key in owned else read):
                raise FleetError(
                    f"jobs {other} and {name} share {what}: give each its own, or a function that"
                    " makes it"
                )


def _read_together(program: JobProgram) -> set[int]:
    """Return the identities of train loaders that several jobs may have."""
    given = _all(program.train) if isinstance(program, LightningJob) else ()
    return {id(loader) for loader in given if shareable(loader)}


def _owned(program: JobProgram) -> Iterator[tuple[int, str]]:
    """Yield what a job changes: the identity of each object, and what it is."""
    if not isinstance(program, LightningJob):
        return
    if isinstance(program.module, L.LightningModule):
        yield id(program.module), f"a module ({type(program.module).__name__})"
        for key, parameter in program.module.named_parameters():
            yield storage_id(parameter), f"the weights of parameter {key}"
        for key, buffer in program.module.named_buffers():
            yield storage_id(buffer), f"the values of buffer {key}"
    for callback in _all(program.trainer.get("callbacks")):
        yield id(callback), f"a callback ({type(callback).__name__})"
    for logger in _all(program.trainer.get("logger")):
        if not isinstance(logger, bool):
            yield id(logger), f"a logger ({type(logger).__name__})"
    for loader in _all(program.train):
        if why := why_not(loader):
            yield from _of_loader(loader, why)
    for loader in _all(program.val):
        yield from _of_loader(loader, "it validates one of them")


def _of_loader(loader: Any, why: str) -> Iterator[tuple[int, str]]:
    if isinstance(loader, ReuseLoader):
        yield id(loader), f"a ReuseLoader, which serves one reader at a time here ({why})"
    elif getattr(loader, "persistent_workers", False):
        yield id(loader), "a loader with persistent_workers, which serves one reader at a time"
    for owner in (loader, getattr(loader, "sampler", None)):
        generator: Any = getattr(owner, "generator", None)
        if isinstance(generator, torch.Generator):
            yield id(generator), "a loader's random generator"


def _all(given: Any) -> Iterable[Any]:
    return given if isinstance(given, list | tuple) else () if given is None else (given,)
