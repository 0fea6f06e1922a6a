"""Data sets of users' own that apply a random transform in [i]: it is redone, or refused."""

import re
from collections import defaultdict
from pathlib import Path
from typing import Any

import pytest
import torch
from support.own_transforms import (
    LIFTABLE,
    RARE,
    RARELY,
    REFUSED,
    SAMPLES,
    Flip,
    Own,
)
from torch.utils.data import DataLoader
from torchvision import transforms
from torchvision.datasets import ImageFolder

from loaders import LoaderError, ReuseLoader, Workers
from loaders.adopting.probing import digests_of
from loaders.errors import FrozenDraw

READERS: dict[str, dict[str, Any]] = {
    "processes": {"workers": Workers(2, "process")},
    "threads": {"workers": Workers(2, "thread")},
    "nobody": {"workers": 0},
}
REUSE = 12


def as_they_are(samples: list[Any]) -> list[Any]:
    return samples


def told(sample: Any) -> str:
    return str(sorted(digests_of(sample).items()))


@pytest.mark.parametrize("name", LIFTABLE)
@pytest.mark.parametrize("reader", ["processes", "nobody"])
def test_each_serve_is_a_sample_as_the_data_set_makes_it_and_draws_anew(
    name: str, reader: str
) -> None:
    data = LIFTABLE[name]()
    before = dict(vars(data))
    served = defaultdict[int, set[str]](set)
    how = READERS[reader]
    with ReuseLoader(data, 7, REUSE, collate=as_they_are, **how) as loader:
        for batch in loader:
            assert loader.last_batch is not None
            for i, sample in zip(loader.last_batch.ids.tolist(), batch, strict=True):
                served[i].add(told(sample))
        assert loader.stats.decoded == SAMPLES
        assert loader.dataset is data
    assert all(vars(data)[attribute] is value for attribute, value in before.items())
    assert sorted(served) == [*range(SAMPLES)]
    for i, outcomes in served.items():
        assert outcomes <= {told(data[i]) for _ in range(64)}
    assert sum(len(outcomes) > 1 for outcomes in served.values()) == SAMPLES


def shape_of(batch: Any) -> Any:
    if isinstance(batch, torch.Tensor):
        return batch.dtype, batch.shape
    if isinstance(batch, dict):
        return {key: shape_of(part) for key, part in batch.items()}
    return [shape_of(part) for part in batch]


@pytest.mark.parametrize("name", REFUSED)
def test_what_is_not_applied_last_and_once_is_refused_by_name(name: str) -> None:
    make, why = REFUSED[name]
    with pytest.raises(LoaderError, match=f"is random: .*{why}") as error:
        ReuseLoader(make(), 7, 2, workers=0)
    assert re.search(
        r"`t, dataset\.(\w+) = dataset\.\1, None`, and give augment=", str(error.value)
    )
    data = make()
    with ReuseLoader(data, 7, 1, workers=0, collate=as_they_are) as loader:
        assert sum(map(len, loader)) == SAMPLES
        assert loader.setup.opened.dataset is data


@pytest.mark.parametrize("reader", READERS)
@pytest.mark.parametrize("name", RARELY)
def test_a_sample_that_is_made_otherwise_is_refused_when_it_is_read(name: str, reader: str) -> None:
    data = Own(RARELY[name], Flip())
    with (
        ReuseLoader(data, 7, 2, collate=as_they_are, on_error="skip", **READERS[reader]) as loader,
        pytest.raises(FrozenDraw, match=rf"sample {RARE} of Own is not made as others.*reuse=1"),
    ):
        list(loader)


@pytest.mark.parametrize("name", RARELY)
def test_without_reuse_the_data_set_is_read_as_it_is(name: str) -> None:
    data = Own(RARELY[name], Flip())
    with ReuseLoader(data, 7, 2, collate=as_they_are, workers=0) as loader:
        loader.set_reuse(1)
        served = [sample for batch in loader for sample in batch]
        assert len(served) == SAMPLES and loader.setup.opened.dataset is data
        loader.set_reuse(2)
        with pytest.raises(FrozenDraw):
            list(loader)


def test_a_folder_whose_transform_returns_several_views_gives_a_list_of_batches(
    tmp_path: Path, make_pictures: Any
) -> None:
    crop = transforms.Compose([transforms.RandomCrop(6), transforms.ToTensor()])
    root = make_pictures(tmp_path / "pictures", {"cat": 5, "dog": 3})
    dataset = ImageFolder(str(root), lambda picture: [crop(picture), crop(picture)])
    theirs, _ = next(iter(DataLoader(dataset, 4)))
    with ReuseLoader(dataset, 4, 2, workers=2) as loader:
        for views, _ in loader:
            assert shape_of(views) == shape_of(theirs)
            assert not torch.equal(*views)
