"""What is closed at the end of a `with` block."""

from typing import Self


class ClosedAtEnd:
    """Something with `close()`."""

    def __enter__(self) -> Self:
        return self

    def __exit__(self, *_: object) -> None:
        self.close()

    def close(self) -> None:
        """End it. It is safe to call this again."""
        raise NotImplementedError
