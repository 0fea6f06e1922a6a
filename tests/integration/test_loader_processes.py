"""Loaders across processes: workers that die, consumers that stop, loaders in children."""

import multiprocessing
import os
import pickle
import signal
import subprocess
import sys
import threading
from collections import Counter
from multiprocessing.context import SpawnContext
from pathlib import Path
from typing import Any, cast

import pytest
import torch
from support import loader_datasets as data
from support import loader_datasets as sets
from support.products import every_value
from torch.utils.data import DataLoader

from loaders import ReuseLoader, Workers
from loaders.errors import PassEnded, SourceError
from loaders.pixels.augmentation import Chain, Flip, PadCrop

pytestmark = [
    # Python 3.12 warns of fork where threads live; these tests ask for it by name.
    pytest.mark.filterwarnings("ignore:This process .* is multi-threaded:DeprecationWarning"),
]

AUGMENT = Chain([PadCrop(2), Flip()])


def apart(source: Any, **changes: Any) -> ReuseLoader:
    options: dict[str, Any] = {"reuse": 3, "augment": AUGMENT, **changes}
    options["workers"] = Workers(2, "process").changed_by(options.get("workers", Workers()))
    return ReuseLoader(source, 4, **options)


# ---- the same as threads ------------------------------------------------------------------------


def test_processes_serve_what_threads_do_and_read_it_as_often(tmp_path: Path) -> None:
    counted = tmp_path / "counted"
    with apart(sets.Pictures(40), workers=Workers(kind="thread")) as threads:
        expected = sets.served(threads) + sets.served(threads)
    with apart(sets.Pictures(40, count=counted)) as processes:
        counted.unlink()  # the loader has looked, when it was made, whether reading repeats itself
        assert sets.served(processes) + sets.served(processes) == expected
        stats = processes.stats
    assert stats.decoded == 80
    # The first sample is read once more, to lay out the slots.
    assert (
        0 <= counted.stat().st_size - processes.stats.decoded - processes.stats.extra_decodes <= 1
    )


def test_a_dataloader_with_workers_keeps_reading_right_where_threads_would_mix_samples(
    tmp_path: Path,
) -> None:
    (tmp_path / "file").write_bytes(bytes(range(200)))
    theirs = DataLoader(sets.SharedFile(200, tmp_path / "file"), 10, num_workers=2)
    with ReuseLoader.from_dataloader(theirs, reuse=2) as loader:
        for values, ids in loader:
            assert values.flatten().tolist() == ids.tolist()


@pytest.mark.parametrize("method", ["fork", "forkserver", "spawn"])
def test_workers_may_be_started_in_any_way(method: Any) -> None:
    with apart(sets.Pictures(12), workers=Workers(kind="thread")) as threads:
        expected = sets.served(threads)
    with apart(sets.Pictures(12), workers=Workers(1, start_method=method)) as processes:
        assert sets.served(processes) == expected


@pytest.mark.parametrize("batches", [1, 11, 29])
def test_a_resume_may_change_who_reads(batches: int) -> None:
    with apart(sets.Pictures(40), workers=Workers(kind="thread")) as threads:
        expected = sets.served(threads)
    with apart(sets.Pictures(40)) as interrupted:
        assert sets.served(interrupted, batches) == expected[:batches]
        state = interrupted.state_dict()
    with apart(sets.Pictures(40)) as resumed:
        resumed.load_state_dict(state)
        assert sets.served(resumed) == expected[batches:]


# ---- a consumer that stops ----------------------------------------------------------------------


def decode_threads() -> list[threading.Thread]:
    return [t for t in threading.enumerate() if t.name.startswith("perfect-")]


@pytest.mark.parametrize("end", ["break", "raise", "close", "drop"])
def test_a_consumer_that_stops_leaves_nothing(end: str) -> None:
    loader = apart(sets.Pictures(100))
    if end == "raise":
        with pytest.raises(KeyError):
            for _ in loader:
                raise KeyError
    else:
        for _ in loader:
            break
    assert not decode_threads()
    if end == "drop":
        del loader
    else:
        loader.close()
        loader.close()
    assert not multiprocessing.active_children()


