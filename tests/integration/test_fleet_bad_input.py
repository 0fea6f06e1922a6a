"""What is wrong with a fleet or a job of it is said, by name; the other jobs finish."""

import math
import re
import threading
from collections.abc import Callable, Mapping
from pathlib import Path
from typing import Any

import lightning as L
import pytest
import torch
from lightning.pytorch.loggers import CSVLogger
from support.fleet_outcomes import states
from torch.utils.data import DataLoader, RandomSampler

from benchmarks.jobs.fleet_jobs import (
    BATCH,
    KINDS,
    QUIET,
    JobKind,
    Net,
    Outcome,
    add,
    alone,
    make,
    samples,
)
from loaders import ReuseLoader
from trainers.fleet import Fleet, FleetError, Halving
from trainers.fleet.deciding.halving import Seen

pytestmark = [
    pytest.mark.usefixtures("nothing_left_at_once"),
    *(pytest.mark.filterwarnings(line) for line in QUIET),
]
PLAIN = KINDS["plain"]


# ---- what jobs must not share -------------------------------------------------------------------


def two_modules(change: Callable[[Net, Net], object]) -> tuple[dict[str, Any], dict[str, Any]]:
    a, b = Net(), Net()
    change(a, b)
    return {"module": a}, {"module": b}


def tied(a: Net, b: Net) -> None:
    b.net[0].weight = a.net[0].weight


def same_statistics(a: Net, b: Net) -> None:
    b.net[1].running_mean = a.net[1].running_mean


def both(**given: Any) -> tuple[dict[str, Any], dict[str, Any]]:
    return dict(given), dict(given)


def generator_of_sampler() -> tuple[dict[str, Any], dict[str, Any]]:
    numbers, data = torch.Generator(), samples()
    one, other = (
        DataLoader(data, BATCH, sampler=RandomSampler(data, generator=numbers)) for _ in range(2)
    )
    return {"train": one}, {"val": [other]}


def train_and_val() -> tuple[dict[str, Any], dict[str, Any]]:
    loader = ReuseLoader(samples(), BATCH, workers=1)
    return {"train": loader}, {"val": loader}


SHARED: Mapping[str, tuple[Callable[[], tuple[dict[str, Any], dict[str, Any]]], str]] = {
    "module": (lambda: both(module=Net()), r"a module \(Net\)"),
    "weights": (lambda: two_modules(tied), r"the weights of parameter net\.0\.weight"),
    "buffer": (lambda: two_modules(same_statistics), r"the values of buffer net\.1\.running_mean"),
    "callback": (lambda: both(trainer={"callbacks": L.Callback()}), r"a callback \(Callback\)"),
    "logger": (lambda: both(trainer={"logger": CSVLogger("")}), r"a logger \(CSVLogger\)"),
    "reuse": (
        lambda: both(train=ReuseLoader(samples(), BATCH, reuse="auto", workers=1)),
        'one reader at a time here .reuse="auto" measures one training loop',
    ),
    "skips": (
        lambda: both(train=ReuseLoader(samples(), BATCH, workers=1, on_error="skip")),
        "one reader at a time here .on_error='skip' counts",
    ),
    "train and val": (train_and_val, "one reader at a time here .it validates one of them"),
    "generator": (
        lambda: both(train=DataLoader(samples(), shuffle=True, generator=torch.Generator())),
        "a loader's random generator",
    ),
    "sampler": (generator_of_sampler, "a loader's random generator"),
    "workers": (
        lambda: both(train=DataLoader(samples(), num_workers=1, persistent_workers=True)),
        "a loader with persistent_workers",
    ),
}


@pytest.mark.parametrize("shared", SHARED)
def test_two_jobs_that_share_what_only_one_may_have_are_refused(
    shared: str, tmp_path: Path
) -> None:
    make_both, what = SHARED[shared]
    (first, second), fleet = make_both(), make(tmp_path)
    add(fleet, "a", PLAIN, **first)
    with pytest.raises(FleetError, match=rf"jobs a and b share .*{what}.*: give each its own"):
        add(fleet, "b", PLAIN, **second)


