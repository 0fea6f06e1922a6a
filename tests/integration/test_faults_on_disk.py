"""Disks that are full, folders that cannot be written, logs that are damaged: who goes on, who says
so, and who ends.

What a run can do without is logged once and left out. What a restart relies on ends in an error of
ours that says what to do. What was there before stays whole.
"""

import json
import logging
import os
import resource
from collections.abc import Callable, Iterator, Mapping
from contextlib import ExitStack, closing, contextmanager
from dataclasses import dataclass
from pathlib import Path
from types import SimpleNamespace
from typing import Any

import pytest
import torch
from fuzz.fuzz_logs import JOURNAL, RUN, STEP_LOG

from offload.caching.plan_cache import PlanCache
from perfect.grids.grid_fleet import job_output
from perfect.grids.grid_run import GridFolder, Timeline
from perfect.runs.kept_runs import is_held
from perfect.runs.record import RunLog, write_run
from trainers.atomic_checkpoint import AtomicCheckpointIO
from trainers.elastic.errors import LogDamaged
from trainers.elastic.peer.step_log import Era, StepLog, newest_era, read_history, read_lines
from trainers.fleet import Fleet, FleetError
from trainers.fleet.deciding.events import Added
from trainers.fleet.keeping.journal import Journal
from trainers.fleet.search.optuna_search import AskedTrials
from trainers.folder_lock import hold_folder
from trainers.record_file import whole_lines

ERA = Era("x", 1)
Begin = Callable[[Path, ExitStack], Callable[[int], None]]


@contextmanager
def full_disk(folder: Path) -> Iterator[None]:
    """No file may grow to more than ten bytes above the largest one: half a line still fits."""
    before = resource.getrlimit(resource.RLIMIT_FSIZE)
    largest = max((path.stat().st_size for path in folder.rglob("*") if path.is_file()), default=0)
    resource.setrlimit(resource.RLIMIT_FSIZE, (largest + 10, before[1]))
    try:
        yield
    finally:
        resource.setrlimit(resource.RLIMIT_FSIZE, before)


@contextmanager
def no_folder(folder: Path) -> Iterator[None]:
    """A file is where the folder was. Root may write into any folder, but not into this one."""
    away = folder.rename(folder.with_name("away"))
    folder.touch()
    try:
        yield
    finally:
        folder.unlink()
        away.rename(folder)


@pytest.fixture
def here() -> Iterator[ExitStack]:
    with ExitStack() as stack:
        yield stack


# ---- writers ------------------------------------------------------------------------------------


def checkpoint(folder: Path, here: ExitStack) -> Callable[[int], None]:
    return lambda step: AtomicCheckpointIO().save_checkpoint(
        {"step": step, "weights": torch.zeros(100 + 900 * step)}, folder / "last.ckpt"
    )


def metrics(folder: Path, here: ExitStack) -> Callable[[int], None]:
    log = RunLog(folder)

    def write(step: int) -> None:
        log.log_metrics({"loss": 0.5}, step)
        log.save()

    return write


def step_log(folder: Path, here: ExitStack) -> Callable[[int], None]:
    log = here.enter_context(closing(StepLog(folder / "a.jsonl", RUN)))
    log.begins(0, "nothing", ERA)

    def write(step: int) -> None:
        commit: Any = SimpleNamespace(step=step, added=(("a", (0, 1)),), digest="d" * 40)
        log.commit(commit)

    return write


def begun_step_log(folder: Path, here: ExitStack) -> Callable[[int], None]:
    def write(step: int) -> None:
        with closing(StepLog(folder / f"{step}.jsonl", RUN)) as log:
            log.begins(step, "nothing", Era("x" * 20 * step, 1))

    return write


def timeline(folder: Path, here: ExitStack) -> Callable[[int], None]:
    lines = here.enter_context(Timeline(folder / "timeline.jsonl"))

    def write(step: int) -> None:
        job = SimpleNamespace(name="a", phase=f"phase {step}", device=0, step=step)
        seen: Any = SimpleNamespace(jobs={"a": job})
        lines.see(seen, seen)

    return write


def journal(folder: Path, here: ExitStack) -> Callable[[int], None]:
    kept = here.enter_context(closing(Journal(folder)))
    kept.open({"stop": "None"})
    return lambda step: kept.write(Added(f"job {step}"))


def begun_journal(folder: Path, here: ExitStack) -> Callable[[int], None]:
    def write(step: int) -> None:
        kept = Journal(folder / str(step))
        try:
            kept.open({"stop": "None"})
        finally:
            kept.close()

    return write


def asked(folder: Path, here: ExitStack) -> Callable[[int], None]:
    trials = AskedTrials(folder)
    return lambda step: trials.note(f"trial {step}", {"lr": 0.1})


def plan_cache(folder: Path, here: ExitStack) -> Callable[[int], None]:
    cache = PlanCache(folder)
    return lambda step: cache.write("plan", (step,), "x" * 200 * (step + 1))


def results(folder: Path, here: ExitStack) -> Callable[[int], None]:
    return lambda step: write_run(folder / "run.json", {"steps": step, "more": "x" * 99 * step})


