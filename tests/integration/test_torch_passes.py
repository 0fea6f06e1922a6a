"""A DataLoader's passes and batches of any data set are served here too, or refused by name."""

import gc
import multiprocessing
import random
import time
from collections import OrderedDict, UserDict, UserList, defaultdict, deque
from collections.abc import Callable, Iterator, Mapping, Sequence
from contextlib import nullcontext
from enum import IntEnum
from pathlib import Path
from types import SimpleNamespace
from typing import Any, NamedTuple

import numpy as np
import pytest
import torch
from support import loader_datasets as sets
from support.numbered_samples import Made
from torch.nn.utils.rnn import pack_sequence
from torch.utils.data import (
    BatchSampler,
    DataLoader,
    Dataset,
    IterableDataset,
    SequentialSampler,
    default_collate,
    get_worker_info,
)
from torchvision import datasets
from torchvision.transforms import v2

from loaders import ReuseLoader, Workers
from loaders.errors import LoaderError, PassEnded, SampleShapeError, WorkerDied

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
    killed = tmp_path / "killed"
    data, workers = sets.Killed(COUNT, 9, times, killed), Workers(2, "process")
    got: list[int] = []
    with ReuseLoader(data, 2, 1, shuffle=False, workers=workers) as loader:
        end = pytest.raises(WorkerDied, match="had died before") if times == 2 else nullcontext()
        with end:
            for _, ids in loader:
                got += ids.tolist()
    assert got == list(range(COUNT if times == 1 else len(got)))
    assert killed.read_text() == "x" * times


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


def test_the_workers_of_a_loader_that_only_a_cycle_holds_are_told_to_end(
    monkeypatch: pytest.MonkeyPatch,
) -> None:
    wait = 30.0  # torch's, for a worker to end
    monkeypatch.setattr(torch.utils.data._utils, "MP_STATUS_CHECK_INTERVAL", wait)
    gc.collect()
    held = SimpleNamespace(loader=ReuseLoader(Numbers(), 4, 1, workers=Workers(2, "process")))
    held.me = held
    next(iter(held.loader))
    workers = multiprocessing.active_children()
    del held
    begun = time.perf_counter()
    gc.collect()
    assert time.perf_counter() - begun < wait
    assert [worker.exitcode for worker in workers] == [0, 0]


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


# ---- what other people's data sets give: the batches of a DataLoader, or a refusal --------------


def same(one: Any, other: Any) -> bool:
    """Whether two batches are equal, their types too. (Words are a list, where torch may have a
    tuple of them.)"""
    if isinstance(one, list) and all(isinstance(word, str | bytes) for word in one):
        return one == list(other)
    if type(one) is not type(other):
        return False
    if isinstance(one, torch.Tensor):
        return one.dtype == other.dtype and torch.equal(one, other)
    if isinstance(one, Mapping):
        return list(one) == list(other) and all(same(one[key], other[key]) for key in one)
    if isinstance(one, Sequence) and not isinstance(one, str | bytes):
        return len(one) == len(other) and all(map(same, one, other))
    return one == other


def batches(loader: Any) -> list[Any]:
    """What a pass gives; the type of the exception that ends it takes a batch's place."""
    found: list[Any] = []
    try:
        for batch in loader:
            found.append(batch)
    except Exception as error:
        found.append(type(error).__name__)
    return found


# ---- CIFAR-10 and MNIST, with other labels ------------------------------------------------------

FEW = 7
LABELS = {
    "numbers": [3, 1, 2, 0, 9, 8, 7],
    "soft": [0.1 * n for n in range(FEW)],
    "bools": [n % 2 == 0 for n in range(FEW)],
    "one-hot": [[float(n == k) for k in range(3)] for n in range(FEW)],
    "pairs": [(n, n / 2) for n in range(FEW)],
    "dicts": [{"coarse": n, "fine": n / 2} for n in range(FEW)],
    "words": [f"class {n}" for n in range(FEW)],
    "int32": np.arange(FEW, dtype=np.int32),
    "float32 rows": np.eye(FEW, dtype=np.float32),
    "uint8 tensor": torch.arange(FEW, dtype=torch.uint8),
    "float16 tensor": torch.linspace(0, 1, FEW, dtype=torch.float16),
    "rows": torch.eye(FEW),
    "numpy words": np.array(["a", "bc"] * 3 + ["d"]),
    "tensors": [torch.tensor(n / 2) for n in range(FEW)],
}


