"""Refuses to move the picture of a sample away from its masks, boxes or key points.

An augmentation changes one part of a sample, the picture. What else says where something is in it
would stay where it was, and no longer fit.
"""

import re
from typing import Any, cast

import numpy as np
import torch

from loaders.adopting.torchvision_steps import torchvision_name
from loaders.errors import LoaderError
from loaders.pixels.augmentation import Chain, Cutout
from loaders.pixels.color import ColorJitter, Normalize, ToFloat
from loaders.slots.leaves import (
    NOT_PICTURES,
    as_tensor,
    is_tv_tensor,
    leaves_of,
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
PLACES = re.compile(
    r"\['((b|bounding_)?box(es)?|segmentations?|(key_?)?points?|landmarks?|masks?|polygons?)'\]"
    r"(\[\d+\])*$",
    re.IGNORECASE,
)
"""The names that such parts have in a dict."""


def check_joint_parts(template: Any, given: str, augment: object) -> None:
    """Refuse `augment`, which was given as the argument `given`, if it would move the picture of a
    sample like `template` and leave behind what goes with it."""
    number = picture_number(template)
    if number is None or augment is None or not moves_pixels(augment):
        return
    places, leaves = places_of(template), leaves_of(template)
    sides = _sides(leaves[number])
    for other, (place, leaf) in enumerate(zip(places, leaves, strict=True)):
        if other != number and (why := _goes_with(sides, place, leaf)):
            raise LoaderError(
                f"{given} would move the picture (part {places[number]} of a sample), and leave"
                f" part {place} where it is, {why}: leave {given} out, and change both together in"
                " a collate function, which runs at every serve with random numbers of its own; or"
                " if they do not belong together, give that part another shape or name"
            )


def moves_pixels(augment: object) -> bool:
    """Whether an augmentation may move pixels to other places."""
    if isinstance(augment, Chain):
        return any(map(moves_pixels, augment.steps))
    if isinstance(augment, ColorJitter | Cutout | Normalize | ToFloat):
        return False
    name = torchvision_name(augment)
    if name == "Compose":
        return any(map(moves_pixels, getattr(augment, "transforms", ())))
    return name not in MOVES_NOTHING


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
