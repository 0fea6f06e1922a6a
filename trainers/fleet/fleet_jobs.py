"""The jobs of a fleet, checked as they are added."""

from collections.abc import Iterable, Iterator, Mapping
from pathlib import Path
from typing import Any

import lightning as L
import torch

from loaders import ReuseLoader
from trainers.fleet.deciding.fleet_error import FleetError
from trainers.fleet.fleet_options import FleetOptions
from trainers.fleet.hosting.device_host import HostedJob
from trainers.fleet.hosting.device_process import pickle_program
from trainers.fleet.inputs.same_input import is_shareable, why_not_shareable
from trainers.fleet.jobs.lightning_job import LightningJob, give_final_weights
from trainers.fleet.jobs.seat import JobProgram
from trainers.random_state import RandomState
from trainers.torch_seams import storage_id

LONGEST_NAME = 255
"""The bytes that file systems allow for the name of a folder."""


class FleetJobs:
    """The jobs by name, in the order of adding."""

    def __init__(self, options: FleetOptions) -> None:
        self.hosted: dict[str, HostedJob] = {}
        """As the devices get them."""
        self._options = options
        self._programs: dict[str, JobProgram] = {}
        """As the user gave them."""

    def add(self, name: str, program: JobProgram, random_state: RandomState, priority: int) -> None:
        if name in self.hosted:
            raise FleetError(f"there are two jobs of the name {name!r}: give each its own")
        _check_apart(name, program, self._programs)
        job = HostedJob(program, self.folder(name), random_state, priority)
        self.hosted[name] = pickle_program(name, job) if self._options.in_processes else job
        self._programs[name] = program

    def folder(self, name: str) -> Path:
        return self._options.folder / "jobs" / name

    def give_final_weights(self, name: str) -> None:
        give_final_weights(self._programs[name], self.folder(name))


def check_name(name: str) -> None:
    """Raise `FleetError` if a job cannot have this name, which its folder has as well."""
    wrong = ""
    if not isinstance(name, str):
        wrong = "give a text"
    elif not name or name != Path(name).name or name in (".", ".."):
        wrong = "it is the name of a folder, too, so give one without / and no . or .."
    elif not name.isprintable():
        wrong = "it is the name of a folder, too, and has a character that cannot be printed"
    elif (length := len(name.encode())) > LONGEST_NAME:
        wrong = f"it is the name of a folder, too, and has {length} bytes of {LONGEST_NAME}"
    if wrong:
        raise FleetError(f"{name!r} cannot be the name of a job: {wrong}")


# ---- objects that only one job may have ---------------------------------------------------------


def _check_apart(name: str, program: JobProgram, others: Mapping[str, JobProgram]) -> None:
    """Raise `FleetError` if this job shares an object with another one that both would change."""
    mine, shareable = dict(_owned_objects(program)), _shareable_loaders(program)
    for other, theirs in others.items():
        owned, readable = dict(_owned_objects(theirs)), _shareable_loaders(theirs)
        for key, what in (mine | owned).items():
            both = key in mine and key in owned
            if both or key in (shareable if key in owned else readable):
                raise FleetError(
                    f"jobs {other} and {name} share {what}: give each its own, or a function that"
                    " makes it"
                )


def _shareable_loaders(program: JobProgram) -> set[int]:
    """Return the identities of train loaders that several jobs may read together."""
    loaders = _as_list(program.train) if isinstance(program, LightningJob) else ()
    return {id(loader) for loader in loaders if is_shareable(loader)}


def _owned_objects(program: JobProgram) -> Iterator[tuple[int, str]]:
    """Yield the identity and a description of each object that a job changes."""
    if not isinstance(program, LightningJob):
        return
    if isinstance(program.module, L.LightningModule):
        yield id(program.module), f"a module ({type(program.module).__name__})"
        for key, parameter in program.module.named_parameters():
            yield storage_id(parameter), f"the weights of parameter {key}"
        for key, buffer in program.module.named_buffers():
            yield storage_id(buffer), f"the values of buffer {key}"
    for callback in _as_list(program.trainer.get("callbacks")):
        yield id(callback), f"a callback ({type(callback).__name__})"
    for logger in _as_list(program.trainer.get("logger")):
        if not isinstance(logger, bool):
            yield id(logger), f"a logger ({type(logger).__name__})"
    for loader in _as_list(program.train):
        if why := why_not_shareable(loader):
            yield from _owned_by_loader(loader, why)
    for loader in _as_list(program.val):
        yield from _owned_by_loader(loader, "it validates one of them")


def _owned_by_loader(loader: Any, why: str) -> Iterator[tuple[int, str]]:
    if isinstance(loader, ReuseLoader):
        yield id(loader), f"a ReuseLoader, which serves one reader at a time here ({why})"
    elif getattr(loader, "persistent_workers", False):
        yield id(loader), "a loader with persistent_workers, which serves one reader at a time"
    for owner in (loader, getattr(loader, "sampler", None)):
        generator: Any = getattr(owner, "generator", None)
        if isinstance(generator, torch.Generator):
            yield id(generator), "a loader's random generator"


def _as_list(given: Any) -> Iterable[Any]:
    return given if isinstance(given, list | tuple) else () if given is None else (given,)
