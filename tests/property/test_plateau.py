"""When a curve is flat: the plateau detector on curves with known answers, and the walk of phases.

Curves come from the Monte-Carlo that chose the rule's defaults: accuracy 93 - 45 e^(-t/5) -
8 e^(-t/25) percent under a constant learning rate, with validation noise of 0.15, 0.5 or 1 point.
"""

import json
import math
from collections.abc import Callable, Sequence
from dataclasses import asdict, replace
from statistics import median
from typing import Any

import numpy as np
import pytest
from hypothesis import given, settings
from hypothesis import strategies as st
from products import examples

from perfect.method.phases import Phase, PhasePolicy, PhaseState
from perfect.method.plateau import (
    Look,
    Observation,
    PlateauDetector,
    PlateauRule,
    Verdict,
    look_from_dict,
    replay,
)
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


# ---- the detector -------------------------------------------------------------------------------


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


# ---- the walk through the phases ----------------------------------------------------------------

CONSTANT = Schedule("constant", 0.1, warmup=0.1)


def phases(pretrain: int = 20, finetune: int = 3) -> list[Phase]:
    return [
        Phase("pretrain", reuse=3, passes=pretrain, lr=CONSTANT),
        Phase("finetune", passes=finetune, lr=Schedule("linear", 0.1)),
    ]


def walk(policy: PhasePolicy, accuracy: Callable[[float], float], steps: int = 10) -> PhasePolicy:
    """As the callback does: `steps` batches a pass and serve, one look an epoch-equivalent."""
    while not policy.finished:
        one_pass(policy, accuracy, steps)
    return policy


def one_pass(policy: PhasePolicy, accuracy: Callable[[float], float], steps: int) -> None:
    phase = policy.phase
    planned = (phase.passes or 1) * steps * phase.reuse
    for _ in range(phase.reuse):
        for _ in range(steps):
            policy.served(1 / steps, 1)
        seen = Observation(policy.state.at, accuracy(policy.state.at) / 100)
        policy.observe(seen, policy.state.step / planned)
    policy.end_pass()


def test_fixed_phases_follow_each_other_after_their_passes() -> None:
    policy = walk(PhasePolicy(phases(4, 3)), learning)
    assert [(s.left, s.entered, s.reason) for s in policy.switches] == [
        ("pretrain", "finetune", "planned"),
        ("finetune", None, "planned"),
    ]
    assert [s.detail for s in policy.switches] == ["4 passes done", "3 passes done"]
    assert [s.step for s in policy.switches] == [120, 150]
    assert [s.at for s in policy.switches] == pytest.approx([12, 15])
    assert policy.state == PhaseState(2, 0, 0, policy.state.at, 150)
    assert policy.phase.name == "finetune", "asked after the end, it is still the last phase"
    assert policy.end_pass() is None


def test_a_phase_of_steps_ends_after_them() -> None:
    policy = PhasePolicy([Phase("train", steps=25), Phase("finetune", passes=1)])
    switches = []
    for steps in (10, 10, 5):
        for _ in range(steps):
            policy.served(0.1, 1)
        switches.append(policy.end_pass())
    assert switches[:2] == [None, None]
    assert switches[2] is not None
    assert (switches[2].step, switches[2].detail) == (25, "25 steps done")


def test_a_batch_without_an_update_is_served_but_is_no_step() -> None:
    policy = PhasePolicy(phases())
    policy.served(0.1, 0)
    policy.served(0.1, 1)
    assert (policy.state.step, policy.state.total_steps) == (1, 1)
    assert policy.state.at == pytest.approx(0.2)


def test_a_plateau_ends_the_phase_at_the_end_of_its_pass() -> None:
    policy = walk(PhasePolicy(phases(40), RULE), learning)
    first = policy.switches[0]
    assert first.reason == "plateau"
    fired = next(look.seen.at for look in policy.trace if look.verdict and look.verdict.fired)
    assert fired <= first.at < fired + 3, "a pass of three serves is served whole"
    assert first.at % 3 == pytest.approx(0, abs=1e-6) or first.at % 3 == pytest.approx(3)
    assert "points/epoch" in first.detail


@pytest.mark.parametrize(
    "planned",
    [
        phases(40, 3),
        [Phase("r6", reuse=6, passes=20), Phase("r2", reuse=2, passes=20), Phase("end", passes=3)],
        [Phase("r3", reuse=3, passes=30), Phase("middle", passes=4), Phase("end", passes=3)],
    ],
    ids=["one", "annealed", "not the next but the last"],
)
def test_a_plateau_moves_the_switch_but_not_the_end_of_the_run(planned: list[Phase]) -> None:
    early, late = (
        walk(PhasePolicy(planned, replace(RULE, not_before=begin)), lambda t: 60)
        for begin in (0.0, 1e9)
    )
    assert early.switches[0].at < late.switches[0].at
    assert early.state.total_steps == late.state.total_steps
    assert early.state.at == pytest.approx(sum((p.passes or 0) * p.reuse for p in planned))


def test_a_plateau_in_a_phase_of_steps_gives_its_steps_to_the_last_phase() -> None:
    policy = PhasePolicy([Phase("r3", reuse=3, steps=1000), Phase("end", steps=50)], RULE)
    while policy.state.index == 0:
        for _ in range(10):
            policy.served(0.1, 1)
        policy.observe(Observation(policy.state.at, 0.6), policy.state.step / 1000)
        policy.end_pass()
    done = policy.state.total_steps
    assert done == 10 * (RULE.cooldown + RULE.window + RULE.hits - 1)
    assert policy.phase.steps == 50 + 1000 - done


