"""The walk through the phases: by passes, by steps, from plateau to plateau, resumed."""

import json
import math
from collections.abc import Callable
from dataclasses import replace
from typing import Any

import numpy as np
import pytest
from hypothesis import given, settings
from hypothesis import strategies as st
from support.products import examples

from perfect.method.phases import Phase, PhasePolicy, PhaseState
from perfect.method.plateau import Observation, PlateauRule
from perfect.method.schedule import Schedule

RULE = PlateauRule()


def learning(t: float) -> float:
    return 93 - 45 * math.exp(-t / 5) - 8 * math.exp(-t / 25)


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
