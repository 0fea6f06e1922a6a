"""One step of a runner whose tail runs while another job may have the stage.

    under the stage's lock    body | outputs, which lie on the device
    without it                       on_tail | tail .......... | tail_over

An error of the body, of `on_tail` or of the tail ends the step. `end` comes always: nothing of the
step runs after it.
"""

import torch

from offload.running.binding import Binding, notes_on_failure
from offload.running.engines.tail_crew import HostTails, SplitWork, TailCrew
from offload.running.engines.work import Record
from offload.running.stage import Stage
from offload.running.trace import Trace


class TailedStep:
    """Made for one step. Its methods are called in the order in which they are written here."""

    def __init__(self, crew: TailCrew, tails: HostTails) -> None:
        self._crew = crew
        self._tails = tails
        self._record = Record()
        self._bound: Binding | None = None
        self._split: SplitWork | None = None
        self._counted: list[torch.Tensor] = []
        self._notified = False

    def prepare(self, bound: Binding) -> bool:
        """Whether the step has a tail. If not, it is run as a whole."""
        self._bound, self._split = bound, bound.split_tail(self._crew)
        self._counted = bound.homes.versioned_tensors()
        return self._split is not None

    def run_body(self, stage: Stage) -> None:
        assert self._split is not None
        self._crew.begin(self._split)
        stage.run(self._split.body, self._record)
        if self._crew.failed:
            self._crew.finish(self._split, self._record)

    @property
    def has_tail(self) -> bool:
        """Whether a tail is left that `run_tail` runs."""
        return self._split is not None

    def run_tail(self) -> None:
        """Call it without the stage's lock."""
        assert self._split is not None
        self._notified = True
        self._tails.on_tail()
        self._crew.finish(self._split, self._record)
        torch.autograd.graph.increment_version(self._counted)

    def annotate(self, error: BaseException) -> None:
        """End the step, and add to the error what became of it."""
        self.end()
        if self._bound is not None and self._split is not None:
            for note in notes_on_failure(self._bound.memgraph, self._record):
                error.add_note(note)

    def end(self) -> Trace | None:
        """Wait for what runs. Returns the trace; None if the step had no tail."""
        if self._bound is None or self._split is None:
            return None
        self._crew.end(self._split, self._record)
        return Trace(self._bound.memgraph, self._record)

    def notify_end(self) -> None:
        """Report that the tail is over, if it was reported that it began."""
        if self._notified:
            self._tails.tail_over()
