"""When a curve is flat, what a budget buys, and what may be a list of phases.

Curves come from the Monte-Carlo that chose the rule's defaults: accuracy 93 - 45 e^(-t/5) -
8 e^(-t/25) percent under a constant learning rate, with validation noise of 0.15, 0.5 or 1 point.
"""

import json
import math
from collections.abc import Callable, Sequence
from dataclasses import replace
from statistics import median
from typing import Any

import numpy as np
import pytest
from hypothesis import given, settings
from hypothesis import strategies as st
from support.products import examples

from perfect.errors import PhaseError
from perfect.method.phases import BudgetSplit, Phase, PhasePolicy, budget_split, check_phases
from perfect.method.plateau import Observation, PlateauDetector, PlateauRule, Verdict, theil_sen
from perfect.method.schedule import Schedule

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


REUSE = Phase("pretrain", reuse=3, passes=4)
FRESH = Phase("finetune", passes=2)


# ---- budget -------------------------------------------------------------------------------------


@pytest.mark.parametrize(
    ("fresh", "total", "reuse", "pretrain", "finetune"),
    [
        (120, 200, 3, 40, 80),  # fig. 4-1
        (110, 200, 3, 45, 65),  # fig. 4-13
        (90, 200, 3, 55, 35),  # fig. 4-29
        (100, 200, 6, 20, 80),  # fig. 4-27
        (26, 56, 3, 15, 11),  # fig. 4-17
        (10.8, 24, 3, 7, 3),  # the pilot's 55 %: 6.6 and 4.2 in whole passes
    ],
)
def test_the_budget_gives_the_splits_of_the_thesis(
    fresh: float, total: float, reuse: int, pretrain: int, finetune: int
) -> None:
    assert budget_split(fresh, total, reuse) == BudgetSplit(pretrain, finetune)


@pytest.mark.parametrize(
    ("fresh", "total", "reuse", "complaint"),
    [
        (66, 200, 3, "between 66.6667 and 200"),
        (201, 200, 3, "between 66.6667 and 200"),
        (0, 200, 3, "0 fresh passes cannot give 200 epochs"),
        (100, 200, 1, "reuse >= 2"),
        (100, 200, 0, "reuse >= 2"),
    ],
)
def test_an_impossible_budget_is_refused_with_the_possible_range(
    fresh: float, total: float, reuse: int, complaint: str
) -> None:
    with pytest.raises(PhaseError, match=complaint):
        budget_split(fresh, total, reuse)


@law
@given(total=st.integers(10, 400), reuse=st.integers(2, 8), share=st.floats(0, 1))
def test_a_split_trains_the_total_and_meets_the_fresh_budget_unless_clipped(
    total: int, reuse: int, share: float
) -> None:
    fresh = total / reuse + share * (total - total / reuse)
    split = budget_split(min(fresh, total), total, reuse)
    assert split.pretrain >= 1
    assert split.finetune >= 1
    # A run so short that 15 % of it is less than half a reused pass may be that much longer.
    epochs = split.pretrain * reuse + split.finetune
    assert epochs == total or (0.15 * total < reuse / 2 and split.finetune == 1)
    assert epochs <= total + reuse / 2 + 1
    exact = (reuse * fresh - total) / (reuse - 1)
    if 0.15 * total <= exact <= 0.45 * total:
        # Whole passes: half a pass of pre-training off at most, which is worth R - 1 decodes.
        off = abs(split.pretrain + split.finetune - fresh)
        assert off <= (reuse - 1) / 2 + 1e-6 or split.pretrain == 1
    else:
        assert 0.15 * total - reuse / 2 - 1e-6 <= split.finetune
        assert split.finetune <= 0.45 * total + reuse / 2 + 1e-6 or split.pretrain == 1


# ---- lists of phases ----------------------------------------------------------------------------


