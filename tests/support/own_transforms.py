"""Data sets of users' own that apply a random transform in [i], in the ways that users do it."""

import random
from collections import namedtuple
from collections.abc import Callable
from typing import Any

import numpy as np
import torch
from PIL import Image, ImageOps
from torch.utils.data import ConcatDataset, Dataset, Subset
from torchvision import datasets, transforms
from torchvision.transforms import v2

SAMPLES, RARE = 14, 8
"""Sample 8 is none of those that are looked at when a loader is made."""
Seen = namedtuple("Seen", ["label", "picture"])


def picture(i: int) -> Image.Image:
    return Image.fromarray(np.random.default_rng(i).integers(0, 256, (8, 6, 3), dtype=np.uint8))


def array(i: int) -> Any:
    return np.array(picture(i))


class Own(Dataset[Any]):
    """A data set that reads as `read(data, i)` does."""

    def __init__(self, read: Callable[[Any, int], Any], transform: Any, **more: Any) -> None:
        self.read, self.transform = [read], transform  # a list is not taken for a transform
        vars(self).update(more)

    def __len__(self) -> int:
        return SAMPLES

    def __getitem__(self, index: int) -> Any:
        return self.read[0](self, index)


class Flip:
    """Flips half of all pictures or arrays, also in samples that are dicts."""

    def __call__(self, given: Any) -> Any:
        turned = random.random() < 0.5
        if isinstance(given, dict):
            image = given["image"]
            return {**given, "image": image[:, ::-1].copy() if turned else image.copy()}
        if isinstance(given, Image.Image):
            return ImageOps.mirror(given) if turned else given
        return np.array(given[:, ::-1] if turned else given)


class FlipBoth:
    """Flips a picture and its mask together, as joint transforms do."""

    def __call__(self, image: Any, mask: Any) -> Any:
        step = -1 if np.random.rand() < 0.5 else 1
        return np.array(image[:, ::step]), {"mask": np.array(mask["mask"][:, ::step])}


class FlipNamed:
    """Takes its arguments by name and returns a dict, as Albumentations does."""

    def __call__(self, **given: Any) -> Any:
        step = -1 if torch.rand(()) < 0.5 else 1
        return {name: np.array(value[:, ::step]) for name, value in given.items()}


class Views:
    """Makes several views, as SimCLR needs them."""

    def __call__(self, given: Any) -> Any:
        one = Flip()
        return [one(given), one(given)]


def noisy(wave: Any) -> Any:
    return wave + torch.randint(0, 2, ())


def usual(data: Any, i: int) -> Any:
    given = picture(i)
    if data.transform:
        given = data.transform(given)
    return given, i


def named(data: Any, i: int) -> Any:
    made = data.transform(image=array(i), mask=array(i)[..., 0])
    return made["image"], {"mask": made["mask"], "id": i}


def in_one_buffer(data: Any, i: int) -> Any:
    data.buffer[:] = array(i)
    made = data.transform(data.buffer)
    data.buffer[:] = 0
    return made, i


class Ids(datasets.FakeData):
    def __getitem__(self, index: int) -> Any:
        return *super().__getitem__(index), index


PREFIXED = transforms.Compose([transforms.Resize((4, 4)), transforms.RandomHorizontalFlip()])
TENSORS = v2.Compose([*PREFIXED.transforms, v2.PILToTensor()])

LIFTABLE: dict[str, Callable[[], Any]] = {
    "a picture": lambda: Own(usual, Flip()),
    "a deterministic beginning": lambda: Own(usual, PREFIXED),
    "of torchvision alone": lambda: Own(usual, TENSORS),
    "an array": lambda: Own(lambda data, i: (data.transform(array(i)), i), Flip()),
    "a part of a dict": lambda: Own(lambda d, i: {"id": i, "x": d.transform(array(i))}, Flip()),
    "a namedtuple": lambda: Own(lambda d, i: Seen(i, d.transform(picture(i))), Flip()),
    "behind another picture": lambda: Own(lambda d, i: (array(i), d.transform(array(i))), Flip()),
    "a whole dict": lambda: Own(lambda d, i: d.transform({"image": array(i), "id": i}), Flip()),
    "a wave": lambda: Own(lambda d, i: (d.transform(torch.arange(9) + i), i), noisy),
    "views": lambda: Own(lambda d, i: (d.transform(array(i)), i), Views()),
    "picture and mask": lambda: Own(
        lambda d, i: d.transforms(array(i), {"mask": array(i)}), None, transforms=FlipBoth()
    ),
    "by name": lambda: Own(named, FlipNamed()),
    "one buffer": lambda: Own(in_one_buffer, Flip(), buffer=np.zeros((8, 6, 3), np.uint8)),
    "a subset": lambda: Subset(Own(usual, TENSORS), range(SAMPLES)[::-1]),
    "two": lambda: (lambda t: ConcatDataset([Subset(Own(usual, t), range(7))] * 2))(Flip()),
    "a subclass of torchvision's": lambda: Ids(SAMPLES, (3, 8, 6), 2, TENSORS),
}


