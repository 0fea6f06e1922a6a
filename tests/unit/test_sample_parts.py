"""The parts of a sample: tensors of a subclass, opaque objects, and what goes with the picture."""

import threading
from collections.abc import Callable
from typing import Any

import numpy as np
import pytest
import torch
from PIL import Image
from support.numbered_samples import Made
from torchvision import transforms as v1
from torchvision import tv_tensors
from torchvision.transforms import v2

from loaders import Cache, LoaderError, ReuseLoader, Workers
from loaders.augment import (
    CentreCrop,
    Chain,
    ColorJitter,
    Cutout,
    Flip,
    Normalize,
    PadCrop,
    ToFloat,
)
from loaders.errors import CacheError, SampleShapeError

SIZE = 12


def pixels(i: int, height: int = 6, width: int = 8) -> torch.Tensor:
    return torch.from_numpy(
        np.random.default_rng(i).integers(0, 256, (3, height, width), dtype=np.uint8)
    )


def as_it_is(samples: list[Any]) -> list[Any]:
    return samples


# ---- subclasses of tensors ----------------------------------------------------------------------


class Noted(torch.Tensor):
    """A subclass of the user's, with attributes of its own."""

    note: list[int]


class Marked(torch.Tensor):
    """Another, without."""


def noted(i: int) -> Noted:
    made = torch.full((2, 3), float(i)).as_subclass(Noted)
    made.note = [i]
    return made


class NotOneTensor(torch.Tensor):
    @staticmethod
    def __new__(cls) -> "NotOneTensor":
        return torch.Tensor._make_wrapper_subclass(cls, (3,))  # pyright: ignore

    @classmethod
    def __torch_dispatch__(cls, func: Any, types: Any, args: Any = (), kwargs: Any = None) -> Any:
        return NotImplemented


def boxes(i: int) -> tv_tensors.BoundingBoxes:
    return tv_tensors.BoundingBoxes(
        torch.tensor([[0, 1, 2 + i, 3]]), format="XYXY", canvas_size=(6 + i, 8)
    )


TENSORS: dict[str, Callable[[int], torch.Tensor]] = {
    "image": lambda i: tv_tensors.Image(pixels(i)),
    "mask": lambda i: tv_tensors.Mask(pixels(i)[0]),
    "video": lambda i: tv_tensors.Video(pixels(i)[None]),
    "boxes": boxes,
    "points": lambda i: tv_tensors.KeyPoints(torch.tensor([[i, 2]]), canvas_size=(6, 8 + i)),
    "with attributes": noted,
    "without": lambda i: torch.full((2,), i).as_subclass(Marked),
    "a number": lambda i: torch.tensor(i).as_subclass(Marked),
    "a parameter": lambda i: torch.nn.Parameter(torch.full((2,), float(i)), requires_grad=False),
    "bfloat16": lambda i: torch.full((2,), i, dtype=torch.bfloat16).as_subclass(Marked),
}


def same(one: torch.Tensor, other: torch.Tensor) -> bool:
    return (
        type(one) is type(other)
        and one.dtype == other.dtype
        and vars(one) == vars(other)
        and torch.equal(one.as_subclass(torch.Tensor), other.as_subclass(torch.Tensor))
    )


@pytest.mark.parametrize("name", TENSORS)
def test_a_collate_function_gets_tensors_of_their_own_class_and_attributes(name: str) -> None:
    make = TENSORS[name]
    data = Made(SIZE, lambda i: {"id": i, "part": make(i)})
    with ReuseLoader(data, 4, reuse=3, workers=2, collate=as_it_is) as loader:
        for batch in loader:
            for sample in batch:
                assert same(sample["part"], make(sample["id"]))


