"""Random reading is refused where reuse or a cache would freeze it, whoever draws from what."""

import random
from collections.abc import Callable
from typing import Any, ClassVar

import numpy as np
import pytest
import torch
from PIL import Image
from support.numbered_samples import Made
from torch.utils.data import ConcatDataset, Subset
from torchvision import datasets, transforms
from torchvision.transforms import v2

from loaders import Cache, LoaderError, ReuseLoader, Workers
from loaders.adopting import probing
from loaders.adopting.probing import READS, schedule
from loaders.errors import CacheError

SIZE = 30


def plain(i: int) -> torch.Tensor:
    return torch.arange(48, dtype=torch.uint8).view(3, 4, 4) + i


class Sized:
    def __len__(self) -> int:
        return SIZE


def read_by(read: Callable[[int], Any], size: int = SIZE) -> Made:
    return Made(size, read)


class Augmenting(Sized):
    """The transform has whatever name a user gave it."""

    def __init__(self, name: str, transform: Any) -> None:
        setattr(self, name, transform)
        self.name = name

    def __getitem__(self, index: int) -> Any:
        return getattr(self, self.name)(plain(index)), index


class Pipe:
    """A library with generators of its own, as albumentations."""

    def __init__(self) -> None:
        self.random_generator = np.random.default_rng(3)
        self.py_random = random.Random(3)

    def __call__(self, picture: torch.Tensor) -> torch.Tensor:
        return picture.flip(-1) if self.py_random.random() < 0.5 else picture


class Wrapped:
    def __init__(self, inner: Any, change: Any) -> None:
        self.d, self.f = inner, change

    def __len__(self) -> int:
        return len(self.d)

    def __getitem__(self, index: int) -> Any:
        return self.f(self.d[index])


class WithTransform(Sized):
    """As a data set of Hugging Face with `with_transform`: batches of rows go through it."""

    def __init__(self, transform: Any) -> None:
        self._format_kwargs = {"transform": transform}

    def __getitem__(self, index: int) -> Any:
        return self.__getitems__([index])[0]

    def __getitems__(self, ids: list[int]) -> Any:
        rows = [{"image": plain(i), "label": i} for i in ids]
        return [{**row, "image": self._format_kwargs["transform"](row["image"])} for row in rows]


class Counting(Sized):
    """Goes round two views, and knows no generator."""

    turn = 0

    def __getitem__(self, index: int) -> Any:
        self.turn += 1
        return plain(index).flip(-1) if self.turn % 2 else plain(index), index


class Memory(Sized):
    """Mixes each sample with the one that was read before."""

    before = 0

    def __getitem__(self, index: int) -> Any:
        before, self.before = self.before, index
        return torch.tensor([index, before])


class AtClass(Sized):
    numbers: ClassVar = np.random.default_rng(0)

    def __getitem__(self, index: int) -> Any:
        return index + self.numbers.integers(1000)


class OpaqueSample:
    def __init__(self, value: float) -> None:
        self.about = {"value": value}


FLIP = v2.RandomHorizontalFlip()
RARE = v2.RandomGrayscale(p=0.01)
CHANGE = transforms.Compose([FLIP, transforms.RandomErasing(0.5)])
NUMBERS = np.random.RandomState(5)

RANDOM: dict[str, Callable[[], Any]] = {
    "aug": lambda: Augmenting("aug", FLIP),
    "preprocess": lambda: Augmenting("preprocess", lambda p: FLIP(p)),
    "seldom": lambda: Augmenting("aug", RARE),
    "own generators": lambda: Augmenting("aug", Pipe()),
    "a wrapper": lambda: Wrapped(read_by(plain), FLIP),
    "a wrapper of a wrapper": lambda: Wrapped(Wrapped(read_by(plain), Pipe()), lambda p: p),
    "with_transform": lambda: WithTransform(FLIP),
    "random.random": lambda: read_by(lambda i: i + random.random()),
    "numpy": lambda: read_by(lambda i: i + np.random.rand()),
    "torch": lambda: read_by(lambda i: i + torch.rand(1)),
    "a generator of a module": lambda: read_by(lambda i: i + NUMBERS.rand()),
    "a generator of a class": AtClass,
    "a fresh generator": lambda: read_by(lambda i: i + np.random.default_rng().random()),
    "the system": lambda: read_by(lambda i: i + random.SystemRandom().random()),
    "an object": lambda: read_by(lambda i: OpaqueSample(random.SystemRandom().random())),
    "a dict": lambda: read_by(lambda i: {"id": i, "more": [{"x": np.random.rand()}]}),
    "a counter": Counting,
    "a memory": Memory,
    "a subset": lambda: Subset(Augmenting("aug", FLIP), range(3, 20)),
    "a concatenation": lambda: ConcatDataset([read_by(plain), Augmenting("aug", FLIP)]),
    "of two transforms": lambda: ConcatDataset(
        [datasets.FakeData(6, (3, 8, 8), 2, t) for t in (FLIP, CHANGE)]
    ),
}

once, again = {"reuse": 1}, {"reuse": 3}
cached = {"cache": Cache("ram", 1 << 20)}


@pytest.mark.parametrize("name", RANDOM)
def test_random_reading_is_refused_with_reuse_and_with_a_cache(name: str) -> None:
    with pytest.raises(LoaderError, match=r"is random: .*augment=.*reaugment=False"):
        ReuseLoader(RANDOM[name](), 4, reuse=3, workers=1)
    with pytest.raises(LoaderError, match="is random: "):
        ReuseLoader(RANDOM[name](), 4, reuse="auto", workers=1).set_reuse(2)
    for how in (once, again, {"reuse": 3, "reaugment": False}):
        with pytest.raises(CacheError, match="served for the whole run"):
            ReuseLoader(RANDOM[name](), 4, workers=1, **how, **cached)


