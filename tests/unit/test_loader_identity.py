"""A state goes on with the data and the sampler that it was saved with, or is refused by name."""

import json
import random
from collections.abc import Iterator
from pathlib import Path
from typing import Any

import numpy as np
import pytest
import torch
from torch.utils.data import (
    ConcatDataset,
    DataLoader,
    RandomSampler,
    Sampler,
    Subset,
    SubsetRandomSampler,
    TensorDataset,
    WeightedRandomSampler,
)

from loaders import ReuseLoader
from loaders.errors import StateError
from loaders.identity import loader_identity
from loaders.pixels.decoding import PictureDecoder
from loaders.sources.datasets import PictureFiles

SAMPLES = 40


class Rows:
    """Samples that are made of whatever `column` holds."""

    def __init__(self, column: Any) -> None:
        self.column = column
        self.seen: list[int] = []

    def __len__(self) -> int:
        return SAMPLES

    def __getitem__(self, index: int) -> int:
        self.seen.append(index)
        return index


class Remembers(Sampler[int]):
    """Draws another order every time it is asked, whatever the pass."""

    def __init__(self) -> None:
        self.asked = 0

    def __len__(self) -> int:
        return SAMPLES

    def __iter__(self) -> Iterator[int]:
        self.asked += 1
        return iter(random.Random(self.asked).sample(range(SAMPLES), SAMPLES))


def files(*names: str, labels: Any = None, root: str = "/a/b") -> PictureFiles:
    paths = [Path(root, name) for name in names]
    return PictureFiles(paths, labels or [0] * len(names), ("x",), PictureDecoder(8))


