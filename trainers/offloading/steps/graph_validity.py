"""Whether a captured graph may still be used, while Python values that its step read change.

    nothing changed              the graph is used
    a value changed              the step is traced once more, without planning anything
        the same ops             the graph is used on; what is only logged is logged anew
        other ops                another graph is captured

A value that changed often without effect is looked at only now and then.
"""

from collections import Counter
from collections.abc import Sequence
from dataclasses import dataclass, replace
from typing import Any

from lightning_utilities.core.rank_zero import rank_zero_info

from offload.torch_seams import pytree
from offload.tracing.sketch import TraceSketch
from offload.watching.watched_state import Change, Place, alike
from trainers.offloading.tracing.closure import StepRecipe
from trainers.offloading.tracing.side_effects import LiveNumber, LogCall, described

HARMLESS = 3
"""After so many changes without effect a place is no longer looked at in every step."""
SELDOM = 64
"""Such places are looked at in every so many steps."""


@dataclass(frozen=True, slots=True, eq=False)
class Retraced:
    """A trace of a step that was captured before."""

    sketch: TraceSketch
    recipe: StepRecipe


class GraphValidity:
    """What one graph was captured for, and what has been learned about it since."""

    def __init__(self, recipe: StepRecipe, sketch: TraceSketch) -> None:
        self.recipe = recipe
        self._sketch = sketch
        self._changes: Counter[Place] = Counter()
        self._seldom: frozenset[Place] = frozenset()
        self._often = recipe.watched
        """The values that are compared in every step."""
        self._uses = 0
        self._numbers = [recipe.numbers]
        """The graph may be used while one of these holds."""
        self.constants_changed = False
        """Whether the last renewal changed a number that is logged and not read in every step."""

    def holds(self) -> bool:
        """Whether no value that the step depends on has changed."""
        self._uses += 1
        if not any(numbers.hold() for numbers in self._numbers):
            return False
        if self._uses % SELDOM == 0:
            return self.recipe.watched.same()
        return self._often.same()

    def changes(self) -> list[Change]:
        return self.recipe.watched.changes()

    def change(self) -> Any:
        """Return the first change, of a value or of a number of the trainer; None if none."""
        return next(iter(self.changes()), None) or self._numbers[-1].change() or None

    def difference(self, again: Retraced) -> str:
        """Say what the step does now and the graph does not; empty if nothing."""
        return self._sketch.difference(again.sketch) or _other_calls(self.recipe, again.recipe)

    def renewed(self, again: Retraced) -> bool:
        """Go on with what another trace found, if the graph does the same."""
        if self.difference(again):
            return False
        changes = self.changes()
        if not any(numbers.hold() for numbers in self._numbers):
            self._numbers.append(again.recipe.numbers)
        self._changes.update({change.place for change in changes})
        seldom = {place for place, count in self._changes.items() if count >= HARMLESS}
        recipe, only_logged = _with_new_numbers(self.recipe, again.recipe, changes)
        constant = {change.place for change in changes} if not only_logged else set()
        self.constants_changed = not only_logged
        self._seldom |= seldom - constant
        self.recipe = replace(recipe, watched=again.recipe.watched)
        self._often = self.recipe.watched.without(self._seldom)
        for change in changes:
            if change.place in self._seldom and self._changes[change.place] == HARMLESS:
                rank_zero_info(
                    f"OffloadStrategy: {change.label} changes often, and the step does the same:"
                    f" it is compared in every {SELDOM}th step from now on"
                )
        return True


def _other_calls(old: StepRecipe, new: StepRecipe) -> str:
    """Say in what the log calls differ besides their numbers."""
    if len(old.calls) != len(new.calls):
        return f"{len(new.calls)} calls of self.log and metrics against {len(old.calls)}"
    pairs = [
        ((a.name, *_leaves(a)), (b.name, *_leaves(b)))
        for a, b in zip(old.calls, new.calls, strict=True)
    ]
    pairs.append((tuple(_leaves(old.output)), tuple(_leaves(new.output))))
    for mine, theirs in pairs:
        if len(mine) != len(theirs) or not all(map(_replaceable, mine, theirs)):
            return f"{described(theirs)} against {described(mine)}"
    return ""


def _leaves(thing: Any) -> list[Any]:
    return pytree.tree_leaves((thing.args, thing.kwargs) if isinstance(thing, LogCall) else thing)


def _replaceable(mine: Any, theirs: Any) -> bool:
    """Whether only the numbers of two arguments differ."""
    if isinstance(mine, LiveNumber) or (_is_number(mine) and _is_number(theirs)):
        return True
    return described(mine) == described(theirs)


def _is_number(leaf: Any) -> bool:
    return isinstance(leaf, int | float) and not isinstance(leaf, bool)


def _with_new_numbers(
    old: StepRecipe, new: StepRecipe, changes: Sequence[Change]
) -> tuple[StepRecipe, bool]:
    """The recipe with the numbers that the step logs now, and whether all of them are read again in
    every step: a number that is the value of a place that changed is read there."""
    constant = False

    def number(mine: Any, theirs: Any) -> Any:
        nonlocal constant
        if isinstance(mine, LiveNumber) or not _is_number(mine) or alike(mine, theirs):
            return mine
        for change in changes:
            if alike(change.before, mine) and alike(change.now, theirs):
                return LiveNumber(change.label, old.watched.reader(change.place))
        constant = True
        return theirs

    def filled(mine: Any, theirs: Any) -> Any:
        leaves, spec = pytree.tree_flatten(mine)
        return pytree.tree_unflatten(list(map(number, leaves, pytree.tree_leaves(theirs))), spec)

    calls = []
    for mine, theirs in zip(old.calls, new.calls, strict=True):
        args, kwargs = filled((mine.args, mine.kwargs), (theirs.args, theirs.kwargs))
        calls.append(replace(mine, args=args, kwargs=kwargs))
    output = filled(old.output, new.output)
    return replace(old, output=output, calls=tuple(calls)), not constant
