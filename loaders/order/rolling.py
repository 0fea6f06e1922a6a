"""The rolling order: the buffer fills, then turns like a ring, then drains.

    batch 0 ....... F |  F + 1 ....................................  | .......... last
    fill: most overdue|  ring: every slot once in `buffer_batches`   | drain: most overdue
                      |  batches; who has had its serves gives its   |
                      |  slot to the next position                   |

After `fill` batches the slots stand in a ring, in the order of their latest serves. Place q of the
ring is slot q mod C in round q div C (C slots), and serves whoever is in it: a formula, so a pass
can be entered at any batch.

In the fill and the drain, position i's n-th serve is due at serve R * i + n * capacity, and a batch
is made of the most overdue samples (`Slots`). Who was served less than half a buffer ago waits if
it can. Where the serves run out, a sample with as many serves left as there are full batches left
is critical and goes first (McNaughton's wrap-around argument), so that nobody comes twice in a
batch.

Without a shuffle every batch is `batch_size` places in a row: its home. With one, each home gives
equal parts, drawn by chance, to its own batch and to the D = floor(`buffer_batches` / 2) after it,
so two serves of a sample are never less than half a buffer apart. Every part has its share of first
serves, second serves, and so on. Before home 0 come D smaller homes, for batch 0 and later.
"""

from collections import deque
from collections.abc import Iterator
from dataclasses import dataclass

import numpy as np

from loaders.order.keyed_permutation import key_of, mixed, shuffled
from loaders.order.serve import IntArray, Residents, Serve

NEVER = -(1 << 40)
"""The latest batch of a sample that was not served yet."""


