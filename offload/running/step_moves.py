"""A step that another thread runs goes on on another stage, from between two of its nodes.

    thread of the step   | F1 F2 |stop| live bytes over | F3 B3 ... on the other stage |
    who asks             ask ..... has the other stage's lock .......................... over

The engine ends between two nodes; what was begun ends. Only the bytes that are still needed are
copied, to the same places of another arena. The job's arena on the host stays. The same nodes are
bound there, and those that have not run yet run there, once. The old stage is free as soon as the
bytes are gone. A step that is over before it could stop has not moved.
"""

import threading
from collections.abc import Callable, Sequence
from dataclasses import dataclass, field

import torch

from offload.gate import StepStopped
from offload.memory.runnable import RunnablePlan
from offload.running.binding import Binding
from offload.running.engines.pieces import WorkPiece
from offload.running.engines.work import Record
from offload.running.runner_memory import Migration
from offload.running.stage import Stage


@dataclass(slots=True, eq=False)
class StepMove:
    """What a thread asks of the step of another one."""

    plan: RunnablePlan
    stage: Stage
    """Who asks holds its lock until the step is over."""
    owned: bool
    """Whether the runner is to close the new stage at its end."""
    moved: Migration | None = None
    """None, without an error: the step was not moved, but it may be after its end."""
    error: Exception | None = None
    """Why there is no going there."""
    over: threading.Event = field(default_factory=threading.Event)


GoOver = Callable[[StepMove, Binding, Record], Binding]
"""Binds the step's nodes elsewhere, or returns the same binding if it must stay."""


class StepMoves:
    """One runner's."""

    def __init__(self) -> None:
        self._lock = threading.Lock()
        self._runs_on: Stage | None = None
        """Where nodes run now that may be stopped."""
        self._asked: StepMove | None = None

    def ask(self, plan: RunnablePlan, stage: Stage, owned: bool) -> StepMove | None:
        """Ask the step that runs now to go on there; None if there is none that could. Wait for
        `over`, or `withdraw`."""
        with self._lock:
            if self._runs_on is None or self._asked is not None:
                return None
            self._asked = StepMove(plan, stage, owned)
            self._runs_on.gate.stop_step()
            return self._asked

    def wait(self, move: StepMove) -> None:
        """Wait until the step is over. A Ctrl-C ends the wait if the step has not moved yet."""
        try:
            move.over.wait()
        except BaseException:
            with self._lock:
                begun = self._asked is not move
                self._asked = self._asked if begun else None
            if begun:
                move.over.wait()
            raise

    def run(self, stage: Stage, bound: Binding, record: Record, go_over: GoOver) -> Binding:
        """Run the step. Returns the binding with which it ended."""
        if stage.engine.captures:
            stage.run(bound.pieces, record)
            return bound
        pieces, stopped = bound.pieces, True
        try:
            while stopped:
                stopped = self._stopped(stage, pieces, record)
                move = self._taken() if stopped else None
                if move is not None:
                    bound = self._moved(move, bound, record, go_over)
                    stage = move.stage if move.moved is not None else stage
                if stopped:  # whoever asked may have withdrawn
                    pieces = bound.left(record.finished)
            return bound
        finally:
            if (late := self._taken()) is not None:
                late.over.set()

    def _stopped(self, stage: Stage, pieces: Sequence[WorkPiece], record: Record) -> bool:
        """Run nodes, and return whether they were stopped."""
        try:
            with stage.gate.stoppable():
                with self._lock:
                    self._runs_on = stage
                stage.run(pieces, record)
            return False
        except StepStopped:
            return True

    def _taken(self) -> StepMove | None:
        """The move that was asked for. From now on none can be."""
        with self._lock:
            self._runs_on = None
            move, self._asked = self._asked, None
            return move

    def _moved(self, move: StepMove, bound: Binding, record: Record, go_over: GoOver) -> Binding:
        try:
            return go_over(move, bound, record)
        finally:
            if move.moved is None:
                move.over.set()


def goes_on(now: RunnablePlan, then: RunnablePlan, here: Stage, there: Stage) -> bool:
    """Whether a step of one plan can go on in the other one, on another stage: every byte is at the
    same place, and the kernels are those of the same kind of device."""
    one, other = now.memgraph, then.memgraph
    return (
        here.device.type == there.device.type
        and not there.engine.captures
        and (one.nodes, one.arenas, one.blocks) == (other.nodes, other.arenas, other.blocks)
        and (one.starts, one.ends, one.scratch) == (other.starts, other.ends, other.scratch)
    )


def draw_alike(old: torch.device, new: torch.device) -> None:
    """Have kernels on another GPU draw what they would have drawn on the old one."""
    if old != new and old.type == new.type == "cuda":
        torch.cuda.set_rng_state(torch.cuda.get_rng_state(old), new)