def rare(data: Any, i: int) -> Any:
    return (picture(i) if i == RARE else data.transform(picture(i))), i


def rare_change(data: Any, i: int) -> Any:
    made = data.transform(array(i))
    return (255 - made if i == RARE else made), i


def rare_place(data: Any, i: int) -> Any:
    made = data.transform(array(i))
    return (array(i), made) if i == RARE else (made, array(i))


def twice(data: Any, i: int) -> Any:
    return data.transform(data.transform(picture(i))), i


def of_its_type(data: Any, i: int) -> Any:
    made = data.transform(array(i))
    return (255 - made if type(made) is np.ndarray else made), i


def kept(data: Any, i: int) -> Any:
    made = data.transform(array(i))
    return made, made


def turned(data: Any, i: int) -> Any:
    exif = Image.Exif()
    exif[0x0112] = 6
    given = picture(i)
    given.info["exif"] = exif.tobytes()
    return data.transform(given), i


def flip_turned(given: Image.Image) -> Image.Image:
    return Flip()(ImageOps.exif_transpose(given))


class Closing(Own):
    def __del__(self) -> None: ...


class Many(Own):
    def __getitems__(self, ids: list[int]) -> list[Any]:
        return [self[i] for i in ids]


REFUSED: dict[str, tuple[Callable[[], Any], str]] = {
    "changed": (lambda: Own(lambda d, i: (d.transform(array(i)) / 255, i), Flip()), "__truediv__"),
    "asked": (lambda: Own(lambda d, i: (d.transform(array(i)).mean(), i), Flip()), "mean"),
    "looked at": (lambda: Own(of_its_type, Flip()), "gives another sample"),
    "twice": (lambda: Own(twice, Flip()), "__class__"),
    "of two pictures": (
        lambda: Own(lambda d, i: (d.transform(array(i)), d.transform(array(i))), Flip()),
        "returns 2 results",
    ),
    "in two places": (lambda: Own(kept, Flip()), "not there once"),
    "not returned": (
        lambda: Own(lambda d, i: (d.transform(picture(i)) and 0, array(i)), Flip()),
        "__bool__",
    ),
    "one of two": (
        lambda: Own(lambda d, i: (d.transforms(array(i), {"mask": array(i)})[0], i), None,
                    transforms=FlipBoth()),
        "not there once.*WholeSample",
    ),
    "for some ids": (
        lambda: Own(lambda d, i: (d.transform(array(i)) if i else array(i), i), Flip()),
        "sample 0: .i. returns 0 results",
    ),
    "more is random": (
        lambda: Own(lambda d, i: (d.transform(array(i)), random.random()), Flip()),
        "gives another sample",
    ),
    "random before": (
        lambda: Own(
            lambda d, i: d.transform(image=array(i) + random.randrange(2)), FlipNamed()
        ),
        "what .i. does beside it is random",
    ),
    "a file's name": (
        lambda: Own(lambda d, i: (d.transform(f"{i}"), i), lambda _: torch.rand(2)),
        "it is given no array",
    ),
    "another name": (
        lambda: Own(lambda d, i: (d.augment(array(i)), i), None, augment=Flip()),
        r"its \.augment is: .*dataset\.augment = dataset\.augment, None.*augment=t",
    ),
    "EXIF": (lambda: Own(turned, flip_turned), "by their EXIF"),
    "a __del__": (lambda: Closing(usual, Flip()), "__del__"),
    "__getitems__": (lambda: Many(usual, Flip()), "__getitems__"),
}  # fmt: skip

RARELY: dict[str, Callable[[Any, int], Any]] = {
    "not applied": rare,
    "changed": rare_change,
    "elsewhere": rare_place,
}
