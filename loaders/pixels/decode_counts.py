"""How many pictures were decoded, by format, by our decoder or by Pillow."""

import threading


class DecodeCounts:
    """Counts of one source. Any thread may call any method. A pickled copy begins with nothing."""

    def __init__(self) -> None:
        self._lock = threading.Lock()
        self._counts: dict[str, int] = {}

    def __reduce__(self) -> tuple[type["DecodeCounts"], tuple[()]]:
        return DecodeCounts, ()

    def add(self, kind: str, *, native: bool) -> None:
        """Count a picture of a format: "JPEG"."""
        self.merge({f"{kind} {'natively' if native else 'by Pillow'}": 1})

    def merge(self, counts: dict[str, int]) -> None:
        """Add the counts of another process."""
        with self._lock:
            for name, count in counts.items():
                self._counts[name] = self._counts.get(name, 0) + count

    def take_all(self) -> dict[str, int]:
        """The counts since the last call."""
        with self._lock:
            counts, self._counts = self._counts, {}
        return counts

    def snapshot(self) -> dict[str, int]:
        with self._lock:
            return dict(sorted(self._counts.items()))
