"""Which parts of a sample go with its picture, and how; whatever would be left behind is refused.

    the class says it     torchvision's Mask, BoundingBoxes, KeyPoints, Image
    the user says it      parts={"mask": "mask", "boxes": "boxes_xyxy"}

An augmentation of ours that moves pixels moves these parts alike (`pixels.moves`). Whatever else
has the picture's height and width, or the name or the shape of boxes, masks or key points, would
stay where it was, and no longer fit. Nobody said what it is, so it is an error.
"""

import re
from collections.abc import Mapping, Sequence
from dataclasses import dataclass
from typing import Any, cast

import numpy as np
import torch

from loaders.adopting.torchvision_steps import torchvision_name
from loaders.batching.user_views import WholeSample
from loaders.errors import LoaderError
from loaders.pixels.augmentation import Chain, Cutout, Geometric
from loaders.pixels.color import ColorJitter, Normalize, ToFloat
from loaders.pixels.moves import PartKind
from loaders.slots.leaves import (
    NOT_PICTURES,
    PLAIN_PICTURES,
    as_tensor,
    is_tv_tensor,
    leaves_of,
    mode_of,
    picture_number,
    places_of,
)

MOVES_NOTHING = frozenset(
    {"ColorJitter", "ConvertImageDtype", "GaussianBlur", "GaussianNoise", "Grayscale", "Identity"}
    | {"JPEG", "Normalize", "PILToTensor", "RandomAdjustSharpness", "RandomAutocontrast"}
    | {"RandomChannelPermutation", "RandomEqualize", "RandomGrayscale", "RandomInvert"}
    | {"RandomPhotometricDistort", "RandomPosterize", "RandomSolarize", "RGB", "ToDtype", "ToImage"}
    | {"ToPILImage", "ToPureTensor", "ToTensor"}
)
"""Transforms of torchvision that leave every pixel where it is."""
BOXES = ("XYXY", "XYWH", "CXCYWH")
PLACES = re.compile(
    r"\['((b|bounding_)?box(es)?|segmentations?|(key_?)?points?|landmarks?|masks?|polygons?)'\]"
    r"(\[\d+\])*$",
    re.IGNORECASE,
)
"""The names that such parts have in a dict."""

PartName = str | int | tuple[str | int, ...]
"""A key of a sample that is a dict, a number of one that is a tuple, or the way to one inside."""
PartKinds = Mapping[PartName, PartKind]


@dataclass(frozen=True, slots=True)
class JointPart:
    """A part of every sample that is moved with the picture."""

    number: int
    """Its number among the leaves of a sample."""
    place: str
    kind: PartKind


def joint_parts(
    template: Any,
    given: str,
    augments: Sequence[object],
    kinds_by_name: PartKinds | None = None,
    optional: bool = False,
) -> tuple[JointPart, ...]:
    """The parts of a sample like `template` that go with its picture, if one of `augments` moves
    that. They were given as the argument `given`; one that would leave such a part behind is
    refused. `optional`: whether the parts of `kinds_by_name` may be missing, or None."""
    number = picture_number(template)
    kinds = _kinds_by_user(template, kinds_by_name or {}, optional)
    whole = any(isinstance(augment, WholeSample) for augment in augments)  # it moves all by itself
    if number is None or whole or not any(map(moves_pixels, augments)):
        return ()
    places, leaves = places_of(template), leaves_of(template)
    sides = _sides(leaves[number])
    parts: list[JointPart] = []
    for other, (place, leaf) in enumerate(zip(places, leaves, strict=True)):
        if other == number or (leaf is None and optional):
            continue
        kind = kinds.get(other) or _kind_of_class(leaf, place, sides)
        why = _goes_with(sides, place, leaf) if kind is None else ""
        if kind is not None and kind != "still":
            parts.append(JointPart(other, place, _checked(leaf, place, kind)))
            why = "" if all(map(is_ours, augments)) else f"which is {_named(kind)}"
        if why:
            raise LoaderError(
                f"{given} would move the picture (part {places[number]} of a sample), and leave"
                f" part {place} where it is, {why}: {_advice(augments)}"
            )
    return tuple(parts)


def check_once(template: Any, once: Any, kinds: PartKinds | None, optional: bool = False) -> None:
    """Refuse the augmentation `once` if it would leave a part of a sample behind."""
    for part in joint_parts(template, "once", [once], kinds, optional):
        raise LoaderError(
            f"once would move the picture, and leave part {part.place} where it is, which is"
            f" {_named(part.kind)}: leave once out, and give its crop as augment, which moves both,"
            " or change both in the data set or in a collate function"
        )


def moves_pixels(augment: object) -> bool:
    """Whether an augmentation may move pixels to other places."""
    if augment is None:
        return False
    if isinstance(augment, Chain):
        return any(map(moves_pixels, augment.steps))
    if isinstance(augment, ColorJitter | Cutout | Normalize | ToFloat):
        return False
    name = torchvision_name(augment)
    if name == "Compose":
        return any(map(moves_pixels, getattr(augment, "transforms", ())))
    return name not in MOVES_NOTHING


