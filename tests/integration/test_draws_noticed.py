"""What a data set draws when it is read: refused where it would freeze, repeated by a seed."""

import random
from collections.abc import Callable
from typing import Any

import numpy as np
import pytest
import torch
from torch.utils.data import DataLoader, Dataset

from loaders import Cache, ReuseLoader, Workers
from loaders.errors import FrozenDraw

SAMPLES, RARE = 200, 137
READERS: dict[str, dict[str, Any]] = {
    "processes": {"workers": Workers(2, "process")},
    "nobody": {"workers": 0},
}
DRAWS: dict[str, Callable[["Rare"], float]] = {
    "torch": lambda _: torch.rand(()).item(),
    "numpy": lambda _: np.random.rand(),
    "random": lambda _: random.random(),
    "held": lambda data: data.own.random(),
}


class Rare(Dataset[torch.Tensor]):
    """One sample of many is random."""

    def __init__(self, draw: str) -> None:
        self.draw, self.own = draw, np.random.default_rng(5)

    def __len__(self) -> int:
        return SAMPLES

    def __getitem__(self, index: int) -> torch.Tensor:
        return torch.tensor([index, DRAWS[self.draw](self) if index == RARE else 0.0])


@pytest.mark.parametrize("reader", READERS)
@pytest.mark.parametrize("draw", DRAWS)
def test_a_rare_sample_that_draws_is_refused_when_it_would_be_served_again(
    draw: str, reader: str
) -> None:
    with (
        ReuseLoader(Rare(draw), 4, 2, **READERS[reader]) as loader,
        pytest.raises(FrozenDraw, match=rf"reading sample {RARE} of Rare drew random"),
    ):
        list(loader)


@pytest.mark.parametrize("reader", READERS)
def test_the_first_sample_of_all_is_watched_too(reader: str) -> None:
    """It is read before the others, to see how large a slot must be."""
    order = [RARE, *range(RARE)]
    with (
        ReuseLoader(Rare("torch"), 4, 2, sampler=order, **READERS[reader]) as loader,
        pytest.raises(FrozenDraw, match=f"reading sample {RARE} of Rare"),
    ):
        list(loader)


@pytest.mark.parametrize("reader", READERS)
def test_a_cache_would_serve_it_again_too_and_skipping_is_no_way_round(reader: str) -> None:
    options: dict[str, Any] = {"cache": Cache("ram", 10**6), "on_error": "skip"}
    with (
        ReuseLoader(Rare("torch"), 4, 1, **options, **READERS[reader]) as loader,
        pytest.raises(FrozenDraw, match=f"reading sample {RARE}"),
    ):
        list(loader)


@pytest.mark.parametrize("reader", READERS)
@pytest.mark.parametrize("options", [{"reuse": 1}, {"reuse": 2, "reaugment": False}], ids=str)
def test_a_sample_that_draws_is_served_where_nothing_freezes(
    options: dict[str, Any], reader: str
) -> None:
    with ReuseLoader(Rare("torch"), 4, **options, **READERS[reader]) as loader:
        drawn = [
            {value for batch in loader for index, value in batch.tolist() if index == RARE}
            for _ in range(2)
        ]
    assert [len(values) for values in drawn] == [1, 1]
    assert drawn[0] != drawn[1]


class Noisy(Dataset[torch.Tensor]):
    """Every sample is random. It remembers which ones were read."""

    def __init__(self) -> None:
        self.read: list[int] = []

    def __len__(self) -> int:
        return 24

    def __getitem__(self, index: int) -> torch.Tensor:
        self.read.append(index)
        return torch.tensor([index, torch.rand(()).item(), random.random()])


@pytest.mark.draws_seeds
def test_runs_without_workers_are_repeated_by_a_seed() -> None:
    """The training draws from the same generators, between the batches."""

    def run(seed: int) -> list[Any]:
        torch.manual_seed(seed)
        random.seed(seed)
        data = DataLoader(Noisy(), 4, shuffle=True, num_workers=0)
        with ReuseLoader.from_dataloader(data, reuse=1) as loader:
            return [
                (batch.tolist(), torch.rand(()).item(), random.random())
                for _ in range(2)
                for batch in loader
            ]

    with torch.random.fork_rng([]):
        state = random.getstate()
        first = run(1)
        assert run(1) == run(1) == first
        assert run(2) != first
        random.setstate(state)


def test_without_workers_nothing_is_read_ahead() -> None:
    data = Noisy()
    with ReuseLoader(data, 4, 1, workers=0) as loader:
        for number, batch in enumerate(loader, 1):
            if number == 1:
                data.read.clear()
                continue
            assert len(data.read) == 4 * (number - 1)
            assert sorted(data.read[-4:]) == sorted(batch[:, 0].int().tolist())
