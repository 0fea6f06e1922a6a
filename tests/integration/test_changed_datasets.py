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


Change = tuple[Callable[[], Any], Callable[[Any], object]]
CHANGES: dict[str, Change] = {
    "epoch": (Rows, lambda data: setattr(data, "epoch", 5)),
    "transform": (Rows, lambda data: setattr(data, "transform", negated)),
    "samples": (Rows, lambda data: setattr(data, "samples", [i + 100 for i in data.samples])),
    "one target": (Rows, lambda data: data.targets.__setitem__(9, 1)),
    "a global": (Rows, lambda _: globals().update(SCALE=SCALE + 1)),
    "indices": (lambda: Subset(Rows(), [*range(9)]), lambda data: data.indices.extend([11, 3, 12])),
    "inside": (
        lambda: Subset(Rows(), [*range(9)]),
        lambda data: setattr(data.dataset, "epoch", 5),
    ),
    "tensors": (
        lambda: TensorDataset(torch.arange(14)),
        lambda data: setattr(data, "tensors", (data.tensors[0] + 100,)),
    ),
    "into a tensor": (
        lambda: TensorDataset(torch.arange(14)),
        lambda data: data.tensors[0].add_(1),
    ),
}


def flat(batches: Any) -> list[Any]:
    return [b[0].tolist() if isinstance(b, list) else b.tolist() for b in batches]


@pytest.mark.parametrize("reader", READERS)
@pytest.mark.parametrize(("make", "change"), CHANGES.values(), ids=CHANGES)
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