def grid_results(folder: Path, here: ExitStack) -> Callable[[int], None]:
    return lambda step: GridFolder(folder).write({"steps": step, "more": "x" * 99 * step})


# ---- what is there ------------------------------------------------------------------------------


def lines_of(path: Path) -> list[dict[str, Any]]:
    return [json.loads(line) for line in whole_lines(path)]


def in_metrics(folder: Path) -> list[int]:
    whole, _, _ = (folder / "metrics.csv").read_text().rpartition("\n")
    rows = [row.split(",") for row in whole.splitlines()]
    assert {len(row) for row in rows} == {3}, rows
    return [int(float(step)) for step, *_ in rows[1:]]


def in_plans(folder: Path) -> list[int]:
    return [n for n in range(9) if PlanCache(folder).read("plan", (n,)) is not None]


@dataclass(frozen=True)
class Row:
    begin: Begin
    read: Callable[[Path], list[int]]
    """The steps that are in the folder."""
    left: tuple[int, ...]
    """What is there at the end, of 1; 2 and 3 under the fault; and 4."""
    ending: type[Exception] | None = None
    """None: what does not fit is left out, and logged."""
    faults: tuple[Callable[[Path], Any], ...] = (full_disk, no_folder)


ROWS = {
    "checkpoint": Row(checkpoint, lambda f: [torch.load(f / "last.ckpt")["step"]], (4,)),
    "metrics": Row(metrics, in_metrics, (1, 2, 3, 4)),
    "plan cache": Row(plan_cache, in_plans, (1, 4)),
    "step log": Row(
        step_log, lambda f: [*read_history([f / "a.jsonl"]).commits], (1, 4), faults=(full_disk,)
    ),
    "timeline": Row(
        timeline, lambda f: [line["step"] for line in lines_of(f / "timeline.jsonl")[1:]], (1, 4),
        faults=(full_disk,),
    ),
    "begun step log": Row(
        begun_step_log,
        lambda f: [n for n in range(9) if len(read_lines(f / f"{n}.jsonl")) > 1],
        (1, 4), LogDamaged,
    ),
    "journal": Row(
        journal, lambda f: [int(line["job"][4:]) for line in lines_of(f / "journal.jsonl")[1:]],
        (1, 4), FleetError, (full_disk,),
    ),
    "begun journal": Row(
        begun_journal, lambda f: [n for n in range(9) if (f / f"{n}/journal.jsonl").exists()],
        (1, 4), FleetError, (no_folder,),
    ),
    "asked trials": Row(
        asked, lambda f: [int(job[6:]) for job in json.loads((f / "search.json").read_text())],
        (1, 2, 3, 4), FleetError,
    ),
    # Who calls these says what it means for the run.
    "results": Row(results, lambda f: [json.loads((f / "run.json").read_text())["steps"]], (4,),
                   OSError),
    "grid": Row(grid_results, lambda f: [json.loads((f / "grid.json").read_text())["steps"]], (4,),
                OSError),
}  # fmt: skip


@pytest.mark.parametrize(
    ("name", "fault"),
    [
        pytest.param(name, f, id=f"{name}-{f.__name__}")
        for name, row in ROWS.items()
        for f in row.faults
    ],
)
def test_what_does_not_fit_is_told_and_what_was_there_stays(
    name: str,
    fault: Callable[[Path], Any],
    tmp_path: Path,
    caplog: pytest.LogCaptureFixture,
    here: ExitStack,
) -> None:
    row, folder = ROWS[name], tmp_path / "folder"
    folder.mkdir()
    write = row.begin(folder, here)
    write(1)
    with fault(folder):
        for step in (2, 3):
            if row.ending is None:
                write(step)
            else:
                with pytest.raises(row.ending, match=r"File too large|Not a directory|File exists"):
                    write(step)
    told = [r.message for r in caplog.records if r.levelno >= logging.WARNING]
    assert len(told) == (0 if row.ending else 2 if name == "checkpoint" else 1), told
    assert row.read(folder) == [1]
    write(4)
    assert row.read(folder) == [*row.left]


def test_a_job_goes_on_though_its_words_have_no_room(
    tmp_path: Path, caplog: pytest.LogCaptureFixture
) -> None:
    said = ["x" * 5]
    with job_output(tmp_path) as console:
        console.print(said[0])
        with full_disk(tmp_path):
            for number in range(3):
                console.print("y" * 9000)
                logging.getLogger("job").warning("number %d", number)
        assert not caplog.records
        console.print(said[0])
    [told] = caplog.messages
    assert "output.txt is incomplete ([Errno 27] File too large): free some space" in told
    lines = (tmp_path / "output.txt").read_text().splitlines()
    assert lines[0] == said[0] and lines[-1].endswith(said[0])


# ---- damaged logs -------------------------------------------------------------------------------

