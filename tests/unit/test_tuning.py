"""Choosing reuse and workers, case by case. The laws are in tests/property/test_tuning.py."""

from dataclasses import replace
from math import inf
from typing import Any

import pytest

from loaders.order.tuning import (
    BatchMeasurement,
    Choice,
    PipelineRates,
    ReuseTuner,
    TuningRules,
    available_cpus,
    choose_reuse,
)

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
    choice = choose_reuse(PipelineRates(decode, step), most)
    assert (choice.reuse, choice.stall_left) == (reuse, pytest.approx(stall))


@pytest.mark.parametrize(
    ("decode", "step", "said"),
    [
        (2000, 1000, "fresh samples keep up, and reuse would only lose information"),
        (1000, 2500, "reuse 3 is the least that keeps up with 10% to spare"),
        (1000, 3900, "reuse 4, the most allowed, just keeps up"),
        (1000, 8000, "even reuse 4, the most allowed, leaves it waiting 50% of the time"),
    ],
)
def test_the_reason_says_the_rates_and_what_they_mean(decode: int, step: int, said: str) -> None:
    reason = choose_reuse(PipelineRates(decode, step), most=4).reason
    assert said in reason
    assert f"decoding gives {decode} fresh samples/s, training takes {step}/s" in reason


@pytest.mark.parametrize(
    ("make", "said"),
    [
        (lambda: choose_reuse(PipelineRates(1, 1), 0), "most must be at least 1, not 0"),
        (lambda: ReuseTuner(0), "most must be at least 1, not 0"),
    ],
)
def test_what_makes_no_sense_is_refused(make: Any, said: str) -> None:
    with pytest.raises(ValueError, match=said):
        make()


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


def test_one_block_out_of_line_changes_nothing() -> None:
    tuner = ReuseTuner(8, QUICK)
    choices(tuner, 1.5, WARM + BLOCK)
    for _ in range(BLOCK):
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


def test_decoding_that_takes_no_time_needs_no_reuse() -> None:
    tuner = ReuseTuner(8, QUICK)
    for _ in range(WARM + AFTER):
        tuner.feed(BatchMeasurement(0.0, 10, 4, 0.1, 64))
    assert tuner.reuse == 1


def test_more_workers_count_as_more_decoding() -> None:
    two, eight = ReuseTuner(16, QUICK), ReuseTuner(16, QUICK)
    for _ in range(WARM + AFTER):
        two.feed(BatchMeasurement(1.0, 64, 2, 0.1, 64))
        eight.feed(BatchMeasurement(1.0, 64, 8, 0.1, 64))
    assert (two.reuse, eight.reuse) == (6, 2)


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


def test_windows_that_ask_for_more_and_for_less_do_not_agree() -> None:
    tuner = ReuseTuner(8, QUICK)
    choices(tuner, 2.5, WARM + AFTER)
    for _ in range(5):
        assert choices(tuner, 6.0, BLOCK * WINDOW) == []
        assert choices(tuner, 0.5, BLOCK * WINDOW) == []


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
