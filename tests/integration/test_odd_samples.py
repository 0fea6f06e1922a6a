"""Samples that are None, or lack what others have: a collate function gets them as they are."""

from pathlib import Path
from typing import Any

import numpy as np
import pytest
import torch
from support import loader_datasets as data
from torch.utils.data import DataLoader

from loaders import Cache, LoaderError, ReuseLoader, Workers
from loaders.augment import Chain, Flip, RandomCrop, WholeSample
from loaders.errors import BufferTooSmall, SampleShapeError

SIZE = 20
both = pytest.mark.parametrize("reading", [Workers(2), Workers(2, "process")], ids=str)


def singles(loader: ReuseLoader, passes: int = 1) -> list[Any]:
    with loader:
        return [sample for _ in range(passes) for batch in loader for sample in batch]


def same(one: Any, other: Any) -> bool:
    if isinstance(one, dict):
        return one.keys() == other.keys() and all(same(one[k], other[k]) for k in one)
    if isinstance(one, torch.Tensor | np.ndarray):
        return type(one) is type(other) and bool((one == other).all())
    return one == other


# ---- None ---------------------------------------------------------------------------------------


@both
@pytest.mark.parametrize("broken", [(3,), (0, 1, 2), (*range(0, SIZE, 2),)], ids=str)
def test_a_collate_that_drops_what_is_none_works_as_with_a_dataloader(
    broken: tuple[int, ...], reading: Any
) -> None:
    broken_set = data.Broken(SIZE, broken)
    theirs = DataLoader(broken_set, 4, collate_fn=data.whole)
    with ReuseLoader.from_dataloader(theirs, reuse=1, workers=reading) as loader:
        batches = list(loader)
        assert loader.stats.served == SIZE  # a None is served, too
    assert len(batches) == 5
    for mine, other in zip(batches, theirs, strict=True):
        assert all(map(torch.equal, mine, other))


