"""The order of a pass, judged by a recount of what it served.

`Pass` replays the served batches into plain lists and dictionaries: who was served when, who was
alive when. Nothing in it knows how `loaders.order.reuse` makes its choice.
"""

import hashlib
import json
from collections import Counter
from collections.abc import Sequence
from dataclasses import dataclass, replace
from itertools import pairwise
from typing import Any

import pytest
from hypothesis import example, given, settings
from hypothesis import strategies as st
from support.products import examples
from support.reuse_plans import pairs, plans

from loaders.order.reuse import MODES, Mode, ReuseBuffer, batches_per_pass, buffered_batches

law = settings(max_examples=examples(150), deadline=None)


@dataclass(frozen=True)
class Pass:
    """What a consumer of one pass saw."""

    batches: list[list[tuple[int, int]]]
    """(position, serve) of each sample of each batch."""

    @property
    def stream(self) -> list[tuple[int, int]]:
        return [sample for batch in self.batches for sample in batch]

    def slots_in_use(self, reuse: int) -> list[int]:
        """Slots that each batch needs: samples enter in order and leave after their last serve."""
        served: Counter[int] = Counter()
        entered, left, needed = 0, 0, []
        for batch in self.batches:
            entered = max(entered, 1 + max(position for position, _ in batch))
            needed.append(entered - left)
            for position, _ in batch:
                served[position] += 1
                left += served[position] == reuse
        return needed


def plan(**changes: Any) -> ReuseBuffer:
    usual: dict[str, Any] = {
        "samples": 100,
        "batch_size": 8,
        "reuse": 3,
        "buffer_batches": 3,
        "mode": "rolling",
        "shuffle": True,
        "drop_last": False,
        "seed": (0, 1),
    }
    return ReuseBuffer(**{**usual, **changes})


def run(buffer: ReuseBuffer) -> Pass:
    return Pass([pairs(serve) for serve in buffer])


def whole_passes(modes: Sequence[Mode] = MODES, min_buffer: int = 1) -> Any:
    return plans(modes, min_buffer).map(lambda plan: replace(plan, drop_last=False))


# ---- every mode ---------------------------------------------------------------------------------


@law
@given(st.data())
def test_a_buffer_that_mixes_nothing_may_be_as_small_as_what_is_read_ahead(
    data: st.DataObject,
) -> None:
    mixing_none: list[tuple[Mode, int]] = [("rolling", 1), ("immediate", 1), ("immediate", 3)]
    mode, reuse = data.draw(st.sampled_from(mixing_none))
    large = plan(
        samples=data.draw(st.integers(1, 300)), batch_size=data.draw(st.integers(1, 7)),
        buffer_batches=data.draw(st.integers(4, 12)), reuse=reuse, mode=mode,
        shuffle=data.draw(st.booleans()), drop_last=data.draw(st.booleans()),
    )  # fmt: skip
    kept = buffered_batches(mode, reuse, large.buffer_batches)
    assert kept == 3
    assert run(replace(large, buffer_batches=kept)) == run(large)
    assert buffered_batches("rolling", 2, 12) == buffered_batches("block", 1, 12) == 12


# A life that comes out even with the slots: a late sample has to be in every batch that is left.
@example(ReuseBuffer(11, 2, 4, 2, "rolling", shuffle=False, drop_last=False, seed=(0,)))
@example(ReuseBuffer(35, 4, 24, 2, "rolling", shuffle=False, drop_last=False, seed=(0,)))
@law
@given(whole_passes())
def test_every_sample_is_served_reuse_times_numbered_from_zero(buffer: ReuseBuffer) -> None:
    serves: dict[int, list[int]] = {position: [] for position in range(buffer.samples)}
    for position, serve in run(buffer).stream:
        serves[position].append(serve)
    assert all(numbers == list(range(buffer.reuse)) for numbers in serves.values())


@law
@given(whole_passes())
def test_never_more_than_the_capacity_is_alive(buffer: ReuseBuffer) -> None:
    # Also why the loader cannot deadlock: a batch never waits for a slot that it occupies itself.
    assert max(run(buffer).slots_in_use(buffer.reuse)) <= buffer.capacity


@law
@given(whole_passes(min_buffer=2))
def test_no_sample_is_twice_in_a_batch_of_a_buffer_larger_than_one(buffer: ReuseBuffer) -> None:
    for batch in run(buffer).batches:
        assert len({position for position, _ in batch}) == len(batch)


@law
@given(whole_passes())
def test_len_is_the_number_of_batches(buffer: ReuseBuffer) -> None:
    for each in (buffer, replace(buffer, drop_last=True)):
        served = run(each).batches
        assert len(each) == len(served)
        assert len(served) == batches_per_pass(
            each.samples, each.batch_size, each.reuse, each.mode, each.drop_last
        )


