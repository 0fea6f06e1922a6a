"""A pass over a stream is the pass of its number of samples, though nobody knew it."""

from dataclasses import dataclass, replace

from hypothesis import example, given, settings
from hypothesis import strategies as st
from support.products import examples

from loaders.order.open_end import ENDLESS, Foresight, walk_stream
from loaders.order.reuse import MODES, ReuseBuffer
from loaders.order.serve import Residents, Serve

law = settings(max_examples=examples(300), deadline=None)


@dataclass
class Discovered:
    """An extent that is found out by asking."""

    there: int
    asked: int = 0
    samples: int | None = None

    def reaches(self, samples: int) -> bool:
        self.asked = max(self.asked, samples)
        if samples > self.there:
            self.samples = self.there
        return samples <= self.there


@st.composite
def passes(draw: st.DrawFn) -> ReuseBuffer:
    batch_size, buffer_batches = draw(st.integers(1, 6)), draw(st.integers(1, 5))
    return ReuseBuffer(
        samples=draw(st.integers(1, 8 * batch_size * buffer_batches + 7)),
        batch_size=batch_size,
        reuse=draw(st.integers(1, 5)),
        buffer_batches=buffer_batches,
        mode=draw(st.sampled_from(MODES)),
        shuffle=draw(st.booleans()),
        drop_last=draw(st.booleans()),
        seed=(draw(st.integers(0, 2**40)),),
    )


def told(serve: Serve) -> list[tuple[int, int]]:
    return list(zip(serve.positions.tolist(), serve.serves.tolist(), strict=True))


def stands(residents: Residents) -> tuple[list[int], list[int], list[int], int]:
    lists = (residents.positions, residents.served, residents.first)
    return (*(each.tolist() for each in lists), residents.entered)


@law
@given(passes(), st.integers(0, 10**6))
@example(ReuseBuffer(60, 5, 1, 2, "rolling", False, False, (0,)), 11)
def test_whoever_discovers_the_end_serves_what_was_served_if_it_was_known(
    plan: ReuseBuffer, entered: int
) -> None:
    batch = entered % (len(plan) + 1)
    residents, serves = plan.walk(batch)
    unknown = replace(plan, samples=0)
    found, discovered = walk_stream(unknown, batch, Discovered(plan.samples))
    assert stands(found) == stands(residents)
    served = list(discovered)
    assert [told(serve) for serve, _ in served] == [told(serve) for serve in serves]
    assert [last for _, last in served] == [False] * (len(served) - 1) + [True] * bool(served)


@law
@given(passes(), st.data())
def test_a_batch_is_that_of_a_pass_without_end_while_its_samples_are_foreseen(
    plan: ReuseBuffer, data: st.DataObject
) -> None:
    """The other side of the law, for every number of samples from the one foreseen on."""
    endless = replace(plan, samples=ENDLESS)
    batch = data.draw(st.integers(0, len(plan)))
    other, others = endless.walk(batch)
    least = max(Foresight(endless).samples(batch), other.entered)
    one, ones = replace(plan, samples=least + data.draw(st.integers(0, 40))).walk(batch)
    assert stands(one) == stands(other)
    assert told(next(ones)) == told(next(others))


@law
@given(passes())
def test_nobody_reads_much_further_than_the_buffer(plan: ReuseBuffer) -> None:
    """What was read and has no slot yet is kept as it was read, so it must be a few batches."""
    extent = Discovered(ENDLESS)
    for batch in (0, 1, plan.reuse * plan.buffer_batches, 1000, 1001):
        residents, serves = walk_stream(plan, batch, extent)
        next(serves)
        assert extent.asked - residents.entered <= 2 * plan.capacity + plan.batch_size
