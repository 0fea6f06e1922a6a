"""Worker processes and threads: what they read, how they fail, what becomes of one that hangs."""

import logging
import multiprocessing
import os
import stat
import threading
from collections.abc import Iterator
from pathlib import Path
from typing import Any

import pytest
import torch
from support import loader_datasets as data
from support import worker_datasets as sets
from support.numbered_samples import Made

from loaders import ReuseLoader, Workers
from loaders.errors import LoaderError, PassEnded, SampleTimeout, SourceError, WorkerDied
from loaders.slots.leaves import Chunk
from loaders.workers.processes import StartMethod, WorkerProcess
from loaders.workers.reading_thread import ReadingThread
from loaders.workers.worker import WorkerPlace

every_method = pytest.mark.parametrize("method", ["fork", "spawn", "forkserver"])
# A spawned process is as one of the fork server's, but for the second that it takes to start.
without_spawning = pytest.mark.parametrize("method", ["fork", "forkserver"])
pytestmark = [
    # Python 3.12 warns of fork where threads live; these tests ask for it by name.
    pytest.mark.filterwarnings("ignore:This process .* is multi-threaded:DeprecationWarning"),
]


def values(chunk: Chunk) -> list[Any]:
    return [sample.tolist() for sample in chunk.samples]


def notes(error: BaseException | None) -> str:
    return "; ".join(getattr(error, "__notes__", []))


# ---- the same samples ---------------------------------------------------------------------------


@every_method
def test_the_staging_area_grows_with_what_it_has_to_hold(method: StartMethod) -> None:
    with WorkerProcess(sets.Sized(), method, "reader") as worker:
        for ids in ([10], [200_000], [1], [300_000, 7, 5_000_000, 400_000], [0, 3]):
            for i, sample in zip(ids, worker.read(ids).samples, strict=True):
                assert sample.shape == (i,)
                assert bool((sample == i % 251).all())


def test_no_other_user_may_open_the_memory_of_a_worker() -> None:
    def list_files() -> set[Path]:
        files = Path("/proc/self/fd").iterdir()
        return {file for file in files if "perfect-staging" in os.path.realpath(file)}

    before = list_files()  # of a worker of another test, which nobody has collected yet
    with WorkerProcess(sets.Sized(), None, "reader") as worker:
        worker.read([9])
        opened = list_files() - before
        assert [stat.S_IMODE(file.stat().st_mode) for file in opened] == [0o600]


@without_spawning
def test_a_worker_computes_on_one_thread_in_a_process_of_its_own(method: StartMethod) -> None:
    with WorkerProcess(sets.Reporting(), method, "reader") as worker:
        [(threads, pid, alive)] = worker.read([0]).samples
        assert (threads, pid) == (1, worker.pid)
        assert pid != os.getpid()
        assert alive == 1


# ---- several samples at once --------------------------------------------------------------------


def test_samples_are_read_at_once_where_the_data_set_can() -> None:
    with WorkerProcess(sets.Together(), None, "reader") as worker:
        assert values(worker.read([3, 4, 5], keys=[0, 0, 0])) == [[3, 3], [4, 3], [5, 3]]
        chunk = worker.read([11, 12, 13, 14])
        assert values(chunk) == [[11, 1], [12, 1]], "singly, so that the one that fails is known"
        assert type(chunk.error) is KeyError


def test_samples_that_have_a_time_limit_each_are_read_singly() -> None:
    with WorkerProcess(sets.Together(), None, "reader", 60, WorkerPlace(singly=True)) as worker:
        assert values(worker.read([3, 4])) == [[3, 1], [4, 1]]


# ---- failures of the data set -------------------------------------------------------------------


@without_spawning
def test_a_failure_keeps_its_type_and_the_samples_before_it_are_there(method: StartMethod) -> None:
    with WorkerProcess(sets.Faulty(), method, "reader") as worker:
        chunk = worker.read([11, 12, 13, 17])
        assert values(chunk) == [11, 12]
        assert type(chunk.error) is KeyError
        assert chunk.error.args == ("sector 7",)
        assert "in worker process reader" in notes(chunk.error)
        assert "worker_datasets.py" in notes(chunk.error)
        assert "the disk" in notes(chunk.error)
        pid = worker.pid
        assert values(worker.read([17, 18])) == [17, 18]
        assert (worker.pid, worker.restarts) == (pid, 0)


