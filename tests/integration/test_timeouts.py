"""A sample at which a worker hangs is named; whoever read it is replaced."""

import logging
import threading
from collections.abc import Iterator
from pathlib import Path
from typing import Any

import pytest
import torch
from support import loader_datasets as data
from support import worker_datasets as sets

from loaders import ReuseLoader, Workers
from loaders.errors import PassEnded, SampleTimeout
from loaders.workers.processes import WorkerProcess
from loaders.workers.reading_thread import ReadingThread

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


def values(chunk: Any) -> list[Any]:
    return [sample.item() for sample in chunk.samples]


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


def test_an_error_before_the_sample_that_hangs_comes_first() -> None:
    with WorkerProcess(sets.Stuck(5), None, "reader", SHORT) as worker:
        chunk = worker.read([1, 13, 5])
        assert values(chunk) == [1]
        assert isinstance(chunk.error, KeyError)


# ---- a thread -----------------------------------------------------------------------------------


def test_a_thread_that_hangs_is_left_behind_and_replaced(
    held: Held, caplog: pytest.LogCaptureFixture
) -> None:
    with ReadingThread(held, SHORT, "perfect-read-0") as thread:
        with caplog.at_level(logging.WARNING, "loaders.workers.reading_thread"):
            chunk = thread.read([3, 4, 5, 8])
        assert values(chunk) == [3, 4]
        assert isinstance(chunk.error, SampleTimeout)
        assert thread.left_behind == 1
        assert values(thread.read([8, 9])) == [8, 9]
        chunk = thread.read([1, 13, 5])
        assert values(chunk) == [1] and isinstance(chunk.error, KeyError)
    assert "left behind" in caplog.text and "sample 5" in caplog.text
    with pytest.raises(PassEnded):
        thread.read([1])


def test_what_a_thread_reads_after_it_was_left_behind_is_served_to_nobody(held: Held) -> None:
    with ReadingThread(held, SHORT, "perfect-read-0") as thread:
        assert values(thread.read([5, 6])) == []
        held.end.set()
        assert values(thread.read([1, 5, 7, 2])) == [1, 5, 7, 2]


# ---- a loader -----------------------------------------------------------------------------------


def served(loader: ReuseLoader) -> list[int]:
    return sorted(i for batch in loader for i in batch[-1].tolist())


@pytest.mark.parametrize("hangs", [(0,), (5,), (0, 5, 15)])
def test_a_loader_names_the_sample_that_hangs_in_a_process(hangs: tuple[int]) -> None:
    hanging = data.Hanging(16, hangs)
    reading: dict[str, Any] = {"workers": Workers(2, "process", timeout=SHORT)}
    loader = ReuseLoader(hanging, 4, reuse=1, **reading)
    with loader, pytest.raises(SampleTimeout, match=r"to read sample \d+") as error:
        served(loader)
    assert "while decoding sample" in "".join(error.value.__notes__)
    assert int(str(error.value).split("sample ")[1].split(":")[0]) in hangs


def test_a_loader_in_processes_skips_what_hangs_and_serves_the_rest() -> None:
    workers = Workers(2, "process", timeout=SHORT)
    with ReuseLoader(
        data.Hanging(16, (5,)), 4, reuse=2, workers=workers, on_error="skip"
    ) as loader:
        ids = served(loader)
        assert len(ids) == 32 and set(ids) == {*range(16)} - {5}
        assert loader.skipped[5].startswith("SampleTimeout: it took longer than timeout=1 ")


@pytest.mark.parametrize("on_error", ["raise", "skip"])
def test_a_loader_in_threads_names_what_hangs_or_skips_it(held: Held, on_error: Any) -> None:
    held.hangs = (5,)

    class Numbers(Held):
        def __getitem__(self, index: int) -> Any:
            if index in held.hangs:
                held.end.wait()
            return torch.tensor(index), index

    how: dict[str, Any] = {"workers": Workers(2, timeout=SHORT), "on_error": on_error}
    with ReuseLoader(Numbers(), 4, reuse=2, **how) as loader:
        if on_error == "raise":
            with pytest.raises(SampleTimeout, match="to read sample 5"):
                served(loader)
        else:
            ids = served(loader)
            assert len(ids) == 32 and set(ids) == {*range(16)} - {5}
            assert [*loader.skipped] == [5]


def test_a_loader_with_a_timeout_serves_what_one_without_does() -> None:
    def batches(workers: Workers) -> list[Any]:
        with ReuseLoader(data.Pictures(16), 4, reuse=2, workers=workers) as loader:
            return [*loader]

    for mine, other in zip(batches(Workers(3, timeout=60)), batches(Workers(3)), strict=True):
        assert all(map(torch.equal, mine, other))


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
