"""How much memory the reuse buffer takes, and whether that is much of what is free."""

from dataclasses import dataclass

MUCH = 0.25
"""A buffer that takes more than this share of the free memory is warned of."""


@dataclass(frozen=True, slots=True)
class BufferSize:
    """The slots of the reuse buffer."""

    batches: int
    nbytes: int | None
    """None: nobody has read a sample yet."""
    about: bool = False
    """Whether that is what is expected before the slots are made."""

    @property
    def said(self) -> str:
        about = "about " if self.about else ""
        size = "" if not self.nbytes else f" ({about}{said_size(self.nbytes)})"
        return f"a buffer of {self.batches} batches{size}"

    def exceeds(self, largest: int) -> bool:
        return not self.about and (self.nbytes or 0) > largest

    def too_large(self, free: int) -> str:
        """What to say if it takes much of the `free` bytes. Empty: it does not."""
        if self.nbytes is None or self.nbytes <= MUCH * free:
            return ""
        return (
            f"the buffer takes {said_size(self.nbytes)}, more than a quarter of the memory that is"
            f" free ({said_size(free)}): keep smaller pictures (size= of picture_folder or"
            " TarShards, or a Resize at the transform's beginning), or give buffer_bytes= or a"
            " smaller buffer_batches="
        )


def said_size(nbytes: float) -> str:
    for unit, size in (("GB", 1e9), ("MB", 1e6), ("kB", 1e3)):
        if nbytes >= size:
            return f"{nbytes / size:.3g} {unit}"
    return f"{nbytes:.0f} bytes"