def test_an_exception_that_cannot_be_rebuilt_arrives_with_its_text() -> None:
    with WorkerProcess(sets.Faulty(), None, "reader") as worker:
        chunk = worker.read([1, 14])
    assert values(chunk) == [1]
    assert type(chunk.error) is LoaderError
    assert "Picky: unlucky at 14" in str(chunk.error)
    assert "raise Picky" in notes(chunk.error)


def test_a_sample_that_cannot_be_sent_is_named() -> None:
    with WorkerProcess(sets.Faulty(), None, "reader") as worker:
        chunk = worker.read([1, 15, 2])
    assert values(chunk) == [1]
    assert type(chunk.error) is LoaderError
    assert "sample 15 holds something that cannot leave its process" in str(chunk.error)
    assert "return tensors" in str(chunk.error)


@pytest.mark.parametrize("method", ["spawn", "forkserver"])
def test_a_data_set_that_cannot_be_pickled_is_named_with_what_to_do(method: StartMethod) -> None:
    with WorkerProcess(sets.Unpicklable(), method, "reader") as worker:
        with pytest.raises(SourceError, match=r"Unpicklable.*lock.*__getstate__") as error:
            worker.read([0])
        assert isinstance(error.value.__cause__, TypeError)
        assert worker.pid is None


def test_a_data_set_that_cannot_be_rebuilt_says_why() -> None:
    with WorkerProcess(sets.NotRebuilt(), "forkserver", "reader") as worker:
        with pytest.raises(SourceError, match=r"NotRebuilt.*cannot be rebuilt.*no number"):
            worker.read([0])
        assert not multiprocessing.active_children()


def test_a_death_before_the_first_sample_is_not_tried_again() -> None:
    with WorkerProcess(sets.DeadAtStart(), "forkserver", "reader") as worker:
        with pytest.raises(WorkerDied, match=r"exit code 9 before it could read.*__main__"):
            worker.read([0])
        assert worker.restarts == 0


def test_a_forked_process_that_dies_at_its_start_is_told_nothing_of_imports() -> None:
    place = WorkerPlace(init=lambda number: os._exit(9))
    worker = WorkerProcess(sets.Faulty(), "fork", "reader", place=place)
    with worker, pytest.raises(WorkerDied, match=r"exit code 9 before it could read.*stderr$"):
        worker.read([0])


SHORT = 1.0


class Held:
    """Sample i is i; reading one of `hangs` waits until `end`."""

    def __init__(self, *hangs: int) -> None:
        self.hangs = hangs
        self.end = threading.Event()

    def __len__(self) -> int:
        return 16

    def __getitem__(self, index: int) -> torch.Tensor:
        if index in self.hangs:
            self.end.wait()
        if index == 13:
            raise KeyError("sector 7")
        return torch.tensor(index)


@pytest.fixture
def held() -> Iterator[Held]:
    made = Held(5, 7)
    yield made
    made.end.set()
    for thread in threading.enumerate():
        if thread.name.startswith("perfect-"):
            thread.join(60)


# ---- a process ----------------------------------------------------------------------------------


@pytest.mark.parametrize("method", ["fork", "forkserver"])
@pytest.mark.filterwarnings("ignore:This process .* is multi-threaded:DeprecationWarning")
def test_a_process_that_hangs_is_killed_and_replaced_and_the_samples_before_it_are_kept(
    method: Any, watch: Any, tmp_path: Path, caplog: pytest.LogCaptureFixture
) -> None:
    with WorkerProcess(sets.Stuck(5, 6), method, "reader", SHORT) as worker:
        worker.read([0])
        ended = watch(worker.pid)
        with caplog.at_level(logging.WARNING, "loaders.workers.processes"):
            for _ in range(2):  # it is no death of its own: it may happen again
                chunk = worker.read([3, 4, 5, 8])
                assert [sample.item() for sample in chunk.samples] == [3, 4]
                assert isinstance(chunk.error, SampleTimeout)
                assert "timeout=1 seconds to read sample 5" in str(chunk.error)
        assert ended()
        assert worker.restarts == 0
        assert values(worker.read([8, 9])) == [8, 9]
        assert values(worker.read([6])) == []
    assert "reader was killed" in caplog.messages[0] and "sample 5" in caplog.messages[0]


