"""A stop rule ends jobs early, by what they report at certain steps (rungs).

    step  0 ........ rung ........ rung ............ end
                      |             '- next_look(step of the rung before)
                      '- judge: which jobs stop here     waits: which jobs wait here for others

A rule may look only at what jobs have reported at their rungs, and in which order. So it gives the
same verdicts when a journal is read again.
"""

from collections.abc import Collection, Mapping
from typing import Protocol

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