@pytest.mark.parametrize("name", TENSORS)
def test_a_batch_is_of_the_class_that_torchs_default_collate_gives(name: str) -> None:
    make = TENSORS[name]
    with ReuseLoader(Made(SIZE, lambda i: (make(i), i)), 4, reuse=2, workers=2) as loader:
        for parts, ids in loader:
            expected = torch.utils.data.default_collate([make(i) for i in ids.tolist()])
            assert type(parts) is type(expected)
            assert torch.equal(parts, expected)


@pytest.mark.parametrize("name", ["boxes", "points", "with attributes"])
def test_a_cache_refuses_attributes_that_it_does_not_keep(name: str) -> None:
    data = Made(SIZE, lambda i: (pixels(i), TENSORS[name](i)))
    loader = ReuseLoader(data, 4, reuse=2, workers=1, cache=Cache("ram", 1 << 20))
    with loader, pytest.raises(CacheError, match=type(TENSORS[name](0)).__name__):
        list(loader)


@pytest.mark.parametrize(
    ("make", "said"),
    [
        (lambda i: NotOneTensor(), "is a NotOneTensor, whose memory"),
        (lambda i: noted(i) if i % 2 else torch.zeros(2, 3), "parts of one kind"),
        (lambda i: tv_tensors.Mask(pixels(i)) if i % 2 else pixels(i), "parts of one kind"),
    ],
)
def test_what_cannot_be_given_back_as_it_was_is_refused(make: Any, said: str) -> None:
    with pytest.raises(SampleShapeError, match=said):
        list(ReuseLoader(Made(SIZE, make), 4, reuse=1, workers=Workers(1, "thread")))


# ---- opaque objects -----------------------------------------------------------------------------


class Opaque:
    def __init__(self, i: int) -> None:
        self.id, self.seen = i, [0]


class Locked(Opaque):
    def __init__(self, i: int) -> None:
        super().__init__(i)
        self.lock = threading.Lock()


CHANGED: dict[str, tuple[Callable[[int], Any], Callable[[Any], Any]]] = {
    "object": (Opaque, lambda thing: thing.seen.append(1) or len(thing.seen)),
    "array": (
        lambda i: np.array([Opaque(i)], dtype=object),
        lambda array: array[0].seen.append(1) or len(array[0].seen),
    ),
    "set": (lambda i: {0, i + 1}, lambda numbers: numbers.add(f"{len(numbers)}") or len(numbers)),
    "bytes": (lambda i: bytearray([i]), lambda data: data.append(0) or len(data)),
}


@pytest.mark.parametrize("kind", CHANGED)
def test_what_a_collate_function_or_a_step_changes_is_gone_at_the_next_serve(kind: str) -> None:
    make, change = CHANGED[kind]
    expected = {change(make(i)) for i in range(SIZE)}
    data = Made(SIZE, lambda i: (i, make(i)))
    with ReuseLoader(
        data, 4, reuse=4, workers=1, collate=lambda batch: [change(part) for _, part in batch]
    ) as loader:
        assert {n for batch in loader for n in batch} == expected
    with ReuseLoader(data, 4, reuse=4, workers=1) as loader:
        assert {change(part) for _, batch in loader for part in batch} == expected


@pytest.mark.parametrize("collate", [None, as_it_is])
def test_what_cannot_be_copied_is_refused_by_name(collate: Any) -> None:
    loader = ReuseLoader(
        Made(SIZE, lambda i: (i, Locked(i))),
        4,
        reuse=2,
        workers=Workers(1, "thread"),
        collate=collate,
    )
    with (
        loader,
        pytest.raises(LoaderError, match=r"is a Locked and cannot be copied.*__deepcopy__"),
    ):
        list(loader)


# ---- one part of several ------------------------------------------------------------------------


def picture_and(other: Callable[[int], Any]) -> Callable[[int], Any]:
    return lambda i: (pixels(i), other(i), i)


