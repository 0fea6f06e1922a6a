"""Laws of the choice of reuse and of the tuner that makes it."""

import json
import math
from dataclasses import replace
from fractions import Fraction
from math import inf

import numpy as np
import pytest
from hypothesis import given, settings
from hypothesis import strategies as st
from support.products import examples

from loaders.order.tuning import (
    BatchMeasurement,
    Choice,
    PipelineRates,
    ReuseTuner,
    TuningRules,
    available_cpus,
    choose_reuse,
)

law = settings(max_examples=examples(60), deadline=None)
RATE = st.integers(1, 10**6)
MARGIN_PERCENT = st.integers(0, 100)


@settings(max_examples=examples(300), deadline=None)
@given(RATE, RATE, st.integers(1, 64), MARGIN_PERCENT)
def test_the_choice_is_the_smallest_that_is_enough_in_exact_arithmetic(
    decode: int, step: int, most: int, percent: int
) -> None:
    rates = PipelineRates(decode, step)
    choice = choose_reuse(rates, most, percent / 100)
    needed = Fraction(step, decode) * Fraction(100 + percent, 100)
    exact = min(most, max(1, math.ceil(needed)))
    if choice.reuse != exact:  # only where rounding a float may decide
        assert abs(needed - round(needed)) < 1e-9
        assert abs(choice.reuse - exact) == 1
    stall = max(Fraction(0), 1 - Fraction(choice.reuse * decode, step))
    assert abs(rates.stall(choice.reuse) - stall) < 1e-9


def measurements(
    ratio: float, batches: int, seed: int, noise: float = 0.2, decoded: tuple[int, ...] = (64,)
) -> list[BatchMeasurement]:
    """Training is `ratio` times as fast as decoding; every time is off by up to `noise`."""
    rng = np.random.default_rng(seed)

    def off() -> float:
        return float(rng.uniform(1 - noise, 1 + noise))

    given = []
    for _ in range(batches):
        fresh = int(rng.choice(decoded))
        seconds = 4 * fresh / 100 * off()
        given.append(BatchMeasurement(seconds, fresh, 4, 64 / (100 * ratio) * off(), 64))
    return given


def fed(tuner: ReuseTuner, batches: list[BatchMeasurement]) -> list[Choice | None]:
    return [tuner.feed(batch) for batch in batches]


RATIO = st.floats(0.2, 12.0)
SEED = st.integers(0, 10**6)


@law
@given(
    st.floats(0.2, 12.0),
    st.sampled_from([(0.1, 0), (0.15, 1)]),
    st.lists(st.floats(0.0, 1.0), min_size=1, max_size=60),
    st.integers(1, 3),
)
def test_windows_that_lie_close_together_change_the_choice_never_or_once(
    ratio: float, spread: tuple[float, int], windows: list[float], agreeing: int
) -> None:
    """Whatever their order: within the margin never, within `clear` at most once."""
    (apart, most_changes), close = spread, 1 - 1e-6  # room for rounding
    tuner = ReuseTuner(16, TuningRules(warm_up=0, block=1, window=1, agreeing=agreeing))
    steps = [1 / (ratio * (1 + apart * close * at)) for at in windows]
    made = [tuner.feed(BatchMeasurement(1.0, 1, 1, step, 1)) for step in steps]
    assert sum(choice is not None for choice in made) <= 1 + most_changes


def test_a_drift_is_followed_within_a_few_windows_and_then_left_alone() -> None:
    """Noise can break this by chance, 2 times in 100,000, so the cases are always the same."""
    rng = np.random.default_rng(7)
    for before, after in rng.uniform(0.2, 12.0, (examples(60), 2)):
        tuner, seed = ReuseTuner(16), int(rng.integers(10**6))
        fed(tuner, measurements(before, 400, seed))
        fed(tuner, measurements(after, 200, seed + 1))
        reuse = tuner.reuse
        assert reuse is not None
        assert reuse == 16 or reuse > 0.9 * after  # training does not starve
        # Nor is much more reused than needed.
        assert reuse == 1 or (reuse - 1) < 1.1 * 1.15 * 1.1 * after
        made = [c for c in fed(tuner, measurements(after, 800, seed + 2)) if c]
        assert len(made) <= 1