@pytest.mark.parametrize("labels", LABELS)
@pytest.mark.parametrize("kind", [datasets.CIFAR10, datasets.MNIST])
def test_labels_in_memory_keep_their_values_and_types(kind: type, labels: str) -> None:
    dataset = sets.in_memory(kind, [0] * FEW, v2.PILToTensor())
    theirs = DataLoader(dataset, 3)
    with ReuseLoader.from_dataloader(theirs, reuse=1) as loader:
        assert same(list(loader), list(theirs))
        dataset.targets = LABELS[labels]
        expected, served = batches(theirs), batches(loader)
    if isinstance(expected[-1], str):
        assert isinstance(served[-1], str)  # torch refuses them as well
    else:
        assert same(served, expected)


# ---- samples of odd classes ---------------------------------------------------------------------


class Degree(IntEnum):
    LOW = 0
    HIGH = 1


class OwnDict(dict[str, Any]):
    """As libraries return it."""


class OwnFloat(float):
    """As libraries return it."""


class Pair(NamedTuple):
    left: torch.Tensor
    right: Any


SAMPLES: dict[str, Callable[[int], Any]] = {
    "tensor": lambda n: torch.full((2, 3), n / 3),
    "array": lambda n: np.full((3, 2), n, dtype=np.int16),
    "non-contiguous": lambda n: torch.arange(6).reshape(2, 3).t() + n,
    "tuple": lambda n: (torch.full((2,), n, dtype=torch.int32), n, n / 3, n % 2 == 0),
    "nested": lambda n: {"a": (torch.tensor(n), [n, n / 2]), "b": {"c": f"sample {n}"}},
    "namedtuple": lambda n: Pair(torch.full((2,), n), {"name": f"sample {n}", "label": n}),
    "words": lambda n: (f"sample {n}", bytes([n]), np.str_(f"sample {n}")),
    "scalars": lambda n: [np.float32(n / 3), np.int16(n), torch.tensor([n / 3]).half()],
    "int": lambda n: n,
    "str": lambda n: f"sample {n}",
    "UserDict": lambda n: UserDict(z=torch.full((2,), n), a=n / 2),
    "dict": lambda n: (OwnDict(x=n), n),
    "OrderedDict": lambda n: OrderedDict(z=n, a=n + 0.5),
    "defaultdict": lambda n: defaultdict(int, a=n),
    "IntEnum": lambda n: (torch.ones(2), Degree(n % 2)),
    "float": lambda n: [OwnFloat(n)],
    "UserList": lambda n: UserList([n, n + 1]),
    "deque": lambda n: deque([n, n / 2]),
    "range": lambda n: range(n, n + 3),
    "float8": lambda n: torch.full((3,), n).to(torch.float8_e4m3fn),
    "conjugate": lambda n: torch.full((2,), 1j * n).conj(),
    "negative": lambda n: torch.full((2,), 1j * n).conj().imag,
}
REFUSED: dict[str, Callable[[int], Any]] = {
    "PackedSequence": lambda n: pack_sequence([torch.ones(3)]),
    "sparse_coo": lambda n: (n, torch.eye(3).to_sparse()),
    "requires_grad": lambda n: torch.ones(3, requires_grad=True) * n,
    "meta": lambda n: torch.ones(3, device="meta"),
}


@pytest.mark.parametrize("kind", SAMPLES)
@pytest.mark.parametrize(("reuse", "reader"), [(1, "thread"), (3, "thread"), (3, "process")])
def test_samples_of_any_class_make_torchs_batches(kind: str, reuse: int, reader: Any) -> None:
    data = Made(FEW, SAMPLES[kind])
    with ReuseLoader(data, 3, reuse, workers=Workers(1, reader)) as loader:
        for batch in loader:
            assert loader.last_batch is not None
            ids = loader.last_batch.ids.tolist()
            assert same(batch, default_collate([data[i] for i in ids]))


def test_keys_in_another_order_do_not_swap_the_parts_of_a_sample() -> None:
    data = Made(6, lambda n: {"a": n, "b": -n} if n % 2 else {"b": -n, "a": n})
    for batch in ReuseLoader(data, 3, 2, workers=Workers(1, "thread")):
        assert torch.equal(batch["a"], -batch["b"])


@pytest.mark.parametrize("kind", REFUSED)
def test_what_no_buffer_keeps_is_refused_by_its_name(kind: str) -> None:
    said = f"{kind}.*let the data set return"
    loader = ReuseLoader(Made(FEW, REFUSED[kind]), 3, 1, workers=Workers(1, "thread"))
    with loader, pytest.raises(SampleShapeError, match=said):
        next(iter(loader))
