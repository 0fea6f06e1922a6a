"""What is said of a plan after it was made. Pure.

graph.notes    what passes did                          frozen with the graph
remarks        what a run found out on this machine     grow while the plan runs
"""

from collections.abc import Iterator


class Remarks:
    """Texts for a person, the newest first, each of them once. `explain()` shows them.

    This is the one thing of a plan that is written after planning; all else of it is frozen. No
    decision reads a remark."""

    def __init__(self) -> None:
        self._texts: tuple[str, ...] = ()

    def add(self, text: str) -> bool:
        """Add a text, and return whether it is new."""
        if text in self._texts:
            return False
        self._texts = (text, *self._texts)
        return True

    def __iter__(self) -> Iterator[str]:
        return iter(self._texts)
