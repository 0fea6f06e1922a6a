"""The budget rule, what may be a list of phases, and the slope that the plateau rule fits."""

from typing import Any

import numpy as np
import pytest
from hypothesis import given, settings
from hypothesis import strategies as st
from support.products import examples

from perfect.errors import PhaseError
from perfect.method.phases import BudgetSplit, Phase, PhasePolicy, budget_split, check_phases
from perfect.method.plateau import PlateauRule, theil_sen
from perfect.method.schedule import Schedule

law = settings(max_examples=examples(200), deadline=None)

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
    ("fresh", "total", "reuse", "split"),
    [
        (75, 200, 3, BudgetSplit(57, 29)),  # 12.5 asked for: no less than 0.15 x 200 = 30
        (
            130,
            200,
            3,
            BudgetSplit(37, 89),
        ),  # fig. 4-10 fine-tunes for 95: no more than 0.45 x 200 = 90
        (200, 200, 3, BudgetSplit(37, 89)),  # everything fresh asked for
        (67, 200, 3, BudgetSplit(57, 29)),
        (34, 200, 6, BudgetSplit(28, 32)),
    ],
)
def test_a_fine_tuning_share_outside_15_to_45_percent_is_clipped(
    fresh: float, total: float, reuse: int, split: BudgetSplit
) -> None:
    assert budget_split(fresh, total, reuse) == split


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


@law
@given(slope=st.floats(-5, 5), offset=st.floats(-50, 50), points=st.integers(3, 20))
def test_a_straight_line_has_its_own_slope(slope: float, offset: float, points: int) -> None:
    x = list(range(points))
    assert theil_sen(x, [offset + slope * v for v in x]) == pytest.approx(slope, abs=1e-9)


@law
@given(bad=st.sets(st.integers(0, 14), max_size=3), by=st.floats(-1e6, 1e6))
def test_a_few_outliers_do_not_move_the_slope_of_a_line(bad: set[int], by: float) -> None:
    x = list(range(15))
    y = [0.5 * v + (by if v in bad else 0) for v in x]
    assert theil_sen(x, y) == pytest.approx(0.5, abs=1e-6)
    # A least-squares line is carried away by the very same points.
    if bad and abs(by) > 1e3 and sum(bad) / len(bad) != 7:
        assert abs(np.polyfit(x, y, 1)[0] - 0.5) > 0.5


def test_points_at_the_same_place_have_no_slope_between_them() -> None:
    assert theil_sen([0, 0, 1, 1], [0, 5, 1, 6]) == pytest.approx(1.0)
