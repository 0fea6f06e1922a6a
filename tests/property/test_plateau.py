"""When a curve is flat: the plateau detector on curves with known answers.

Curves come from the Monte-Carlo that chose the rule's defaults: accuracy 93 - 45 e^(-t/5) -
8 e^(-t/25) percent under a constant learning rate, with validation noise of 0.15, 0.5 or 1 point.
"""

import json
import math
from collections.abc import Callable, Sequence
from dataclasses import replace
from statistics import median

import numpy as np
import pytest
from hypothesis import given, settings
from hypothesis import strategies as st
from support.products import examples

from perfect.method.plateau import Observation, PlateauDetector, PlateauRule, Verdict

law = settings(max_examples=examples(60), deadline=None)

RULE = PlateauRule()


def curve(
    accuracy: Callable[[float], float],
    points: int,
    *,
    noise: float = 0.0,
    seed: int = 0,
    loss: Callable[[float], float] | None = None,
) -> list[Observation]:
    """One look an epoch; accuracy in percent, noise in points."""
    rng = np.random.default_rng(seed)
    return [
        Observation(
            t, (accuracy(t) + noise * rng.standard_normal()) / 100, loss(t) if loss else None
        )
        for t in range(1, points + 1)
    ]


def learning(t: float) -> float:
    return 93 - 45 * math.exp(-t / 5) - 8 * math.exp(-t / 25)


def fires_at(looks: Sequence[Observation], rule: PlateauRule = RULE) -> float | None:
    detector = PlateauDetector(rule)
    return next((look.at for look in looks if detector.observe(look).fired), None)


def test_a_curve_that_keeps_climbing_never_fires() -> None:
    assert fires_at(curve(lambda t: 20 + 0.15 * t, 300)) is None


def test_a_curve_that_climbs_and_flattens_fires_where_it_flattens() -> None:
    # Its slope is 0.10 points an epoch at t = 33, and the window looks back over 12.
    assert fires_at(curve(learning, 100)) == pytest.approx(38, abs=3)


@law
@given(seed=st.integers(0, 10**6), not_before=st.integers(0, 60))
def test_nothing_fires_before_its_time(seed: int, not_before: int) -> None:
    rule = replace(RULE, not_before=float(not_before))
    fired = fires_at(curve(learning, 100, noise=0.5, seed=seed), rule)
    assert fired is None or fired >= not_before


@pytest.mark.parametrize("hits", [1, 2, 4])
@pytest.mark.parametrize("cooldown", [0, 3])
@pytest.mark.parametrize("window", [5, 12])
def test_a_flat_curve_fires_at_the_first_moment_allowed(
    hits: int, cooldown: int, window: int
) -> None:
    rule = PlateauRule(window=window, hits=hits, cooldown=cooldown)
    flat = curve(lambda t: 60, 100)
    assert fires_at(flat, rule) == cooldown + window + hits - 1
    # Hits are counted from not_before on, so the first one allowed is the hits-th look there.
    assert fires_at(flat, replace(rule, not_before=50.0)) == 50 + hits - 1


def test_a_curve_of_noise_alone_fires_at_the_first_moment_allowed() -> None:
    first = RULE.cooldown + RULE.window + RULE.hits - 1
    fired = [fires_at(curve(lambda t: 60, 100, noise=0.3, seed=s)) for s in range(50)]
    assert median(f or math.inf for f in fired) == first
    assert sum(f == first for f in fired) > 40


def test_a_curve_that_falls_counts_as_flat() -> None:
    # Staying is not worth it, whatever the reason.
    assert fires_at(curve(lambda t: 60 - 0.5 * t, 40)) is not None


def test_a_loss_that_still_falls_or_rises_holds_the_switch_back() -> None:
    def flat(t: float) -> float:
        return 60

    rule = replace(RULE, loss_slope=0.005)
    first = rule.cooldown + rule.window + rule.hits - 1
    assert fires_at(curve(flat, 60, loss=lambda t: 1.3), rule) == first
    assert fires_at(curve(flat, 60, loss=lambda t: 1.3 * 0.99**t), rule) is None
    assert fires_at(curve(flat, 60, loss=lambda t: 1.3 * 1.01**t), rule) is None
    assert fires_at(curve(flat, 60, loss=lambda t: 1.3 * 0.999**t), rule) == first


def test_the_slopes_are_points_and_relative_loss_an_epoch_whatever_the_spacing() -> None:
    detector = PlateauDetector(replace(RULE, cooldown=0))
    looks = [Observation(t / 4, (20 + 2 * t / 4) / 100, 0.95 ** (t / 4)) for t in range(1, 20)]
    verdict = [detector.observe(look) for look in looks][-1]
    assert verdict.accuracy_slope == pytest.approx(2.0)
    assert verdict.loss_slope == pytest.approx(math.log(0.95))
    assert "accuracy +2.000 points/epoch" in verdict.reason
    assert "first-serve loss -5.13 %/epoch" in verdict.reason