INTERRUPTED = """
import multiprocessing, sys, threading
from support import loader_datasets
from loaders import LoaderError, ReuseLoader, Workers

def main():
    loader = ReuseLoader(
        loader_datasets.Pictures(10_000_000), 4, 2, workers=Workers(2, {kind!r})
    )
    try:
        for number, _ in enumerate(loader):
            if number == 3:
                print("serving", *[p.pid for p in multiprocessing.active_children()], flush=True)
    except KeyboardInterrupt:
        left = [t.name for t in threading.enumerate() if t.name.startswith("perfect-")]
        print("threads", *left, flush=True)
        if {again}:
            print("again", len(next(iter(loader))[1]), flush=True)
        raise

if __name__ == "__main__":
    main()
"""


@pytest.mark.parametrize("again, kind", every_value([False, True], ["thread", "process"]))
def test_a_ctrl_c_ends_the_pass_and_leaves_nothing(
    kind: str, again: bool, watch: Any, tmp_path: Path
) -> None:
    script = tmp_path / "script.py"
    script.write_text(INTERRUPTED.format(kind=kind, again=again))
    child = subprocess.Popen(
        [sys.executable, str(script)],
        stdout=subprocess.PIPE, stderr=subprocess.PIPE, text=True,
    )  # fmt: skip
    try:
        assert child.stdout is not None
        word, *pids = child.stdout.readline().split()
        assert word == "serving"
        ended = [watch(int(pid)) for pid in pids]
        assert bool(pids) == (kind == "process")
        child.send_signal(signal.SIGINT)
        out, err = child.communicate()
    finally:
        child.kill()
        child.communicate()
    assert out.splitlines() == ["threads", *["again 4"] * again]
    assert err.rstrip().endswith("KeyboardInterrupt"), err
    assert "Exception ignored" not in err
    assert all(each() for each in ended)


# ---- loaders in children ------------------------------------------------------------------------


def serve_in_a_child(loader: ReuseLoader, told: Any) -> None:
    served = Counter(i for _, labels in loader for i in labels.tolist())
    loader.close()
    told.send((len(served), set(served.values())))


@pytest.mark.parametrize(
    "moment, method", every_value(["before", "within", "after"], ["fork", "spawn"])
)
def test_a_loader_goes_to_a_child_at_any_moment_and_the_parents_is_not_disturbed(
    method: str, moment: str
) -> None:
    expected_loader = apart(sets.Pictures(20), workers=Workers(kind="thread"))
    expected = sets.served(expected_loader)
    expected_loader.close()
    loader = apart(sets.Pictures(20), workers=Workers(kind="thread"))
    got = []
    context = cast(SpawnContext, multiprocessing.get_context(method))
    ours, theirs = context.Pipe()

    def child() -> None:
        process = context.Process(target=serve_in_a_child, args=(loader, theirs))
        process.start()
        assert ours.poll(100)
        assert ours.recv() == (20, {3})
        process.join()
        assert process.exitcode == 0

    if method == "spawn":
        # The child imports this module by its name, as it does those of a script.
        pytest.importorskip("integration.test_loader_processes")
        globals()["serve_in_a_child"] = sys.modules[
            "integration.test_loader_processes"
        ].serve_in_a_child
    if moment == "before":
        child()
    for pictures, labels in loader:
        got.append((tuple(labels.tolist()), pictures.numpy().tobytes()))
        if moment == "within" and len(got) == 2:
            child()
    if moment == "after":
        child()
    assert got == expected
    loader.close()


def test_a_pass_that_was_begun_in_the_parent_is_refused_in_a_fork() -> None:
    loader = apart(sets.Pictures(40), workers=Workers(kind="thread"))
    begun = iter(loader)
    next(begun)
    child = os.fork()
    if child == 0:
        try:
            next(begun)
        except PassEnded:
            os._exit(7)
        finally:
            os._exit(1)
    assert os.waitstatus_to_exitcode(os.waitpid(child, 0)[1]) == 7
    assert len(list(begun)) == 29
    loader.close()