@law
@given(RATIO, RATIO, SEED, st.integers(0, 300))
def test_a_tuner_resumed_anywhere_decides_alike(
    before: float, after: float, seed: int, cut: int
) -> None:
    rules = TuningRules(warm_up=5, block=3, window=3)
    batches = measurements(before, 150, seed, decoded=(0, 30, 64))
    batches += measurements(after, 150, seed + 1, decoded=(0, 30, 64))
    whole = ReuseTuner(16, rules)
    wanted = fed(whole, batches)
    first, second = ReuseTuner(16, rules), ReuseTuner(16, rules)
    got = fed(first, batches[:cut])
    saved = first.state_dict()
    text = json.dumps(saved)
    second.load_state_dict(json.loads(text))
    fed(first, batches[cut:])
    got += fed(second, batches[cut:])
    assert got == wanted
    assert json.dumps(saved) == text  # a state is a copy: who took it may go on
    assert second.state_dict() == whole.state_dict()


WARM, BLOCK, WINDOW = 2, 2, 3
QUICK = TuningRules(warm_up=WARM, block=BLOCK, window=WINDOW)
AFTER = 3 * BLOCK * WINDOW  # three windows have to agree


@pytest.mark.parametrize(
    ("decode", "step", "most", "reuse", "stall"),
    [
        (1000, 500, 8, 1, 0.0),
        (1100, 1000, 8, 1, 0.0),  # exactly the margin to spare
        (1099, 1000, 8, 2, 0.0),
        (1000, 2000, 8, 3, 0.0),  # 2 would do, with nothing to spare
        (1000, 2700, 8, 3, 0.0),
        (1000, 2900, 8, 4, 0.0),
        (1000, 7500, 8, 8, 0.0),  # keeps up, with less than the margin
        (1000, 16000, 8, 8, 0.5),
        (1000, 4000, 1, 1, 0.75),
        (0, 1000, 4, 4, 1.0),
        (inf, 1000, 4, 1, 0.0),
        (1000, inf, 4, 4, 1.0),
        (inf, inf, 4, 1, 0.0),
        (1000, 0, 4, 1, 0.0),
    ],
)
def test_the_smallest_reuse_that_keeps_up_is_chosen(
    decode: float, step: float, most: int, reuse: int, stall: float
) -> None:
    rates = PipelineRates(decode, step)
    assert choose_reuse(rates, most).reuse == reuse
    assert rates.stall(reuse) == pytest.approx(stall)


# ---- the tuner ----------------------------------------------------------------------------------


def batch(ratio: float, decoded: int = 32, served: int = 64, step: float = 0.1) -> BatchMeasurement:
    """Training takes `ratio` times the samples that 4 workers decode."""
    rate = served / step / ratio
    return BatchMeasurement(4 * decoded / rate, decoded, 4, step, served)


def choices(tuner: ReuseTuner, ratio: float, batches: int) -> list[Choice]:
    return [c for _ in range(batches) if (c := tuner.feed(batch(ratio)))]


def test_the_first_choice_comes_after_three_windows() -> None:
    tuner = ReuseTuner(8)
    assert choices(tuner, 2.5, 10 + 3 * 5 * 8 - 1) == []
    assert tuner.reuse is None
    [choice] = choices(tuner, 2.5, 1)
    assert choice == choose_reuse(PipelineRates(256, 640), 8)
    assert tuner.reuse == 3


def test_what_happens_while_warming_up_counts_for_nothing() -> None:
    tuner = ReuseTuner(8, QUICK)
    for _ in range(WARM):
        tuner.feed(batch(100.0))
    [choice] = choices(tuner, 1.5, AFTER)
    assert choice.reuse == 2


