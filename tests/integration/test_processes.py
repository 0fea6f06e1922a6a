"""Worker processes: the samples and the failures of the data set, as threads would give them."""

import contextlib
import multiprocessing
import os
from pathlib import Path
from typing import Any

import numpy as np
import pytest
import torch
from PIL import Image
from support import worker_datasets as sets

from loaders.errors import LoaderError, SourceError, WorkerDied
from loaders.slots.leaves import Chunk, Picture, copy_sample
from loaders.slots.slab import Slab
from loaders.workers.processes import StartMethod, WorkerProcess, default_start_method
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
def test_a_sample_is_what_the_data_set_returns(method: StartMethod) -> None:
    source = sets.Everything()
    with WorkerProcess(source, method, "reader") as worker:
        for ids in ([3], [5, 4, 90], [*range(40)]):
            chunk = worker.read(ids)
            assert chunk.error is None
            for i, sample in zip(ids, chunk.samples, strict=True):
                assert_same(sample, source[i])
        assert worker.restarts == 0


def assert_same(got: Any, wanted: Any) -> None:
    """Written out, not by `flatten`: it is what the worker uses itself."""
    if isinstance(wanted, dict):
        assert list(got) == list(wanted)
        for key in wanted:
            assert_same(got[key], wanted[key])
    elif isinstance(wanted, tuple | list):
        assert type(got).__name__ == type(wanted).__name__
        assert len(got) == len(wanted)
        for one, other in zip(got, wanted, strict=True):
            assert_same(one, other)
    elif isinstance(wanted, Image.Image):
        assert isinstance(got, Picture)
        assert got.picture_mode == wanted.mode
        # One bit a pixel, a palette: stored as RGB.
        plain = wanted.convert("RGB") if wanted.mode in ("1", "P") else wanted
        pixels = np.atleast_3d(np.array(plain)).transpose(2, 0, 1)
        assert np.array_equal(got.detach().numpy(), pixels)
    elif isinstance(wanted, torch.Tensor):
        assert type(got) is torch.Tensor
        assert got.dtype == wanted.dtype
        assert got.shape == wanted.shape
        assert torch.equal(got, wanted)
        assert not got.requires_grad
        # Another distance between rows, but the order of dimensions in memory stays.
        if wanted.numel() and 0 not in wanted.stride():
            assert np.argsort(got.stride()).tolist() == np.argsort(wanted.stride()).tolist()
    elif isinstance(wanted, np.ndarray) and wanted.dtype.kind == "f":
        assert type(got) is np.ndarray and got.dtype == wanted.dtype
        assert np.array_equal(got, wanted)
    else:
        assert type(got) is type(wanted)
        assert np.array_equal(got, wanted) if isinstance(got, np.ndarray) else got == wanted


def test_slots_hold_the_same_whether_a_process_or_a_thread_read_the_sample() -> None:
    source = sets.Everything()
    slabs = Slab(source[0], 4), Slab(source[0], 4)
    with WorkerProcess(source, None, "reader") as worker:
        for slot, sample in enumerate(worker.read([7, 8, 9, 10]).samples):
            slabs[0].write(slot, sample, slot)
    for slot in range(4):
        slabs[1].write(slot, source[7 + slot], slot)
    for slot in range(4):
        read, direct = (slab.leaves(slot) for slab in slabs)
        for one, other in zip(read, direct, strict=True):
            if isinstance(other, torch.Tensor):
                assert torch.equal(one, other)
                assert one.stride() == other.stride()
            else:
                assert np.array_equal(one, other)


def test_pictures_can_be_had_back_as_pillow_s() -> None:
    with WorkerProcess(sets.Everything(), None, "reader") as worker:
        pictures = copy_sample(worker.read([3]).samples[0])["picture"]
    for got, wanted in zip(pictures, sets.Everything()[3]["picture"], strict=True):
        if wanted.mode in ("1", "P"):  # RGB that remembers what it was, so that it can be refused
            assert_same(got, wanted)
            continue
        assert isinstance(got, Image.Image)
        assert (got.mode, got.size, got.tobytes()) == (wanted.mode, wanted.size, wanted.tobytes())


@every_method
def test_the_staging_area_grows_with_what_it_has_to_hold(method: StartMethod) -> None:
    with WorkerProcess(sets.Sized(), method, "reader") as worker:
        for ids in ([10], [200_000], [1], [300_000, 7, 5_000_000, 400_000], [0, 3]):
            for i, sample in zip(ids, worker.read(ids).samples, strict=True):
                assert sample.shape == (i,)
                assert bool((sample == i % 251).all())


@without_spawning
def test_nothing_of_it_has_a_name_in_shared_memory(method: StartMethod) -> None:
    before = named_memory(os.getpid())
    with WorkerProcess(sets.Sized(), method, "reader") as worker:
        worker.read([1_000_000])
        assert worker.pid is not None
        assert named_memory(os.getpid()) | named_memory(worker.pid) <= before


def named_memory(pid: int) -> set[str]:
    """What this process has open or mapped that stands in /dev/shm. (Others use it, too.)"""
    process = Path("/proc", str(pid))
    found = {line.split(maxsplit=5)[-1] for line in (process / "maps").read_text().splitlines()}
    for link in (process / "fd").iterdir():
        with contextlib.suppress(FileNotFoundError):
            found.add(os.readlink(link))
    return {name for name in found if name.startswith("/dev/shm/") and "(deleted)" not in name}


@without_spawning
def test_a_worker_computes_on_one_thread_in_a_process_of_its_own(method: StartMethod) -> None:
    with WorkerProcess(sets.Reporting(), method, "reader") as worker:
        [(threads, pid, alive)] = worker.read([0]).samples
        assert (threads, pid) == (1, worker.pid)
        assert pid != os.getpid()
        assert alive == 1


def test_the_processes_are_started_as_a_dataloaders_are() -> None:
    assert default_start_method() == multiprocessing.get_context().get_start_method() == "fork"
    assert WorkerProcess(sets.Sized(), None, "reader").start_method == "fork"


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


def test_another_number_of_samples_than_of_ids_is_refused() -> None:
    with WorkerProcess(sets.Together(spare=1), None, "reader") as worker:
        chunk = worker.read([3, 4])
        assert "__getitems__ of Together gave 3 samples for 2 ids" in str(chunk.error)


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


def test_a_data_set_that_exits_is_a_failure_and_no_death() -> None:
    with WorkerProcess(sets.Faulty(), None, "reader") as worker:
        assert type(worker.read([16]).error) is SystemExit
        assert worker.restarts == 0


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
