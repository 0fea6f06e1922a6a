"""Passes that torch's DataLoader makes: what is served once and as it is read, at reuse 1."""

import logging
import os
import random
import signal
from collections.abc import Callable, Iterator
from pathlib import Path
from typing import Any

import numpy as np
import pytest
import torch
from torch.utils.data import (
    BatchSampler,
    DataLoader,
    Dataset,
    IterableDataset,
    SequentialSampler,
    get_worker_info,
)

from loaders import ReuseLoader, Workers
from loaders.errors import LoaderError, PassEnded, WorkerDied

COUNT = 20


class Numbers(Dataset[Any]):
    """[i] gives a tensor and a word; of a list of ids, a tensor of them."""

    def __len__(self) -> int:
        return COUNT

    def __getitem__(self, index: Any) -> Any:
        return torch.as_tensor(index), str(index)


class Drawn(Numbers):
    """[i] draws from each of the generators that everybody shares."""

    def __getitem__(self, index: Any) -> Any:
        return index, torch.rand(()), np.random.rand(), random.random()


class Deadly(Numbers):
    """Reading sample 9 ends the process, so often."""

    def __init__(self, notes: Path, times: int) -> None:
        self.notes, self.times = notes, times

    def __getitem__(self, index: Any) -> Any:
        if index == 9 and len(self.notes.read_text()) < self.times:
            self.notes.write_text(self.notes.read_text() + "x")
            os.kill(os.getpid(), signal.SIGKILL)
        return index


class Torn(Numbers):
    """Sample 6 cannot be read."""

    def __getitem__(self, index: Any) -> Any:
        if index == 6:
            raise ValueError("no sample 6")
        return index


class Asked(Numbers):
    """[i] says which worker reads it, and of which data set."""

    def __getitem__(self, index: Any) -> Any:
        info = get_worker_info()
        return index, info is not None and info.dataset is self, -1 if info is None else info.id


class Shared(IterableDataset[int]):
    """Each worker gives its share."""

    def __iter__(self) -> Iterator[int]:
        info = get_worker_info()
        start, step = (0, 1) if info is None else (info.id, info.num_workers)
        return iter(range(start, COUNT, step))


BUCKETS = [[3, 1, 2], [4], [7, 7]]
THEIRS: dict[str, Callable[[int], DataLoader[Any]]] = {
    "buckets": lambda n: DataLoader(Numbers(), batch_sampler=BUCKETS, num_workers=n),
    "batch sampler": lambda n: DataLoader(
        Numbers(), batch_sampler=BatchSampler(range(9, 0, -1), 4, False), num_workers=n
    ),
    "no batches": lambda n: DataLoader(Numbers(), batch_size=None, num_workers=n),
    "lists of ids": lambda n: DataLoader(
        Numbers(), batch_size=None, sampler=BatchSampler(range(9), 4, True), num_workers=n
    ),
    "stream": lambda n: DataLoader(Shared(), 3, num_workers=n),
    "stream of batches": lambda n: DataLoader(Shared(), batch_size=None, num_workers=n),
    "short last batch": lambda n: DataLoader(Numbers(), 3, num_workers=n),
    "dropped last batch": lambda n: DataLoader(Numbers(), 3, num_workers=n, drop_last=True),
}


@pytest.mark.parametrize("workers", [0, 2])
@pytest.mark.parametrize("kind", THEIRS)
def test_it_serves_what_the_dataloader_serves_and_resumes(kind: str, workers: int) -> None:
    theirs = THEIRS[kind](workers)
    expected = [str(batch) for batch in theirs]
    with ReuseLoader.from_dataloader(theirs, reuse=1) as loader:
        for _ in range(2):
            assert [str(batch) for batch in loader] == expected
        serving = iter(loader)
        next(serving)
        state = loader.state_dict()
    with ReuseLoader.from_dataloader(theirs, reuse=1) as resumed:
        resumed.load_state_dict(state)
        assert [str(batch) for batch in resumed] == expected[1:]


@pytest.mark.parametrize("kind", ["buckets", "no batches", "stream of batches"])
def test_reuse_would_mix_their_batches_so_it_is_refused(kind: str) -> None:
    with pytest.raises(LoaderError, match="mixes samples of different batches"):
        ReuseLoader.from_dataloader(THEIRS[kind](0), reuse=3)
    loader = ReuseLoader.from_dataloader(THEIRS[kind](0), reuse=1)
    with loader, pytest.raises(LoaderError, match="mixes samples of different batches"):
        loader.set_reuse(2)


def test_a_batch_sampler_that_names_no_rank_is_refused_on_several() -> None:
    loader = ReuseLoader.from_dataloader(THEIRS["buckets"](0), reuse=1, rank=(0, 2))
    with pytest.raises(LoaderError, match="names no rank"):
        next(iter(loader))


