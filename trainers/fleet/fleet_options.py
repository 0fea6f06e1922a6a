"""The arguments of a fleet, checked once."""

import threading
from collections.abc import Iterator, Mapping, Sequence
from dataclasses import dataclass
from pathlib import Path
from typing import Any, Literal

import lightning as L
import torch

from loaders import ReuseLoader
from offload.memory.host_memory import memory_left
from offload.sizes import format_count, is_share, parse_share, parse_size
from trainers.fleet.deciding.events import Added, FleetError
from trainers.fleet.deciding.fleet_state import FleetSettings
from trainers.fleet.deciding.halving import StopRule
from trainers.fleet.hosting.device_process import HostedJob, pickle_program
from trainers.fleet.inputs.shared_inputs import why_not_shareable
from trainers.fleet.jobs.lightning_job import LightningJob, as_list, give_final_weights
from trainers.fleet.jobs.seat import JobProgram
from trainers.fleet.jobs.tenancy import SeatSettings
from trainers.random_state import RandomState
from trainers.torch_seams import storage_id

Isolation = Literal["thread", "process"]
Devices = str | int | Sequence[str | int]


@dataclass(frozen=True, slots=True)
class FleetOptions:
    """The arguments of `Fleet`, where they are explained."""

    devices: tuple[torch.device, ...]
    isolation: Isolation
    budget: str | int | None
    host_budget: str | int | None
    stop: StopRule | None
    metric: str | None
    mode: Literal["min", "max"]
    quantum: int | None
    folder: Path
    checkpoint_seconds: float
    seconds: float | None
    migrate: bool

    def __post_init__(self) -> None:
        """Raise `FleetError` if an option is wrong."""
        if self.isolation not in ("thread", "process"):
            raise FleetError(f"isolation={self.isolation!r}: give 'thread' or 'process'")
        if self.isolation == "thread" and len(self.devices) > 1:
            raise FleetError(
                f"isolation='thread' with {len(self.devices)} devices: random generators belong to"
                " a process, so jobs of two devices cannot run in one. Leave isolation out"
            )
        if self.mode not in ("min", "max"):
            raise FleetError(f"mode={self.mode!r}: give 'min' or 'max'")
        if self.quantum is not None and (type(self.quantum) is not int or self.quantum < 1):
            raise FleetError(f"quantum={self.quantum!r}: give a number of steps, 1 or more")
        if not self.checkpoint_seconds > 0:
            raise FleetError(
                f"checkpoint_minutes={self.checkpoint_seconds / 60:g}: give a number above 0"
            )
        parse_budget = parse_share if self.budget and is_share(self.budget) else parse_size
        for name, parse in (("budget", parse_budget), ("host_budget", parse_size)):
            try:
                if (value := getattr(self, name)) is not None:
                    parse(value)
            except ValueError as error:
                raise FleetError(f"{name}: {error}") from None

    @property
    def in_processes(self) -> bool:
        """Whether each device has a process of its own."""
        return self.isolation == "process"

    def identity(self) -> dict[str, Any]:
        """Return the options that must be the same when the fleet resumes."""
        return {"stop": repr(self.stop), "metric": self.metric, "mode": self.mode}

    def random_state(self) -> RandomState:
        """Return the random state of this process. It leaves the GPUs to the devices' processes."""
        return RandomState.capture(torch.device("cpu") if self.in_processes else self.devices[0])

    def seat(self, number: int) -> SeatSettings:
        """Return the settings of all jobs of a device."""
        return SeatSettings(
            self.devices[number], number, self.budget, self.metric, self.checkpoint_seconds,
            self.folder / "plans",
        )  # fmt: skip

    def settings(self) -> FleetSettings:
        """Return the settings of all decisions, with the memory that is left now."""
        device = self.devices[0]
        on_device = 0
        if device.type == "cuda":
            on_device = torch.cuda.get_device_properties(device).total_memory
        arena = 0 if self.budget is None or is_share(self.budget) else parse_size(self.budget)
        host = memory_left().nbytes if self.host_budget is None else parse_size(self.host_budget)
        return FleetSettings(
            devices=len(self.devices),
            host_bytes=host,
            device_bytes=on_device,
            arena_bytes=arena,
            quantum=self.quantum,
            rule=self.stop,
            seconds=self.seconds,
            migrate=self.migrate,
        )


def check_stop_rule(stop: StopRule | None) -> None:
    """Raise `FleetError` if the fleet cannot ask this rule, or compare it after a restart."""
    if stop is None:
        return
    if not hasattr(stop, "judge"):
        raise FleetError(f"stop={stop!r}: give a stop rule, such as Halving('val_loss')")
    if type(stop).__repr__ is object.__repr__:
        raise FleetError(
            f"stop={type(stop).__name__}: give this class a __repr__ with its settings (a"
            " dataclass has one), because the fleet's folder knows its stop rule by it"
        )


