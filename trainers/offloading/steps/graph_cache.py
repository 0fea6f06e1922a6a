"""The graphs of a run are cached by situation; the least recently used one is dropped first.

    (shapes, micro-batch, ...)  -->  [graph while alpha = 0.5, graph while alpha = 0.25]

One situation may have several graphs: a graph can be used if the Python values that its step read
are unchanged.
"""

from collections import OrderedDict
from collections.abc import Callable
from typing import Any, Generic, Protocol, TypeVar

from lightning_utilities.core.rank_zero import rank_zero_warn

from trainers.offloading.tracing.closure import BatchParts, StepRecipe

MOST = 16
"""A cache holds so many graphs."""
MANY = 3
"""After so many captures for a similar reason a warning says why."""


class ServedGraph(Protocol):
    """A graph in a runner. The object is also its key there."""

    @property
    def recipe(self) -> StepRecipe: ...


S = TypeVar("S", bound=ServedGraph)


class GraphCache(Generic[S]):
    """The graphs of one runner, by situation."""

    def __init__(self, what: str, forget: Callable[[S], None]) -> None:
        """`what` names in warnings what is captured. `forget` is called with a dropped graph."""
        self._what = what
        self._forget = forget
        self._steps: OrderedDict[Any, list[S]] = OrderedDict()
        self._shapes: dict[Any, dict[Any, None]] = {}
        self._warned = False

    def find(self, key: Any) -> S | None:
        """Return the graph for this situation and the present Python values."""
        for step in self._steps.get(key, ()):
            if step.recipe.watched.same():
                self._steps.move_to_end(key)
                return step
        return None

    def put(self, key: Any, step: S) -> None:
        self._steps.setdefault(key, []).append(step)
        self._steps.move_to_end(key)
        while sum(map(len, self._steps.values())) > MOST:
            _, steps = next(iter(self._steps.items()))
            self._forget(steps.pop(0))
            if not steps:
                self._steps.popitem(last=False)

    def warn_if_many(self, key: Any, parts: BatchParts, of: Any = None) -> None:
        """Warn once that many graphs are captured, and say why. Two shapes are no reason: the last
        batch of an epoch may be smaller.

        `of`: shapes are counted for each epoch or loader by itself."""
        shapes = self._shapes.setdefault(of, {})
        before, known = len(shapes), self._steps.get(key)
        shapes[parts.key] = None
        why = ""
        if before < MANY <= len(shapes):
            came = ", ".join(map(shapes_of, shapes))
            why = f"batches differ in shape ({came}): return batches of one shape"
        elif known is not None and len(known) == MANY - 1:
            why = f"the step reads a value that changes: {known[-1].recipe.watched.changed()}"
        if why and not self._warned:
            self._warned = True
            rank_zero_warn(
                f"OffloadStrategy has captured and planned {self._what} {MANY} times, because"
                f" {why}. Each time costs seconds, and at most {MOST} plans are kept"
            )


def shapes_of(key: Any) -> str:
    """Say the shapes of the tensors in a batch's key."""
    return " ".join(str(tuple(leaf[0])) for leaf in key[1:] if len(leaf) > 2) or "constants"
