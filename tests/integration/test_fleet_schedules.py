"""A job has the bits that it has alone, whatever else its device does in between."""

from collections.abc import Iterator, Mapping
from pathlib import Path

import pytest

from benchmarks.jobs.fleet_jobs import KINDS, QUIET, AnySchedule, JobKind, Outcome, alone

pytestmark = [pytest.mark.filterwarnings(line) for line in QUIET]
FAILING = {"failing": JobKind(6, fails_at=3)}


@pytest.fixture(scope="module")
def lone() -> Mapping[str, Outcome]:
    return {name: alone(kind) for name, kind in KINDS.items()}


@pytest.fixture
def schedules() -> Iterator[list[AnySchedule]]:
    made: list[AnySchedule] = []
    yield made
    for schedule in made:
        schedule.close()


@pytest.mark.parametrize("seed", range(3))
def test_any_order_of_turns_tails_and_moves_gives_every_job_its_own_bits(
    seed: int, lone: Mapping[str, Outcome], schedules: list[AnySchedule], tmp_path: Path
) -> None:
    schedules.append(schedule := AnySchedule({**KINDS, **FAILING}, tmp_path, seed))
    schedule.run()
    assert list(schedule.failed) == ["failing"], schedule.failed
    assert "made to fail" in schedule.failed["failing"].error
    found = {name: Outcome.of(schedule.modules[name]) for name in KINDS}
    assert {name: lone[name].differences(found[name]) for name in KINDS} == {n: [] for n in KINDS}


def test_turns_of_one_step_without_moves_repeat_every_draw(
    lone: Mapping[str, Outcome], schedules: list[AnySchedule], tmp_path: Path
) -> None:
    schedules.append(schedule := AnySchedule(KINDS, tmp_path, 11))
    schedule.run(moves=0, longest=1)
    for name in KINDS:
        found = Outcome.of(schedule.modules[name])
        assert len(found.draws) == len(lone[name].draws) == 10
        assert lone[name].differences(found) == []
