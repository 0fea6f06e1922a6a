"""`OffloadStrategy` for a job of a fleet: its runners are tenants of the device's one stage."""

from dataclasses import replace
from typing import Any

from trainers.offloading.strategy import OffloadStrategy
from trainers.steps.target import MakeRunner, Target


class JobStrategy(OffloadStrategy):
    """Plans and offloads the steps of one job."""

    strategy_name = "offload_job"

    def __init__(self, make_runner: MakeRunner, tails: bool, **options: Any) -> None:
        """`make_runner` returns a runner for a plan as soon as there is memory for it. `tails`:
        plan for a device that goes to another job when only the host works on a step. `options`:
        those of `OffloadStrategy`."""
        super().__init__(**options)
        # Without a budget, too, the first step has a plan, which shows what the job needs.
        request = replace(self._run.request, tails=tails, default_budget="100%")
        self._start_run(request)
        self._make_runner = make_runner

    def find_target(self) -> Target:
        return replace(super().find_target(), make_runner=self._make_runner)

    def on_validation_end(self) -> None:
        super().on_validation_end()
        if self._run.module.trainer.sanity_checking:
            self._run.session.close()  # only the runner of the training counts as the job's memory
