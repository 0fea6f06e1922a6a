"""A user's own functions draw what their serve says, from whatever generators they hold."""

import logging
import random
from typing import Any

import numpy as np
import pytest
import torch
from support.numbered_samples import Made

from loaders import ReuseLoader, Workers

SIZE = 16


PICTURES = Made(SIZE, lambda i: (torch.zeros(3, 2, 2) + i, i))


class Albumentation:
    """One transform of a library that has its own generators, and its protocol to seed them."""

    def __init__(self) -> None:
        self.set_random_seed(None)

    def set_random_seed(self, seed: int | None) -> None:
        self.random_generator = np.random.default_rng(seed)
        self.py_random = random.Random(seed)

    def __call__(self, picture: torch.Tensor) -> torch.Tensor:
        return picture + self.py_random.random() + float(self.random_generator.random())


class Compose(Albumentation):
    def __init__(self) -> None:
        super().__init__()
        self.transforms = [Albumentation(), Albumentation()]

    def __call__(self, picture: torch.Tensor) -> torch.Tensor:
        for each in self.transforms:
            picture = each(picture)
        return super().__call__(picture)


class Everything:
    def __call__(self, picture: torch.Tensor) -> torch.Tensor:
        return picture + torch.rand(()) + np.random.rand() + random.random()


class Unseedable:
    def __call__(self, picture: torch.Tensor) -> torch.Tensor:
        return picture + random.SystemRandom().random()


def in_a_closure() -> Any:
    held = Compose()
    return lambda picture: held(picture)


def served(augment: Any, **how: Any) -> list[list[float]]:
    how = {"workers": Workers(2, "thread"), **how}  # nothing is sent anywhere
    with ReuseLoader(PICTURES, 4, reuse=3, augment=augment, **how) as loader:
        return [
            [float(picture[0, 0, 0]) - i for picture, i in zip(pictures, ids.tolist(), strict=True)]
            for pictures, ids in loader
        ]


REPEATABLE = [Albumentation, Compose, Everything, in_a_closure]


@pytest.mark.parametrize("make", REPEATABLE)
def test_the_draws_of_a_serve_are_the_same_in_every_run(
    make: Any, caplog: pytest.LogCaptureFixture
) -> None:
    first = served(make())
    used = make()
    used(torch.zeros(1))
    assert served(used) == served(used) == first
    assert served(make(), seed=1) != first
    numbers = [round(x, 6) for batch in first for x in batch]
    assert len(set(numbers)) == len(numbers), "every serve has its own"
    frozen = served(make(), reaugment=False)
    assert len({round(x, 4) for batch in frozen for x in batch}) <= SIZE
    assert caplog.text == ""


@pytest.mark.parametrize("make", [Albumentation, Compose, Everything, in_a_closure])
def test_the_generators_go_on_afterwards_as_if_nobody_had_drawn(make: Any) -> None:
    untouched, used = make(), make()
    torch.manual_seed(4), np.random.seed(4), random.seed(4)
    if hasattr(used, "set_random_seed"):
        untouched.set_random_seed(4), used.set_random_seed(4)
        expected = untouched.random_generator.random()
        served(used)
        assert used.random_generator.random() == expected
    expected_here = torch.rand(2), np.random.rand(), random.random()
    torch.manual_seed(4), np.random.seed(4), random.seed(4)
    served(used)
    here = torch.rand(2), np.random.rand(), random.random()
    assert torch.equal(here[0], expected_here[0]) and here[1:] == expected_here[1:]


def batched_without_draws(images: torch.Tensor, draws: Any) -> torch.Tensor:
    return images + torch.rand(len(images), 1, 1, 1)


@pytest.mark.parametrize(
    "augment", [Unseedable(), batched_without_draws], ids=["object", "function"]
)
def test_an_augmentation_that_cannot_be_repeated_is_named_once(
    augment: Any, caplog: pytest.LogCaptureFixture
) -> None:
    with caplog.at_level(logging.WARNING, "loaders"):
        served(augment)
    [record] = caplog.records
    name = getattr(augment, "__name__", type(augment).__name__)
    assert f"augmentation {name} is not repeatable" in record.getMessage()


def test_an_augmentation_that_writes_into_its_picture_is_repeatable(
    caplog: pytest.LogCaptureFixture,
) -> None:
    assert served(lambda picture: picture.add_(1)) == [[1.0] * 4] * (SIZE * 3 // 4)
    assert served(lambda images, draws: images.add_(1)) == [[1.0] * 4] * (SIZE * 3 // 4)
    assert caplog.text == ""


def test_a_collate_function_draws_what_its_batch_says_from_what_it_holds() -> None:
    class Mixing:
        def __init__(self) -> None:
            self.rng = np.random.default_rng()

        def __call__(self, samples: list[Any]) -> float:
            return float(self.rng.random())

    def run() -> list[float]:
        with ReuseLoader(PICTURES, 4, reuse=2, workers=1, collate=Mixing()) as loader:
            return list(loader)

    first = run()
    assert run() == first
    assert len(set(first)) == len(first)
