"""Moves of a training to another device: captured ahead, and made between two steps.

    any thread    move_to(device=) ..................................... done.result()
    the training  | step | capture there, step here | step | the transfer | step there

A capture needs the module, its optimizer and a batch, as they are between two steps. So the thread
that trains makes it, at the first step that begins after the move was asked for. That step still
runs here. The tensors move before the batch of the next one is brought to its device.
"""

import threading
from collections.abc import Iterator
from concurrent.futures import Future
from contextlib import contextmanager
from dataclasses import dataclass, field

import torch
from lightning_utilities.core.rank_zero import rank_zero_warn

from offload import DeviceLost, OffloadError
from offload.running.runner_memory import Migration
from trainers.offloading.hardware.target import Target
from trainers.offloading.steps.movable_steps import MovableSteps

SAME = "same"
"""As a budget: that of the plan that is left."""


@dataclass(slots=True, eq=False)
class DeviceMove:
    """A move that was asked for and is not over."""

    target: Target
    budget: str | int | None
    done: Future[Migration] = field(default_factory=Future)
    there: MovableSteps | None = None
    """The version of the steps that it goes over to, once it is captured and planned."""


class DeviceMoves:
    """The moves of one strategy. They are made one after the other."""

    def __init__(self) -> None:
        self._lock = threading.Lock()
        self._waiting: list[DeviceMove] = []
        self._left: dict[torch.device, MovableSteps] = {}
        """The versions that were left. To return to one takes no capture."""

    def ask(self, target: Target, budget: str | int | None) -> Future[Migration]:
        move = DeviceMove(target, budget)
        move.done.set_running_or_notify_cancel()  # nobody can cancel it
        with self._lock:
            self._waiting.append(move)
        return move.done

    @property
    def next(self) -> DeviceMove | None:
        """The move that comes next."""
        with self._lock:
            return self._waiting[0] if self._waiting else None

    def left(self, device: torch.device) -> MovableSteps | None:
        """Return the version of this device that was left, and give it up."""
        return self._left.pop(device, None)

    def leave(self, device: torch.device, steps: MovableSteps) -> None:
        self._left[device] = steps

    @contextmanager
    def refusing(self, move: DeviceMove, refusals: type[Exception]) -> Iterator[None]:
        """If this block raises, the move is over. After one of `refusals` the training goes on
        where it is; others end it, and so does the loss of a device."""
        try:
            yield
        except BaseException as error:
            self._end(move)
            move.done.set_exception(error)
            if not isinstance(error, refusals) or isinstance(error, DeviceLost):
                raise
            rank_zero_warn(
                f"OffloadStrategy stays on its device, because it cannot move to"
                f" {move.target.name}, and nothing has moved: {error}"
            )

    def made(self, move: DeviceMove, moved: Migration) -> None:
        self._end(move)
        move.done.set_result(moved)

    def _end(self, move: DeviceMove) -> None:
        with self._lock:
            self._waiting.remove(move)

    def end(self) -> None:
        """No step comes any more, or none of these versions."""
        with self._lock:
            moves, self._waiting = self._waiting, []
        self._left.clear()
        for move in moves:
            move.done.set_exception(
                OffloadError("the run ended before the step that would have moved: nothing moved")
            )
