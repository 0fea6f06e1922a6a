"""Keys and values by which the members of a new generation find each other."""

from dataclasses import dataclass


@dataclass(frozen=True, slots=True)
class Question:
    """A member waits for a key."""

    name: str
    generation: int
    key: str
    ticket: int
    """The number by which the member recognizes the answer."""


class MeetingPlace:
    """The values of the newest generation, and who waits for which."""

    def __init__(self) -> None:
        self._generation = 0
        self._values: dict[str, bytes] = {}
        self._open: list[Question] = []

    def begin(self, generation: int) -> None:
        """Forget all earlier generations."""
        self._generation = generation
        self._values.clear()
        self._open.clear()

    def put(self, generation: int, key: str, value: bytes | memoryview) -> None:
        if generation == self._generation:
            self._values[key] = bytes(value)

    def ask(self, name: str, generation: int, key: str, ticket: int) -> None:
        self._open.append(Question(name, generation, key, ticket))

    def answers(self) -> list[tuple[str, int, bytes]]:
        """Return member, ticket and value of all questions that can be answered now."""
        ready = [q for q in self._open if q.generation == self._generation]
        ready = [q for q in ready if q.key in self._values]
        self._open = [q for q in self._open if q not in ready and q.generation == self._generation]
        return [(q.name, q.ticket, self._values[q.key]) for q in ready]
