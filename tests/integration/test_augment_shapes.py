"""The shapes of pictures that augmentations of ours take: [C, H, W], grey [H, W], clips
[T, C, H, W]. Any other is refused by name."""

from collections.abc import Callable
from typing import Any

import numpy as np
import pytest
import torch

from loaders import ReuseLoader
from loaders.augment import (
    CentreCrop,
    Chain,
    ColorJitter,
    Cutout,
    Flip,
    Normalize,
    PadCrop,
    RandomCrop,
    RandomResizedCrop,
    ToFloat,
)
from loaders.errors import LoaderError, SampleShapeError
from loaders.pixels.augmentation import Draws

STEPS: dict[str, Any] = {
    "flip": Flip(),
    "pad": PadCrop(2),
    "hole": Cutout(3),
    "crop": RandomCrop((1, 2)),
    "centre": CentreCrop((1, 1)),
    "resized": RandomResizedCrop((4, 6)),
    "chain": Chain([RandomResizedCrop(5), Flip(), Cutout(2)]),
    "float": ToFloat(),
    "normalize": Normalize((0.4,), (0.2,)),
    "jitter": ColorJitter(0.4, 0.4, 0.4),
}
KINDS = [torch.uint8, torch.float32, torch.float16, torch.int16, torch.uint16, torch.bool]
NESTS: dict[str, Callable[[Any, int], Any]] = {
    "alone": lambda picture, _: picture,
    "tuple": lambda picture, n: (picture, n),
    "dict": lambda picture, n: {"label": n, "picture": picture},
}
COUNT = 5


class Shaped:
    """Pictures that are given, each in a nest."""

    def __init__(self, pictures: torch.Tensor, nest: str) -> None:
        self._pictures, self._nest = pictures, NESTS[nest]

    def __len__(self) -> int:
        return len(self._pictures)

    def __getitem__(self, index: int) -> Any:
        return self._nest(self._pictures[index], index)


def random_pictures(shape: tuple[int, ...], kind: torch.dtype, gaps: bool = False) -> torch.Tensor:
    generator = torch.Generator().manual_seed(0)
    top = 200 if kind in (torch.uint8, torch.int16, torch.uint16) else 1
    made = torch.rand(COUNT, *(shape[::-1] if gaps else shape), generator=generator)
    if gaps:
        made = made.permute(0, *range(made.ndim - 1, 0, -1))
    return (made > 0.5) if kind is torch.bool else (made * top).to(kind)


def served(pictures: torch.Tensor, step: Any, nest: str = "alone", reuse: int = 2) -> torch.Tensor:
    """The pictures of a pass in the order of the serves, which depends on nothing but their
    number."""
    given: dict[str, Any] = {"batch_size": 3, "augment": step, "seed": 1, "workers": 1}
    with ReuseLoader(Shaped(pictures, nest), reuse=reuse, **given) as loader:
        found = list(loader)
    match nest:
        case "tuple":
            found = [batch[0] for batch in found]
        case "dict":
            found = [batch["picture"] for batch in found]
    return torch.cat(found)


@pytest.mark.parametrize("gaps", [False, True])
@pytest.mark.parametrize("kind", KINDS, ids=str)
@pytest.mark.parametrize("step", STEPS)
def test_grey_pictures_and_clips_are_changed_as_pictures_of_channels_are(
    step: str, kind: torch.dtype, gaps: bool
) -> None:
    clips = random_pictures((4, 3, 8, 9), kind, gaps)
    if step in ("float", "normalize", "jitter") and kind in (torch.int16, torch.uint16, torch.bool):
        with pytest.raises(LoaderError, match="have no known range of colours"):
            changed(clips, step)
        return
    for frame in range(4):
        exactly(changed(clips, step)[:, frame], changed(clips[:, frame], step))
    exactly(changed(clips[:, 0, 0], step)[:, None], changed(clips[:, 0, :1], step))


def changed(pictures: torch.Tensor, step: str) -> torch.Tensor:
    if step == "jitter":  # the mean that the contrast needs depends on the layout in memory
        pictures = pictures.contiguous()
    return STEPS[step](pictures.clone(), Draws(np.arange(len(pictures), dtype=np.uint64)))


def exactly(one: torch.Tensor, other: torch.Tensor) -> None:
    torch.testing.assert_close(one, other, rtol=0, atol=0)


@pytest.mark.parametrize("nest", NESTS)
@pytest.mark.parametrize("reuse", [1, 2])
@pytest.mark.parametrize("kind", [torch.uint8, torch.float32], ids=str)
def test_a_loader_serves_them_so(kind: torch.dtype, reuse: int, nest: str) -> None:
    clips, step = random_pictures((4, 3, 8, 9), kind), STEPS["chain"]
    exactly(served(clips, step, nest, reuse)[:, 2], served(clips[:, 2], step, nest, reuse))
    grey, plane = clips[:, 0, 0], clips[:, 0, :1]
    exactly(served(grey, step, nest, reuse)[:, None], served(plane, step, nest, reuse))


SMALL = [(1, 1), (32, 32), (3, 1, 1), (5, 1, 1), (2, 1, 1, 1), (6, 8, 9)]


@pytest.mark.parametrize("shape", SMALL, ids=str)
def test_small_pictures_and_ones_of_many_channels_stay_apart(shape: tuple[int, ...]) -> None:
    pictures = random_pictures(shape, torch.uint8)
    made = served(pictures, Flip(1.0), reuse=1)
    flipped = {picture.flip(-1).numpy().tobytes() for picture in pictures}
    assert made.shape == pictures.shape
    assert {picture.contiguous().numpy().tobytes() for picture in made} == flipped


WRONG = {
    "a row": (8,), "a number": (), "no rows": (3, 0, 5), "no planes": (0, 8, 9), "nothing": (0, 5),
    "channels last": (32, 32, 3), "grey, last": (32, 32, 1), "with alpha": (32, 32, 4),
    "frames, last": (6, 32, 32, 3), "no frames": (0, 3, 8, 9), "clips of views": (2, 4, 3, 8, 9),
}  # fmt: skip


@pytest.mark.parametrize("shape", WRONG)
def test_other_shapes_are_refused_with_the_shape_and_what_to_do(shape: str) -> None:
    pictures = random_pictures(WRONG[shape], torch.uint8)
    for step in STEPS:
        if step != "float":  # which does the same to every number
            with pytest.raises(SampleShapeError, match=r"here a picture is \(.*\): "):
                changed(pictures, step)
    for nest in NESTS:
        with pytest.raises(LoaderError, match=r"here a picture is|no picture to augment: leave"):
            served(pictures, Flip(), nest)
