"""When steps are traced once more."""

import pytest

from trainers.offloading.steps import audit
from trainers.offloading.steps.audit import EARLY, EDGES, AuditSchedule


class Clock:
    now = 0.0

    def __call__(self) -> float:
        return self.now


@pytest.fixture
def clock(monkeypatch: pytest.MonkeyPatch) -> Clock:
    found = Clock()
    monkeypatch.setattr(audit, "monotonic", found)
    return found


def audited(schedule: AuditSchedule, clock: Clock, count: int, cost: float) -> list[int]:
    """The micro-batches that are audited, of steps that take a second."""
    found: list[int] = []
    for number in range(1, count + 1):
        clock.now += 1.0
        if schedule.due(edge=False):
            schedule.done(cost)
            found.append(number)
    return found


def test_early_micro_batches_are_audited_whatever_it_takes(clock: Clock) -> None:
    assert audited(AuditSchedule(0.01), clock, 20, cost=1e9) == [*EARLY]


@pytest.mark.parametrize("cost", [0.1, 1.0, 5.0])
def test_later_audits_take_no_more_than_their_share(clock: Clock, cost: float) -> None:
    found = audited(AuditSchedule(0.01), clock, 10_000, cost)
    late = [number for number in found if number > EARLY[-1]]
    assert late
    assert len(found) * cost <= 0.01 * 10_000 + (len(EARLY) + 1) * cost


def test_the_edges_of_the_first_epochs_are_audited(clock: Clock) -> None:
    schedule = AuditSchedule(0.01)
    due = [schedule.due(edge=True) for _ in range(EDGES + 1)]
    assert due == [True] * EDGES + [False]


def test_without_a_share_nothing_is_audited(clock: Clock) -> None:
    schedule = AuditSchedule(0)
    assert not any(schedule.due(edge=True) for _ in range(100))
    assert schedule.count == 100
