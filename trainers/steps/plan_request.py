"""The user's wishes for every plan of a run: the budgets, and what a plan may do to keep them."""

import math
from collections.abc import Callable
from dataclasses import dataclass, replace
from pathlib import Path
from typing import Any

from lightning.pytorch.plugins.precision import Precision

import offload
from offload import BudgetTooSmall, CaptureError, OffloadError, Plan, PlanCache, TaskGraph
from offload.plans.plan import largest_peak, reserve_of
from offload.sizes import format_size, is_share, parse_share, parse_size, size_to_give
from trainers.steps.target import ENGINES, ON_CPU, Target

RECOMPUTE = ("auto", "never")
OPTIMIZERS = ("auto", "device", "host")


@dataclass(frozen=True, slots=True)
class PlanRequest:
    """The options that the user gave for every plan, and the target where plans run."""

    budget: str | int | None = None
    host_budget: str | int | None = None
    recompute: str = "auto"
    optimizer: str = "auto"
    engine: str = "auto"
    verify: bool = True
    target: Target = ON_CPU
    reserved: Callable[[], int] = int
    """Returns the bytes of the budget that are kept for guests of high priority."""
    tails: bool = False
    """Whether another job has the device while only the host works at the end of a step."""
    cache: PlanCache | None = None
    """Where plans and measurements are kept for later starts of the same run."""
    host_dir: Path | None = None
    """A folder for the files that are the host's memory; None: it is RAM."""
    devices: int = 1
    """Over how many devices a step is spread. Each of them has the budget."""
    most_devices: int = 1
    """Over so many it may be spread later. Its steps are those of several devices by now."""
    default_budget: str | None = None
    """The budget of the steps of a fleet's job whose `budget` is None."""

    def __post_init__(self) -> None:
        for name, given, known in (
            ("recompute", self.recompute, RECOMPUTE),
            ("optimizer", self.optimizer, OPTIMIZERS),
            ("engine", self.engine, ENGINES),
        ):
            if given not in known:
                raise ValueError(f"{name}={given!r} is not known: give one of {', '.join(known)}")
        if self.devices < 1:
            raise ValueError(f"devices={self.devices}: give 1 or more")
        if self.budget is not None:
            _check("budget", parse_share if is_share(self.budget) else parse_size, self.budget)
        if self.host_budget is not None:
            _check("host_budget", parse_size, self.host_budget)

    @property
    def joins_batches(self) -> bool:
        """Whether all batches of an update are one step, so that devices work on them at once."""
        return max(self.devices, self.most_devices) > 1

    def for_target(self, target: Target, plugin: Precision) -> "PlanRequest":
        """Return the request for plans on this target, whose rates are measured if need be."""
        return replace(self, target=target.measured(plugin, self.cache, self.devices))

    def check_eager(self, why: str) -> None:
        """Raise `CaptureError` if this run has a budget, which eager training could not keep, or
        several devices, of which it would use one."""
        if self.devices > 1:
            raise CaptureError(
                f"OffloadStrategy(devices={self.devices}): this run cannot be planned: {why}."
                " Without a plan one device would do all: change what is named, or give devices=1"
            )
        if self.budget is not None:
            raise CaptureError(
                f"OffloadStrategy(budget={self.budget!r}): this run cannot be planned: {why}."
                " Without a plan no budget can be kept: change what is named, or give budget=None"
                " to train without offloading"
            )

    def plan(self, graph: TaskGraph) -> Plan:
        budget, whole_bytes = self.budget, 0
        if isinstance(budget, str) and is_share(budget):
            share, whole_bytes = parse_share(budget), largest_peak(graph)
            # The share is one of the bytes that can leave the device; its libraries keep theirs.
            budget = math.ceil(whole_bytes * share) + reserve_of(graph)
            if share >= 1:  # nothing needs to move, but the packed layout may be a bit larger
                whole = offload.plan(graph, costs=self.target.costs, recompute=False)
                budget = max(budget, whole.device_bytes)
        reserved = self.reserved() if budget is not None else 0
        if budget is not None and reserved:
            budget = parse_size(budget) - reserved
            if budget <= 0:
                raise OffloadError(
                    f"budget={self.budget!r} is used up by {format_size(reserved)} that are"
                    " reserved for requests of high priority: give a larger budget, or them less"
                )
        try:
            return offload.plan(
                graph,
                budget,
                self.target.costs,
                self.host_budget,
                recompute=self.recompute == "auto",
                optimizer=self.optimizer,
                proven=self.verify,
                tails=self.tails,
                cache=self.cache,
            )
        except BudgetTooSmall as error:
            if error.on_host or not (reserved or whole_bytes):
                raise
            needed = error.needed + reserved
            advice = f"give budget='{size_to_give(needed, self.budget)}'"
            if whole_bytes:
                enough = math.ceil(100 * (needed - reserve_of(graph)) / whole_bytes)
                advice = (
                    f"{self.budget} is a share of the {format_size(whole_bytes)} that this step"
                    f" needs without offloading: give {enough}%"
                )
            if reserved:
                advice += (
                    f". This budget is budget={self.budget!r} without the {format_size(reserved)}"
                    " that are reserved for requests of high priority, and those come on top"
                )
            raise error.with_advice(advice, more=reserved) from error


def _check(name: str, parse: Callable[[Any], float], given: str | int) -> None:
    try:
        parse(given)
    except ValueError as error:
        raise ValueError(f"{name}: {error}") from None
