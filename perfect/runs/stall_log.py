"""Counts where the time of a run with `offload:` goes, phase by phase, and what its plans took.

    batch end |-- waiting for input --|-- planning, kernels, waiting for transfers --|-- rest --|
               the loader's counter    the strategy's `spent`

Validation is not counted. The numbers are saved in checkpoints, so a resumed run continues them;
they are those of rank 0. Without an offloading strategy nothing is counted, and run.json has no
section `offload`.
"""

import time
from collections.abc import Callable
from dataclasses import asdict, dataclass, replace
from pathlib import Path
from typing import Any

import lightning as L

from perfect.callbacks.phase_switch import PhaseSwitch
from trainers.offloading.strategy import OffloadStrategy
from trainers.steps.meter import MeasuredPlan, TimeSpent

Row = dict[str, Any]
SHAPES = 4
"""At most so many shapes of batches are listed for a phase."""
DRAWN = 0.1
"""A plan is drawn if its runs took at least this share of the time of all steps."""


@dataclass(frozen=True, slots=True)
class PhaseTime:
    """The seconds of training in a phase. `seconds` also contains what no part counts: loggers,
    callbacks, checkpoints, the check of the first steps, and the gaps between two kernels."""

    name: str
    runs: int = 0
    seconds: float = 0.0
    compute_seconds: float = 0.0
    transfer_seconds: float = 0.0
    input_seconds: float = 0.0
    planning_seconds: float = 0.0
    inputs: tuple[str, ...] = ()
    """The shapes of its batches."""

    def plus(self, seconds: float, waited: float, before: TimeSpent, now: TimeSpent) -> "PhaseTime":
        shapes = self.inputs
        if now.inputs and now.inputs not in shapes:
            shapes = (*shapes, now.inputs)[:SHAPES]
        spent = {
            name: getattr(self, name) + getattr(now, name) - getattr(before, name)
            for name in ("runs", "compute_seconds", "transfer_seconds", "planning_seconds")
        }
        seconds, waited = self.seconds + seconds, self.input_seconds + waited
        return replace(self, seconds=seconds, input_seconds=waited, inputs=shapes, **spent)