def tensors(middle: int) -> TensorDataset:
    column = torch.zeros(SAMPLES, 3)
    column[SAMPLES // 2] = middle
    return TensorDataset(column)


def rows(middle: int) -> list[int]:
    return [0] * 20 + [middle] + [0] * 19


def saved(data: Any, served: int, **options: Any) -> dict[str, Any]:
    """The state after so many batches, as it comes out of a file."""
    with ReuseLoader(data, 4, 2, workers=1, **options) as loader:
        for number, _ in enumerate(loader, 1):
            if number == served:
                return json.loads(json.dumps(loader.state_dict()))
        return json.loads(json.dumps(loader.state_dict()))


def resume(data: Any, state: dict[str, Any], **options: Any) -> ReuseLoader:
    loader = ReuseLoader(data, 4, 2, workers=1, **options)
    loader.load_state_dict(state)
    return loader


DATA: dict[str, tuple[Any, Any]] = {
    "array": (lambda v: Rows(np.array(rows(v))), "holds other values"),
    "large array": (lambda v: Rows(np.full((SAMPLES, 10_000), v, np.float32)), "other values"),
    "list": (lambda v: Rows(rows(v)), "holds other values"),
    "objects": (lambda v: Rows(np.array([str(r) for r in rows(v)], object)), "other values"),
    "tensors": (tensors, "holds other values"),
    "names": (
        lambda v: Rows([f"/data/{v if n == 20 else n}.png" for n in range(SAMPLES)]),
        "other",
    ),
    "subset": (
        lambda v: Subset(Rows([1] * SAMPLES), [*range(v, SAMPLES), *range(v)]),
        "other samp",
    ),
    "inside a subset": (lambda v: Subset(tensors(v), range(SAMPLES)), "holds other values"),
    "concatenated": (lambda v: ConcatDataset([tensors(1), tensors(v)]), "made of are others"),
    "labels of files": (lambda v: files("a", "b", "c", "d", labels=[0, v, 1, 1]), "labels are"),
    "names of files": (lambda v: files("a", f"b{v}", "c", "d"), "names of the pictures are"),
}


@pytest.mark.parametrize(("make", "said"), DATA.values(), ids=DATA)
def test_a_state_of_other_data_of_the_same_length_is_refused(
    make: Any, said: str, monkeypatch: pytest.MonkeyPatch
) -> None:
    monkeypatch.setattr(loader_identity, "WHOLE_BYTES", 1 << 20)  # of more, blocks are looked at
    state = json.loads(json.dumps(ReuseLoader(make(0), 4, 2, workers=1).state_dict()))
    resume(make(0), state)
    with pytest.raises(StateError, match=rf"of other data.*{said}.*take 'identity' out"):
        resume(make(1), state)
    del state["identity"]
    resume(make(1), state)


def test_data_may_move_be_used_and_be_read_by_other_code() -> None:
    loader = ReuseLoader(files("x/a", "x/b", "y/a", "y/b"), 4, 2, workers=1)
    state = loader.state_dict()
    resume(files("x/a", "x/b", "y/a", "y/b", root="/somewhere/else"), state)

    class Edited(Rows):
        def __getitem__(self, index: int) -> int:
            return super().__getitem__(index)

    used = saved(Rows(rows(1)), 3)
    resume(Edited(rows(1)), used)
    filled = Rows([None] * SAMPLES)
    state = ReuseLoader(filled, 4, 2, workers=1).state_dict()
    filled.column[3] = 5
    resume(filled, state)


SAMPLERS: dict[str, tuple[Any, Any, str]] = {
    "class": (None, lambda: RandomSampler(range(SAMPLES)), "was none, here it is RandomSampler"),
    "none": (lambda: RandomSampler(range(SAMPLES)), None, "was RandomSampler, here it is none"),
    "indices": (
        lambda: SubsetRandomSampler(range(SAMPLES)),
        lambda: SubsetRandomSampler(range(1, SAMPLES + 1)),
        "other arguments",
    ),
    "weights": (
        lambda: WeightedRandomSampler([1.0] * SAMPLES, SAMPLES),
        lambda: WeightedRandomSampler([1.0] * 39 + [2.0], SAMPLES),
        "other arguments",
    ),
    "ids": (
        lambda: list(range(SAMPLES)),
        lambda: list(reversed(range(SAMPLES))),
        "other arguments",
    ),
}


@pytest.mark.parametrize("served", [0, 3])
@pytest.mark.parametrize(("before", "after", "said"), SAMPLERS.values(), ids=SAMPLERS)
def test_a_state_of_another_sampler_is_refused(
    before: Any, after: Any, said: str, served: int
) -> None:
    first = before and before()
    state = saved(Rows(None), served, sampler=first)
    with resume(Rows(None), state, sampler=before and before()) as loader:
        next(iter(loader))
    with pytest.raises(StateError, match=rf"of another order.*{said}.*take 'identity' out"):
        resume(Rows(None), state, sampler=after and after())


def test_a_sampler_that_draws_another_order_in_the_middle_of_a_pass_is_refused() -> None:
    state = saved(Rows(None), 3, sampler=Remembers())
    with resume(Rows(None), state, sampler=Remembers()) as loader:
        next(iter(loader))
    other = Remembers()
    other.asked = 7
    with resume(Rows(None), state, sampler=other) as loader:
        assert loader.state_dict()["identity"] == state["identity"], (
            "it is still to be gone on with"
        )
        with pytest.raises(StateError, match="Remembers draws another order for this pass"):
            next(iter(loader))
    del state["identity"]["order"]
    with resume(Rows(None), state, sampler=other) as loader:
        next(iter(loader))


@pytest.mark.parametrize("ranks", [(0, 0), (0, 1)])
def test_a_rank_goes_on_from_the_state_that_another_rank_saved(ranks: tuple[int, int]) -> None:
    """The first rank saves for all, and its share is not that of the others."""

    def make(rank: int) -> Any:
        return torch.utils.data.DistributedSampler(range(SAMPLES), 2, rank)

    state = saved(Rows(None), 3, sampler=make(ranks[0]))
    with resume(Rows(None), state, sampler=make(ranks[1])) as loader:
        assert len(list(loader)) == 10 - 3


def test_a_state_of_an_older_version_is_taken_with_a_word(
    caplog: pytest.LogCaptureFixture,
) -> None:
    state = saved(Rows(rows(1)), 3)
    del state["identity"]
    loader = resume(Rows(rows(2)), state)
    loader.load_state_dict(state)
    assert caplog.text.count("does not say of which data and sampler it is") == 1


class Counted(Rows):
    """Keeps, with one entry for each sample, what it has read."""

    def __init__(self) -> None:
        super().__init__(None)
        self.reads, self.kept = [0] * SAMPLES, np.zeros(SAMPLES)

    def __getitem__(self, index: int) -> int:
        self.reads[index] += 1
        self.kept[index] = index
        return index


@pytest.mark.parametrize("reuse", [1, 2])
def test_what_a_data_set_writes_down_when_it_is_read_is_no_part_of_its_identity(reuse: int) -> None:
    with ReuseLoader(Counted(), 4, reuse, workers=1) as loader:
        whole = [batch.tolist() for batch in loader]
    with ReuseLoader(Counted(), 4, reuse, workers=1) as first:
        begun = [batch.tolist() for _, batch in zip(range(3), first, strict=False)]
        state = first.state_dict()
    with ReuseLoader(Counted(), 4, reuse, workers=1) as second:
        second.load_state_dict(state)
        assert whole[3:] == [batch.tolist() for batch in second]
    assert begun == whole[:3]


# ---- adopted from a DataLoader ------------------------------------------------------------------


def adopted(seed: int, shuffle: bool = True, **options: Any) -> ReuseLoader:
    with torch.random.fork_rng([]):
        torch.manual_seed(seed)
        rows: Any = Rows(list(range(SAMPLES)))
        theirs = DataLoader(rows, 4, shuffle=shuffle, **options)
        return ReuseLoader.from_dataloader(theirs, reuse=2)
