"""Which parts go with a picture, what becomes of them, and what is refused."""

from collections.abc import Callable
from typing import Any

import numpy as np
import pytest
import torch
from PIL import Image
from support.numbered_samples import Made
from torchvision import tv_tensors
from torchvision.transforms import v2

from loaders import Device, LoaderError, ReuseLoader
from loaders.augment import CentreCrop, Chain, Flip, PadCrop, RandomResizedCrop
from loaders.errors import SampleShapeError
from loaders.pixels.augmentation import Draws, draw_keys
from loaders.pixels.moves import Moves, PartKind, move_parts
from loaders.pixels.placing import picture_sizes

HEIGHT, WIDTH = 6, 8


def pixels(i: int, height: int = HEIGHT, width: int = WIDTH) -> torch.Tensor:
    return torch.from_numpy(
        np.random.default_rng(i).integers(0, 256, (3, height, width), dtype=np.uint8)
    )


def moved(kind: PartKind, part: Any, *steps: Any) -> Any:
    """One part of a sample, moved with a picture of HEIGHT x WIDTH."""
    images = pixels(0)[None]
    nobody = np.zeros(1, np.int64)
    _, placings = Chain(steps).apply(images, Draws(draw_keys(0, 0, nobody, nobody)))
    moves = Moves(np.array([17]), picture_sizes(images), placings)
    (found,) = move_parts(kind, [torch.as_tensor(part)], moves, "['it']")
    return found.tolist()


def batches(make: Callable[[int], Any], augment: Any, **arguments: Any) -> list[Any]:
    usual: dict[str, Any] = {"reuse": 1, "workers": 1, "shuffle": False}
    with ReuseLoader(Made(8, make), 4, augment=augment, **{**usual, **arguments}) as loader:
        return list(loader)


def as_it_is(samples: list[Any]) -> list[Any]:
    return samples


# ---- what becomes of one part -------------------------------------------------------------------


def test_a_point_that_is_gone_moves_on_or_is_no_longer_seen() -> None:
    points = [[0, 0], [2, 2], [5, 3], [6, 3]]
    expected = [[-2, -2], [0, 0], [3, 1], [4, 1]]
    assert moved("points", points, CentreCrop((2, 4))) == expected
    seen = [[0, 0, 0], [0, 0, 2], [3, 1, 2], [0, 0, 0]]
    assert moved("points", [[x, y, 2] for x, y in points], CentreCrop((2, 4))) == seen


@pytest.mark.parametrize("dtype", [torch.bool, torch.uint8, torch.int64, torch.float32])
def test_a_mask_keeps_its_type_and_its_planes(dtype: torch.dtype) -> None:
    mask = torch.stack([pixels(3)[0] > 100, pixels(4)[0] > 100]).to(dtype)
    images = pixels(0)[None]
    nobody = np.zeros(1, np.int64)
    _, placings = Chain([Flip(1.0)]).apply(images, Draws(draw_keys(0, 0, nobody, nobody)))
    moves = Moves(nobody, picture_sizes(images), placings)
    (found,) = move_parts("mask", [mask], moves, "")
    assert found.dtype == dtype
    assert torch.equal(found, mask.flip(-1))


@pytest.mark.parametrize(
    ("kind", "part", "said"),
    [
        ("mask", torch.zeros(6, 7), r"\['it'\] of sample 17 is for a picture of 6 x 7.*6 x 8"),
        ("mask", torch.zeros(8), r"sample 17 is \(8,\), but a mask"),
        ("picture", torch.zeros(3, 5, 8), "sample 17 is for a picture of 5 x 8"),
        ("boxes_xyxy", [[0, 0, 2, 2], [5, 2, 10, 4]], r"box 1 .*sample 17 is \[5.0, 2.0, 10.0, 4"),
        ("boxes_xyxy", [[-2, 0, 3, 3]], "no box inside its picture of 6 x 8"),
        ("boxes_xyxy", [[5, 2, 3, 4]], "no box inside"),
        ("boxes_xyxy", [[0.0, 0.0, float("nan"), 1.0]], "no box inside"),
        ("boxes_xywh", [[4, 2, 6, 3]], "as xywh, which is no box inside"),
        ("boxes_xyxy", [[0, 0, 2]], r"is \(1, 3\), but boxes are \[..., 4\]"),
        ("points", [[1, 2, 3, 4]], "key points are"),
        ("points", 3, "key points are"),
    ],
)
def test_a_part_that_does_not_fit_its_picture_is_an_error(
    kind: PartKind, part: Any, said: str
) -> None:
    with pytest.raises(SampleShapeError, match=said):
        moved(kind, part, Flip(1.0))