@pytest.mark.parametrize(
    ("phases", "problems"),
    [
        ([REUSE, FRESH], []),
        ([Phase("train", passes=3)], []),
        ([Phase("train", passes=3), Phase("train", steps=10)], []),
        ([REUSE], []),
        ([Phase(f"r{r}", reuse=r, passes=1) for r in (6, 3, 2, 1)], []),
        ([], ["a run needs at least one phase"]),
        ([Phase("endless", reuse=3)], ["phase 0 'endless' never ends: give passes or steps"]),
        (
            [Phase("both", passes=1, steps=1)],
            ["phase 0 'both' has both passes and steps: give one of them"],
        ),
        (
            [REUSE, Phase("none", passes=0)],
            ["phase 1 'none' must last at least 1 pass or step, not 0"],
        ),
        (
            [Phase("less", steps=-4)],
            ["phase 0 'less' must last at least 1 pass or step, not -4"],
        ),
        (
            [Phase("zero", reuse=0, passes=1)],
            ["phase 0 'zero': reuse must be at least 1, not 0"],
        ),
        (
            [Phase("flat", passes=1, batch_size=0)],
            ["phase 0 'flat': batch_size must be at least 1, not 0"],
        ),
        ([FRESH], ["phase 0 is 'finetune', but nothing is pre-trained yet: rename it"]),
        (
            [Phase("train", passes=3), REUSE],
            [
                "phase 0 'train' is fine-tuning (reuse 1) but a later phase reuses samples:"
                " pre-train on reused samples first, fine-tune on fresh ones last"
            ],
        ),
    ],
    ids=str,
)
def test_what_is_wrong_with_a_list_of_phases_is_said(
    phases: list[Phase], problems: list[str]
) -> None:
    assert check_phases(phases) == problems


def test_everything_that_is_wrong_is_said_at_once() -> None:
    phases = [Phase("a"), Phase("b", passes=0, reuse=0), Phase("c", passes=1, steps=1)]
    problems = check_phases(phases)
    assert [p.split(":")[0].split(" ")[1] for p in problems] == ["0", "1", "1", "2"]
    with pytest.raises(PhaseError) as error:
        PhasePolicy(phases)
    assert all(problem in str(error.value) for problem in problems)


@pytest.mark.parametrize(
    ("phases", "complaint"),
    [
        ([Phase("train", passes=3)], "needs a phase with reuse > 1 before the last"),
        ([REUSE], "needs a phase with reuse > 1 before the last"),
        (
            [Phase("pretrain", reuse=3, passes=4, lr=Schedule("cosine", 0.1)), FRESH],
            "phase 'pretrain'.*constant learning rate, not cosine",
        ),
        (
            [REUSE, Phase("finetune", steps=20)],
            "needs all phases in passes, or all phases in steps",
        ),
    ],
    ids=["nothing reused", "nothing after", "cosine", "passes and steps"],
)
def test_a_plateau_rule_that_could_never_fire_is_refused(
    phases: list[Phase], complaint: str
) -> None:
    with pytest.raises(PhaseError, match=complaint):
        PhasePolicy(phases, PlateauRule())


@pytest.mark.parametrize("wrong", [{"window": 2}, {"hits": 0}, {"cooldown": -1}])
def test_a_plateau_rule_needs_three_points_one_hit_and_no_negative_cooldown(
    wrong: dict[str, Any],
) -> None:
    with pytest.raises(PhaseError, match="window >= 3, hits >= 1, cooldown >= 0"):
        PlateauRule(**wrong)


# ---- Theil-Sen ----------------------------------------------------------------------------------


@law
@given(
    st.lists(
        st.tuples(st.integers(-1000, 1000), st.floats(-1e3, 1e3, width=32)),
        min_size=2,
        max_size=25,
        unique_by=lambda point: point[0],
    )
)
def test_the_slope_is_the_median_of_the_slopes_of_all_pairs(
    points: list[tuple[int, float]],
) -> None:
    slopes = [(b[1] - a[1]) / (b[0] - a[0]) for n, a in enumerate(points) for b in points[n + 1 :]]
    x, y = zip(*points, strict=True)
    assert theil_sen(x, y) == pytest.approx(float(np.median(slopes)), rel=1e-9, abs=1e-9)


def test_points_at_the_same_place_have_no_slope_between_them() -> None:
    assert theil_sen([0, 0, 1, 1], [0, 5, 1, 6]) == pytest.approx(1.0)