@pytest.mark.parametrize("name", ["aug", "a wrapper", "numpy", "a counter"])
def test_where_nothing_is_frozen_or_the_user_says_so_random_reading_is_served(name: str) -> None:
    for how in (once, {"reuse": 3, "reaugment": False}):
        with ReuseLoader(RANDOM[name](), 4, workers=1, **how) as loader:
            assert sum(1 for _ in loader) > 0


def test_reuse_that_comes_later_is_refused_when_it_comes() -> None:
    with ReuseLoader(Augmenting("aug", FLIP), 4, reuse=1, workers=1) as loader:
        with pytest.raises(LoaderError, match="is random"):
            loader.set_reuse(3)
        assert loader.reuse == 1
        loader.set_reuse(3, reaugment=False)
        with pytest.raises(LoaderError, match="is random"):
            loader.set_reuse(2, reaugment=True)
        frozen = loader.state_dict()
    fresh = {**frozen, "next": {**frozen["next"], "reaugment": True}}
    resumed = ReuseLoader(Augmenting("aug", FLIP), 4, reuse=1, workers=1)
    with pytest.raises(LoaderError, match="is random"):
        resumed.load_state_dict(fresh)


# ---- what is not random -------------------------------------------------------------------------


def seeded_by_index(i: int) -> torch.Tensor:
    torch.manual_seed(i)
    return torch.rand(3)


def seeded_apart(i: int) -> Any:
    return np.random.default_rng(i).random(3), random.Random(i).random()


class DrawnOnce(Sized):
    """Draws its split at the first read, and keeps it."""

    split: Any = None

    def __getitem__(self, index: int) -> Any:
        if self.split is None:
            self.split = torch.randperm(SIZE)
        return self.split[index]


class HoldsAnother(Sized):
    def __init__(self) -> None:
        self.opened: Any = None

    def __getitem__(self, index: int) -> Any:
        self.opened = self.opened or object()
        if index == 0:
            raise OSError("unreadable")
        return {"text": f"{index}", "names": {"a", "b", "c"}, "opaque": OpaqueSample(1.0)}


@pytest.mark.parametrize(
    "dataset",
    [
        read_by(plain),
        read_by(seeded_by_index),
        read_by(seeded_apart),
        DrawnOnce(),
        HoldsAnother(),
        datasets.FakeData(9, (3, 8, 8), 2),
        read_by(lambda i: Image.fromarray(np.full((4, 4, 3), i, np.uint8))),
        read_by(lambda i: np.array([object(), "a"], dtype=object)),
        read_by(lambda i: float("nan")),
        read_by(lambda i: torch.ones(2).to_sparse() if i == 0 else i),
        list(range(1, 9)),
        read_by(plain, 1),
    ],
    ids=lambda dataset: type(dataset).__name__,
)
def test_reading_that_repeats_itself_is_taken(dataset: Any) -> None:
    ReuseLoader(dataset, 1, reuse=3, workers=1)
    ReuseLoader(dataset, 1, reuse=1, workers=1, **cached)


def test_what_a_data_set_draws_once_comes_from_the_users_own_seed() -> None:
    torch.manual_seed(17)
    expected = torch.randperm(SIZE)
    torch.manual_seed(17)
    data = DrawnOnce()
    ReuseLoader(data, 4, reuse=3, workers=Workers(1, "thread"))
    assert torch.equal(data.split, expected)


def test_the_look_leaves_every_generator_as_it_was() -> None:
    pipe = Pipe()

    def read(_: int) -> Any:
        return pipe(plain(0)), NUMBERS.rand() + random.random() + np.random.rand()

    def states() -> str:
        held = (pipe.random_generator.bit_generator.state, pipe.py_random.getstate())
        globals_ = (random.getstate(), str(np.random.get_state()), str(NUMBERS.get_state()))
        return repr((held, globals_, torch.get_rng_state().tolist()))

    before = states()
    with pytest.raises(LoaderError, match="is random"):
        ReuseLoader(read_by(read), 4, reuse=3, workers=Workers(1, "thread"))
    assert states() == before


def test_nothing_is_read_where_nothing_can_be_frozen() -> None:
    read: list[int] = []
    data = read_by(lambda i: read.append(i) or i)
    ReuseLoader(data, 4, reuse=1, workers=Workers(1, "thread"))
    ReuseLoader(data, 4, reuse=3, reaugment=False, workers=Workers(1, "thread"))
    assert read == []
    ReuseLoader(data, 4, reuse=2, workers=Workers(1, "thread"))
    assert len(read) == READS
    assert sorted(set(read)) == sorted(set(schedule(SIZE)))


def test_reading_that_takes_long_is_looked_at_twice(monkeypatch: pytest.MonkeyPatch) -> None:
    clock = iter(range(0, 10**6, 100))
    monkeypatch.setattr(probing.time, "monotonic", lambda: next(clock))
    read: list[int] = []
    ReuseLoader(read_by(lambda i: read.append(i) or i), 4, reuse=2, workers=Workers(1, "thread"))
    assert read == [0, 0]
    with pytest.raises(LoaderError, match="sample 0 was read again"):
        ReuseLoader(Augmenting("aug", RARE), 4, reuse=2, workers=Workers(1, "thread"))
