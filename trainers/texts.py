"""Text in a batch (names of files, say), which is another in every batch.

    batch {"x": tensor, "name": ["a.jpg", ...]}   traced with stand-ins   {"out": .., "name": ..}

A step that only hands it on has one graph for all. One that looks at it is traced with the text as
it is, and has a graph for every text.
"""

from typing import Any, NoReturn, Self

from offload import CaptureError


class Text(str):
    """May be handed on, and not looked at."""

    number: int
    """Among the texts of the batch."""

    @classmethod
    def several(cls, count: int, second: bool) -> list[Self]:
        """Other letters in the second trace: where they count for something, the traces differ."""
        found = [cls(f"text {number}{' again' if second else ''}") for number in range(count)]
        for number, text in enumerate(found):
            text.number = number
        return found

    def _used(self, *_: Any) -> NoReturn:
        raise CaptureError("the step looks at the text of the batch")

    def __getattribute__(self, name: str) -> Any:
        if name == "number" or name.startswith("_"):
            return super().__getattribute__(name)
        self._used()

    __eq__ = __ne__ = __lt__ = __le__ = __gt__ = __ge__ = _used  # type: ignore[assignment]
    __len__ = __iter__ = __getitem__ = __contains__ = __hash__ = _used  # type: ignore[assignment]
    __add__ = __mul__ = __rmul__ = __mod__ = __str__ = __format__ = _used  # type: ignore[assignment]