@dataclass(slots=True, eq=False)
class Slots:
    """Who is in which slot before batch `batch`."""

    position: IntArray
    served: IntArray
    """The reuse, where a slot is free: its sample was served to its end."""
    first: IntArray
    """The batch of the first serve."""
    last: IntArray
    """The batch of the latest serve of this slot, whoever was in it."""
    due: IntArray
    """[slots, reuse]: when each serve of its sample is due."""
    entered: int
    """So many positions are or were in a slot."""
    batch: int
    outstanding: int
    """So many serves are still to come in the pass."""

    def residents(self, reuse: int) -> Residents:
        there = np.flatnonzero((self.served < reuse) & (self.position < self.entered))
        there = there[np.argsort(self.position[there])]
        first = np.where(self.served[there] > 0, self.first[there], -1)
        return Residents(self.position[there], self.served[there], first, self.entered)

    def serve(self, size: int, gap: int) -> tuple[IntArray, Serve]:
        """Choose the next batch of `size` samples; `gap` batches should lie between two serves of
        one. Returns its slots, too."""
        reuse = self.due.shape[1]
        alive = self.served < reuse
        uses_left = reuse - self.served
        rested = (self.served == 0) | (self.batch - self.last >= gap)
        critical = np.where(uses_left >= self.outstanding // size, uses_left, 0)
        next_due = self.due[np.arange(len(alive)), np.minimum(self.served, reuse - 1)]
        ranked = np.lexsort((next_due, ~rested, -critical, ~alive))
        chosen = ranked[: min(size, self.outstanding)]
        assert alive[chosen].all(), f"the order ran out of samples at batch {self.batch}"
        return chosen, Serve(self.position[chosen], self.served[chosen])

    def end_batch(self, chosen: IntArray, samples: int) -> None:
        """Count a batch. Slots that fall free get the next of `samples` positions."""
        self.first[chosen[self.served[chosen] == 0]] = self.batch
        self.last[chosen] = self.batch
        self.served[chosen] += 1
        self.outstanding -= len(chosen)
        self.batch += 1
        self.admit(samples)

    def admit(self, samples: int) -> None:
        """Give free slots to the next positions. Each is due a life after whoever was there."""
        slots, reuse = self.due.shape
        if self.entered >= samples:
            return
        free = np.flatnonzero(self.served == reuse)
        free = free[np.argsort(self.due[free, 0], kind="stable")][: samples - self.entered]
        self.position[free] = np.arange(self.entered, self.entered + len(free))
        self.due[free] += slots * reuse
        self.served[free] = 0
        self.entered += len(free)


DUE, PARTS, BATCH = 0, 1, 2
"""What is drawn from the seed: who is due when in the fill, the parts of homes, batches' orders."""


@dataclass(frozen=True, slots=True)
class RollingPass:
    """One pass of a buffer of at least two batches."""

    samples: int
    batch_size: int
    reuse: int
    buffer_batches: int
    shuffle: bool
    seed: tuple[int, ...]

    def walk(self, batch: int) -> tuple[Residents, Iterator[Serve]]:
        """Who stands in the buffer before `batch`, and all serves from there on."""
        slots = self._first_slots()
        self._skip_to(slots, min(batch, self._fill))
        if batch < self._fill:
            return slots.residents(self.reuse), self._from_fill(slots)
        ring = self._ring_of(slots)
        if ring is not None and batch < ring.end:
            return ring.slots(batch).residents(self.reuse), self._from_ring(ring, batch)
        slots = slots if ring is None else self._slots_after(ring)
        self._skip_to(slots, batch)
        return slots.residents(self.reuse), self._overdue(slots)

    def foreseen(self) -> "tuple[list[int], Ring]":
        """For each batch of the fill, how many samples must be there for it to be that of a pass
        without end; and the ring of such a pass."""
        slots, needed = self._first_slots(), list[int]()
        while slots.batch < self._fill:
            # With fewer serves left, `Slots.serve` finds samples that are critical.
            serves = (slots.batch + self.reuse + 1) * self.batch_size
            needed.append(max(slots.entered, -(-serves // self.reuse)))
            self._next(slots)
        ring = self._ring_of(slots)
        assert ring is not None, "a pass without end fills all slots"
        return needed, ring

    def _from_fill(self, slots: Slots) -> Iterator[Serve]:
        yield from self._overdue(slots, until=self._fill)
        ring = self._ring_of(slots)
        yield from self._overdue(slots) if ring is None else self._from_ring(ring, slots.batch)

    def _from_ring(self, ring: "Ring", batch: int) -> Iterator[Serve]:
        for number, serve in enumerate(ring.serves(batch), start=batch):
            yield self._mixed(number, serve)
        yield from self._overdue(self._slots_after(ring))

    def _slots_after(self, ring: "Ring") -> Slots:
        slots = ring.slots(ring.end)
        slots.admit(self.samples)
        return slots

    def _overdue(self, slots: Slots, until: int | None = None) -> Iterator[Serve]:
        """Serve the most overdue samples up to batch `until`, or to the end of the pass."""
        while slots.outstanding and slots.batch != until:
            yield self._mixed(slots.batch, self._next(slots))

    def _skip_to(self, slots: Slots, batch: int) -> None:
        while slots.outstanding and slots.batch < batch:
            self._next(slots)

    def _next(self, slots: Slots) -> Serve:
        chosen, serve = slots.serve(self.batch_size, (self.buffer_batches + 1) // 2)
        slots.end_batch(chosen, self.samples)
        return serve

    def _mixed(self, batch: int, serve: Serve) -> Serve:
        if not self.shuffle:
            return serve
        order = shuffled(len(serve.positions), *self.seed, BATCH, batch)
        return Serve(serve.positions[order], serve.serves[order])

    @property
    def _capacity(self) -> int:
        return self.buffer_batches * self.batch_size

    @property
    def _fill(self) -> int:
        """So many batches are served while the buffer fills: a life."""
        return self.reuse * self.buffer_batches

    def _first_slots(self) -> Slots:
        count = min(self._capacity, self.samples)
        return Slots(
            position=np.arange(count),
            served=np.zeros(count, dtype=np.int64),
            first=np.full(count, -1),
            last=np.full(count, NEVER),
            due=self._first_dues(count),
            entered=count,
            batch=0,
            outstanding=self.samples * self.reuse,
        )

    def _first_dues(self, count: int) -> IntArray:
        """When the serves of the first positions are due. With a shuffle, neighbours exchange when
        they are due, but for their first serves: as many as half a part of a life has."""
        every = np.arange(count)
        order = np.tile(every[:, None], (1, self.reuse))
        window = max(1, self._capacity // (2 * self.reuse))
        for serve in range(1, self.reuse if self.shuffle else 0):
            drawn = mixed(every, key_of(*self.seed, DUE, serve))
            order[np.lexsort((drawn, every // window)), serve] = every
        # `Slots.admit` adds a life for the next sample of a slot.
        return order * self.reuse + np.arange(self.reuse) * self._capacity

    def _ring_of(self, slots: Slots) -> "Ring | None":
        """The ring in which the slots stand after the fill. None: they are not all taken."""
        if len(slots.position) < self._capacity or (slots.served == self.reuse).any():
            return None
        spread = self.buffer_batches // 2 if self.shuffle and self.reuse > 1 else 0
        # The ring does not see that a late sample has to be in every batch that is left. Where a
        # life comes out even with the slots of two batches, the drain needs that much longer.
        even = not self.shuffle and self.buffer_batches == 2 and self.reuse % self._capacity == 0
        margin = self.reuse if even else 0
        return Ring.from_slots(slots, self.samples, self.batch_size, spread, self.seed, margin)


@dataclass(frozen=True, slots=True, eq=False)
class Ring:
    """The slots of a full buffer, in the order in which they are served, round by round."""

    begin: Slots
    """The slots before the first batch, in the ring's order."""
    samples: int
    batch_size: int
    spread: int
    seed: tuple[int, ...]
    margin: int
    """So many batches the ring could serve are left to the drain."""
    left: IntArray
    """So many rounds serve the first sample of each slot."""
    rank: IntArray
    """The slots, numbered in the order in which they get their second samples."""

    @classmethod
    def from_slots(
        cls,
        slots: Slots,
        samples: int,
        batch_size: int,
        spread: int,
        seed: tuple[int, ...],
        margin: int,
    ) -> "Ring":
        # Who was served in the same batch alternates by its number of serves.
        nth = np.zeros_like(slots.served)
        for served in np.unique(slots.served):
            for batch in np.unique(slots.last):
                alike = np.flatnonzero((slots.served == served) & (slots.last == batch))
                alike = alike[np.argsort(slots.position[alike])]
                nth[alike] = (2 * np.arange(len(alike)) + 1) * len(nth) // (2 * len(alike) or 1)
        ring = np.lexsort((slots.position, slots.served, nth, slots.last))
        begin = Slots(
            slots.position[ring], slots.served[ring], slots.first[ring], slots.last[ring],
            slots.due[ring], slots.entered, slots.batch, slots.outstanding,
        )  # fmt: skip
        left = slots.due.shape[1] - begin.served
        rank = np.empty_like(left)
        rank[np.argsort(left, kind="stable")] = np.arange(len(left))
        return cls(begin, samples, batch_size, spread, seed, margin, left, rank)

    @property
    def end(self) -> int:
        """The first batch that is not served by the ring, because too few samples are left."""
        capacity, reuse = len(self.left), self.begin.due.shape[1]
        turns, rest = divmod(self.samples - self.begin.entered, capacity)
        begun = np.cumsum(np.bincount(self.left, minlength=reuse)[:reuse])  # 0, ... are begun
        rounds = turns * reuse + int(np.searchsorted(begun, rest, side="right"))
        batches = (rounds * capacity - self._start(0)) // self.batch_size - self.margin
        return self.begin.batch + max(batches, 0)

    def foreseen(self, batch: int) -> int:
        """With so many samples or more, the ring does not end before this batch is served."""
        capacity, reuse = len(self.left), self.begin.due.shape[1]
        batches = batch - self.begin.batch + 1 + self.margin
        places = batches * self.batch_size + self._start(0)
        turns, rest = divmod(max(-(-places // capacity), 1) - 1, reuse)  # in rounds before it
        begun = np.cumsum(np.bincount(self.left, minlength=reuse)[:reuse])
        return self.begin.entered + turns * capacity + int(begun[rest])

    def serves(self, batch: int) -> Iterator[Serve]:
        first = batch - self.begin.batch
        homes = deque((self._home(h) for h in range(first - self.spread, first)), self.spread + 1)
        for number in range(first, self.end - self.begin.batch):
            homes.append(self._home(number))
            parts = [
                (slot[part == number - home], turn[part == number - home])
                for home, (slot, turn, part) in zip(
                    range(number - self.spread, number + 1), homes, strict=True
                )
            ]
            slot, turn = (np.concatenate(column) for column in zip(*parts, strict=True))
            yield Serve(*self._served_at(slot, turn))

    def slots(self, batch: int) -> Slots:
        """The slots before a batch."""
        reuse, capacity = self.begin.due.shape[1], len(self.left)
        number, begin = batch - self.begin.batch, self.begin
        # Everybody who stands there was served first after this home, or before the ring.
        home = max(-self.spread, number - self.spread - reuse * (capacity // self.batch_size))
        every = np.arange(capacity)
        turns = np.maximum(-((every - self._start(home)) // capacity), 0)
        first, last = begin.first.copy(), begin.last.copy()
        for h in range(home, number):
            slot, turn, part = self._home(h)
            there = h + part < number
            slot, turn, served_in = slot[there], turn[there], begin.batch + h + part[there]
            turns[slot], last[slot] = turn + 1, served_in
            fresh = self._served_at(slot, turn)[1] == 0
            first[slot[fresh]] = served_in[fresh]
        position, served = self._served_at(every, turns)
        due = (every + (turns - served) * capacity)[:, None] + np.arange(reuse) * capacity
        following = self._served_at(every, turns + reuse - served)[0]
        entered = min(int(following.min()), self.samples)
        free = position >= entered  # whoever comes, comes in the order of the positions
        served[free] = reuse
        due[free] -= reuse * capacity
        outstanding = begin.outstanding - number * self.batch_size
        return Slots(position, served, first, last, due, entered, batch, outstanding)

    def _served_at(self, slot: IntArray, turn: IntArray) -> tuple[IntArray, IntArray]:
        """Whom slots serve in which rounds: the positions, and the numbers of their serves."""
        reuse, begin = self.begin.due.shape[1], self.begin
        since = turn - self.left[slot]
        followers, serve = np.divmod(since, reuse)
        later = begin.entered + followers * len(self.left) + self.rank[slot]
        return (
            np.where(since < 0, begin.position[slot], later),
            np.where(since < 0, begin.served[slot] + turn, serve),
        )

    def _home(self, home: int) -> tuple[IntArray, IntArray, IntArray]:
        """The slots at the places of a home, their rounds, and the part that each is in."""
        start, part = self._start(home), self._parts(home)
        turn, slot = np.divmod(start + np.arange(len(part)), len(self.left))
        if self.spread:
            drawn = mixed(start + np.arange(len(part)), key_of(*self.seed, PARTS))
            order = np.lexsort((drawn, self._served_at(slot, turn)[1]))
            turn, slot = turn[order], slot[order]
        return slot, turn, part

    def _parts(self, home: int) -> IntArray:
        part = np.arange(self.batch_size) % (self.spread + 1)
        return part[part >= -home]

    def _start(self, home: int) -> int:
        """The first place of a home."""
        before = sum(len(self._parts(h)) for h in range(-self.spread, min(home, 0)))
        return before + max(home, 0) * self.batch_size
