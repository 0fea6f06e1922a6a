"""The order of a pass, judged by a recount of what it served.

`Pass` replays the served batches into plain lists and dictionaries: who was served when, who was
alive when. Nothing in it knows how `loaders.order.reuse` makes its choice.
"""

from collections import Counter
from collections.abc import Sequence
from dataclasses import dataclass, replace
from statistics import median
from typing import Any

import pytest
from hypothesis import example, given, settings
from hypothesis import strategies as st
from support.products import examples

from loaders.order.reuse import MODES, ReuseBuffer, batches_per_pass, buffered_batches
from loaders.order.serve import Serve

law = settings(max_examples=examples(150), deadline=None)


@dataclass(frozen=True)
class Pass:
    """What a consumer of one pass saw."""

    batches: list[list[tuple[int, int]]]
    """(position, serve) of each sample of each batch."""

    @property
    def stream(self) -> list[tuple[int, int]]:
        return [sample for batch in self.batches for sample in batch]

    def batches_of(self, position: int) -> list[int]:
        return [n for n, batch in enumerate(self.batches) for p, _ in batch if p == position]

    def gaps(self) -> list[tuple[int, int]]:
        """(batch, batches since the sample's serve before) of each serve that is not a first."""
        seen: dict[int, int] = {}
        found = []
        for number, batch in enumerate(self.batches):
            for position, _ in batch:
                if position in seen:
                    found.append((number, number - seen[position]))
                seen[position] = number
        return found

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


def pairs(serve: Serve) -> list[tuple[int, int]]:
    return list(zip(serve.positions.tolist(), serve.serves.tolist(), strict=True))


@st.composite
def plans(draw: st.DrawFn, modes: Sequence[str] = MODES, min_buffer: int = 1) -> ReuseBuffer:
    """Any pass over at least one batch; often with a remainder, often larger than the buffer."""
    batch_size = draw(st.integers(1, 12))
    buffer_batches = draw(st.integers(min_buffer, 5))
    samples = draw(
        st.integers(batch_size, 2 * batch_size)
        | st.integers(batch_size, 3 * batch_size * buffer_batches + 7)
    )
    return ReuseBuffer(
        samples=samples,
        batch_size=batch_size,
        reuse=draw(st.integers(1, 8)),
        buffer_batches=buffer_batches,
        mode=draw(st.sampled_from(modes)),
        shuffle=draw(st.booleans()),
        drop_last=False,
        seed=(draw(st.integers(0, 2**40)), draw(st.integers(0, 3))),
    )


def with_drop_last(buffer: ReuseBuffer) -> ReuseBuffer:
    fields = {name: getattr(buffer, name) for name in buffer.__slots__}
    return ReuseBuffer(**{**fields, "drop_last": True})


# ---- every mode ---------------------------------------------------------------------------------


@law
@given(st.data())
def test_a_buffer_that_mixes_nothing_may_be_as_small_as_what_is_read_ahead(
    data: st.DataObject,
) -> None:
    mode, reuse = data.draw(st.sampled_from([("rolling", 1), ("immediate", 1), ("immediate", 3)]))
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
@given(plans())
def test_every_sample_is_served_reuse_times_numbered_from_zero(buffer: ReuseBuffer) -> None:
    serves: dict[int, list[int]] = {position: [] for position in range(buffer.samples)}
    for position, serve in run(buffer).stream:
        serves[position].append(serve)
    assert all(numbers == list(range(buffer.reuse)) for numbers in serves.values())


@law
@given(plans())
def test_never_more_than_the_capacity_is_alive(buffer: ReuseBuffer) -> None:
    # Also why the loader cannot deadlock: a batch never waits for a slot that it occupies itself.
    assert max(run(buffer).slots_in_use(buffer.reuse)) <= buffer.capacity


@law
@given(plans(min_buffer=2))
def test_no_sample_is_twice_in_a_batch_of_a_buffer_larger_than_one(buffer: ReuseBuffer) -> None:
    for batch in run(buffer).batches:
        assert len({position for position, _ in batch}) == len(batch)


@law
@given(plans())
def test_len_is_the_number_of_batches(buffer: ReuseBuffer) -> None:
    for each in (buffer, with_drop_last(buffer)):
        served = run(each).batches
        assert len(each) == len(served)
        assert len(served) == batches_per_pass(
            each.samples, each.batch_size, each.reuse, each.mode, each.drop_last
        )


