"""Any fleet, with whatever may happen to it: what holds at every moment, and what at the end.

`fleet_simulator.py` runs the commands and checks after every event that a device does one thing at
a time, that every job is in the phase that fits what happens to it, that memory is never exceeded,
and that nobody starves.
"""

import math
import random
from collections.abc import Callable

from hypothesis import given, settings
from hypothesis import strategies as st
from support.fleet_simulator import PaperFleet, PaperJob
from support.products import examples

from trainers.fleet.deciding.events import JobMemory, StopAsked, TurnEnded
from trainers.fleet.deciding.fleet_state import FleetSettings
from trainers.fleet.deciding.halving import Halving

HOST = 100


def curve(seed: int, hole: bool) -> Callable[[int], float | None]:
    """A metric that is a function of the step; some are NaN, and some are missing."""

    def metric(step: int) -> float | None:
        rng = random.Random(seed * 7919 + step)
        if hole and step > 5:
            return None
        return rng.choice((math.nan, *(rng.randrange(5) / 4 for _ in range(9))))

    return metric


def some_job(rng: random.Random, number: int, limits: bool, devices: int = 1) -> PaperJob:
    least = rng.choice((1, 1, 1, devices, rng.randrange(1, devices + 1)))
    large = HOST + 20 if rng.random() < 0.1 else HOST - 20
    return PaperJob(
        f"job{number}",
        steps=rng.randrange(5, 60),
        priority=rng.choice((0, 0, 0, 1, 2)),
        step_seconds=rng.choice((0.1, 0.5, 1.0)),
        tail_seconds=rng.choice((0.0, 0.0, 0.08)),
        swap_seconds=rng.choice((0.0, 0.01)),
        start_seconds=rng.choice((0.0, 0.7)),
        leave_seconds=rng.choice((0.0, 0.3)),
        predicted=rng.choice((0.0, 0.5, 1.0, 2.0)),
        memory=JobMemory(
            rng.randrange(1, large) if limits else 1,
            rng.randrange(15),
            rng.choice((0, 0, 30)),
            turn_bytes=rng.choice((0, 10, 10, 20)),
        ),
        deaf=rng.random() < 0.2,
        metric=curve(rng.randrange(2**32), hole=rng.random() < 0.1),
        fails_at=rng.randrange(60) if rng.random() < 0.15 else None,
        saves_every=rng.choice((0, 1, 4)),
        input=rng.choice(("", "a", "a", "b")),
        least=least,
        most=rng.choice((least, devices)),
        gain=rng.choice((0.0, 0.5, 0.9)),
    )


def some_fleet(rng: random.Random, rule: Halving | None, limits: bool) -> PaperFleet:
    return PaperFleet(
        FleetSettings(
            devices=rng.randrange(1, 5),
            host_bytes=HOST if limits else 0,
            device_bytes=100 if limits else 0,
            arena_bytes=50 if limits else 0,
            quantum=rng.choice((None, 1, 7)),
            quantum_seconds=rng.choice((0.5, 3.0)),
            move_seconds=rng.choice((0.0, 0.5)),
            rule=rule,
            migrate=rng.random() < 0.7,
        ),
        window=rng.choice((1, 3, 20)),
    )


@settings(max_examples=examples(400))
@given(seed=st.integers(0, 2**32), halving=st.booleans(), limits=st.booleans())
def test_whatever_happens_every_job_ends_and_no_law_is_broken(
    seed: int, halving: bool, limits: bool
) -> None:
    rng = random.Random(seed)
    rule = Halving("loss", eta=rng.choice((2, 3)), first=rng.randrange(1, 6)) if halving else None
    fleet = some_fleet(rng, rule, limits)
    devices = fleet.settings.devices if rng.random() < 0.6 else 1
    jobs = [some_job(rng, number, limits, devices) for number in range(rng.randrange(1, 8))]
    early = rng.randrange(1, len(jobs) + 1)
    for job in jobs[:early]:
        fleet.add(job)
    late = jobs[early:]
    trouble = rng.choice((0.0, 0.02, 0.1))
    for _ in range(20_000):
        if rng.random() < trouble:
            disturb(fleet, rng)
            trouble *= 0.9
        elif late and rng.random() < 0.05:
            fleet.add(late.pop())
        elif not fleet.step():
            if not late:
                break
            fleet.add(late.pop())
    assert fleet.state.is_done
    fleet.replay()
    for job in fleet.state.jobs.values():
        check_end(job.name, fleet)


def test_long_steps_stand_aside_for_whoever_comes_with_a_higher_priority() -> None:
    cuts = 0
    for seed in range(60):
        rng = random.Random(seed)
        fleet = some_fleet(rng, None, limits=seed % 2 == 0)
        late = [some_job(rng, number, limits=False) for number in range(rng.randrange(2, 7))]
        for number, job in enumerate(late):
            job.priority, job.step_seconds, job.fails_at = number, 0.5, None
            job.memory = JobMemory(5, 1, turn_bytes=rng.choice((5, 5, 10)))
        late.reverse()
        while late or fleet.due:
            if late and rng.random() < 0.2:
                fleet.add(late.pop())
            fleet.step()
        fleet.replay()
        assert {job.phase for job in fleet.state.jobs.values()} == {"finished"}
        cuts += fleet.cuts
    assert cuts > 10


