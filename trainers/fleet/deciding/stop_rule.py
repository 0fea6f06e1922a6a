"""What a stop rule answers.

    step  0 ........ rung ........ rung ............ end
                      |             '- next_look(step of the rung before)
                      '- judge: who stops here       waits: who stands still until others are here

All that a rule may look at is what jobs have reported at their rungs, and in which order. A journal
that is read again tells it the same in the same order, so it gives the same verdicts.
"""

from collections.abc import Collection, Mapping
from typing import Protocol

Seen = Mapping[str, Mapping[int, float]]
"""By job, in the order of adding: the value of the metric at each rung that it has reached. A job
that has reported nothing yet is there too, with nothing in it."""


class StopRule(Protocol):
    """Decides at rungs which jobs end early."""

    @property
    def metric(self) -> str:
        """The name under which jobs log what the rule looks at."""
        ...

    def next_look(self, step: int) -> int | None:
        """The first rung after `step`; None if there is no more."""
        ...

    def judge(self, seen: Seen, gone: Mapping[str, str]) -> Mapping[str, str]:
        """Why, by job that should stop. `gone` have ended, or are about to: finished, stopped or
        failed. The fleet asks after every report, and stops only jobs that stand at a rung."""
        ...

    def waits(self, job: str, seen: Seen, alive: Collection[str]) -> bool:
        """Whether `job`, which stands at its newest rung, waits there for others."""
        ...
