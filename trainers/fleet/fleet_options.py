"""What a fleet was made with: checked once, and the same for the whole run."""

import threading
from dataclasses import dataclass
from pathlib import Path
from typing import Any, Literal

import torch

from offload.memory.host_memory import memory_left
from offload.sizes import is_share, parse_share, parse_size
from trainers.dice import Dice
from trainers.fleet.deciding.fleet_error import FleetError
from trainers.fleet.deciding.fleet_state import FleetSettings
from trainers.fleet.deciding.stop_rule import StopRule
from trainers.fleet.device_names import Devices, devices_of
from trainers.fleet.jobs.seat_settings import SeatSettings

Isolation = Literal["thread", "process"]
LONGEST_NAME = 255
"""The bytes that file systems allow for the name of a folder."""


@dataclass(frozen=True, slots=True)
class FleetOptions:
    """The arguments of `Fleet`, which says what they mean."""

    devices: tuple[torch.device, ...]
    isolation: Isolation
    budget: str | int | None
    host_budget: str | int | None
    stop: StopRule | None
    metric: str | None
    mode: str
    quantum: int | None
    folder: Path
    checkpoint_seconds: float
    seconds: float | None

    @classmethod
    def of(
        cls,
        budget: str | int | None,
        devices: Devices,
        host_budget: str | int | None,
        stop: StopRule | None,
        metric: str | None,
        mode: str,
        quantum: int | None,
        folder: str | Path,
        isolation: Isolation | None,
        checkpoint_minutes: float,
        hours: float | None,
    ) -> "FleetOptions":
        found = devices_of(devices)
        if stop is not None and not hasattr(stop, "judge"):
            raise FleetError(f"stop={stop!r}: give a stop rule, such as Halving('val_loss')")
        if stop is not None and type(stop).__repr__ is object.__repr__:
            raise FleetError(
                f"stop={type(stop).__name__}: give this class a __repr__ with its settings (a"
                " dataclass has one), because the fleet's folder knows its stop rule by it"
            )
        options = cls(
            found,
            isolation or ("process" if len(found) > 1 else "thread"),
            budget,
            host_budget,
            stop,
            stop.metric if stop is not None else metric,
            getattr(stop, "mode", mode),
            quantum,
            Path(folder),
            60 * checkpoint_minutes,
            None if hours is None else checked_hours(hours),
        )
        options.check()
        return options

    def check(self) -> None:
        """Raise `FleetError` if a fleet cannot be made so."""
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
        try:
            if self.budget is not None:
                _parsed(self.budget)
        except ValueError as error:
            raise FleetError(f"budget: {error}") from None
        try:
            if self.host_budget is not None:
                parse_size(self.host_budget)
        except ValueError as error:
            raise FleetError(f"host_budget: {error}") from None

    def identity(self) -> dict[str, Any]:
        """Return what must be the same when the fleet goes on, for the same decisions."""
        return {"stop": repr(self.stop), "metric": self.metric, "mode": self.mode}

    def dice(self) -> Dice:
        """Return the dice as they lie now. With processes, this one leaves the GPUs alone."""
        apart = self.isolation == "process"
        return Dice.now(torch.device("cpu") if apart else self.devices[0])

    def seat(self, number: int, device: torch.device) -> SeatSettings:
        """Return what the seats of a device have in common."""
        return SeatSettings(
            device, number, self.budget, self.metric, self.checkpoint_seconds,
            self.folder / "plans",
        )  # fmt: skip

    def settings(self) -> FleetSettings:
        """Return what decisions depend on, with the memory that is left now."""
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


def wrong_name(name: str) -> str:
    """Say why a job cannot have this name, which its folder has, too; "" if it can."""
    if not isinstance(name, str):
        return "give a text"
    if not name or name != Path(name).name or name in (".", ".."):
        return "it is the name of a folder, too, so give one without / and no . or .."
    if not name.isprintable():
        return "it is the name of a folder, too, and has a character that cannot be printed"
    if (length := len(name.encode())) > LONGEST_NAME:
        return f"it is the name of a folder, too, and has {length} bytes of {LONGEST_NAME}"
    return ""


def checked_hours(hours: Any) -> float:
    """Return the seconds of a number of hours."""
    number = isinstance(hours, int | float) and not isinstance(hours, bool)
    if not number or not 0 < 3600 * hours < threading.TIMEOUT_MAX:
        raise FleetError(f"hours={hours!r}: give a number above 0, such as 2 or 0.5")
    return 3600.0 * hours


def _parsed(budget: str | int) -> float:
    """Return the bytes of a budget, or its share of what a step needs."""
    if isinstance(budget, str) and is_share(budget):
        return parse_share(budget)
    return parse_size(budget)