def checked_hours(hours: Any) -> float:
    """Return the seconds of a number of hours."""
    number = isinstance(hours, int | float) and not isinstance(hours, bool)
    if not number or not 0 < 3600 * hours < threading.TIMEOUT_MAX:
        raise FleetError(f"hours={hours!r}: give a number above 0, such as 2 or 0.5")
    return 3600.0 * hours


def find_devices(given: Devices) -> tuple[torch.device, ...]:
    """Return the devices that `Fleet(devices=...)` names. `auto`: every GPU, or the CPU if there is
    none; a number of GPUs; a list: names of devices, or numbers of GPUs."""
    count = torch.cuda.device_count()
    if given == "auto":
        return tuple(torch.device("cuda", n) for n in range(count)) or (torch.device("cpu"),)
    if isinstance(given, bool) or (isinstance(given, int) and given < 1):
        raise FleetError(f"devices={given!r}: give auto, a number of GPUs, or a list of devices")
    if isinstance(given, int):
        given = list(range(given))
    names = [given] if isinstance(given, str) else given
    if not isinstance(names, Sequence) or not names:
        raise FleetError(f"devices={given!r}: give auto, a number of GPUs, or a list of devices")
    devices = tuple(_find_device(name, count) for name in names)
    if len({device.type for device in devices}) > 1:
        raise FleetError(
            f"devices={given!r} are of several kinds, and a job has different bits on each: give"
            " devices of one kind"
        )
    gpus = [device for device in devices if device.type == "cuda"]
    if len(set(gpus)) < len(gpus):
        raise FleetError(f"devices={given!r} names one GPU twice: name each once")
    return devices


def _find_device(name: str | int, count: int) -> torch.device:
    try:
        device = torch.device("cuda", name) if isinstance(name, int) else torch.device(name)
    except (RuntimeError, TypeError) as error:
        raise FleetError(
            f"devices: {name!r} is no device: give cpu, cuda:0, or the number of a GPU"
        ) from error
    if device.type not in ("cpu", "cuda"):
        raise FleetError(f"devices: a fleet runs on the CPU and on CUDA devices, not on {name!r}")
    if device.type == "cpu":
        return torch.device("cpu")
    number = device.index or 0
    if number >= count:
        has = f"{count} GPU{'s' * (count != 1)}" if count else "no GPU"
        raise FleetError(f"devices: {name!r} is not there: this machine has {has}")
    return torch.device("cuda", number)


def parse_job_devices(
    given: int | str, devices: Sequence[torch.device], what: str
) -> tuple[int, int]:
    """Return the least and the most devices that a job asks for: 2, or "1..4"."""
    least, dots, most = str(given).partition("..")
    known = not isinstance(given, bool) and least.isdecimal() and (most or least).isdecimal()
    if not known or bool(dots) != bool(most) or not 1 <= int(least) <= int(most or least):
        raise FleetError(f'{what}: give a number of devices, or a range such as "1..4"')
    if int(most or least) > len(devices):
        raise FleetError(
            f"{what}: the fleet has {format_count(len(devices), 'device')}: give it more, or the"
            " job less"
        )
    numbers = [device.index or 0 for device in devices]
    in_order = numbers == [*range(numbers[0], numbers[0] + len(numbers))]
    if int(most or least) > 1 and devices[0].type == "cuda" and not in_order:
        raise FleetError(
            f"{what}: a job has GPUs that follow one another, and those of the fleet are"
            f" {', '.join(map(str, devices))}: give the fleet such as cuda:0, cuda:1"
        )
    return int(least), int(most or least)


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

    def add(
        self,
        name: str,
        program: JobProgram,
        random_state: RandomState,
        priority: int,
        devices: tuple[int, int],
    ) -> None:
        if name in self.hosted:
            raise FleetError(f"there are two jobs of the name {name!r}: give each its own")
        _check_apart(name, program, self._programs)
        job = HostedJob(program, self.folder(name), random_state, priority, *devices)
        self.hosted[name] = pickle_program(name, job) if self._options.in_processes else job
        self._programs[name] = program

    def added(self, name: str) -> Added:
        """Return the event that tells the fleet of a job."""
        job = self.hosted[name]
        return Added(name, job.priority, job.least, job.most)

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
    loaders = as_list(program.train) if isinstance(program, LightningJob) else ()
    return {id(loader) for loader in loaders if not why_not_shareable(loader)}


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
    for callback in as_list(program.trainer.get("callbacks")):
        yield id(callback), f"a callback ({type(callback).__name__})"
    for logger in as_list(program.trainer.get("logger")):
        if not isinstance(logger, bool):
            yield id(logger), f"a logger ({type(logger).__name__})"
    for loader in as_list(program.train):
        if why := why_not_shareable(loader):
            yield from _owned_by_loader(loader, why)
    for loader in as_list(program.val):
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