@law
@given(whole_passes())
def test_drop_last_drops_the_batches_that_are_not_full_and_nothing_else(
    buffer: ReuseBuffer,
) -> None:
    whole, dropped = run(buffer).batches, run(replace(buffer, drop_last=True)).batches
    full = [batch for batch in whole if len(batch) == buffer.batch_size]
    assert dropped == full
    assert whole[: len(full)] == full, "only the tail of a pass may be short"


@pytest.mark.parametrize("mode", ["rolling", "block"])
@given(seed=st.tuples(st.integers(0, 2**40), st.integers(0, 2**20)), other=st.integers(1, 9))
@settings(max_examples=examples(25), deadline=None)
def test_the_same_seed_gives_the_same_order_and_another_seed_another(
    mode: str, seed: tuple[int, int], other: int
) -> None:
    first = run(plan(mode=mode, seed=seed))
    assert run(plan(mode=mode, seed=seed)) == first
    assert run(plan(mode=mode, seed=(seed[0] + other, seed[1]))) != first
    assert run(plan(mode=mode, seed=(seed[0], seed[1] + other))) != first


@law
@given(whole_passes())
def test_without_shuffle_and_reuse_the_order_is_the_sources(buffer: ReuseBuffer) -> None:
    plain = replace(buffer, shuffle=False, reuse=1)
    assert [position for position, _ in run(plain).stream] == list(range(buffer.samples))


@pytest.mark.parametrize("mode", ["rolling", "block"])
def test_shuffle_mixes_what_a_batch_holds_and_in_which_order(mode: str) -> None:
    mixed, plain = (run(plan(mode=mode, shuffle=s)).batches for s in (True, False))
    assert sum(a != b for a, b in zip(mixed, plain, strict=True)) > len(plain) / 2
    in_batch = [[p for p, _ in batch] for batch in run(plan(mode=mode, reuse=1)).batches]
    assert sum(positions != sorted(positions) for positions in in_batch) > len(in_batch) / 2
    as_sets = [({p for p, _ in a}, {p for p, _ in b}) for a, b in zip(mixed, plain, strict=True)]
    assert sum(a != b for a, b in as_sets) > len(plain) / 2


@pytest.mark.parametrize("mode", MODES)
def test_a_sample_is_first_served_close_to_its_place_in_the_source(mode: str) -> None:
    # The source's order is the shuffle; the buffer only mixes within itself.
    buffer = plan(mode=mode, samples=600)
    firsts = [position for position, serve in run(buffer).stream if serve == 0]
    assert max(abs(place - p) for place, p in enumerate(firsts)) <= buffer.capacity


# ---- immediate ----------------------------------------------------------------------------------


@law
@given(whole_passes(modes=("immediate",)))
def test_immediate_serves_each_batch_reuse_times_in_a_row(buffer: ReuseBuffer) -> None:
    batches = run(buffer).batches
    for first in range(0, len(batches), buffer.reuse):
        start = first // buffer.reuse * buffer.batch_size
        expected = list(range(start, min(start + buffer.batch_size, buffer.samples)))
        for serve in range(buffer.reuse):
            assert batches[first + serve] == [(p, serve) for p in expected]


# ---- block --------------------------------------------------------------------------------------


@law
@given(whole_passes(modes=("block",)).filter(lambda buffer: buffer.reuse > 1))
def test_block_serves_a_block_in_rounds_to_its_end_before_the_next_one(buffer: ReuseBuffer) -> None:
    blocks: list[list[list[int]]] = []  # block, round, position
    round_before = buffer.reuse
    for position, serve in run(buffer).stream:
        if serve < round_before:
            blocks.append([[] for _ in range(buffer.reuse)])
        blocks[-1][serve].append(position)
        round_before = serve
    sizes = [len(rounds[0]) for rounds in blocks]
    start = 0
    for size, rounds in zip(sizes, blocks, strict=True):
        block = list(range(start, start + size))
        assert [sorted(positions) for positions in rounds] == [block] * buffer.reuse
        start += size
    assert start == buffer.samples
    assert all(size == buffer.capacity for size in sizes[:-2])
    assert max(sizes) <= buffer.capacity


# ---- rolling ------------------------------------------------------------------------------------