def is_ours(augment: object) -> bool:
    """Whether an augmentation is made of ours alone. Then it draws from its `draws` and nothing
    else, and tells how it moves pixels, so that other parts can be moved alike."""
    if isinstance(augment, Chain):
        return all(map(is_ours, augment.steps))
    return isinstance(augment, Geometric | ColorJitter | Normalize | ToFloat)


def _kinds_by_user(template: Any, kinds_by_name: PartKinds, optional: bool) -> dict[int, PartKind]:
    """The kind of each leaf that the user named, or that lies in a part that he named."""
    places, kinds = places_of(template), dict[int, PartKind]()
    for name, kind in kinds_by_name.items():
        way = name if isinstance(name, tuple) else (name,)
        place = "".join(f"[{key!r}]" for key in way)
        inside = [n for n, other in enumerate(places) if f"{other}[".startswith(f"{place}[")]
        if not inside and not optional:
            raise LoaderError(
                f"parts names {name!r}, which no sample has: its parts are {', '.join(places)};"
                ' give a key, a number, or both in a tuple, as (1, "boxes")'
            )
        kinds |= dict.fromkeys(inside, kind)
    return kinds


def _kind_of_class(leaf: Any, place: str, sides: tuple[int, int]) -> PartKind | None:
    """What the class of a leaf says. A further picture of another size goes its own way."""
    if not is_tv_tensor(type(leaf)):
        return None
    match type(leaf).__name__:
        case "Mask":
            return "mask"
        case "KeyPoints":
            return "points"
        case "Image" if tuple(leaf.shape[-2:]) == sides:
            return "picture"
        case "BoundingBoxes":
            return boxes_kind(leaf.format, place)
        case _:
            return None


def boxes_kind(layout: Any, place: str) -> PartKind:
    """The kind of boxes of one of torchvision's formats."""
    if layout.name not in BOXES:
        raise LoaderError(
            f"the boxes in part {place} have the format {layout.name}, and only XYXY, XYWH and"
            " CXCYWH can be moved: convert them, or change them in a collate function"
        )
    return cast(PartKind, f"boxes_{layout.name.lower()}")


def _checked(leaf: Any, place: str, kind: PartKind) -> PartKind:
    if not isinstance(as_tensor(leaf), torch.Tensor):
        raise LoaderError(
            f"parts says that part {place} is {_named(kind)}, but it is a {type(leaf).__name__}:"
            " let the data set return an array or a tensor"
        )
    if (mode := mode_of(leaf)) is not None and mode not in PLAIN_PICTURES:
        raise LoaderError(
            f"part {place} is a picture of Pillow's mode {mode!r}, which is stored as colours and"
            f" cannot be moved as {_named(kind)}: let the data set return numpy.array(picture)"
        )
    return kind


def _named(kind: PartKind) -> str:
    """A kind in a sentence."""
    match kind:
        case "picture" | "mask":
            return f"a {kind}"
        case "points":
            return "key points"
        case _:
            return f"boxes ({kind.removeprefix('boxes_')})"


def _advice(augments: Sequence[object]) -> str:
    collate = "change both together in a collate function, which runs at every serve with random"
    if not all(map(is_ours, augments)):
        return (
            "take augmentations of loaders.augment, which move both, or a WholeSample(transform);"
            f" or leave them out, and {collate} numbers of its own; or if they do not belong"
            ' together, give parts={...: "still"}'
        )
    return (
        'say what it is with parts={...: "mask"} (or "boxes_xyxy", "points", "picture", or "still"'
        f" if they do not belong together); or leave it out, and {collate} numbers of its own"
    )


def _goes_with(sides: tuple[int, int], place: str, leaf: Any) -> str:
    """Why a leaf says where something is in a picture with these sides; nothing if it does not."""
    if is_tv_tensor(type(leaf)) and type(leaf).__name__ in NOT_PICTURES:
        return f"which is a {type(leaf).__name__}"
    if PLACES.search(place):
        return "which its name says to be places in a picture"
    value = as_tensor(leaf)
    shape = tuple(value.shape) if isinstance(value, torch.Tensor) else ()
    if len(shape) < 2:
        return ""
    if sides in (shape[-2:], shape[:2], shape[-3:-1]):
        return f"which has the picture's height and width, {sides[0]} x {sides[1]}"
    if len(shape) == 2 and shape[1] == 4:
        return f"which looks like boxes, {shape[0]} x 4"
    return ""


def _sides(picture: Any) -> tuple[int, int]:
    """The height and width of a picture [..., H, W], or of an array [H, W, C]."""
    *_, rows, height, width = (1, *cast(torch.Tensor, as_tensor(picture)).shape)
    in_rows = isinstance(picture, np.ndarray) and picture.ndim == 3 and width <= 4
    return (rows, height) if in_rows else (height, width)