# ---- names, and when ----------------------------------------------------------------------------


def test_a_refused_name_or_module_leaves_the_fleet_as_it_was(tmp_path: Path) -> None:
    fleet = make(tmp_path)
    module = add(fleet, "good", PLAIN)
    with pytest.raises(FleetError, match="two jobs of the name 'good'"):
        add(fleet, "good", PLAIN)
    bad: list[Any] = ["", "a/b", "..", ".", "a\0b", "a\nb", "ä" * 128, 3]
    for name in bad:
        with pytest.raises(FleetError, match="cannot be the name of a job"):
            add(fleet, name, PLAIN)
    for given in ({"strategy": "ddp"}, {"devices": 2}, {"accelerator": "gpu"}, {"num_nodes": 2}):
        with pytest.raises(FleetError, match=rf"job bad: trainer=.{next(iter(given))!r}.*chooses"):
            add(fleet, "bad", PLAIN, trainer=given)
    with pytest.raises(FleetError, match=r"there is no job 'x': the jobs are good"):
        fleet.stop("x")
    result = fleet.fit()
    assert states(result) == {"good": "finished"}
    assert alone(PLAIN).differences(Outcome.of(module)) == []
    with pytest.raises(FleetError, match=r"after fit\(\) had ended"):
        add(fleet, "late", PLAIN)
    with pytest.raises(FleetError, match=r"fit\(\) has ended"):
        fleet.fit()
    with pytest.raises(FleetError, match="has no jobs"):
        make(tmp_path / "other").fit()


