"""Which steps count, after any history of restarts from any checkpoints."""

from hypothesis import given, settings
from hypothesis import strategies as st
from support.products import examples

from trainers.elastic.peer.step_log import Era, steps_that_count

Steps = list[tuple[str, int]]


@st.composite
def some_lives(draw: st.DrawFn) -> tuple[list[Era], dict[str, int], Steps]:
    """Return the eras, how far each came, and the steps that the last one was made of."""
    eras: list[Era] = []
    ends: dict[str, int] = {}
    made: dict[str, Steps] = {}
    for number in range(1, draw(st.integers(1, 6)) + 1):
        name = draw(st.text("ab", min_size=1, max_size=2)) + str(number)
        parent = draw(st.sampled_from([None, *eras]))
        if parent is None:
            era, before = Era(name, number), Steps()
        else:
            step = draw(st.integers(parent.step, ends[parent.id]))
            era, before = Era(name, number, parent.id, step), made[parent.id][:step]
        ends[name] = era.step + draw(st.integers(0, 5))
        made[name] = before + [(name, step) for step in range(era.step, ends[name])]
        eras.append(era)
    return eras, ends, made[eras[-1].id]


@given(some_lives(), st.randoms())
@settings(max_examples=examples(200), deadline=None)
def test_just_the_steps_that_the_last_life_is_made_of_count(
    lives: tuple[list[Era], dict[str, int], Steps], dice: object
) -> None:
    eras, ends, made = lives
    shuffled = list(eras)
    dice.shuffle(shuffled)  # pyright: ignore[reportAttributeAccessIssue]
    counts = steps_that_count([*shuffled, *eras])
    logged = [(era.id, step) for era in eras for step in range(era.step, ends[era.id])]
    counted = [(name, step) for name, step in logged if step < counts.get(name, 0)]
    assert sorted(counted, key=lambda one: one[1]) == made
