"""A step may change the dicts and lists of its batch: `labels = batch.pop("labels")`.

while it is traced     it changes the dicts of a batch that was rebuilt for the trace
after every step       the dicts of the real batch get the same contents, for hooks and for
                       whoever keeps the batch
"""

from collections.abc import Iterator, Mapping, MutableMapping
from typing import Any

from trainers.offloading.tracing.side_effects import OutputSlot, TraceNotes

Container = MutableMapping[Any, Any] | list[Any]


def containers_of(batch: Any) -> Iterator[Container]:
    """The dicts and lists in a batch, the outer ones first."""
    if isinstance(batch, MutableMapping | list):
        yield batch
    if isinstance(batch, Mapping):
        for inner in batch.values():
            yield from containers_of(inner)
    elif isinstance(batch, list | tuple):
        for inner in batch:
            yield from containers_of(inner)


class BatchChanges:
    """What one trace changes in the dicts and lists of its batch."""

    def __init__(self, batch: Any, first: int) -> None:
        """`first`: the position of the first container among what the real batch gives."""
        self._containers = [*containers_of(batch)]
        self._before = [_items(each) for each in self._containers]
        self._slots = {
            id(each): OutputSlot(first + number, given=True)
            for number, each in enumerate(self._containers)
        }

    def put_off(self, notes: TraceNotes) -> None:
        """Have the real batch changed after every step, as this one was."""
        for container, before in zip(self._containers, self._before, strict=True):
            now = _items(container)
            if len(now) == len(before) and all(map(_same, now, before)):
                continue
            keys = [key for key, _ in now]
            values = [self._slots.get(id(value), value) for _, value in now]
            notes.call("batch", _put, (self._slots[id(container)], keys, values), {})


def _items(container: Container) -> list[tuple[Any, Any]]:
    pairs = container.items() if isinstance(container, MutableMapping) else enumerate(container)
    return [*pairs]


def _same(one: tuple[Any, Any], other: tuple[Any, Any]) -> bool:
    return one[0] == other[0] and one[1] is other[1]


def _put(container: Container, keys: list[Any], values: list[Any]) -> None:
    container.clear()
    if isinstance(container, list):
        container.extend(values)
    else:
        container.update(zip(keys, values, strict=True))
