"""The arguments of a fleet, checked once."""

import threading
from collections.abc import Sequence
from dataclasses import dataclass
from pathlib import Path
from typing import Any, Literal

import torch

from offload.memory.host_memory import memory_left
from offload.sizes import is_share, parse_share, parse_size
from trainers.fleet.deciding.fleet_error import FleetError
from trainers.fleet.deciding.fleet_state import FleetSettings
from trainers.fleet.deciding.stop_rule import StopRule
from trainers.fleet.jobs.seat_settings import SeatSettings
from trainers.random_state import RandomState

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
        for name, parse in (("budget", _parse_budget), ("host_budget", parse_size)):
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

    def seat(self, number: int, device: torch.device) -> SeatSettings:
        """Return the settings of all jobs of a device."""
        return SeatSettings(
            device, number, self.budget, self.metric, self.checkpoint_seconds,
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


def _parse_budget(budget: str | int) -> float:
    """Return the bytes of a budget, or its share of what a step needs."""
    if isinstance(budget, str) and is_share(budget):
        return parse_share(budget)
    return parse_size(budget)
