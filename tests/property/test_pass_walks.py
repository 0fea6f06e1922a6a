"""A pass may be entered at any batch: what is served there, who is in the buffer, what it costs.

The recount below knows what was served before a batch, and nothing of the ring in `rolling`.
"""

import hashlib
import json
from collections import Counter
from typing import Any

import numpy as np
import pytest
from hypothesis import given, settings
from hypothesis import strategies as st
from support.products import examples

from loaders.order.reuse import MODES, Mode, ReuseBuffer
from loaders.order.serve import BufferAges, Serve

law = settings(max_examples=examples(200), deadline=None)


def pairs(serve: Serve) -> list[tuple[int, int]]:
    return list(zip(serve.positions.tolist(), serve.serves.tolist(), strict=True))


@st.composite
def short_passes(draw: st.DrawFn) -> ReuseBuffer:
    """A pass of any mode, whose buffer may never be full."""
    batch_size, buffer_batches = draw(st.integers(1, 7)), draw(st.integers(1, 5))
    return ReuseBuffer(
        samples=draw(st.integers(batch_size, 3 * batch_size * buffer_batches + 7)),
        batch_size=batch_size,
        reuse=draw(st.integers(1, 6)),
        buffer_batches=buffer_batches,
        mode=draw(st.sampled_from(MODES)),
        shuffle=draw(st.booleans()),
        drop_last=draw(st.booleans()),
        seed=(draw(st.integers(0, 2**40)),),
    )


@st.composite
def long_passes(draw: st.DrawFn) -> ReuseBuffer:
    """A rolling pass that is much longer than its buffer."""
    batch_size, buffer_batches = draw(st.integers(1, 5)), draw(st.integers(2, 5))
    capacity = batch_size * buffer_batches
    return ReuseBuffer(
        samples=draw(st.integers(3 * capacity, 12 * capacity)),
        batch_size=batch_size,
        reuse=draw(st.integers(1, 5)),
        buffer_batches=buffer_batches,
        mode="rolling",
        shuffle=draw(st.booleans()),
        drop_last=draw(st.booleans()),
        seed=(draw(st.integers(0, 2**40)),),
    )


@law
@given(short_passes() | long_passes(), st.data())
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


@pytest.mark.parametrize("mode", MODES)
@pytest.mark.parametrize("shuffle", [True, False])
def test_a_pass_over_any_number_of_samples_is_entered_with_the_work_of_a_few_buffers(
    mode: Mode, shuffle: bool, monkeypatch: pytest.MonkeyPatch
) -> None:
    computed = [0]
    arange = np.arange

    def counting(*args: Any, **options: Any) -> Any:
        made = arange(*args, **options)
        computed[0] += len(made)
        return made

    monkeypatch.setattr(np, "arange", counting)
    work = []
    for samples in (10**5, 10**12):
        buffer = ReuseBuffer(samples, 8, 3, 3, mode, shuffle, False, (0, 1))
        for batch in (0, len(buffer) // 2, len(buffer) - 3):
            computed[0] = 0
            _, serves = buffer.walk(batch)
            next(serves)
            work.append(computed[0])
    assert max(work[3:]) <= max(work[:3]) + buffer.capacity
    assert max(work) < 10**4


@law
@given(short_passes() | long_passes(), st.data())
def test_ages_that_are_counted_from_any_batch_are_those_of_the_whole_pass(
    buffer: ReuseBuffer, data: st.DataObject
) -> None:
    batch = data.draw(st.integers(0, len(buffer)))
    born: dict[int, int] = {}
    ages: list[int] = []
    for number, serve in enumerate(buffer):
        for position in serve.positions.tolist():
            born.setdefault(position, number)
        ages.append(sum(number - born[position] for position in serve.positions.tolist()))
    residents, serves = buffer.walk(batch)
    found = BufferAges.at_entry(residents, buffer.reuse)
    for number, serve in enumerate(serves, start=batch):
        assert found.count(number, serve.positions, serve.serves) == ages[number]
        assert len(found.born) <= buffer.capacity, "it remembers only who is in the buffer"


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