@pytest.mark.parametrize(
    ("given", "said"),
    {
        "a gpu that is not there": ("cuda:7", "'cuda:7' is not there: this machine has no GPU"),
        "too many gpus": (3, "is not there: this machine has no GPU"),
        "none": ([], r"devices=\[\]: give auto"),
        "nothing": (None, "devices=None: give auto"),
        "a broken number": (1.5, "devices=1.5: give auto"),
        "a broken list": ([None], "None is no device: give cpu"),
        "below the first": (-1, "devices=-1: give auto"),
        "another kind": ("meta", "not on 'meta'"),
        "no kind": ("gpu 1", "'gpu 1' is no device"),
    }.values(),
)
def test_devices_that_are_not_there_are_refused(
    given: Any, said: str, tmp_path: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    monkeypatch.setattr(torch.cuda, "device_count", lambda: 0)
    with pytest.raises(FleetError, match=said):
        Fleet(folder=tmp_path, devices=given)


class Nameless:
    """A stop rule that is written with its address, so no folder would know it again."""

    metric = "val_loss"

    def judge(self, seen: Seen, gone: Mapping[str, str]) -> Mapping[str, str]:
        return {}


@pytest.mark.parametrize(
    "given",
    [
        {"budget": "much"}, {"budget": 0}, {"host_budget": -1}, {"quantum": 0}, {"mode": "best"},
        {"isolation": "none"}, {"checkpoint_minutes": 0}, {"stop": "halving"},
        {"stop": Nameless()}, {"hours": 0}, {"hours": -1.0}, {"hours": math.nan}, {"hours": "2"},
        {"hours": math.inf}, {"hours": True},
    ],
    ids=" ".join,
)  # fmt: skip
def test_options_that_mean_nothing_are_refused_by_name(
    given: dict[str, Any], tmp_path: Path
) -> None:
    with pytest.raises(FleetError, match=next(iter(given))):
        Fleet(**{"devices": "cpu", "folder": tmp_path, **given})


# ---- too little memory --------------------------------------------------------------------------


def test_a_job_that_the_budget_cannot_hold_fails_with_the_bytes_and_the_others_finish(
    tmp_path: Path,
) -> None:
    fleet = Fleet("8KiB", "cpu", folder=tmp_path, metric="val_loss", quantum=3)
    add(fleet, "large", JobKind(1, width=256))
    module = add(fleet, "small", KINDS["adam"])
    result = fleet.fit()
    assert states(result) == {"large": "failed", "small": "finished"}
    said = r"\d\d\.\d KiB are needed at task .* the budget is 8.0 KiB; raise the budget to \d\dKiB"
    assert re.search(said, result.jobs["large"].why)
    assert alone(KINDS["adam"], "8KiB").differences(Outcome.of(module)) == []
    assert result.best == "small"


def test_a_host_too_small_for_a_job_is_said_with_the_numbers(tmp_path: Path) -> None:
    fleet = make(tmp_path, host_budget="6KiB")
    add(fleet, "large", KINDS["adam"])
    add(fleet, "small", PLAIN)
    result = fleet.fit()
    assert states(result) == {"large": "failed", "small": "finished"}
    why = result.jobs["large"].why
    assert "KiB of the host's memory, and all jobs together may take 6.0 KiB" in why
    assert "raise host_budget" in why


# ---- metrics ------------------------------------------------------------------------------------


class Wordless(Net):
    """It validates and logs nothing of it."""

    def validation_step(self, batch: Any, batch_idx: int) -> None:
        return


class NotANumber(Net):
    """Its loss is NaN."""

    def validation_step(self, batch: Any, batch_idx: int) -> None:
        self.log("val_loss", torch.tensor(float("nan")))


def test_a_job_without_the_metric_fails_and_says_what_it_logged_and_nan_is_the_worst(
    tmp_path: Path,
) -> None:
    fleet = make(tmp_path, stop=Halving("val_loss", eta=2, first=5))
    add(fleet, "nan", PLAIN, NotANumber())
    add(fleet, "wordless", PLAIN, Wordless())
    module = add(fleet, "good", PLAIN)
    result = fleet.fit()
    assert states(result) == {"nan": "stopped", "wordless": "failed", "good": "finished"}
    assert "val_loss nan at step 5 is number 2 of 2" in result.jobs["nan"].why
    why = result.jobs["wordless"].why
    assert "val_loss was never logged by step 5" in why and "(loss was logged)" in why
    assert result.best == "good" and alone(PLAIN).differences(Outcome.of(module)) == []


def test_a_rung_beyond_every_job_is_refused_before_anybody_trains(tmp_path: Path) -> None:
    fleet = make(tmp_path, stop=Halving("val_loss", first=500))
    add(fleet, "a", PLAIN)
    with pytest.raises(FleetError, match=r"first=500.* the longest job has 10 steps"):
        fleet.fit()
    assert fleet.result().jobs["a"].step == 0


# ---- jobs that cannot be shared -----------------------------------------------------------------


def test_what_cannot_be_shared_fails_by_name_and_the_others_finish(tmp_path: Path) -> None:
    fleet = make(tmp_path)
    add(fleet, "endless", PLAIN, trainer={**PLAIN.trainer, "max_epochs": -1})
    add(fleet, "unknown", PLAIN, trainer={**PLAIN.trainer, "epochs": 3})
    add(fleet, "no module", PLAIN, torch.nn.Linear(1, 1))
    module = add(fleet, "good", PLAIN)
    result = fleet.fit()
    said = {name: job.why for name, job in result.jobs.items() if job.state == "failed"}
    assert said.keys() == {"endless", "unknown", "no module"}
    assert "job endless has no end: give its Trainer max_epochs" in said["endless"]
    assert "'epochs'" in said["unknown"]
    assert "a Linear was given as its module" in said["no module"]
    assert states(result)["good"] == "finished"
    assert alone(PLAIN).differences(Outcome.of(module)) == []


class Unpicklable(Net):
    """A process cannot get it."""

    def __init__(self) -> None:
        super().__init__()
        self.lock = threading.Lock()

    def __reduce__(self) -> Any:
        raise RuntimeError("a lock stays where it is")


def test_what_cannot_go_to_a_process_is_named_when_it_is_added(tmp_path: Path) -> None:
    fleet = make(tmp_path, isolation="process")
    for module, why in ((lambda: Net(), "lambda"), (Unpicklable(), "a lock stays where it is")):
        with pytest.raises(FleetError, match=f"job a cannot be sent to the process.*{why}"):
            add(fleet, "a", PLAIN, module)
    fleet.close()
