"""Jobs of a fleet that have several devices: the bits that they have alone on one."""

from dataclasses import dataclass
from pathlib import Path
from queue import SimpleQueue
from typing import Any

import pytest
import torch
from support.fleet_outcomes import states, wrong

from benchmarks.jobs.fleet_jobs import BUDGET, KINDS, QUIET, JobKind, add, alone
from trainers.fleet import Fleet, FleetError
from trainers.fleet.deciding import device_sets
from trainers.fleet.deciding.events import (
    Departed,
    Event,
    Finished,
    Leave,
    Planned,
    Start,
    Turn,
    TurnEnded,
)
from trainers.fleet.deciding.fleet_state import FleetState
from trainers.fleet.hosting.device_process import DeviceHost, HostedJob
from trainers.fleet.jobs.lightning_job import LightningJob
from trainers.fleet.jobs.tenancy import SeatSettings
from trainers.random_state import RandomState

pytestmark = [
    pytest.mark.usefixtures("nothing_left_at_once"),
    *(pytest.mark.filterwarnings(line) for line in QUIET),
]


@dataclass(frozen=True, slots=True)
class AccumulatingKind(JobKind):
    """An update of it has two batches, on which two devices work at once."""

    @property
    def trainer(self) -> dict[str, Any]:
        return JobKind.trainer.fget(self) | {"accumulate_grad_batches": 2}  # pyright: ignore


JOBS = {
    "two": JobKind(1, epochs=2),
    "range": AccumulatingKind(2, "sgd", 24, epochs=60),
    "one": JobKind(3, clip=0.05, epochs=2),
}


def test_jobs_on_several_devices_have_their_own_bits_and_the_last_gets_more(
    tmp_path: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    monkeypatch.setattr(device_sets, "LEAST_GAIN", -10.0)  # these nets are too small to gain
    monkeypatch.setattr(device_sets, "WIDENING_WORTH", -1e9)
    widths: dict[str, list[int]] = {name: [] for name in JOBS}
    predicted: dict[str, tuple[float, ...]] = {}

    def see(state: FleetState, event: Event) -> None:
        if isinstance(event, Planned):
            widths[event.job].append(event.devices)
            predicted.setdefault(event.job, event.seconds_by_devices)

    fleet = Fleet("100%", ["cpu"] * 3, folder=tmp_path, metric="val_loss", quantum=5, watch=see)
    for name, devices in (("two", 2), ("range", "1..3"), ("one", 1)):
        add(fleet, name, JOBS[name], devices=devices)
    assert states(fleet.fit()) == dict.fromkeys(JOBS, "finished")
    assert {*widths["two"]} == {2}
    assert {*widths["one"]} == {1}
    assert widths["range"][0] == 1 and max(widths["range"]) > 1
    assert predicted["two"] == predicted["one"] == ()
    assert [0 < seconds < 1e9 for seconds in predicted["range"]] == [True] * 3
    lone = {name: alone(kind, BUDGET) for name, kind in JOBS.items()}
    assert wrong(lone, tmp_path) == {name: [] for name in JOBS}


@pytest.mark.gpu
@pytest.mark.skipif(torch.cuda.device_count() < 2, reason="needs two GPUs")
def test_a_job_on_two_gpus_leaves_them_empty_and_goes_on_on_one(tmp_path: Path) -> None:
    kind, first = AccumulatingKind(2, "sgd", 24, epochs=3), torch.device("cuda", 0)
    events: SimpleQueue[Event] = SimpleQueue()
    module = kind.module()
    options = kind.options_on(first)
    made = LightningJob(
        module, kind.train(), kind.val(), kind.trainer_on(first), options, None, None
    )
    empty = torch.cuda.mem_get_info(1)[0]
    random_state = RandomState.capture(first)
    job = HostedJob(made, tmp_path / "jobs" / "a", random_state, least=1, most=2)
    with DeviceHost(SeatSettings(first, 0, "100%", "val_loss", 1e9), events.put) as host:
        said: list[Event] = []
        for command in (
            Start("a", 0, 2), Turn("a", 0, 4, share=False), Leave("a", 0, "moved"),
            Start("a", 0, 1), Turn("a", 0, 99, share=False),
        ):  # fmt: skip
            host.do(command, job)
            said.append(events.get(timeout=120))
            if isinstance(command, Leave):
                assert torch.cuda.mem_get_info(1)[0] >= empty
    kinds = [Planned, TurnEnded, Departed, Planned, Finished]
    assert [type(event) for event in said] == kinds, said
    planned = [event for event in said if isinstance(event, Planned)]
    assert [event.devices for event in planned] == [2, 1]
    assert wrong({"a": alone(kind, "100%", first)}, tmp_path) == {"a": []}


@pytest.mark.parametrize(
    ("devices", "said"),
    [
        (0, "give a number of devices, or a range"),
        ("2..1", "give a number of devices, or a range"),
        ("1..", "give a number of devices, or a range"),
        ("many", "give a number of devices, or a range"),
        (True, "give a number of devices, or a range"),
        (3, "the fleet has 2 devices: give it more, or the job less"),
        ("1..4", "the fleet has 2 devices"),
    ],
)
def test_a_number_of_devices_that_no_job_can_have_is_named(
    devices: Any, said: str, tmp_path: Path
) -> None:
    fleet = Fleet(devices=["cpu", "cpu"], folder=tmp_path)
    with pytest.raises(FleetError, match=f"job a: devices={devices!r}: .*{said}"):
        add(fleet, "a", KINDS["adam"], devices=devices)


def test_what_a_job_cannot_have_beside_several_devices_is_named(tmp_path: Path) -> None:
    fleet = Fleet(devices=["cpu", "cpu"], folder=tmp_path)
    with pytest.raises(FleetError, match=r"offload=False.*one device"):
        add(fleet, "a", KINDS["plain"], devices=2)
    add(fleet, "b", KINDS["adam"], offload={"devices": 2})
    result = fleet.fit()
    assert "give Fleet.add(devices=...)" in result.jobs["b"].why


def test_a_job_that_is_resumed_with_other_devices_is_refused(tmp_path: Path) -> None:
    first = Fleet(devices=["cpu", "cpu"], folder=tmp_path)
    add(first, "a", KINDS["adam"], devices=2)
    first.plan()
    first.close()
    second = Fleet(devices=["cpu", "cpu"], folder=tmp_path)
    add(second, "a", KINDS["adam"], devices="1..2")
    with pytest.raises(FleetError, match=r"job a had devices=2\.\.2 and has 1\.\.2 now"):
        second.plan()