@pytest.mark.parametrize("reuse", [2, 3, 6])
@pytest.mark.parametrize("buffer_batches", [2, 3, 5])
@pytest.mark.parametrize("shuffle", [True, False])
def test_rolling_decodes_steadily(reuse: int, buffer_batches: int, shuffle: bool) -> None:
    batch_size = 60
    buffer = plan(
        samples=5000,
        batch_size=batch_size,
        reuse=reuse,
        buffer_batches=buffer_batches,
        shuffle=shuffle,
    )
    new = [sum(serve == 0 for _, serve in batch) for batch in run(buffer).batches]
    # The buffer fills at first and drains at last: in between every batch is 1/R new.
    middle = new[reuse * buffer_batches : -reuse * buffer_batches]
    rate = batch_size / reuse
    assert len(middle) > 50
    assert all(0.5 * rate <= count <= 1.5 * rate for count in middle)
    assert abs(sum(middle) / len(middle) - rate) < 0.03 * rate


def test_rolling_mixes_the_ages_of_samples_in_a_batch() -> None:
    buffer = plan(samples=1000, batch_size=16, reuse=4, buffer_batches=3)
    batches = run(buffer).batches
    mixed = [{serve for _, serve in batch} for batch in batches[12:-12]]
    assert sum(len(serves) == 4 for serves in mixed) > 0.9 * len(mixed)


def test_the_first_batch_of_a_rolling_pass_needs_only_a_batch_of_decodes() -> None:
    # Starting must not wait for a whole buffer.
    first = run(plan(samples=500, buffer_batches=5)).batches[0]
    assert sorted(first) == [(p, 0) for p in range(8)]


# ---- how far two serves of a sample lie apart ---------------------------------------------------


def rolling(samples: int, batch_size: int, reuse: int, buffer: int) -> ReuseBuffer:
    return ReuseBuffer(samples, batch_size, reuse, buffer, "rolling", True, False, seed=(0,))


def serves_of(plan: ReuseBuffer) -> tuple[dict[int, list[int]], int]:
    """In which batches each position is served; and the first one before which all were admitted:
    a slot is given on after its sample's last serve."""
    batches: dict[int, list[int]] = {}
    waiting, draining = plan.samples - plan.capacity, 0
    for number, serve in enumerate(plan):
        if waiting > 0:
            draining = number + 1
        for position in serve.positions.tolist():
            batches.setdefault(position, []).append(number)
            waiting -= len(batches[position]) == plan.reuse
    return batches, draining


@law
@given(plans(("rolling",)))
@example(rolling(200, 4, 3, 2))
@example(rolling(200, 4, 3, 3))
@example(rolling(120, 1, 7, 12))
def test_two_serves_lie_half_a_buffer_apart_until_the_pass_drains(plan: ReuseBuffer) -> None:
    serves, draining = serves_of(plan)
    least = (plan.buffer_batches + 1) // 2
    for position, batches in serves.items():
        for one, other in pairwise(batches):
            assert other - one >= (least if other < draining else 0), (position, batches)


@law
@given(plans(("rolling",)))
def test_a_life_is_about_a_buffer_long(plan: ReuseBuffer) -> None:
    """Nobody waits in the buffer for ever: what is overdue goes first."""
    serves, _ = serves_of(plan)
    for position, batches in serves.items():
        if plan.buffer_batches > 1:
            longest = plan.reuse * (plan.buffer_batches + 1) + 1
            assert batches[-1] - batches[0] <= longest, (position, batches)


# ---- a pass that is entered at any batch --------------------------------------------------------


@law
@given(plans(), st.data())
def test_a_pass_that_is_entered_at_any_batch_goes_on_as_one_that_was_served_up_to_there(
    buffer: ReuseBuffer, data: st.DataObject
) -> None:
    whole = [pairs(serve) for serve in buffer]
    batch = data.draw(st.integers(0, len(buffer)))
    residents, serves = buffer.walk(batch)
    assert [pairs(serve) for serve in serves] == whole[batch:]
    served: Counter[int] = Counter()
    first: dict[int, int] = {}
    for number, each in enumerate(whole[:batch]):
        for position, _ in each:
            served[position] += 1
            first.setdefault(position, number)
    left = [p for p in range(residents.entered) if served[p] < buffer.reuse]
    assert residents.positions.tolist() == left
    assert residents.served.tolist() == [served[p] for p in left]
    assert residents.first.tolist() == [first.get(p, -1) for p in left]
    assert max(served, default=-1) < residents.entered, "nobody beyond was served"
    assert len(left) <= buffer.capacity, "all of them have slots"


def test_the_order_of_a_seed_never_changes() -> None:
    """Saved runs go on with it. Whoever changes it has to raise `ORDER_VERSION`."""
    digests = {}
    for mode in MODES:
        buffer = ReuseBuffer(300, 8, 3, 3, mode, True, False, (0, 1, 2, 3))
        told = [pairs(serve) for serve in buffer]
        digests[mode] = hashlib.sha256(json.dumps(told).encode()).hexdigest()[:16]
    assert digests == {
        "rolling": "4057ca3bfa9f340e",
        "block": "33e5743f2a4da50d",
        "immediate": "8ccec5dd187280f2",
    }
