"""The graphs of a run that are kept, by situation; the one not used for longest goes first.

    (shapes, micro-batch, ...)  -->  [graph while alpha = 0.5, graph while alpha = 0.25]

In one situation there may be several: a graph serves as long as the python values that its step
read are those of now.
"""

from collections import OrderedDict
from collections.abc import Callable
from typing import Any, Generic, Protocol, TypeVar

from lightning_utilities.core.rank_zero import rank_zero_warn

from trainers.closure import Batch, Recipe

MOST = 16
"""Graphs that are kept."""
MANY = 3


class Served(Protocol):
    """A graph in a runner, by itself as the key."""

    @property
    def recipe(self) -> Recipe: ...


S = TypeVar("S", bound=Served)


class Kept(Generic[S]):
    """Of one runner."""

    def __init__(self, what: str, forget: Callable[[S], None]) -> None:
        """`what`: a graph is of, for people. `forget`: called with what is not kept."""
        self._what = what
        self._forget = forget
        self._steps: OrderedDict[Any, list[S]] = OrderedDict()
        self._shapes: dict[Any, dict[Any, None]] = {}
        self._said = False

    def find(self, key: Any) -> S | None:
        """The one for this situation and the python values of now."""
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

    def say_many(self, key: Any, parts: Batch, of: Any = None) -> None:
        """Before another is captured, once: when it is not the last, smaller batch alone.

        `of`: what has shapes of its own, an epoch or a loader."""
        shapes = self._shapes.setdefault(of, {})
        before, known = len(shapes), self._steps.get(key)
        shapes[parts.key] = None
        why = ""
        if before < MANY <= len(shapes):
            came = ", ".join(map(shapes_of, shapes))
            why = f"batches of other shapes came ({came}): give out batches of one shape"
        elif known is not None and len(known) == MANY - 1:
            why = f"the step reads what changes: {known[-1].recipe.watched.changed()}"
        if why and not self._said:
            self._said = True
            rank_zero_warn(
                f"OffloadStrategy has captured and planned {self._what} {MANY} times, as {why}."
                f" Every time costs seconds; at most {MOST} plans are kept"
            )


def shapes_of(key: Any) -> str:
    return " ".join(str(tuple(leaf[0])) for leaf in key[1:] if len(leaf) > 2) or "constants"