@pytest.mark.parametrize("every", [3, 10, 50])
def test_pauses_between_batches_change_nothing(every: int) -> None:
    """As of a validation, or of a checkpoint, however often they come."""
    usual, pause = batch(2.5), replace(batch(2.5), step_seconds=40.0)
    tuner = ReuseTuner(4)
    given = [tuner.feed(usual if n % every else pause) for n in range(400)]
    assert [choice for choice in given if choice] == [choose_reuse(PipelineRates(256, 640), 4)]


def test_seconds_that_come_on_one_batch_for_several_are_spread_over_their_block() -> None:
    """As where the GPU is waited for at every other batch only, and one decodes for the next."""
    tuner = ReuseTuner(8, QUICK)
    given = [
        tuner.feed(BatchMeasurement(4 * 0.2 * odd, 64 * odd, 4, 0.4 * odd, 64))
        for odd in [0, 1] * ((WARM + AFTER) // 2)
    ]
    # 64 samples decoded in 0.2 s of 4 workers: 320/s; 128 served in 0.4 s: 320/s.
    assert given[-1] == choose_reuse(PipelineRates(320, 320), 8)


def test_batches_that_decode_nothing_are_waited_out() -> None:
    tuner = ReuseTuner(8, QUICK)
    for _ in range(100):
        assert tuner.feed(batch(2.5, decoded=0)) is None
    assert tuner.reuse is None
    choices(tuner, 2.5, AFTER)
    assert tuner.reuse == 3


@pytest.mark.parametrize(
    ("before", "after", "reuse"),
    [
        (1.5, 2.5, 3),  # training became faster: starves at 2
        (2.5, 1.2, 2),
        (2.5, 0.5, 1),
        (6.0, 50.0, 8),
        (1.5, 1.95, None),  # 3 would be the first choice, but 2 still keeps up
        (1.9, 1.7, None),
        (2.5, 1.7, None),  # 2 would be the first choice, but keeps up too barely to come back to
        (20.0, 50.0, None),  # 8 is the most either way
    ],
)
def test_a_drift_changes_the_choice_only_where_it_is_clear(
    before: float, after: float, reuse: int | None
) -> None:
    tuner = ReuseTuner(8, QUICK)
    [first] = choices(tuner, before, WARM + AFTER)
    again = choices(tuner, after, 3 * AFTER)
    assert [c.reuse for c in again] == ([] if reuse is None else [reuse])
    assert tuner.reuse == (reuse or first.reuse)


def test_two_windows_that_ask_for_more_are_not_enough() -> None:
    tuner = ReuseTuner(8, QUICK)
    choices(tuner, 1.5, WARM + AFTER)
    for _ in range(5):
        assert choices(tuner, 4.0, 2 * BLOCK * WINDOW) == []
        assert choices(tuner, 1.5, BLOCK * WINDOW) == []
    assert len(choices(tuner, 4.0, AFTER)) == 1


# ---- workers ------------------------------------------------------------------------------------


@pytest.mark.parametrize(
    ("affinity", "quota", "ranks", "cpus"),
    [
        (8, None, 1, 8),
        (128, (400_000, 100_000), 1, 4),
        (128, (350_000, 100_000), 1, 4),
        (2, (400_000, 100_000), 1, 2),
        (8, (50_000, 100_000), 1, 1),
        (8, (-1, 100_000), 1, 8),
        (8, (0, 0), 1, 8),
        (8, None, 4, 2),
        (7, None, 2, 3),
        (128, (1_600_000, 100_000), 8, 2),
        (2, None, 8, 1),
        (4, None, 0, 4),
    ],
)
def test_cpus_are_what_the_process_may_use_shared_by_the_ranks(
    affinity: int, quota: tuple[int, int] | None, ranks: int, cpus: int
) -> None:
    assert available_cpus(affinity, quota, ranks) == cpus
