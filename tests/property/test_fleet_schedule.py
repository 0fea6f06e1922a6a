"""Nobody could end earlier, and few jobs move: by a simulator that knows no rule of scheduling.

    makespan <= 1.03 x max(longest job, sum / devices) + moves x cost

To the right belongs what no order of turns can save: the starts at the beginning, and a turn for
each move, because a job leaves when its turn ends. Jobs that are dealt to nodes are dealt once.
"""

import itertools
import math
from collections.abc import Collection, Mapping, Sequence
from dataclasses import dataclass
from itertools import pairwise

import pytest
from hypothesis import given, settings
from hypothesis import strategies as some
from hypothesis import strategies as st
from support.fleet_simulator import PaperFleet, PaperJob, bound
from support.products import examples

from trainers.fleet.deciding.events import FleetError
from trainers.fleet.deciding.fleet_state import FleetSettings
from trainers.fleet.deciding.halving import Seen, StopRule
from trainers.fleet.deciding.schedule import Runnable, assign_shares
from trainers.fleet.ray_cluster.ray_fleet import deal

STEP = 0.25
QUANTUM = 0.5


def run(
    seconds: Sequence[float], devices: int, cost: float, swap: float = 0.0,
    rule: StopRule | None = None,
) -> tuple[float, PaperFleet]:  # fmt: skip
    """The makespan without the starts at the beginning, and the fleet afterwards."""
    fleet = PaperFleet(
        FleetSettings(devices, quantum_seconds=QUANTUM, move_seconds=cost, rule=rule), checked=False
    )
    for number, length in enumerate(seconds):
        fleet.add(
            PaperJob(
                f"job{number:02}", round(length / STEP), STEP, swap_seconds=swap,
                start_seconds=cost, metric=lambda step: 0.0,
            )
        )  # fmt: skip
    begins = cost * -(-len(seconds) // devices)
    return fleet.run() - begins, fleet


def check_law(makespan: float, best: float, fleet: PaperFleet, cost: float) -> None:
    assert makespan <= 1.03 * best + fleet.moves * (cost + QUANTUM) + QUANTUM


@settings(max_examples=examples(60))
@given(
    seconds=st.lists(st.integers(40, 160), min_size=1, max_size=9),
    devices=st.integers(1, 5),
    cost=st.sampled_from((0.0, 0.2, 2.0)),
)
def test_no_schedule_is_much_shorter_whatever_the_sizes(
    seconds: list[int], devices: int, cost: float
) -> None:
    makespan, fleet = run(seconds, devices, cost)
    check_law(makespan, bound([*fleet.jobs.values()], devices), fleet, cost)
    assert fleet.moves <= 3 * len(seconds)


EIGHT_SIZES = [20.0 * size for size in (1, 2, 3, 4, 5, 6, 7, 8, 1, 3, 5, 7)]
TWO_LATE = [142.0, 43.0, 53.0, 147.0, 159.0, 123.0, 92.0, 106.0, 149.0]


@pytest.mark.parametrize(
    "seconds, devices, most_moves",
    [
        pytest.param([100.0] * 12, 8, 8, id="12-point grid on 8"),
        pytest.param([100.0] * 13, 4, 12, id="13 jobs on 4"),
        pytest.param(EIGHT_SIZES, 4, 12, id="12 of sizes 1 to 8 on 4"),
        pytest.param([100.0] * 4, 3, 4, id="4 jobs on 3"),
        pytest.param(TWO_LATE, 5, 8, id="two with no time to spare on one device"),
    ],
)
@pytest.mark.parametrize("cost, swap", [(0.0, 0.0), (1.0, 0.002)], ids=["free", "at a cost"])
def test_the_tables_are_met_with_few_moves(
    seconds: list[float], devices: int, most_moves: int, cost: float, swap: float
) -> None:
    makespan, fleet = run(seconds, devices, cost, swap)
    check_law(makespan, bound([*fleet.jobs.values()], devices), fleet, cost)
    assert fleet.moves <= most_moves


@dataclass(frozen=True)
class StopsAt:
    """A rule that ends some jobs at a step that nobody knows before."""

    at: Mapping[str, int]
    metric: str = "loss"

    def next_look(self, step: int) -> int:
        return (step // 4 + 1) * 4

    def judge(self, seen: Seen, gone: Collection[str]) -> Mapping[str, str]:
        over = {job for job in self.at if max(seen.get(job, {}), default=0) >= self.at[job]}
        return dict.fromkeys(over, "it is time")

    def waits(self, job: str, seen: Seen, alive: Collection[str]) -> bool:
        return False


def together(seconds: Sequence[float], devices: int) -> float:
    """The makespan of jobs that all proceed at one speed: no rule that cannot know who ends early
    is better in general."""
    clock, done = 0.0, 0.0
    for number, length in enumerate(sorted(seconds)):
        clock += (length - done) * max(1.0, (len(seconds) - number) / devices)
        done = length
    return clock


@pytest.mark.parametrize("cost", [0.0, 0.2])
def test_jobs_that_end_early_leave_no_device_without_work(cost: float) -> None:
    early = {0: 30.0, 3: 55.0, 5: 20.0, 9: 70.0, 11: 45.0}
    rule = StopsAt({f"job{number:02}": round(s / STEP) for number, s in early.items()})
    makespan, fleet = run([100.0] * 12, 8, cost, rule=rule)
    best = together([early.get(number, 100.0) for number in range(12)], 8)
    check_law(makespan, best, fleet, cost)
    assert makespan <= 1.06 * best


def test_a_short_job_beside_a_long_one_has_its_turn_in_time() -> None:
    _, fleet = run([200.0, 2.0], 1, 0.0)
    short = [number for number, (_, turn) in enumerate(fleet.turns) if turn.job == "job01"]
    assert short[0] < 110 and len(fleet.turns) > 400
    assert all(after - before <= 102 for before, after in pairwise(short))


# ---- the tape -----------------------------------------------------------------------------------


@st.composite
def tapes(draw: st.DrawFn) -> tuple[list[Runnable], int]:
    devices = draw(st.integers(1, 6))
    seconds = draw(st.lists(st.integers(0, 50), max_size=12))
    places = [draw(st.integers(0, devices - 1)) for _ in seconds]
    return [
        Runnable(f"job{number}", place, float(length))
        for number, (place, length) in enumerate(zip(places, seconds, strict=True))
    ], devices


@settings(max_examples=examples(300))
@given(tapes())
def test_the_tape_has_all_of_each_job_and_ends_everywhere_in_time(
    case: tuple[list[Runnable], int],
) -> None:
    jobs, devices = case
    laid = assign_shares(jobs, devices)
    end = max((job.seconds for job in jobs), default=0.0)
    end = max(end, sum(job.seconds for job in jobs) / devices)
    for device, shares in enumerate(laid):
        assert sum(share.seconds for share in shares) <= end + 1e-6
        for share in shares:
            [job] = [job for job in jobs if job.job == share.job]
            assert share.moves == (job.device != device)
            assert not share.whole or share.seconds == pytest.approx(job.seconds)
    for job in jobs:
        parts = [share.seconds for shares in laid for share in shares if share.job == job.job]
        assert sum(parts) == pytest.approx(job.seconds)


@settings(max_examples=examples(200))
@given(tapes(), st.floats(0.1, 30), st.floats(0, 10))
def test_nothing_is_cut_that_is_not_worth_it(
    case: tuple[list[Runnable], int], grain: float, move: float
) -> None:
    jobs = [Runnable(job.job, job.device, job.seconds, grain, move) for job in case[0]]
    laid = assign_shares(jobs, case[1])
    for job in jobs:
        parts = [share for shares in laid for share in shares if share.job == job.job]
        assert sum(share.seconds for share in parts) == pytest.approx(job.seconds)
        if len(parts) > 1:
            assert sum(share.seconds for share in parts if share.moves) > grain


WORK = some.dictionaries(
    some.text("abcdef", min_size=1, max_size=3), some.floats(0, 100), max_size=6
)
SPEEDS = some.dictionaries(
    some.sampled_from(["n", "m", "k"]), some.floats(0.5, 8), min_size=1, max_size=3
)


def ends(
    dealt: Mapping[str, tuple[str, ...]], work: Mapping[str, float], speeds: Mapping[str, float]
) -> float:
    return max(sum(work[job] for job in jobs) / speeds[node] for node, jobs in dealt.items())


@settings(max_examples=examples(80), deadline=None)
@given(WORK, SPEEDS)
def test_every_job_is_dealt_once_and_the_end_is_within_twice_the_best(
    work: dict[str, float], speeds: dict[str, float]
) -> None:
    dealt = deal(work, speeds)
    assert sorted(job for jobs in dealt.values() for job in jobs) == sorted(work)
    assert dealt.keys() == speeds.keys()
    best = min(
        ends(
            {n: tuple(j for j, at in zip(work, places, strict=True) if at == n) for n in speeds},
            work,
            speeds,
        )
        for places in itertools.product(speeds, repeat=len(work))
    )
    assert ends(dealt, work, speeds) <= 2 * best + 1e-9


def test_equal_jobs_and_nodes_are_dealt_in_their_order_and_loads_count() -> None:
    work = dict.fromkeys("abcd", 1.0)
    assert deal(work, {"n": 1.0, "m": 1.0}) == {"n": ("a", "c"), "m": ("b", "d")}
    assert deal(work, {"n": 3.0, "m": 1.0}) == {"n": ("a", "b", "c"), "m": ("d",)}
    assert deal(work, {"n": 1.0, "m": 1.0}, {"n": 4.0}) == {"n": (), "m": ("a", "b", "c", "d")}
    assert deal({}, {"n": 1.0}) == {"n": ()}


@pytest.mark.parametrize(
    ("work", "speeds", "says"),
    [
        ({"a": 1.0}, {}, "no node for 1 job"),
        ({"a": -1.0}, {"n": 1.0}, "job a was given work=-1.0"),
        ({"a": math.nan}, {"n": 1.0}, "job a was given work=nan"),
        ({"a": math.inf}, {"n": 1.0}, "job a was given work=inf"),
        ({"a": 1.0}, {"n": 0.0}, "node n has the speed 0.0"),
    ],
    ids=str,
)
def test_bad_numbers_are_refused_by_name(
    work: dict[str, float], speeds: dict[str, float], says: str
) -> None:
    with pytest.raises(FleetError, match=says):
        deal(work, speeds)
