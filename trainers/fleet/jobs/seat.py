"""What a job's program sees of the fleet: its strategy, its folder, and whether it has to leave."""

from collections.abc import Callable
from dataclasses import replace
from pathlib import Path
from typing import Any, Protocol

import lightning as L
import torch

from trainers.fleet.deciding.events import Event, FleetError
from trainers.fleet.inputs.shared_inputs import SharedInputs, why_not_shareable
from trainers.fleet.jobs.job_turns import JobProgress, JobTurns, leave_for_good
from trainers.fleet.jobs.tenancy import Baton, SeatSettings, Tenancy
from trainers.offloading.strategy import OffloadStrategy
from trainers.random_state import RandomState
from trainers.steps.target import MakeRunner, Target


class JobStrategy(OffloadStrategy):
    """Plans and offloads the steps of one job."""

    strategy_name = "offload_job"

    def __init__(
        self, make_runner: MakeRunner, tails: bool, most_devices: int = 1, **options: Any
    ) -> None:
        """`make_runner` returns a runner for a plan as soon as there is memory for it. `tails`:
        plan for a device that goes to another job when only the host works on a step.
        `most_devices`: so many the job may have later. `options`: those of `OffloadStrategy`."""
        super().__init__(**options)
        # Without a budget, too, the first step has a plan, which shows what the job needs.
        request = replace(
            self._run.request, tails=tails, default_budget="100%", most_devices=most_devices
        )
        self._start_run(request)
        self._make_runner = make_runner

    def find_target(self) -> Target:
        return replace(super().find_target(), make_runner=self._make_runner)

    @property
    def is_in_step(self) -> bool:
        return self._run.session.is_in_step

    def seconds_by_devices(self) -> tuple[float, ...]:
        """Predict the latest step on 1, 2, .. devices."""
        return self._run.seconds_by_devices()

    def on_validation_end(self) -> None:
        super().on_validation_end()
        if self._run.module.trainer.sanity_checking:
            self._run.session.close()  # only the runner of the training counts as the job's memory


class Seat:
    """One job's."""

    def __init__(
        self,
        name: str,
        folder: Path,
        settings: SeatSettings,
        tenancy: Tenancy,
        random_state: RandomState,
        send: Callable[[Event], None],
        inputs: SharedInputs,
    ) -> None:
        self.name = name
        self.folder = folder
        self.settings = settings
        self.callbacks: list[L.Callback] = []
        """They must be in the Trainer."""
        self.reserve: int | None = None
        """The bytes that a job without a plan takes of its device, as its user says."""
        self.leave_between_batches: Callable[[], None] | None = None
        """Leaves where the loader waits for a batch, if a checkpoint can be written there."""
        self.progress = JobProgress(name, settings.metric)
        self.turns = JobTurns(
            settings, tenancy, Baton(settings.device, random_state, tenancy, send),
            self.progress, inputs,
        )  # fmt: skip
        self._inputs = inputs

    @property
    def device(self) -> torch.device:
        return self.settings.device

    @property
    def on_device(self) -> dict[str, Any]:
        """The Trainer's arguments that name the fleet's device."""
        if self.device.type == "cpu":
            return {"accelerator": "cpu", "devices": 1}
        return {"accelerator": "gpu", "devices": [self.device.index or 0]}

    @property
    def leave_asked(self) -> str:
        """Why the job has to leave now; empty if it need not."""
        return self.turns.baton.leave_reason

    def strategy(self, **options: Any) -> JobStrategy:
        """Return an `OffloadStrategy` with these options, within the fleet's budget."""
        on_gpu = self.device.type == "cuda"  # a CPU is its own host: no tail is hidden there
        given = {"budget": self.settings.budget, "plan_cache": self.settings.plans, **options}
        if "devices" in options:
            raise FleetError(
                f"job {self.name}: offload={{'devices': {options['devices']!r}}} cannot be given,"
                " because the fleet chooses them: give Fleet.add(devices=...)"
            )
        devices, most = self.settings.devices, self.settings.most_devices
        made = JobStrategy(self.turns.make_runner, on_gpu, most, devices=devices, **given)
        self.turns.seconds_by_devices = made.seconds_by_devices if most > devices else None
        return made

    def share_loader(self, loader: Any, given: Any = None) -> Any:
        """Return what the job trains with: a view of this loader, if other jobs could read it as
        well. `given`: the loader object that the user gave to the job. It stays as it is, so that
        each job that has it begins at the same place."""
        if why_not_shareable(loader):
            return loader
        return self._inputs.view(self.name, loader, given, self._wait_for_jobs)

    def _wait_for_jobs(self, jobs: tuple[str, ...]) -> bool:
        """Let other jobs read first. If the job has to leave instead, it leaves here if it can; if
        not, it reads on alone until it can write a checkpoint."""
        if self.turns.wait_for_jobs(jobs):
            return True
        trainer = self.progress.trainer
        if trainer is not None and self.leave_asked == "stopped":
            leave_for_good(self.name, self.folder, trainer)
        if self.leave_asked and self.leave_between_batches is not None:
            self.leave_between_batches()
        return False

    def close(self) -> None:
        """Drop the Trainer and its module, because the job's program has returned."""
        self.leave_between_batches = None
        self._inputs.leave(self.name)
        self.progress.trainer = None
        self.callbacks.clear()  # Lightning lets each of them refer to the module


class JobProgram(Protocol):
    """Builds a Trainer with `seat.strategy(...)` and `seat.callbacks`, and fits with it.

    It is called in the job's thread, at the beginning and again after the job has left: then it
    resumes from its own checkpoint in `seat.folder`. While `seat.leave_asked` is not empty, the
    program writes a checkpoint as soon as it can and raises `JobLeft`. A program is pickled if the
    fleet has processes."""

    def __call__(self, seat: Seat) -> None: ...
