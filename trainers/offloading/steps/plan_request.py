"""The user's wishes for every plan of a run: the budgets, and what a plan may do to keep them."""

import math
from collections.abc import Callable
from dataclasses import dataclass, replace
from typing import Any

import offload
from offload import BudgetTooSmall, OffloadError, Plan, TaskGraph
from offload.sizes import is_share, parse_share, parse_size, say_size
from trainers.offloading.hardware.target import ENGINES, ON_CPU, Target

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

    def __post_init__(self) -> None:
        for name, given, known in (
            ("recompute", self.recompute, RECOMPUTE),
            ("optimizer", self.optimizer, OPTIMIZERS),
            ("engine", self.engine, ENGINES),
        ):
            if given not in known:
                raise ValueError(f"{name}={given!r} is not known: give one of {', '.join(known)}")
        if self.budget is not None:
            _check("budget", parse_share if is_share(self.budget) else parse_size, self.budget)
        if self.host_budget is not None:
            _check("host_budget", parse_size, self.host_budget)

    def with_bytes_of(self, plan: Plan) -> "PlanRequest":
        """Return the request for other graphs with as many bytes as this plan was given. A share of
        another graph would be other bytes."""
        limits = [limit for limit in plan.budget.values() if limit is not None]
        # What is reserved is taken off already.
        return replace(self, budget=limits[0] if limits else None, reserved=int)

    def plan(self, graph: TaskGraph, late: bool = False) -> Plan:
        """Plan this graph. `late`: updates on the host may be deferred to the next step."""
        budget = self.budget
        if isinstance(budget, str) and is_share(budget):
            whole = offload.plan(graph, costs=self.target.costs, recompute=False)
            share = parse_share(budget)
            # The share is one of the bytes that can leave the device; its libraries keep theirs.
            budget = math.ceil(whole.peak_bytes * share) + whole.reserve
            if share >= 1:  # nothing needs to move, but the packed layout may be a bit larger
                budget = max(budget, whole.device_bytes)
        reserved = self.reserved() if budget is not None else 0
        if budget is not None and reserved:
            budget = parse_size(budget) - reserved
            if budget <= 0:
                raise OffloadError(
                    f"budget={self.budget!r} is used up by {say_size(reserved)} that are"
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
                late=late,
                tails=self.tails,
            )
        except BudgetTooSmall as error:
            if not reserved:
                raise
            raise BudgetTooSmall(
                f"{error}. This budget is budget={self.budget!r} without the {say_size(reserved)}"
                " that are reserved for requests of high priority, and those come on top",
                needed=error.needed + reserved,
                task=error.task,
            ) from error


def _check(name: str, parse: Callable[[Any], float], given: str | int) -> None:
    try:
        parse(given)
    except ValueError as error:
        raise ValueError(f"{name}: {error}") from None
