"""Text in a batch (names of files, say), which is another in every batch.

    batch {"x": tensor, "name": ["a.jpg", ...]}   traced with stand-ins   {"out": .., "name": ..}

A step that only hands it on has one graph for all. One that looks at it is traced with the text as
it is, and has a graph for every text.
"""

from typing import Any, NoReturn

from offload import CaptureError


class Text(str):
    """May be handed on, and not looked at."""

    number: int
    """Among the texts of the batch."""

    @classmethod
    def of(cls, number: int, second: bool) -> "Text":
        """Other letters in the second trace: where they count for something, the traces differ."""
        text = cls(f"text {number}{' again' if second else ''}")
        text.number = number
        return text

    def _used(self, *_: Any) -> NoReturn:
        raise CaptureError("the step looks at the text of the batch")

    def __getattribute__(self, name: str) -> Any:
        if name == "number" or name.startswith("_"):
            return super().__getattribute__(name)
        self._used()

    __eq__ = __ne__ = __lt__ = __le__ = __gt__ = __ge__ = _used  # type: ignore[assignment]
    __len__ = __iter__ = __getitem__ = __contains__ = __hash__ = _used  # type: ignore[assignment]
    __add__ = __mul__ = __rmul__ = __mod__ = __str__ = __format__ = _used  # type: ignore[assignment]