@pytest.mark.parametrize("end", ["close", "drop"])
def test_a_fork_that_closes_its_copy_leaves_the_parents_workers_alone(end: str) -> None:
    loader = apart(sets.Pictures(40))
    begun = iter(loader)
    next(begun)
    workers = {p.pid for p in multiprocessing.active_children()}
    assert workers
    child = os.fork()
    if child == 0:
        try:
            if end == "close":
                loader.close()
            del begun, loader
        finally:
            os._exit(0)
    os.waitpid(child, 0)
    assert len(list(begun)) == 29
    # The second of them may have been begun since.
    assert workers <= {p.pid for p in multiprocessing.active_children()}
    loader.close()


# ---- pickling -----------------------------------------------------------------------------------


@pytest.mark.parametrize("worker_kind", ["thread", "process"])
@pytest.mark.parametrize("served_before", [0, 5, 15])
def test_a_pickled_loader_goes_on_with_the_next_pass_and_its_state_in_the_middle(
    served_before: int, worker_kind: Any
) -> None:
    with apart(sets.Pictures(20), workers=Workers(kind=worker_kind)) as loader:
        if served_before:
            sets.served(loader, served_before)
        with pickle.loads(pickle.dumps(loader)) as copy:
            assert copy.state_dict() == loader.state_dict()
            assert sets.served(copy) == sets.served(loader)
            resumed = pickle.loads(pickle.dumps(loader))
            resumed.load_state_dict(loader.state_dict())
            assert sets.served(resumed) == sets.served(loader)
            resumed.close()


@pytest.mark.parametrize("method", ["fork", "forkserver"])
def test_it_is_called_with_the_workers_number_and_may_change_the_data_set(method: Any) -> None:
    workers, told = Workers(3, "process", method, init=data.tell_data_set), data.ToldByInit(24)
    with ReuseLoader(told, 4, reuse=1, workers=workers) as loader:
        rows = [
            row for batch in loader for row in zip(*(c.tolist() for c in batch[1:]), strict=True)
        ]
    assert sorted(index for index, _, _ in rows) == list(range(24))
    assert all(said == 30 + number and 0 <= number < 3 for _, said, number in rows)
    assert told.told == -1  # the one here is another one


def test_a_process_that_was_replaced_calls_it_too(tmp_path: Path) -> None:
    killed = data.Killed(16, 5, 1, tmp_path / "killed")
    workers = Workers(1, "process", init=data.tell_data_set)
    with ReuseLoader(killed, 4, reuse=1, workers=workers) as loader:
        assert sorted(i for batch in loader for i in batch[1].tolist()) == list(range(16))


def test_draws_of_samples_do_not_depend_on_it() -> None:
    def drawn(init: Any) -> list[Any]:
        workers = Workers(2, "process", init=init)
        with ReuseLoader(data.Drawing(16), 4, reuse=1, workers=workers) as loader:
            return [*loader]

    for mine, other in zip(drawn(None), drawn(data.reseed), strict=True):
        assert all(map(torch.equal, mine, other))


def test_its_error_is_raised_as_it_is() -> None:
    workers = Workers(1, "process", init=data.fail_to_begin)
    loader = ReuseLoader(data.Pictures(8), 4, reuse=1, workers=workers)
    with loader, pytest.raises(RuntimeError, match="no licence for worker 0") as error:
        next(iter(loader))
    assert "while init was called with 0" in str(error.value)


def test_what_cannot_be_sent_to_a_fork_server_is_refused() -> None:
    workers = Workers(1, start_method="forkserver", init=lambda _: None)
    loader = ReuseLoader(data.Pictures(8), 4, reuse=1, workers=workers)
    said = r"init=<function .*start_method=\"fork\""
    with loader, pytest.raises(SourceError, match=said):
        next(iter(loader))