KINDS: Mapping[str, bytes] = {
    "a number": b"3", "null": b"null", "a list": b"[]", "half": b'{"commit": 1', "empty": b"",
    "text as a step": b'{"commit": "x", "added": [], "digest": "d", "time": 1.0}',
    "no lanes": b'{"commit": 1, "added": [["a", null]], "digest": "d", "time": 1.0}',
    "a run without sums": b'{"run": {"lanes": 4}, "time": 1.0}',
    "half a character": b'{"commit": 1, "added": [], "digest": "\\ud800", "time": 1.0}',
    "400 digits": b'{"commit": 1, "added": [], "digest": "d", "time": 1' + b"0" * 400 + b"}",
    "an era without a number": b'{"begins": 0, "with": "x", "era": {"id": "x"}, "time": 1.0}',
    "an era of text": b'{"begins": 0, "with": "x", "era": {"id": "x", "number": "2"}, "time": 1.0}',
    "deep": b"[" * 100_000, "not UTF-8": b'{"commit": "\xff"}', "zeros": b"\0" * 40,
}  # fmt: skip


def as_lines(objects: list[dict[str, Any]]) -> list[bytes]:
    return [json.dumps(one).encode() for one in objects]


@pytest.mark.parametrize("kind", KINDS)
def test_a_damaged_line_is_refused_with_its_number_and_what_to_do(
    kind: str, tmp_path: Path
) -> None:
    log, events = as_lines(STEP_LOG), as_lines(JOURNAL)
    log[2] = events[2] = KINDS[kind]
    path = tmp_path / "a.jsonl"
    path.write_bytes(b"\n".join(log) + b"\n")
    for read in (
        lambda: read_history([path]),
        lambda: newest_era([path]),
        lambda: read_lines(path),
    ):
        with pytest.raises(LogDamaged, match=r"a.jsonl:3 is damaged \(.*move this file out"):
            read()
    (tmp_path / "journal.jsonl").write_bytes(b"\n".join(events) + b"\n")
    refused = pytest.raises(FleetError, match=r"journal.jsonl:3 is .*delete the folder")
    with closing(Journal(tmp_path)) as kept, refused:
        kept.open(JOURNAL[0]["fleet"])


def test_events_that_cannot_follow_each_other_are_refused(tmp_path: Path) -> None:
    events = as_lines(JOURNAL)
    (tmp_path / "journal.jsonl").write_bytes(b"\n".join([*events[:2], *events[3:]]) + b"\n")
    fleet = Fleet(folder=tmp_path, devices=["cpu"], isolation="thread", host_budget="1GiB")
    fleet.add_program("a", lambda seat: None)
    with pytest.raises(FleetError, match=r"Planned.*cannot come there.*delete the folder"):
        fleet.fit()


@pytest.mark.parametrize(
    "tail", [b"", b"\0" * 30, b"\0" * 30 + b"\n"], ids=["", "zeros", "zeros and a newline"]
)
def test_a_log_that_is_torn_at_any_byte_is_cut_and_written_further(
    tail: bytes, tmp_path: Path, caplog: pytest.LogCaptureFixture
) -> None:
    lines, path = as_lines(STEP_LOG), tmp_path / "a.jsonl"
    whole = b"\n".join(lines) + b"\n"
    for size in range(len(whole)):
        path.write_bytes(whole[:size] + tail)
        caplog.clear()
        kept = whole[:size].count(b"\n")
        assert len(read_lines(path)) == kept
        log = StepLog(path, RUN)
        log.begins(7, "checkpoint", ERA)
        log.close()
        assert [line.get("begins") for line in read_lines(path)[kept:]] == [None, 7]
        assert path.read_bytes().split(b"\n")[:kept] == lines[:kept]
        is_torn = bool(tail or not whole[:size].endswith(b"\n")) and size + len(tail) > 0
        assert ("has a torn last line" in caplog.text) == is_torn


def test_a_journal_that_is_torn_at_any_byte_is_cut_and_written_further(tmp_path: Path) -> None:
    lines, path = as_lines(JOURNAL), tmp_path / "journal.jsonl"
    whole = b"\n".join(lines) + b"\n"
    for size in range(len(whole)):
        path.write_bytes(whole[:size])
        kept = whole[:size].count(b"\n")
        with closing(Journal(tmp_path)) as journal:
            assert len(journal.open(JOURNAL[0]["fleet"])) == max(0, kept - 1)
            journal.write(Added("z"))
        assert path.read_bytes().split(b"\n")[:-2] == lines[: max(1, kept)]


# ---- two at once --------------------------------------------------------------------------------


def test_a_fork_does_not_hold_the_folder_of_its_parent(tmp_path: Path) -> None:
    """A loader's worker may outlive a run that was killed, which is begun again at once."""
    (begun, begin), (over, end) = os.pipe(), os.pipe()
    with hold_folder(tmp_path) as free:
        assert free and is_held(tmp_path)
        if not (child := os.fork()):
            os.write(begin, b"x")
            os.read(over, 1)
            os._exit(0)
        os.read(begun, 1)
    try:
        assert not is_held(tmp_path)
    finally:
        os.write(end, b"x")
        os.waitpid(child, 0)
        for pipe in (begun, begin, over, end):
            os.close(pipe)