def test_a_window_only_sees_its_last_points() -> None:
    steep_then_flat = curve(lambda t: min(t, 20.0), 60)
    # Flat from 20 on: a window of 12 is flat by half its points, Theil-Sen's median by then.
    assert 26 <= (fires_at(steep_then_flat) or 0) <= 34


def test_a_change_restarts_the_window_and_the_cool_down() -> None:
    detector = PlateauDetector(RULE)
    flat = curve(lambda t: 60, 60)
    first = RULE.cooldown + RULE.window + RULE.hits - 1
    for look in flat[: first - 1]:
        assert not detector.observe(look).fired
    detector.changed()
    verdicts = [detector.observe(look) for look in flat[first - 1 :]]
    fired = [number for number, verdict in enumerate(verdicts, 1) if verdict.fired]
    assert fired[0] == first
    assert [v.reason for v in verdicts[: RULE.cooldown]] == [
        "cooling down after a change"
    ] * RULE.cooldown
    assert verdicts[RULE.cooldown].reason == "window fills: 1 of 12 points"


@pytest.mark.parametrize(
    "nothing",
    [
        Observation(0.5),
        Observation(0.5, accuracy=math.nan),
        Observation(0.5, loss=math.inf),
        Observation(0.5, accuracy=0.6, loss=math.nan),
    ],
    ids=str,
)
def test_a_look_that_is_no_number_counts_for_nothing_and_breaks_a_run_of_hits(
    nothing: Observation,
) -> None:
    flat = curve(lambda t: 60, 40)
    first = RULE.cooldown + RULE.window + RULE.hits - 1
    detector = PlateauDetector(RULE)
    for look in flat[: first - 1]:
        detector.observe(look)
    verdict = detector.observe(nothing)
    assert verdict == Verdict(0.5, False, None, None, 0, "no finite value: ignored")
    after = [detector.observe(look).fired for look in flat[first - 1 : first + 1]]
    assert after == [False, True], "the run of hits began anew, the window did not"


def test_looks_without_an_accuracy_or_a_loss_are_judged_by_the_other_one() -> None:
    first = RULE.cooldown + RULE.window + RULE.hits - 1
    loss_only = [Observation(t, loss=1.0) for t in range(1, 30)]
    assert fires_at(loss_only) == first
    falling = [Observation(t, loss=0.98**t) for t in range(1, 30)]
    assert fires_at(falling) is None


@law
@given(seed=st.integers(0, 10**6), cut=st.integers(0, 60), noise=st.sampled_from([0.15, 1.0]))
def test_a_detector_resumed_anywhere_gives_the_same_verdicts(
    seed: int, cut: int, noise: float
) -> None:
    looks = curve(learning, 60, noise=noise, seed=seed, loss=lambda t: 0.3 + math.exp(-t / 10))
    looks[7] = Observation(8.0, accuracy=math.nan)
    whole = PlateauDetector(RULE)
    verdicts = [whole.observe(look) for look in looks]
    before = PlateauDetector(RULE)
    for look in looks[:cut]:
        before.observe(look)
    state = json.loads(json.dumps(before.state_dict()))
    resumed = PlateauDetector(RULE)
    resumed.load_state_dict(state)
    assert [resumed.observe(look) for look in looks[cut:]] == verdicts[cut:]


def test_the_level_of_noise_hardly_moves_the_switch() -> None:
    def epoch(noise: float) -> float:
        rule = replace(RULE, window=15)
        fired = [fires_at(curve(learning, 100, noise=noise, seed=s), rule) for s in range(80)]
        return median(f or math.inf for f in fired)

    quiet, usual, loud = (epoch(noise) for noise in (0.15, 0.5, 1.0))
    assert max(quiet, usual, loud) - min(quiet, usual, loud) <= 4
    assert all(38 <= e <= 45 for e in (quiet, usual, loud))


def test_patience_would_be_moved_by_noise() -> None:
    # Why the rule is as it is: the same curves under "no best for 10 looks".
    def epoch(noise: float) -> float:
        fired = []
        for seed in range(40):
            values = [
                100 * (look.accuracy or 0) for look in curve(learning, 150, noise=noise, seed=seed)
            ]
            best = [max(values[: n + 1]) for n in range(len(values))]
            fired.append(next(n for n in range(10, 150) if best[n] == best[n - 10]))
        return median(fired)

    assert epoch(0.15) - epoch(1.0) > 20
