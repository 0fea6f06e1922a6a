"""How far two serves of a sample lie apart."""

from itertools import pairwise

from hypothesis import example, given, settings
from hypothesis import strategies as st
from support.products import examples

from loaders.order.reuse import MODES, ReuseBuffer

law = settings(max_examples=examples(150), deadline=None)


@st.composite
def plans(draw: st.DrawFn, mode: str | None = None) -> ReuseBuffer:
    batch_size = draw(st.integers(1, 9))
    return ReuseBuffer(
        samples=draw(st.integers(batch_size, 200)),
        batch_size=batch_size,
        reuse=draw(st.integers(1, 7)),
        buffer_batches=draw(st.integers(1, 12)),
        mode=mode or draw(st.sampled_from(MODES)),  # pyright: ignore[reportArgumentType]
        shuffle=draw(st.booleans()),
        drop_last=draw(st.booleans()),
        seed=(draw(st.integers(0, 1000)),),
    )


def plan_of(samples: int, batch_size: int, reuse: int, buffer: int) -> ReuseBuffer:
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
@given(plans("rolling"))
@example(plan_of(200, 4, 3, 2))
@example(plan_of(200, 4, 3, 3))
@example(plan_of(120, 1, 7, 12))
def test_two_serves_lie_half_a_buffer_apart_until_the_pass_drains(plan: ReuseBuffer) -> None:
    serves, draining = serves_of(plan)
    least = (plan.buffer_batches + 1) // 2
    for position, batches in serves.items():
        for one, other in pairwise(batches):
            assert other - one >= (least if other < draining else 0), (position, batches)


@law
@given(plans("rolling"))
def test_a_life_is_about_a_buffer_long(plan: ReuseBuffer) -> None:
    """Nobody waits in the buffer for ever: what is overdue goes first."""
    serves, _ = serves_of(plan)
    for position, batches in serves.items():
        if plan.buffer_batches > 1:
            longest = plan.reuse * (plan.buffer_batches + 1) + 1
            assert batches[-1] - batches[0] <= longest, (position, batches)