def test_a_box_may_reach_a_pixel_over_the_edge_as_rounded_ones_do() -> None:
    assert moved("boxes_xyxy", [[-0.5, 0.0, 8.7, 6.2]], Flip(1.0)) == [[0.0, 0.0, 8.0, 6.0]]


def test_places_that_their_type_cannot_hold_are_an_error() -> None:
    wide = RandomResizedCrop((6, 300), scale=(1.0, 1.0), ratio=(8 / 6, 8 / 6))
    box = torch.tensor([[0, 0, 8, 6]], dtype=torch.uint8)
    with pytest.raises(SampleShapeError, match=r"places of torch.uint8, which do not hold 300"):
        moved("boxes_xyxy", box, wide)


# ---- which parts they are -----------------------------------------------------------------------


def tv_sample(i: int) -> Any:
    return tv_tensors.Image(pixels(i)), {
        "boxes": tv_tensors.BoundingBoxes(  # pyright: ignore
            torch.tensor([[1, 2, 3, 1]]), format="XYWH", canvas_size=(HEIGHT, WIDTH)
        ),
        "mask": tv_tensors.Mask(pixels(i)[0]),
        "points": tv_tensors.KeyPoints(torch.tensor([[2, 1]]), canvas_size=(HEIGHT, WIDTH)),  # pyright: ignore
        "label": i,
    }


def test_a_collate_function_gets_torchvisions_classes_with_the_new_size() -> None:
    for batch in batches(tv_sample, RandomResizedCrop((3, 4)), collate=as_it_is):
        for picture, target in batch:
            assert type(picture) is tv_tensors.Image and picture.shape == (3, 3, 4)
            assert type(target["mask"]) is tv_tensors.Mask and target["mask"].shape == (3, 4)
            assert target["boxes"].canvas_size == target["points"].canvas_size == (3, 4)
            assert target["boxes"].format.name == "XYWH"


@pytest.mark.parametrize(
    ("make", "parts", "part"),
    [
        (lambda i: (pixels(i), pixels(i)[0].numpy()), {1: "mask"}, lambda s: s[1]),
        (lambda i: {"x": pixels(i), "m": pixels(i)[0]}, {"m": "mask"}, lambda s: s["m"]),
        (lambda i: (pixels(i), {"m": pixels(i)[0]}), {(1, "m"): "mask"}, lambda s: s[1]["m"]),
        (lambda i: (pixels(i), {"m": [pixels(i)[0]]}), {1: "mask"}, lambda s: s[1]["m"][0]),
        (lambda i: (pixels(i), pixels(i)), {1: "picture"}, lambda s: s[1][..., 0, :, :]),
    ],
)
def test_a_part_is_named_by_its_place(make: Any, parts: Any, part: Any) -> None:
    for batch in batches(make, Chain([PadCrop(2), Flip()]), parts=parts):
        pictures = batch["x"] if isinstance(batch, dict) else batch[0]
        assert torch.equal(part(batch), pictures[:, 0])
    for samples in batches(make, Chain([PadCrop(2), Flip()]), parts=parts, collate=as_it_is):
        for sample in samples:
            picture = sample["x"] if isinstance(sample, dict) else sample[0]
            found = part(sample)
            assert isinstance(found, np.ndarray) == isinstance(part(make(0)), np.ndarray)
            assert torch.equal(torch.as_tensor(found), picture[0])


@pytest.mark.parametrize(
    ("make", "arguments", "said"),
    [
        (tv_sample, {"parts": {"maks": "mask"}}, r"'maks', which no sample has.*\[1\]\['boxes'\]"),
        (lambda i: (pixels(i), "a"), {"parts": {1: "mask"}}, r"\[1\] is a mask, but it is a str"),
        (
            lambda i: (pixels(i), Image.new("P", (WIDTH, HEIGHT))),
            {"parts": {1: "mask"}},
            r"mode 'P'.*numpy.array",
        ),
        (
            lambda i: (
                pixels(i),
                tv_tensors.BoundingBoxes(torch.zeros(1, 5), format="XYWHR", canvas_size=(6, 8)),  # pyright: ignore
            ),
            {},
            "format XYWHR, and only XYXY",
        ),
        (tv_sample, {"augment": v2.RandomHorizontalFlip()}, "which is boxes .*loaders.augment"),
        (tv_sample, {"augment": lambda images, draws: images}, "which is boxes"),
        (
            lambda i: (pixels(i), pixels(i)[0]),
            {},
            r'height and width, 6 x 8: say what it is with parts=\{\.\.\.: "mask"\}',
        ),
    ],
)
def test_what_cannot_be_moved_is_refused_with_what_to_do(
    make: Any, arguments: Any, said: str
) -> None:
    with pytest.raises(LoaderError, match=said):
        batches(make, **{"augment": Flip(), **arguments})