def disturb(fleet: PaperFleet, rng: random.Random) -> None:
    what = rng.randrange(4)
    if what == 0:
        fleet.end_device(rng.randrange(fleet.settings.devices))
    elif what == 1:
        fleet.kill()
    elif what == 2:
        fleet.tell(StopAsked(rng.choice([*fleet.jobs]), "asked"))
    else:
        fleet.interrupt()
        while fleet.step():
            assert not fleet.state.is_done or not fleet.due
        assert fleet.state.is_done
        assert all(job.device is None for job in fleet.state.jobs.values())
        fleet.kill()


def check_end(name: str, fleet: PaperFleet) -> None:
    """A job has ended in a way that what is true of it explains."""
    job, paper = fleet.state.jobs[name], fleet.jobs[name]
    if job.phase == "finished":
        assert job.step == paper.steps
        assert paper.fails_at is None or paper.fails_at > paper.steps
    elif job.phase == "stopped":
        assert job.why
    else:
        assert job.phase == "failed" and job.reason
        fails = paper.fails_at is not None and job.reason in ("diverged", "cannot start")
        large = "raise host_budget" in job.reason
        assert fails or large or "never logged" in job.reason or "ended before" in job.reason
        needed = paper.memory
        alone = needed.host_bytes + needed.passing_bytes + needed.arena_bytes
        assert large <= (alone > HOST)
    assert job.device is None and not job.plan.is_admitted
    assert not job.rungs.remarks  # replayed steps gave the same values


# ---- one input ----------------------------------------------------------------------------------


@settings(max_examples=examples(100))
@given(seed=st.integers(0, 2**32), window=st.integers(1, 4))
def test_jobs_that_read_together_wait_for_each_other_and_never_for_ever(
    seed: int, window: int
) -> None:
    rng = random.Random(seed)
    fleet = PaperFleet(FleetSettings(quantum=rng.choice((None, 1, 7))), window=window)
    jobs = [some_job(rng, number, limits=False) for number in range(rng.randrange(2, 6))]
    for job in jobs:
        job.input, job.fails_at = "a", None
        fleet.add(job)
    fleet.run()
    fleet.replay()
    assert {job.phase for job in fleet.state.jobs.values()} == {"finished"}
    ended = [event for event in fleet.journal if isinstance(event, TurnEnded)]
    assert sum(event.steps == 0 for event in ended) <= sum(event.steps > 0 for event in ended)


# ---- halving ------------------------------------------------------------------------------------


def survivors(jobs: list[PaperJob], rule: Halving) -> dict[str, int]:
    """Where each job ends if jobs run from rung to rung together: its rung, or its last step."""
    ends = {job.name: job.steps for job in jobs}
    going, rung = jobs, rule.first
    while going := [job for job in going if job.steps > rung]:
        reports = {job.name: job.metric(rung) for job in going}
        # Who ends exactly here reports, too.
        reports |= {
            job.name: job.metric(rung) for job in jobs if ends[job.name] == rung == job.steps
        }
        values = {
            name: math.inf if v is None or math.isnan(v) else v for name, v in reports.items()
        }
        order = sorted(
            values, key=lambda name: (math.isnan(reports[name] or 0), values[name], name)
        )
        best = order[: -(-len(order) // rule.eta)]
        for job in going:
            if job.name not in best:
                ends[job.name] = rung
        going = [job for job in going if job.name in best]
        rung *= rule.eta
    return ends


@settings(max_examples=examples(200))
@given(seed=st.integers(0, 2**32), limits=st.booleans())
def test_halving_stops_the_same_jobs_however_often_the_fleet_is_killed(
    seed: int, limits: bool
) -> None:
    rng = random.Random(seed)
    rule = Halving("loss", eta=rng.choice((2, 3)), first=rng.randrange(1, 6))
    jobs = [some_job(rng, number, limits) for number in range(rng.randrange(1, 9))]
    for number, job in enumerate(jobs):
        job.fails_at, job.metric = None, curve(seed + number, hole=False)
        job.memory = JobMemory(min(job.memory.host_bytes, 60), 0, 0)
    fleet = some_fleet(rng, rule, limits)
    for job in jobs:
        fleet.add(job)
    kills = rng.choice((0.0, 0.01, 0.05))
    while not fleet.state.is_done:
        if rng.random() < kills:
            fleet.kill()
            kills *= 0.9
        fleet.step()
    expected = survivors(jobs, rule)
    ended = {name: job.step for name, job in fleet.state.jobs.items()}
    assert ended == expected
    for job in jobs:
        phase = fleet.state.jobs[job.name].phase
        assert phase == ("finished" if expected[job.name] == job.steps else "stopped")