class StallLog(L.Callback):
    """Counts the time of each phase. It comes after `switch` in the list of callbacks."""

    def __init__(self, switch: PhaseSwitch, clock: Callable[[], float] = time.perf_counter) -> None:
        self._switch = switch
        self._clock = clock
        self._strategy: OffloadStrategy | None = None
        self._phases: list[PhaseTime] = []
        self._plan: Row = {}
        self._earlier: list[Row] = []
        """The plans of the run before it was resumed."""
        self._made = 0
        """The number of plans made before the run was resumed."""
        self._since = 0.0
        self._spent = TimeSpent()
        self._waited = 0.0

    def setup(self, trainer: L.Trainer, pl_module: L.LightningModule, stage: str) -> None:
        if stage == "fit" and isinstance(trainer.strategy, OffloadStrategy):
            self._strategy = trainer.strategy

    def on_train_start(self, trainer: L.Trainer, pl_module: L.LightningModule) -> None:
        if self._strategy is not None:
            self._spent, self._waited = self._strategy.spent, self._input_seconds()
            self._since = self._clock()

    def on_validation_end(self, trainer: L.Trainer, pl_module: L.LightningModule) -> None:
        self._since = self._clock()

    def on_train_batch_end(self, *_: Any, **__: Any) -> None:
        if self._strategy is None:
            return
        now, spent, waited = self._clock(), self._strategy.spent, self._input_seconds()
        while len(self._phases) < len(self._switch.records):
            self._phases.append(PhaseTime(self._switch.records[len(self._phases)].name))
        self._phases[-1] = self._phases[-1].plus(
            now - self._since, waited - self._waited, self._spent, spent
        )
        self._since, self._spent, self._waited = now, spent, waited

    def state_dict(self) -> dict[str, Any]:
        if not self._counts:
            return {}
        return {
            "phases": [asdict(phase) for phase in self._phases],
            "plan": self._headline(),
            "plans": self._plans(),
            "plans_made": self._plans_made,
        }

    def load_state_dict(self, state_dict: dict[str, Any]) -> None:
        self._phases = [
            PhaseTime(**row | {"inputs": tuple(row["inputs"])}) for row in state_dict["phases"]
        ]
        self._plan, self._earlier = state_dict["plan"], state_dict["plans"]
        self._made = state_dict["plans_made"]

    def _input_seconds(self) -> float:
        loader = self._switch.loader
        return loader.stats.stall_seconds if loader is not None else 0.0

    def section(self) -> Row | None:
        """Return the section `offload` of run.json; None if nothing is offloaded."""
        if not self._counts:
            return None
        plans, phases = self._plans(), self._phases
        runs = sum(row["runs"] for row in plans)
        seconds = sum(row["seconds"] for row in plans)
        stalled = sum(row["transfer_seconds"] for row in plans)
        return {
            **self._headline(),
            "held_bytes": max((row["held_bytes"] for row in plans), default=None),
            # These are for one run of a graph: an optimizer step, or one of its micro-batches.
            **{
                name: sum(row["runs"] * row[name] for row in plans) / runs if runs else None
                for name in ("predicted_seconds", "median_seconds")
            },
            "transfer_share": stalled / seconds if seconds else None,
            **{
                f"{part}_seconds": sum(getattr(phase, f"{part}_seconds") for phase in phases)
                for part in ("compute", "transfer", "input", "planning")
            },
            "seconds": sum(phase.seconds for phase in phases),
            "runs": sum(phase.runs for phase in phases),
            "plans_made": self._plans_made,
            "plans": plans,
            "phases": [asdict(phase) for phase in phases],
        }

    @property
    def _counts(self) -> bool:
        """Whether time is counted now, or was before the run was resumed."""
        return self._strategy is not None or bool(self._phases)

    def draw(self, folder: Path) -> None:
        """Draw the plans that took most of the time, each into the file that its row names."""
        for row, measured in self._measured_plans():
            if measured is not None and "picture" in row:
                measured.plan.draw(folder / row["picture"])

    @property
    def _plans_made(self) -> int:
        return self._made + (self._strategy.spent.plans if self._strategy is not None else 0)

    def _headline(self) -> Row:
        """Return the figures of the plan of a whole step."""
        if self._strategy is not None and self._strategy.spent.plans:
            plan = self._strategy.plan
            limits = [nbytes for nbytes in plan.budget.values() if nbytes is not None]
            self._plan = {
                "budget_bytes": max(limits, default=None),
                "host_budget_bytes": plan.host_budget,
                "smallest_bytes": plan.smallest_bytes,
                "peak_bytes": plan.device_bytes,
                "host_bytes": plan.host_bytes,
                "unmoved_bytes": plan.peak_bytes + plan.reserve,
                "resident_seconds": plan.resident_seconds,
                "bound_seconds": plan.bound.seconds,
                "binds": plan.bound.lane,
                "device": self._strategy.target.name,
                "engine": self._strategy.target.engine,
            }
        return self._plan

    def _plans(self) -> list[Row]:
        return [row for row, _ in self._measured_plans()]

    def _measured_plans(self) -> list[tuple[Row, MeasuredPlan | None]]:
        """Return the plans of the whole run, one row for each, also of before a resume."""
        plans: list[tuple[Row, MeasuredPlan | None]] = [(row, None) for row in self._earlier]
        if self._strategy is None:
            return plans
        steps = self._strategy.spent.seconds
        for measured in self._strategy.plans:
            row = _row(measured)
            of = row["inputs"], row["part"]
            at = next(
                (
                    n
                    for n, (old, now) in enumerate(plans)
                    if now is None and (old["inputs"], old["part"]) == of
                ),
                len(plans),
            )
            if at < len(plans):
                old = plans[at][0]
                summed = ("runs", "seconds", "compute_seconds", "transfer_seconds")
                row = old | row | {key: old[key] + row[key] for key in summed}
            else:
                plans.append((row, measured))
            if measured.spent.seconds >= DRAWN * steps:
                row["picture"] = f"memory-{at + 1}.svg"
            plans[at] = (row, measured)
        return plans


def _row(measured: MeasuredPlan) -> Row:
    plan, spent = measured.plan, measured.spent
    return {
        "inputs": measured.inputs,
        "part": measured.part,
        "runs": spent.runs,
        "seconds": spent.seconds,
        "compute_seconds": spent.compute_seconds,
        "transfer_seconds": spent.transfer_seconds,
        "median_seconds": measured.median_seconds,
        "predicted_seconds": plan.predicted_seconds,
        "bound_seconds": plan.bound.seconds,
        "binds": plan.bound.lane,
        "copies": measured.copies,
        "bytes_in": measured.bytes_in,
        "bytes_out": measured.bytes_out,
        "peak_bytes": plan.device_bytes,
        "held_bytes": measured.held_bytes,
    }


def stall_log(trainer: L.Trainer) -> StallLog:
    """Return the StallLog of this run; every run has one."""
    callbacks: list[Any] = trainer.callbacks  # type: ignore[attr-defined]
    return next(c for c in callbacks if isinstance(c, StallLog))