def test_a_slow_chunk_is_no_slow_sample() -> None:
    with WorkerProcess(sets.Slow(0.1), None, "reader", SHORT) as worker:
        assert values(worker.read(range(12))) == [*range(12)]


# ---- a thread -----------------------------------------------------------------------------------


def test_a_thread_that_hangs_is_left_behind_and_replaced(
    held: Held, caplog: pytest.LogCaptureFixture
) -> None:
    with ReadingThread(held, SHORT, "perfect-read-0") as thread:
        with caplog.at_level(logging.WARNING, "loaders.workers.reading_thread"):
            chunk = thread.read([3, 4, 5, 8])
        assert values(chunk) == [3, 4]
        assert isinstance(chunk.error, SampleTimeout)
        assert len(caplog.messages) == 1
        assert values(thread.read([8, 9])) == [8, 9]
        chunk = thread.read([1, 13, 5])
        assert values(chunk) == [1] and isinstance(chunk.error, KeyError)
    assert "left behind" in caplog.text and "sample 5" in caplog.text
    with pytest.raises(PassEnded):
        thread.read([1])


# ---- a loader -----------------------------------------------------------------------------------


def served(loader: ReuseLoader) -> list[int]:
    return sorted(
        int(i) for batch in loader for i in (batch if torch.is_tensor(batch) else batch[-1])
    )


@pytest.mark.parametrize(
    ("kind", "hangs", "reuse"), [("process", (0,), 1), ("process", (5,), 2), ("thread", (5,), 2)]
)
def test_a_loader_names_what_hangs_or_skips_it(
    held: Held, hangs: tuple[int], reuse: int, kind: Any
) -> None:
    held.hangs = hangs
    slow: Any = Made(16, lambda i: (held.end.wait() if i in held.hangs else None, i)[1])
    hanging = data.Hanging(16, hangs) if kind == "process" else slow
    how: dict[str, Any] = {"reuse": reuse, "workers": Workers(2, kind, timeout=SHORT)}
    with (
        ReuseLoader(hanging, 4, **how) as loader,
        pytest.raises(SampleTimeout, match=f"to read sample {hangs[0]}") as error,
    ):
        served(loader)
    assert "while decoding sample" in "".join(error.value.__notes__)
    if reuse == 1:
        return
    with ReuseLoader(hanging, 4, on_error="skip", **how) as loader:
        ids = served(loader)
        assert len(ids) == 32 and set(ids) == {*range(16)} - {*hangs}
        assert loader.skipped[hangs[0]].startswith("SampleTimeout: it took longer than timeout=1 ")


def test_an_augmentation_that_hangs_in_a_process_is_named() -> None:
    reading: dict[str, Any] = {"workers": Workers(2, "process", timeout=SHORT)}
    pictures = data.Pictures(16)
    odd = {i for i in range(16) if int(data.pixels(i)[0, 0, 0]) % 2}
    loader = ReuseLoader(pictures, 4, reuse=1, augment=data.never_again, **reading)
    with loader, pytest.raises(SampleTimeout, match="to augment sample") as error:
        served(loader)
    assert int(str(error.value).split("sample ")[1].split(":")[0]) in odd


@pytest.mark.parametrize(
    ("timeout", "backend", "said"),
    [
        (0, "native", "timeout must be more than 0 seconds, not 0"),
        (3, "dali", "timeout has no effect with backend='dali'"),
    ],
)
def test_a_timeout_that_cannot_be_kept_is_refused(timeout: int, backend: Any, said: str) -> None:
    with pytest.raises(ValueError, match=said):
        ReuseLoader(data.Pictures(8), 4, workers=Workers(timeout=timeout), backend=backend)
