"""Hugging Face's data sets: a transform is taken apart, a stream goes on from its own state.

They are in no extra of ours (with pyarrow and pandas they take 270 MB). Without them all of this is
skipped.
"""

import json
import random
from collections import Counter
from typing import Any

import numpy as np
import pytest
import torch
from PIL import Image
from torch.utils.data import DataLoader

from loaders import LoaderError, ReuseLoader
from loaders.streams import IterableSamples

datasets = pytest.importorskip("datasets", reason="Hugging Face's datasets is not installed")

SAMPLES = 40


def rows() -> Any:
    noise = np.random.default_rng(0).integers(0, 256, (SAMPLES, 6, 5, 3), dtype=np.uint8)
    features = datasets.Features({"image": datasets.Image(), "label": datasets.Value("int64")})
    told = {"image": [Image.fromarray(each) for each in noise], "label": list(range(SAMPLES))}
    return datasets.Dataset.from_dict(told, features=features)


def scaled(batch: dict[str, list[Any]]) -> dict[str, list[Any]]:
    pixels = [torch.from_numpy(np.array(each)).float() / 255 for each in batch["image"]]
    return {"pixels": pixels, "label": batch["label"]}


def shaken(batch: dict[str, list[Any]]) -> dict[str, list[Any]]:
    return {**scaled(batch), "drawn": [random.random() for _ in batch["label"]]}


def watch(loader: ReuseLoader) -> list[list[int]]:
    return [batch["number"].tolist() for batch in loader]


# ---- map-style ----------------------------------------------------------------------------------


def test_a_transform_is_redone_at_every_serve_over_columns_that_are_decoded_once() -> None:
    dataset = rows().with_transform(shaken)
    with ReuseLoader(dataset, 8, 3, workers=2) as loader:
        assert loader.setup.opened.split is not None
        assert "redone at every serve: shaken" in loader.setup.opened.split.report
        drawn: dict[int, set[float]] = {}
        for batch in loader:
            assert set(batch) == {"pixels", "label", "drawn"}
            for label, draw in zip(batch["label"].tolist(), batch["drawn"].tolist(), strict=True):
                drawn.setdefault(label, set()).add(draw)
        assert loader.stats.decoded == SAMPLES
    assert {label: len(draws) for label, draws in drawn.items()} == dict.fromkeys(range(SAMPLES), 3)


@pytest.mark.parametrize("columns", [None, ["image", "label"]])
def test_a_transform_that_is_not_random_gives_what_a_dataloader_gives(columns: Any) -> None:
    dataset = rows()
    dataset.set_transform(scaled, columns=columns)
    theirs = list(DataLoader(dataset, 8))
    with ReuseLoader(dataset, 8, 1, shuffle=False, workers=2) as loader:
        for ours, batch in zip(loader, theirs, strict=True):
            assert ours.keys() == batch.keys()
            assert all(torch.equal(ours[name], batch[name]) for name in batch)


# ---- streams ------------------------------------------------------------------------------------


def stream(shuffled: bool = False, buffer: int = 10) -> Any:
    told = {"number": list(range(SAMPLES))}
    streamed = datasets.Dataset.from_dict(told).to_iterable_dataset(num_shards=4)
    streamed = streamed.map(lambda row: {"twice": 2 * row["number"]})
    return streamed.shuffle(seed=1, buffer_size=buffer) if shuffled else streamed


def loader_of(dataset: Any, **options: Any) -> ReuseLoader:
    usual = {"batch_size": 3, "reuse": 2, "buffer_batches": 2, "workers": 1, "seed": 5}
    return ReuseLoader(dataset, **{**usual, **options})


@pytest.mark.parametrize("shuffled", [False, True])
def test_a_stream_goes_on_after_any_batch(shuffled: bool) -> None:
    with loader_of(stream(shuffled)) as whole:
        expected = [*watch(whole), *watch(whole)]
    assert Counter(number for batch in expected for number in batch) == dict.fromkeys(
        range(SAMPLES), 4
    )
    with loader_of(stream(shuffled)) as one:
        states = []
        for _ in range(2):
            for _ in one:
                states.append(json.loads(json.dumps(one.state_dict())))
    for batches, state in enumerate(states, start=1):
        if batches % 4 == 1:
            with loader_of(stream(shuffled)) as resumed:
                resumed.load_state_dict(state)
                tail = watch(resumed)
                assert tail == expected[batches : batches + len(tail)], batches


def test_a_stream_goes_on_from_its_own_state_and_not_from_its_beginning() -> None:
    read: list[int] = []

    def reading(row: dict[str, int]) -> dict[str, int]:
        read.append(row["number"])
        return row

    told = datasets.Dataset.from_dict({"number": list(range(4000))})
    streamed = told.to_iterable_dataset(num_shards=40).map(reading)
    with loader_of(streamed, batch_size=20) as one:
        for batch, _ in enumerate(one):
            if batch == 380:
                break
        state = one.state_dict()
    read.clear()
    with loader_of(streamed, batch_size=20) as resumed:
        resumed.load_state_dict(state)
        assert len(watch(resumed)) == 400 - 381
    assert 0 < len(read) < 1000


@pytest.mark.parametrize("shards", [4, 3])
def test_ranks_get_samples_of_their_own(shards: int) -> None:
    told = datasets.Dataset.from_dict({"number": list(range(SAMPLES))})
    served: Counter[int] = Counter()
    for rank in range(2):
        streamed = told.to_iterable_dataset(num_shards=shards)
        promised = IterableSamples(streamed, samples=SAMPLES)
        with loader_of(promised, rank=(rank, 2)) as loader:
            served.update(number for batch in watch(loader) for number in batch)
    assert served == dict.fromkeys(range(SAMPLES), 2)


def test_other_data_in_a_stream_are_noticed() -> None:
    with loader_of(stream()) as one:
        next(iter(one))
        state = one.state_dict()
    other = stream().map(lambda row: {"number": row["number"] + 1})
    with loader_of(IterableSamples(other)) as resumed:
        resumed.load_state_dict(state)
        with pytest.raises(LoaderError, match="others than in the run that saved the state"):
            watch(resumed)
