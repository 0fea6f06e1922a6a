"""The graphs of a run are cached by situation; the least recently used one is dropped first.

    (shapes, micro-batch, ...)  -->  [graph while alpha = 0.5, graph while alpha = 0.25]

One situation may have several graphs: a graph can be used if the Python values that its step read
are unchanged, or if they have no effect (graph_validity.py). A value that changes in every step and
has an effect is refused by name, because it would cost a capture in every step.
"""

from collections import OrderedDict
from collections.abc import Callable
from time import monotonic
from typing import Any, Generic, Protocol, TypeVar

from lightning_utilities.core.rank_zero import rank_zero_warn

from offload import CaptureError, TaskGraph
from offload.sizes import say_size
from trainers.offloading.steps.graph_validity import GraphValidity, Retraced
from trainers.offloading.tracing.batch_parts import BatchParts

TASK_BYTES = 10 << 10
"""What a task of a kept graph takes of the host's memory, with its plan and its bound kernels:
measured on a transformer, 96 tasks, twelve graphs."""
KEPT_BYTES = 1 << 30
"""A cache holds graphs of so many bytes."""
OFTEN = 16
"""So many captures that changes of values cause may become too many."""
MANY = 3
"""After so many captures for a similar reason a warning says why."""
STORM = 0.1
"""Captures that changes of values cause may take this part of the time."""


class ServedGraph(Protocol):
    """A graph in a runner. The object is also its key there."""

    @property
    def validity(self) -> GraphValidity: ...

    @property
    def graph(self) -> TaskGraph: ...


S = TypeVar("S", bound=ServedGraph)


class GraphCache(Generic[S]):
    """The graphs of one runner, by situation."""

    def __init__(self, what: str, forget: Callable[[S], None]) -> None:
        """`what` names in warnings what is captured. `forget` is called with a dropped graph."""
        self._what = what
        self._forget = forget
        self._steps: OrderedDict[Any, list[S]] = OrderedDict()
        self._latest: S | None = None
        self._followed: dict[S, S] = {}
        """The graph that ran after each graph when it ran last."""
        self._shapes: dict[Any, dict[Any, None]] = {}
        self._warned = False
        self._other = 0
        """How many steps running needed another graph because of a value."""
        self._others = 0
        self._begun = monotonic()
        self._spent = 0.0

    def find(self, key: Any, fits: Callable[[S], bool] = lambda _: True) -> S | None:
        """Return the graph for this situation and the present Python values. Of those that fit, it
        is the one that followed last time, or else the one that was used last."""
        steps = self._steps.get(key, [])
        likely = self._followed.get(self._latest) if self._latest else None
        for step in ([likely] if likely in steps else []) + steps[::-1]:
            if fits(step) and step.validity.holds():
                self._steps.move_to_end(key)
                steps.append(steps.pop(steps.index(step)))
                self._other = 0
                return step
        return None

    def ran(self, step: S) -> None:
        """Note that this graph has run: values that come in turns have their graphs in turns."""
        if self._latest is not None:
            self._followed[self._latest] = step
        self._latest = step

    def renewed(self, key: Any, retrace: Callable[[], Retraced]) -> S | None:
        """Return a graph for this situation that does what the step does now, although a value that
        the step reads has changed. `retrace` traces the step once more."""
        known = self._steps.get(key)
        if not known:
            return None
        begun = monotonic()
        again = retrace()
        self._spent += monotonic() - begun
        for step in reversed(known):
            change = step.validity.change()
            if step.validity.renewed(again):
                self._check_storm(change, step.validity.constants_changed)
                return step
        self._check_storm(known[-1].validity.change(), True)
        return None

    def _check_storm(self, change: Any, has_effect: bool) -> None:
        """Refuse a value that changes in every step, or so often that captures take over."""
        self._other = self._other + 1 if has_effect else 0
        self._others += has_effect
        often = self._others >= OFTEN and self._spent > STORM * (monotonic() - self._begun)
        if self._other >= MANY or often:
            how = "in every step" if self._other >= MANY else f"{self._others} times so far"
            raise CaptureError(
                f"{change}: it changes {how}, and what {self._what} computes or logs depends on it."
                " Keep it in a tensor (self.register_buffer) and change that in place, or change it"
                " once an epoch"
            )

    def put(self, key: Any, step: S) -> None:
        self._steps.setdefault(key, []).append(step)
        self._steps.move_to_end(key)
        while self._kept_bytes() > KEPT_BYTES and self._count() > 1:
            _, steps = next(iter(self._steps.items()))
            gone = steps.pop(0)
            self._followed = {a: b for a, b in self._followed.items() if gone not in (a, b)}
            self._latest = None if self._latest is gone else self._latest
            self._forget(gone)
            if not steps:
                self._steps.popitem(last=False)

    def _count(self) -> int:
        return sum(map(len, self._steps.values()))

    def _kept_bytes(self) -> int:
        graphs = (step.graph for steps in self._steps.values() for step in steps)
        return TASK_BYTES * sum(len(graph.tasks) for graph in graphs)

    def warn_if_many(self, key: Any, parts: BatchParts, of: Any = None, surprise: str = "") -> None:
        """Warn once that many graphs are captured, and say why. Two shapes are no reason: the last
        batch of an epoch may be smaller.

        `of`: shapes are counted for each epoch or loader by itself. `surprise`: the value that the
        step asks for and that is not what a graph assumes."""
        shapes = self._shapes.setdefault(of, {})
        before, known = len(shapes), self._steps.get(key)
        shapes[parts.key] = None
        why = ""
        if before < MANY <= len(shapes):
            came = dict.fromkeys(map(shapes_of, shapes))
            why = (
                f"batches differ in shape ({', '.join(came)}): return batches of one shape, or pad"
                " them to a few lengths (docs/offload/lengths.md)"
            )
            if len(came) == 1:
                why = "the step reads text or numbers of the batch, which differ: return tensors"
        elif known is not None and len(known) == MANY - 1:
            change = surprise or known[-1].validity.change() or ""
            why = f"the step reads a value that changes: {change}"
        if why and not self._warned:
            self._warned = True
            rank_zero_warn(
                f"OffloadStrategy has captured and planned {self._what} {MANY} times, because"
                f" {why}. Each time costs seconds. Plans of up to {say_size(KEPT_BYTES)} are kept"
            )


def shapes_of(key: Any) -> str:
    """Say the shapes of the tensors in a batch's key."""
    return " ".join(str(tuple(leaf[0])) for leaf in key[1:] if len(leaf) > 2) or "constants"