@pytest.mark.parametrize("ours", [True, False])
def test_what_is_none_stays_so_at_every_serve_and_the_rest_is_augmented(ours: bool) -> None:
    augment = Chain([RandomCrop(4)]) if ours else data.darker
    how: dict[str, Any] = {"augment": augment, "collate": data.as_they_are, "workers": 2}
    served = singles(ReuseLoader(data.Broken(SIZE, (3, 7)), 4, reuse=3, **how))
    assert sum(sample is None for sample in served) == 6
    for image, number in (sample for sample in served if sample is not None):
        if ours:
            assert image.shape == (3, 4, 4)
        else:
            assert torch.equal(image, data.pixels(number) // 2)


def test_a_cache_keeps_what_is_no_none(tmp_path: Path) -> None:
    broken = data.Broken(SIZE, (3, 7), tmp_path / "count")
    how: dict[str, Any] = {"cache": Cache("ram", 1 << 20), "collate": data.as_they_are}
    # One worker: another might begin the next pass with a sample that is still being decoded.
    with ReuseLoader(broken, 4, reuse=1, workers=1, **how) as loader:
        for _ in range(3):
            assert sum(s is None for batch in loader for s in batch) == 2
        assert loader.stats.cached == 2 * (SIZE - 2)


@both
@pytest.mark.parametrize("broken", [(3,), (0,), (*range(SIZE),)], ids=str)
def test_without_a_collate_a_none_is_named_with_what_to_do(
    broken: tuple[int, ...], reading: Any
) -> None:
    loader = ReuseLoader(data.Broken(SIZE, broken), 4, reuse=2, shuffle=False, workers=reading)
    said = rf"sample {broken[0]} is None.*give a collate function.*on_error=\"skip\""
    with loader, pytest.raises(SampleShapeError, match=said):
        list(loader)


# ---- keys ---------------------------------------------------------------------------------------


@both
@pytest.mark.parametrize("seed", range(4))  # another sample comes first each time
def test_a_collate_gets_every_sample_with_the_keys_that_it_has(seed: int, reading: Any) -> None:
    optional = data.Optional(SIZE)
    how: dict[str, Any] = {"collate": data.as_they_are, "workers": reading, "seed": seed}
    served = singles(ReuseLoader(optional, 4, reuse=2, **how), passes=2)
    assert sorted(sample["number"] for sample in served) == sorted([*range(SIZE)] * 4)
    assert all(same(sample, optional[sample["number"]]) for sample in served)


def test_what_a_serve_changes_in_an_odd_sample_no_other_serve_sees() -> None:
    how: dict[str, Any] = {"collate": data.as_they_are, "shuffle": False, "workers": 1}
    with ReuseLoader(data.Optional(SIZE), 4, reuse=2, **how) as loader:
        for batch in loader:
            for sample in batch:
                assert same(sample, data.Optional(SIZE)[sample["number"]])
                for value in sample.values():
                    if isinstance(value, torch.Tensor | np.ndarray):
                        value[...] = 0


@pytest.mark.parametrize("seed", range(4))
def test_a_mask_that_only_some_have_moves_with_its_picture(seed: int) -> None:
    how: dict[str, Any] = {"collate": data.as_they_are, "seed": seed, "parts": {"mask": "mask"}}
    moved = Chain([RandomCrop(5), Flip()])

    class Pictured(data.Optional):
        def __getitem__(self, index: int) -> Any:
            return super().__getitem__(5 * (index // 4) + index % 4)  # not those without a picture

    served = singles(ReuseLoader(Pictured(16), 4, reuse=3, augment=moved, **how))
    masks = [sample for sample in served if "mask" in sample]
    assert len(served) == 48 and 0 < len(masks) < 48
    assert all(sample["picture"].shape == (3, 5, 5) for sample in served)
    assert all(torch.equal(sample["mask"], sample["picture"][:1]) for sample in masks)


def test_the_draws_of_a_sample_do_not_depend_on_what_others_lack() -> None:
    moved = Chain([RandomCrop(5), Flip()])
    how: dict[str, Any] = {"collate": data.as_they_are, "augment": moved, "workers": 2}
    plain = singles(ReuseLoader(data.Pictures(SIZE), 4, reuse=2, **how))
    broken = singles(ReuseLoader(data.Broken(SIZE, (2, 9, 11)), 4, reuse=2, **how))
    for one, other in zip(broken, plain, strict=True):
        assert (one is None) == (other[1] in (2, 9, 11))
        assert one is None or torch.equal(one[0], other[0])


def test_an_unsaid_mask_that_the_first_sample_lacks_is_refused_with_its_sample() -> None:
    how: dict[str, Any] = {"collate": data.as_they_are, "augment": Chain([RandomCrop(5)])}

    class Later(data.Pictures):
        def __getitem__(self, index: int) -> Any:
            return {
                "picture": data.pixels(index),
                **({"mask": data.pixels(1)} if index == 9 else {}),
            }

    loader = ReuseLoader(Later(SIZE), 4, reuse=1, shuffle=False, **how)
    with loader, pytest.raises(LoaderError, match=r"leave part \['mask'\] where it is") as error:
        list(loader)
    assert "in sample 9, which has other parts than the first one" in error.value.__notes__


@both
def test_a_whole_sample_transform_gets_the_keys_that_are_there(reading: Any) -> None:
    how: dict[str, Any] = {"collate": data.as_they_are, "augment": WholeSample(data.named)}
    served = singles(ReuseLoader(data.Optional(SIZE), 4, reuse=2, **how, workers=reading))
    assert all(sample["named"] == sorted(k for k in sample if k != "named") for sample in served)


@pytest.mark.parametrize(
    ("first", "second", "said"),
    [
        ({"a": 1, "b": 2}, {"a": 1}, r"sample 1 is nested .* \(it lacks \['b'\]\): give a collate"),
        ({"a": 1}, {"a": 1, "b": 2}, r"sample 1 .*\(the first one lacks \['b'\]\)"),
        ((1, {"a": 1}), (1, {}), r"sample 1 .*\(it lacks \[1\]\['a'\]"),
    ],
)
def test_without_a_collate_a_missing_key_is_named_with_its_sample(
    first: Any, second: Any, said: str
) -> None:
    samples = [first, second, first, first]
    loader = ReuseLoader(samples, 2, reuse=1, shuffle=False, workers=1)
    with loader, pytest.raises(SampleShapeError, match=said):
        list(loader)


def test_the_memory_of_odd_samples_counts() -> None:
    class Growing(data.Pictures):
        def __getitem__(self, index: int) -> Any:
            more = {} if index == 0 else {"more": torch.zeros(1 << 16)}
            return {"picture": data.pixels(index), **more}

    how: dict[str, Any] = {"collate": data.as_they_are, "workers": 1, "shuffle": False}
    with ReuseLoader(Growing(SIZE), 4, reuse=2, **how) as loader:
        for _ in loader:
            assert loader.stats["buffer_bytes"] > 3 << 18
            break
    loader = ReuseLoader(Growing(SIZE), 1, reuse=1, buffer_bytes=1 << 16, **how)
    with loader, pytest.raises(BufferTooSmall):
        list(loader)
