"""How many bytes the columns of a slab may take together."""

import threading

from loaders.errors import BufferTooSmall


class Allowance:
    """The bytes that all columns of a slab together may take, rows and larger slots."""

    def __init__(self, limit: int | None) -> None:
        self.limit = limit
        self._taken = 0
        self._lock = threading.Lock()

    def take(self, nbytes: int, slot_bytes: int) -> None:
        """Take `nbytes` for a slot of `slot_bytes`. A negative number gives bytes back."""
        with self._lock:
            if self.limit is not None and self._taken + nbytes > self.limit:
                raise BufferTooSmall(
                    f"a sample of {slot_bytes} bytes does not fit: the buffer holds"
                    f" {self._taken} of at most {self.limit} bytes; raise buffer_bytes, lower"
                    " batch_size, or store smaller samples"
                )
            self._taken += nbytes