TOGETHER: dict[str, Callable[[int], Any]] = {
    "mask": picture_and(lambda i: pixels(i)[0]),
    "mask as an array": picture_and(lambda i: pixels(i)[0].numpy()),
    "picture": picture_and(pixels),
    "depth": picture_and(lambda i: torch.zeros(1, 6, 8)),
    "boxes": picture_and(boxes),
    "points": picture_and(TENSORS["points"]),
    "small mask": picture_and(lambda i: tv_tensors.Mask(torch.zeros(3, 4))),
    "plain boxes": picture_and(lambda i: torch.zeros(7, 4)),
    "named boxes": lambda i: {"x": pixels(i), "target": {"boxes": torch.zeros(4)}},
    "named points": lambda i: {"x": pixels(i), "keypoints": [torch.zeros(2)] * 3},
    "pictures of Pillow": lambda i: tuple(
        Image.fromarray(pixels(i).permute(1, 2, 0).numpy()).convert(m) for m in ("RGB", "L")
    ),
    "boxes first": lambda i: (boxes(i), pixels(i)),
}
OF_A_CLASS = frozenset({"boxes", "points", "small mask", "boxes first"})
"""Those whose class says what they are: augmentations of ours move them, too."""
OURS = [Flip(), Chain([Normalize((0.5,), (0.5,)), Flip()]), PadCrop(1)]
THEIRS = [
    v2.RandomHorizontalFlip(),
    v1.Compose([v1.RandomCrop(3)]),
    lambda picture: picture,
    lambda images, draws: images,
]
MOVES_NOTHING = [
    Chain([ColorJitter(0.4, 0.4, 0.4), Normalize((0.5,), (0.5,))]),
    ToFloat(),
    Cutout(3),
    v2.ColorJitter(0.3),
    v1.Compose([v1.GaussianBlur(3)]),
]


@pytest.mark.parametrize("name", TOGETHER)
def test_what_goes_with_the_picture_is_not_left_behind(name: str) -> None:
    for augment in THEIRS if name in OF_A_CLASS else [*OURS, *THEIRS]:
        loader = ReuseLoader(Made(SIZE, TOGETHER[name]), 4, reuse=2, workers=1, augment=augment)
        with loader, pytest.raises(LoaderError, match=r"would move the picture .*collate"):
            list(loader)
    loader = ReuseLoader(Made(SIZE, TOGETHER[name]), 4, reuse=2, workers=1, once=CentreCrop(3))
    with loader, pytest.raises(LoaderError, match="once would move the picture"):
        list(loader)


@pytest.mark.parametrize("augment", MOVES_NOTHING, ids=lambda a: type(a).__name__)
def test_colours_are_no_reason_to_refuse(augment: Any) -> None:
    data = Made(SIZE, TOGETHER["mask"])
    with ReuseLoader(data, 4, reuse=2, workers=1, augment=augment) as loader:
        for _, masks, ids in loader:
            assert torch.equal(masks, torch.stack([pixels(i)[0] for i in ids.tolist()]))


@pytest.mark.parametrize(
    "other", [lambda i: torch.zeros(5, 7), lambda i: torch.zeros(6), lambda i: "boxes"]
)
def test_what_does_not_go_with_the_picture_is_no_reason_to_refuse(other: Any) -> None:
    with ReuseLoader(Made(SIZE, picture_and(other)), 4, 2, workers=1, augment=Flip(1.0)) as loader:
        for pictures, _, ids in loader:
            assert torch.equal(pictures, torch.stack([pixels(i).flip(-1) for i in ids.tolist()]))


def test_the_picture_of_a_dict_is_the_first_as_the_dict_lists_them() -> None:
    def make(i: int) -> Any:
        return {"id": i, "view": pixels(i), "embedding": torch.full((5, 7), i)}

    with ReuseLoader(Made(SIZE, make), 4, reuse=2, workers=1, augment=Flip(1.0)) as loader:
        for batch in loader:
            ids = batch["id"].tolist()
            assert torch.equal(batch["view"], torch.stack([pixels(i).flip(-1) for i in ids]))
            assert torch.equal(batch["embedding"], torch.stack([make(i)["embedding"] for i in ids]))
