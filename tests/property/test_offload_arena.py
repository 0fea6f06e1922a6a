"""An address space against a row of cells: each has an owner, and knows who touched it last."""

from dataclasses import dataclass, field

from hypothesis import given, settings
from hypothesis import strategies as st
from support.products import examples

from offload.graph.memgraph import ALIGNMENT
from offload.planning.arena import Space

UNIT = ALIGNMENT
law = settings(max_examples=examples(120), deadline=None)


@dataclass
class Cells:
    """The same, one unit of memory after the other, without any cleverness."""

    count: int
    owner: list[int | None] = field(init=False)
    touched: list[tuple[int, ...]] = field(init=False)
    """Who must be over before a cell is written anew."""

    def __post_init__(self) -> None:
        self.owner = [None] * self.count
        self.touched = [()] * self.count

    def holes(self) -> list[tuple[int, int]]:
        """(cells, first) of every row of free cells that is as long as it can be."""
        found, start = [], None
        for at in range(self.count + 1):
            free = at < self.count and self.owner[at] is None
            if free and start is None:
                start = at
            elif not free and start is not None:
                found.append((at - start, start))
                start = None
        return found

    def best_fit(self, size: int, high: bool) -> int | None:
        fitting = [hole for hole in self.holes() if hole[0] >= size]
        if not fitting:
            return None
        cells, first = min(fitting)
        return first + cells - size if high else first

    def segments(self) -> list[tuple[int, int]]:
        """(first, end) of what has one owner, and of every hole."""
        holes = [(first, first + cells) for cells, first in self.holes()]
        rows: dict[int, list[int]] = {}
        for at, owner in enumerate(self.owner):
            if owner is not None:
                rows.setdefault(owner, []).append(at)
        return sorted(holes + [(row[0], row[-1] + 1) for row in rows.values()])


def spread(pieces: list[tuple[int, int, tuple[int, ...]]], count: int) -> list[tuple[int, ...]]:
    """Pieces as cells, where none may overlap another."""
    cells: list[tuple[int, ...] | None] = [None] * count
    for start, end, nodes in pieces:
        assert start % UNIT == end % UNIT == 0
        assert start < end
        for at in range(start // UNIT, end // UNIT):
            assert cells[at] is None, "two pieces of one byte"
            cells[at] = nodes
    return [nodes or () for nodes in cells]


def same(space: Space, cells: Cells) -> None:
    segments = cells.segments()
    assert space.segments() == [first * UNIT for first, _ in segments]
    assert [space.end(first * UNIT) for first, _ in segments] == [end * UNIT for _, end in segments]
    assert space.free == cells.owner.count(None) * UNIT
    for number, (first, _) in enumerate(segments):
        assert space.is_free(first * UNIT) == (cells.owner[first] is None)
        assert space.owner(first * UNIT) == cells.owner[first]
        before, after = space.neighbours(first * UNIT)
        assert before == (segments[number - 1][0] * UNIT if number else None)
        last = number + 1 == len(segments)
        assert after == (None if last else segments[number + 1][0] * UNIT)


@law
@given(st.data())
def test_a_space_is_a_row_of_cells(data: st.DataObject) -> None:
    count = data.draw(st.integers(1, 24), "cells")
    space, cells = Space(count * UNIT), Cells(count)
    highest = 0
    for number in range(data.draw(st.integers(1, 30), "moves")):
        taken = [first for first, _ in cells.segments() if cells.owner[first] is not None]
        if taken and data.draw(st.booleans(), "give"):
            first = data.draw(st.sampled_from(taken), "which")
            end = next(end for start, end in cells.segments() if start == first)
            # What an owner never touched says who touched it before: history that it was given.
            pieces = data.draw(st.sampled_from(["new", "old", "none"]), "pieces")
            history = {
                "new": [(first * UNIT, end * UNIT, (number,))],
                "old": [
                    (at * UNIT, (at + 1) * UNIT, cells.touched[at])
                    for at in range(first, end)
                    if cells.touched[at]
                ],
                "none": [],
            }[pieces]
            space.give(first * UNIT, history)
            for at in range(first, end):
                cells.owner[at] = None
                kept = cells.touched[at] if pieces == "old" else ()
                cells.touched[at] = (number,) if pieces == "new" else kept
        else:
            size = data.draw(st.integers(1, count), "size")
            high = data.draw(st.booleans(), "high")
            found = space.best_fit(size * UNIT, high)
            wanted = cells.best_fit(size, high)
            assert found == (None if wanted is None else wanted * UNIT)
            if wanted is None:
                continue
            cells_there, begin = next(
                hole for hole in cells.holes() if hole[1] <= wanted < hole[1] + hole[0]
            )
            # An owner may ask for any bytes of a free segment, not for its ends alone.
            at = data.draw(st.integers(begin, begin + cells_there - size), "at")
            given_out = spread(space.take(at * UNIT, size * UNIT, number), count)
            assert given_out[at : at + size] == cells.touched[at : at + size]
            assert not any(given_out[:at] + given_out[at + size :])
            cells.owner[at : at + size] = [number] * size
            highest = max(highest, at + size)
        same(space, cells)
        assert space.used == highest * UNIT
