"""What is known of the values that a step asks for, when a graph has assumed other ones.

    run graph A   its check fails: mask.all() is False now    told: (False,)
    find a graph that assumes False, or capture one with the present values, and run that

A failed run has changed nothing that outlives the step. Random numbers that it drew are put back.
"""

from collections.abc import Callable, Iterator, Sequence
from contextlib import contextmanager
from typing import Protocol, TypeVar

import torch

from offload import AssumptionFailed, CaptureError, TaskGraph
from offload.program.assumptions import Number, same_start
from trainers.offloading.hardware.generators import drawn, generators_of, put_back

Outputs = TypeVar("Outputs")

CAPTURES = 3
"""A value for which the step is captured in so many steps in a row changes too often..."""
TURNS = 32
"""...and one that the step itself keeps, if it is in so many: the pointer of a queue comes back."""
FAILURES = 16
"""So does one for which another graph is used in so many steps in a row."""


class AssumingStep(Protocol):
    """The graph of a step, and what it assumes."""

    @property
    def assumed(self) -> Sequence[Number]: ...

    @property
    def graph(self) -> TaskGraph: ...


class Answers:
    """The answers that are known for the present micro-batch, and how often they surprise."""

    def __init__(self) -> None:
        self.known: tuple[Number, ...] = ()
        """The answers to the first questions of the step; empty before a check has failed."""
        self.surprise = ""
        """What the last check that failed has said."""
        self._failed = 0
        """In so many steps in a row a check has failed."""
        self._captured = 0
        """For so many of these a graph was captured."""

    def settled(self, run: Callable[[], Outputs]) -> Outputs:
        """Run another micro-batch, and again by another graph where a check has failed: by one that
        assumes what is known then."""
        self.known, self.surprise = (), ""
        while True:
            try:
                return run()
            except AssumptionFailed:
                continue

    def fit(self, step: AssumingStep) -> bool:
        """Whether the graph assumes what is known."""
        return same_start(step.assumed, self.known)

    def for_capture(self) -> tuple[Number, ...]:
        """Return what is known to whoever captures the step now."""
        self._captured += bool(self.known)
        return self.known

    @contextmanager
    def told(self, step: AssumingStep, device: torch.device) -> Iterator[None]:
        """Run the step in this block. Note the answer of a check that fails. Raise `CaptureError`
        if that happens too often."""
        own = generators_of(step.graph) if step.assumed else ()
        states = drawn(device, own) if step.assumed else ()
        try:
            yield
        except AssumptionFailed as error:
            put_back(states, device, own)
            self._failed += not self.known
            self.surprise = str(error)
            self.known = (*step.assumed[: error.number], error.found)
            limit = TURNS if error.own else CAPTURES
            if self._captured >= limit or self._failed >= max(limit, FAILURES):
                raise CaptureError(
                    f"{error}: it is another one in {self._failed} steps in a row, and a graph has"
                    " one value. Keep it a tensor, choose with torch.where, or return it from the"
                    " step and read it there"
                ) from error
            raise
        if not self.known:
            self._failed = self._captured = 0


def why_not_late(graph: TaskGraph) -> str:
    """Say why updates of this step may not wait for the next one; empty if they may."""
    if any(task.checks for task in graph.tasks):
        return "the step checks values, and a step that is made again must not have updated before"
    return ""