def test_what_workers_draw_is_a_function_of_pass_and_sample() -> None:
    def drawn(workers: int, batch: int) -> dict[int, tuple[float, ...]]:
        with ReuseLoader(Drawn(), batch, 1, seed=7, workers=Workers(workers, "process")) as loader:
            for _ in range(2):
                rows = [tuple(map(float, row)) for b in loader for row in zip(*b, strict=True)]
            return {int(row[0]): row[1:] for row in rows}

    one = drawn(1, 4)
    assert one == drawn(2, 5)
    assert len(set(one.values())) == COUNT


@pytest.mark.parametrize("workers", [0, 2])
def test_a_data_set_sees_what_it_sees_in_a_dataloader(workers: int) -> None:
    theirs = DataLoader(Asked(), 4, num_workers=workers)
    expected = [[column.tolist() for column in batch] for batch in theirs]
    with ReuseLoader.from_dataloader(theirs, reuse=1) as loader:
        assert [[column.tolist() for column in batch] for batch in loader] == expected


@pytest.mark.parametrize("times", [1, 2])
def test_a_worker_may_die_once_in_a_pass(tmp_path: Path, times: int) -> None:
    notes = tmp_path / "deaths"
    notes.touch()
    got: list[int] = []
    workers = Workers(2, "process")
    with ReuseLoader(Deadly(notes, times), 2, 1, shuffle=False, workers=workers) as loader:
        if times == 1:
            got = [index for batch in loader for index in batch.tolist()]
            assert got == list(range(COUNT))
        else:
            with pytest.raises(WorkerDied, match="had died before"):
                for batch in loader:
                    got += batch.tolist()
            assert got == list(range(len(got)))
    assert notes.read_text() == "x" * times


@pytest.mark.parametrize("workers", [0, 2])
def test_who_catches_an_error_may_go_on_with_the_next_batch(workers: int) -> None:
    with ReuseLoader.from_dataloader(DataLoader(Torn(), 4, num_workers=workers), 1) as loader:
        serving, got = iter(loader), []
        for _ in range(COUNT // 4):
            try:
                got.append(next(serving).tolist())
            except ValueError as error:
                assert "no sample 6" in str(error)
                got.append(None)
        assert next(serving, "the end") == "the end"
    assert got == [[0, 1, 2, 3], None, [8, 9, 10, 11], [12, 13, 14, 15], [16, 17, 18, 19]]


def test_the_summary_says_who_makes_the_batches(caplog: pytest.LogCaptureFixture) -> None:
    caplog.set_level(logging.INFO, "loaders")
    for theirs in (
        DataLoader(Numbers(), 4, prefetch_factor=4, num_workers=2),
        THEIRS["buckets"](2),
    ):
        ReuseLoader.from_dataloader(theirs, 1)
    plain, own = (record.getMessage() for record in caplog.records)
    assert plain.startswith("made by torch's DataLoader: nothing is reused, cached or redone;")
    assert plain.endswith("prefetch_factor=4 has no effect: how much is read ahead is settled here")
    assert own.startswith("made as the DataLoader makes them, which has a batch_sampler (list);")


def test_one_iterator_at_a_time() -> None:
    with ReuseLoader(Numbers(), 4, 1, workers=Workers(1, "process")) as loader:
        first, second = iter(loader), None
        next(first)
        second = iter(loader)
        next(second)
        with pytest.raises(PassEnded, match="one iterator at a time"):
            next(first)


def test_the_attributes_of_a_dataloader_are_true() -> None:
    def init(number: int) -> None: ...

    theirs = DataLoader(Numbers(), 4, num_workers=2, timeout=60, worker_init_fn=init)
    with ReuseLoader.from_dataloader(theirs, reuse=1) as loader:
        same = ("num_workers", "timeout", "worker_init_fn", "collate_fn", "pin_memory", "in_order")
        for name in (*same, "batch_size", "drop_last", "dataset"):
            assert getattr(loader, name) == getattr(theirs, name), name
    for reuse in (1, 3):
        with ReuseLoader(Numbers(), 4, reuse, seed=5, workers=0) as loader:
            assert not isinstance(loader.sampler, SequentialSampler)  # for overfit_batches
            assert sorted(loader.sampler) == list(range(COUNT))
            for _ in range(2):
                planned = list(loader.batch_sampler)
                assert len(planned) == len(loader.batch_sampler) == len(loader)
                assert [batch[0].tolist() for batch in loader] == planned
    assert isinstance(ReuseLoader(Numbers(), 4, 1, shuffle=False).sampler, SequentialSampler)
    with ReuseLoader.from_dataloader(THEIRS["buckets"](0), reuse=1) as loader:
        assert loader.batch_sampler is BUCKETS
    assert ReuseLoader(Shared(), 4, 1).sampler is None
