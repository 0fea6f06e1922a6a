"""Which members count when silent ones may train with another anchor, behind a cut link.

    generation 7 {a b c d e}, settled      c, d, e are silent: a and b must not go on
    generation 8 {a b c}, begun by a, b, c, and c is silent before a step was made
                                           c may not know 8, and continue from 7 with d and e

A generation is settled when a step was committed in it: then all of its members know it. Until then
the members of the last settled one count as well, and of each since. Two anchors that
both begin a generation from the same one would each need more than half of it.
"""

from collections.abc import Sequence
from dataclasses import dataclass, field


@dataclass(slots=True)
class Electorate:
    """The views that count, and who is silent."""

    views: list[tuple[str, ...]] = field(default_factory=list)
    """The last settled view first, then those since."""
    silent: set[str] = field(default_factory=set)
    """Members that are gone without a closed connection."""

    def add_view(self, view: tuple[str, ...]) -> None:
        """A generation of these members begins."""
        self.views.append(view)

    def settle(self, view: tuple[str, ...]) -> None:
        """All members of this generation know it."""
        self.views = [view]
        self.silent &= {*view}

    def outnumbers(self, here: Sequence[str]) -> list[str]:
        """Return the silent members of a view if they are at least as many as its members here."""
        for view in self.views:
            silent = sorted(self.silent.intersection(view))
            if silent and len(silent) >= len({*here} & {*view}):
                return silent
        return []