@law
@given(plans())
def test_drop_last_drops_the_batches_that_are_not_full_and_nothing_else(
    buffer: ReuseBuffer,
) -> None:
    whole, dropped = run(buffer).batches, run(with_drop_last(buffer)).batches
    full = [batch for batch in whole if len(batch) == buffer.batch_size]
    assert dropped == full
    assert whole[: len(full)] == full, "only the tail of a pass may be short"


@law
@given(plans(modes=("rolling", "block")))
def test_all_batches_but_the_last_are_full(buffer: ReuseBuffer) -> None:
    sizes = [len(batch) for batch in run(buffer).batches]
    assert set(sizes[:-1]) <= {buffer.batch_size}
    assert 1 <= sizes[-1] <= buffer.batch_size


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
@given(plans())
def test_without_shuffle_and_reuse_the_order_is_the_sources(buffer: ReuseBuffer) -> None:
    fields = {name: getattr(buffer, name) for name in buffer.__slots__}
    plain = ReuseBuffer(**{**fields, "shuffle": False, "reuse": 1})
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
@given(plans(modes=("immediate",)))
def test_immediate_serves_each_batch_reuse_times_in_a_row(buffer: ReuseBuffer) -> None:
    batches = run(buffer).batches
    for first in range(0, len(batches), buffer.reuse):
        start = first // buffer.reuse * buffer.batch_size
        expected = list(range(start, min(start + buffer.batch_size, buffer.samples)))
        for serve in range(buffer.reuse):
            assert batches[first + serve] == [(p, serve) for p in expected]


# ---- block --------------------------------------------------------------------------------------


@law
@given(plans(modes=("block",)).filter(lambda buffer: buffer.reuse > 1))
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


def test_block_has_full_blocks_and_lends_a_batch_to_a_last_one_that_is_too_small() -> None:
    # 27 samples, buffer 2 x 8: blocks of 16 and 11. 20 samples: 16 + 4 would leave a block with
    # less than a batch, so 8 + 12.
    def last_new(batches: list[list[tuple[int, int]]]) -> list[int]:
        return [max(p for p, _ in batch) for batch in batches]

    usual = {"mode": "block", "batch_size": 8, "buffer_batches": 2, "reuse": 2}
    assert last_new(run(plan(samples=27, shuffle=False, **usual)).batches[:4]) == [7, 15, 7, 15]
    assert max(last_new(run(plan(samples=27, **usual)).batches[:4])) == 15
    assert max(last_new(run(plan(samples=20, **usual)).batches[:2])) == 7


def test_a_rolling_buffer_of_one_batch_is_a_block_of_one_batch() -> None:
    one = {"samples": 50, "buffer_batches": 1}
    assert run(plan(mode="rolling", **one)) == run(plan(mode="block", **one))


# ---- rolling ------------------------------------------------------------------------------------


@st.composite
def long_rolling(draw: st.DrawFn) -> ReuseBuffer:
    """A pass that fills its buffer at least once."""
    batch_size, buffer_batches = draw(st.integers(1, 16)), draw(st.integers(2, 5))
    capacity = batch_size * buffer_batches
    return plan(
        samples=draw(st.integers(capacity, 6 * capacity + 5)),
        batch_size=batch_size,
        reuse=draw(st.integers(2, 8)),
        buffer_batches=buffer_batches,
        shuffle=draw(st.booleans()),
        seed=(draw(st.integers(0, 2**40)),),
    )


@law
@given(long_rolling())
def test_rolling_keeps_half_a_buffer_between_two_serves_until_the_pass_drains(
    buffer: ReuseBuffer,
) -> None:
    # Only a sample with as many serves left as there are batches may break it: the last R batches.
    gap = (buffer.buffer_batches + 1) // 2
    too_soon = [number for number, apart in run(buffer).gaps() if apart < gap]
    assert all(number >= len(buffer) - buffer.reuse for number in too_soon)


@pytest.mark.parametrize("reuse", [2, 3, 6])
@pytest.mark.parametrize("buffer_batches", [2, 3, 5])
def test_rolling_lets_about_a_buffer_pass_between_two_serves(
    reuse: int, buffer_batches: int
) -> None:
    buffer = plan(samples=2000, batch_size=16, reuse=reuse, buffer_batches=buffer_batches)
    apart = [gap for _, gap in run(buffer).gaps()]
    assert buffer_batches <= median(apart) <= buffer_batches + 1


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
