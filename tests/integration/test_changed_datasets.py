"""A pass serves the data set as it is when the pass begins, whoever reads it."""

from collections.abc import Callable
from typing import Any

import pytest
import torch
from torch.utils.data import DataLoader, Dataset, Subset, TensorDataset

from loaders import Cache, ReuseLoader, Workers

SCALE = 1
READERS: dict[str, dict[str, Any]] = {
    "processes": {"workers": Workers(2, "process")},
    "threads": {"workers": Workers(2, "thread")},
    "nobody": {"workers": 0},
}


def negated(sample: torch.Tensor) -> torch.Tensor:
    return -sample


class Rows(Dataset[torch.Tensor]):
    """Each sample tells all that it is made of."""

    def __init__(self) -> None:
        self.samples, self.targets, self.epoch = [*range(14)], [0] * 14, 0
        self.transform: Callable[[torch.Tensor], torch.Tensor] | None = None

    def __len__(self) -> int:
        return len(self.samples)

    def __getitem__(self, index: int) -> torch.Tensor:
        sample = torch.tensor([self.samples[index], self.targets[index], self.epoch, SCALE])
        return sample if self.transform is None else self.transform(sample)


def set_epoch(data: Any) -> None:
    data.epoch += 5


def set_transform(data: Any) -> None:
    data.transform = negated


def set_samples(data: Any) -> None:
    data.samples = [i + 100 for i in data.samples]


def set_one_target(data: Any) -> None:
    data.targets[9] += 1


def set_tensors(data: Any) -> None:
    data.tensors = (data.tensors[0] + 100,)


def write_into_tensor(data: Any) -> None:
    data.tensors[0][3] += 1


def extend_indices(data: Any) -> None:
    data.indices.extend([11, 3, 12])


def set_inside(data: Any) -> None:
    data.dataset.epoch += 5


def set_global(_: Any) -> None:
    globals()["SCALE"] += 1


CHANGES: list[tuple[Callable[[], Any], Callable[[Any], None]]] = [
    (Rows, set_epoch),
    (Rows, set_transform),
    (Rows, set_samples),
    (Rows, set_one_target),
    (Rows, set_global),
    (lambda: Subset(Rows(), [*range(9)]), extend_indices),
    (lambda: Subset(Rows(), [*range(9)]), set_inside),
    (lambda: TensorDataset(torch.arange(14)), set_tensors),
    (lambda: TensorDataset(torch.arange(14)), write_into_tensor),
]


def flat(batches: Any) -> list[Any]:
    return [b[0].tolist() if isinstance(b, list) else b.tolist() for b in batches]


@pytest.mark.parametrize("reader", READERS)
@pytest.mark.parametrize(("make", "change"), CHANGES, ids=[c.__name__ for _, c in CHANGES])
def test_a_pass_serves_what_a_dataloader_would_serve_then(
    make: Callable[[], Any], change: Any, reader: str, monkeypatch: pytest.MonkeyPatch
) -> None:
    monkeypatch.setitem(globals(), "SCALE", 1)
    data = make()
    with ReuseLoader(data, 4, 1, shuffle=False, **READERS[reader]) as loader:
        before = flat(loader)
        assert before == flat(DataLoader(data, 4)) == flat(loader)
        change(loader.dataset)
        expected = flat(DataLoader(data, 4))
        assert expected != before
        assert flat(loader) == expected
        assert len(loader) == len(expected)


@pytest.mark.parametrize("reader", READERS)
def test_a_change_within_a_pass_is_served_from_the_next_one_on(reader: str) -> None:
    data = Rows()
    options = {"buffer_batches": 2, "shuffle": False, **READERS[reader]}
    with ReuseLoader(data, 4, 2, **options) as loader:
        list(loader)
        data.epoch = 1
        for _ in loader:
            pass
        data.epoch = 2
        assert {epoch for batch in flat(loader) for _, _, epoch, _ in batch} == {2}


@pytest.mark.parametrize("reader", READERS)
def test_a_cache_does_not_serve_what_the_data_set_was_before(reader: str) -> None:
    data = Rows()
    kept: dict[str, Any] = {"cache": Cache("ram", 10**6), "shuffle": False}
    with ReuseLoader(data, 4, 1, **kept, **READERS[reader]) as loader:
        list(loader)
        data.epoch = 1
        assert flat(loader) == flat(DataLoader(data, 4))


@pytest.mark.parametrize("reader", READERS)
def test_a_data_set_that_stays_is_opened_once(reader: str) -> None:
    with ReuseLoader(Rows(), 4, 1, **READERS[reader]) as loader:
        setup = loader.setup
        for _ in range(3):
            list(loader)
        assert loader.setup is setup