def test_without_a_plateau_the_phase_ends_at_its_latest_start_and_says_what_it_saw_last() -> None:
    policy = walk(PhasePolicy(phases(10), RULE), lambda t: 20 + t)
    first = policy.switches[0]
    assert (first.reason, first.at) == ("latest start", pytest.approx(30))
    assert "no plateau within 10 passes; last look: accuracy +1.000 points/epoch" in first.detail


def test_the_plateau_rule_does_not_look_during_warm_up_or_fine_tuning() -> None:
    policy = walk(PhasePolicy(phases(10), RULE), lambda t: 60)
    judged = [look.verdict is not None for look in policy.trace]
    # Ten passes of three: the first 10 % are warm-up, looked at but not judged.
    assert judged[:3] == [False, False, True]
    assert all(
        not j for look, j in zip(policy.trace, judged, strict=True) if look.phase != "pretrain"
    )


def test_an_annealing_switches_from_plateau_to_plateau_each_with_a_window_of_its_own() -> None:
    annealing = [Phase(f"r{r}", reuse=r, passes=40) for r in (6, 3, 2)] + [
        Phase("finetune", passes=2)
    ]
    policy = walk(PhasePolicy(annealing, RULE), lambda t: 60)
    assert [s.reason for s in policy.switches] == ["plateau"] * 3 + ["planned"]
    lengths = np.diff([0, *(s.at for s in policy.switches[:3])])
    least = RULE.cooldown + RULE.window + RULE.hits - 1
    assert all(least <= length < least + 6 for length in lengths)


WALKS = st.fixed_dictionaries(
    {
        "noise": st.sampled_from([0.1, 0.6]),
        "seed": st.integers(0, 10**6),
        "pretrain": st.integers(3, 18),
        "schedule": st.sampled_from([CONSTANT, None]),
        "annealed": st.booleans(),
    }
)


def walked(options: dict[str, Any]) -> tuple[list[Phase], Callable[[float], float]]:
    rng = np.random.default_rng(options["seed"])
    noise = {t: options["noise"] * rng.standard_normal() for t in range(400)}
    lr, passes = options["schedule"], options["pretrain"]
    middle = [Phase("again", reuse=2, passes=passes, lr=lr)] if options["annealed"] else []
    return (
        [
            Phase("pretrain", reuse=3, passes=passes, lr=lr),
            *middle,
            Phase("finetune", passes=20, lr=lr),
        ],
        lambda t: learning(t / 2) + noise[round(t)],
    )


@law
@given(WALKS)
def test_a_trace_replays_to_the_same_verdicts(options: dict[str, Any]) -> None:
    planned, accuracy = walked(options)
    policy = walk(PhasePolicy(planned, RULE), accuracy)
    written = json.loads(json.dumps([asdict(look) for look in policy.trace]))
    trace = [look_from_dict(look) for look in written]
    assert trace == policy.trace
    judged = [look.verdict for look in trace if look.verdict is not None]
    assert replay(trace, RULE) == judged


def test_a_trace_replays_with_another_rule() -> None:
    policy = walk(PhasePolicy(phases(40), replace(RULE, not_before=1e9)), learning)
    strict = replace(RULE, accuracy_slope=0.03)

    def fired(rule: PlateauRule) -> float:
        return next(v.at for v in replay(policy.trace, rule) if v.fired)

    assert policy.switches[0].reason == "latest start"
    assert fired(RULE) < fired(strict)


def test_a_replay_does_not_look_into_passes_of_a_changing_rate() -> None:
    looks = [
        Look("pretrain", 3, constant, Observation(float(t), 0.6), None)
        for t, constant in enumerate([True] * 14 + [False] + [True] * 30)
    ]
    verdicts = replay(looks, RULE)
    fired = [v.at for v in verdicts if v.fired]
    assert fired[0] == 14 + RULE.cooldown + RULE.window + RULE.hits - 1
    assert 14.0 not in [v.at for v in verdicts]


@settings(max_examples=examples(25), deadline=None)
@given(WALKS, st.integers(0, 60))
def test_a_policy_resumed_anywhere_walks_on_the_same_way(options: dict[str, Any], cut: int) -> None:
    planned, accuracy = walked(options)
    whole = walk(PhasePolicy(planned, RULE), accuracy)
    before = PhasePolicy(planned, RULE)
    for _ in range(cut):
        if not before.finished:
            one_pass(before, accuracy, 10)
    resumed = PhasePolicy(planned, RULE)
    resumed.load_state_dict(json.loads(json.dumps(before.state_dict())))
    assert resumed.state == before.state
    walk(resumed, accuracy)
    assert resumed.trace == whole.trace
    assert resumed.switches == whole.switches
    assert resumed.state == whole.state


def test_a_policy_resumed_between_the_firing_and_the_end_of_the_pass_still_switches() -> None:
    policy = PhasePolicy(phases(40), replace(RULE, hits=1))
    while not any(look.verdict and look.verdict.fired for look in policy.trace):
        policy.served(1.0, 10)
        policy.observe(Observation(policy.state.at, 0.6), 0.5)
    resumed = PhasePolicy(phases(40), replace(RULE, hits=1))
    resumed.load_state_dict(policy.state_dict())
    switch = resumed.end_pass()
    assert switch is not None
    assert switch.reason == "plateau"
    assert switch == policy.end_pass()