def boxed(i: int, count: int, canvas: tuple[int, int] = (6, 8), layout: str = "XYXY") -> Any:
    boxes = torch.tensor([[1, 2, 3, 4]] * count, dtype=torch.int64).reshape(count, 4)
    made = tv_tensors.BoundingBoxes(boxes, format=layout, canvas_size=canvas)  # type: ignore[arg-type]
    return pixels(i), made


@pytest.mark.parametrize(
    ("make", "said"),
    [
        (lambda i: boxed(i, i + 1), r"part \[1\] is \(1, 4\) in sample 0 and \(2, 4\) in sample 1"),
        (lambda i: boxed(i, 1, (6, 8 + i)), "sample 1 is for a picture of 6 x 9.* 6 x 8"),
        (lambda i: boxed(i, 1, layout="XYWH" if i else "XYXY"), "sample 1 has the format XYWH"),
        (lambda i: (pixels(i), tv_tensors.Mask(torch.zeros(3, 4))), "a picture of 3 x 4"),
    ],
)
def test_samples_that_do_not_agree_are_named(make: Any, said: str) -> None:
    with pytest.raises(SampleShapeError, match=said):
        batches(make, Flip())


def test_boxes_of_another_number_in_every_sample_go_to_a_collate_function() -> None:
    found = batches(lambda i: boxed(i, i % 3), Flip(1.0), collate=as_it_is)
    assert [len(boxes) for batch in found for _, boxes in batch] == [0, 1, 2, 0, 1, 2, 0, 1]
    assert all(
        box == [5, 2, 7, 4] for batch in found for _, boxes in batch for box in boxes.tolist()
    )


def test_once_and_a_device_move_the_picture_alone_and_say_so() -> None:
    with pytest.raises(LoaderError, match=r"once would move the picture, and leave part \[1\]"):
        batches(tv_sample, None, once=CentreCrop(3))
    with pytest.raises(ValueError, match=r"pictures alone, and part \[1\]\['boxes'\] goes"):
        batches(tv_sample, Flip(), device=Device("cpu", augments=True))


@pytest.mark.parametrize(
    ("arguments", "said"),
    [
        ({"parts": {1: "masks"}}, r"parts\[1\] must be one of picture, mask"),
        ({"augment": []}, "empty list"),
        ({"parts": {1: "mask"}, "augment": None}, "parts has no effect without augment"),
    ],
)
def test_arguments_without_sense_are_refused(arguments: dict[str, Any], said: str) -> None:
    given = {"augment": Flip(), "batch_size": 4, **arguments}
    with pytest.raises(ValueError, match=said):
        ReuseLoader(Made(8, tv_sample), **given)


# ---- views --------------------------------------------------------------------------------------


def labelled(i: int) -> Any:
    return pixels(i), i


@pytest.mark.parametrize("augment", [v2.RandomResizedCrop(4), lambda images, draws: images[:, :2]])
def test_a_users_own_function_makes_views_too(augment: Any) -> None:
    for images, labels in batches(labelled, [augment] * 3):
        assert len(images) == 3 and all(len(view) == len(labels) for view in images)
    plain, three = batches(labelled, augment), batches(labelled, [augment] * 3)
    for (alone, _), (images, _) in zip(plain, three, strict=True):
        assert torch.equal(alone, images[0])


def test_an_augmentation_that_writes_into_one_view_leaves_the_others() -> None:
    def blacken(images: torch.Tensor, draws: Any) -> torch.Tensor:
        return images.zero_()

    def keep(images: torch.Tensor, draws: Any) -> torch.Tensor:
        return images

    for arguments in ({}, {"device": Device("cpu", augments=True)}, {"collate": as_it_is}):
        for batch in batches(labelled, [blacken, keep], **arguments):
            views = batch[0] if isinstance(batch, tuple) or len(batch) == 2 else batch[0][0]
            assert not views[0].any() and views[1].any()


def test_views_of_unequal_number_are_an_error_that_names_the_samples() -> None:
    class Crops:
        made = 0

        def __call__(self, image: torch.Tensor) -> list[torch.Tensor]:
            # It counts pictures, not calls: a result is made twice.
            return [image] * (2 if int(image.sum()) == int(pixels(0).sum()) else 3)

    with pytest.raises(SampleShapeError, match="2 views of sample 0 and 3 of sample 1"):
        batches(labelled, Crops())
