"""Synchronous successive halving: from each rung only the best jobs go on.

    first = 500, eta = 3       500          1500            4500
    a  0.9 ------------------- | stops
    b  0.5 ------------------- | ---------- | ------------- | ...
    c  0.7 ------------------- | ---------- | stops
    d      ........ added late | judged against all that was ever recorded here

A job waits at a rung until every living job has reported there. Then, of `n` values that were
recorded at this rung, the best `ceil(n / eta)` go on. A job that comes later is judged the same
way, and jobs that went on before stay. NaN is the worst value; equal values go by the job's name.

Of Jamieson and Talwalkar, "Non-stochastic Best Arm Identification" (2016), with late jobs.
"""

import math
from collections.abc import Collection, Mapping
from dataclasses import dataclass
from typing import Literal, Protocol

Seen = Mapping[str, Mapping[int, float]]
"""By job, in the order of adding: the value of the metric at each rung that it has reached. It has
jobs without any value, too."""


class StopRule(Protocol):
    """Decides at rungs which jobs end early."""

    @property
    def metric(self) -> str:
        """The name of the metric."""
        ...

    def next_look(self, step: int) -> int | None:
        """Return the first rung after `step`; None if there is none."""
        ...

    def judge(self, seen: Seen, gone: Mapping[str, str]) -> Mapping[str, str]:
        """Return the reason by job that should stop. `gone`: by job that has ended, or will soon:
        finished, stopped or failed. Only jobs that stand at a rung are stopped."""
        ...

    def waits(self, job: str, seen: Seen, alive: Collection[str]) -> bool:
        """Return whether `job` waits at its newest rung for others."""
        ...


@dataclass(frozen=True, slots=True)
class Halving:
    """Stops all but the best `1 / eta` of the jobs at the steps first, first * eta, ..."""

    metric: str
    """The name under which modules log the metric."""
    eta: int = 3
    """One of this many jobs goes on, and each rung is this many times later than the one before."""
    first: int = 500
    """The step of the first rung."""
    mode: Literal["min", "max"] = "min"
    """Whether a smaller or a larger value is better."""

    def __post_init__(self) -> None:
        _check(self.metric, self.eta, self.first, self.mode)

    def next_look(self, step: int) -> int:
        """Return the first of first, first * eta, ... after `step`."""
        rung = self.first
        while rung <= step:
            rung *= self.eta
        return rung

    def judge(self, seen: Seen, gone: Collection[str]) -> Mapping[str, str]:
        """Return the jobs that are not among the best of their newest rung, if it is complete."""
        verdicts: dict[str, str] = {}
        alive = [job for job in seen if job not in gone]
        for job in alive:
            rung = max(seen[job], default=None)
            if rung is None or self.waits(job, seen, alive):
                continue
            order = self._order(rung, seen)
            kept = math.ceil(len(order) / self.eta)
            if (place := order.index(job)) >= kept:
                verdicts[job] = (
                    f"{self.metric} {seen[job][rung]:.6g} at step {rung} is number {place + 1} of"
                    f" {len(order)}, and {_best(kept)} on"
                )
        return verdicts

    def waits(self, job: str, seen: Seen, alive: Collection[str]) -> bool:
        """Return whether a living job has not reported yet at the newest rung of `job`."""
        rung = max(seen[job])
        return any(rung not in seen[other] for other in alive)

    def _order(self, rung: int, seen: Seen) -> list[str]:
        """Return the jobs that reported at a rung, the best one first."""
        sign = 1 if self.mode == "min" else -1

        def rank(job: str) -> tuple[bool, float, str]:
            value = seen[job][rung]
            return math.isnan(value), 0.0 if math.isnan(value) else sign * value, job

        return sorted((job for job in seen if rung in seen[job]), key=rank)


def _best(kept: int) -> str:
    return "only the best one goes" if kept == 1 else f"the best {kept} go"


def _check(metric: str, eta: int, first: int, mode: str) -> None:
    if not isinstance(metric, str) or not metric:
        raise ValueError(
            f"Halving: metric is {metric!r}: give the name under which your module logs a value,"
            " such as 'val_loss'"
        )
    if not isinstance(eta, int) or isinstance(eta, bool) or eta < 2:
        raise ValueError(
            f"Halving: eta is {eta!r}: give a whole number of at least 2; 3 keeps the best third"
        )
    if not isinstance(first, int) or isinstance(first, bool) or first < 1:
        raise ValueError(
            f"Halving: first is {first!r}: give the step of the first rung, such as 500"
        )
    if mode not in ("min", "max"):
        raise ValueError(
            f"Halving: mode is {mode!r}: give 'min' if a smaller {metric} is better, or 'max'"
        )
