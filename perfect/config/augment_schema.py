"""The steps of a YAML's `augment`: ours by `name`, others by `class_path`."""

from functools import partial
from typing import Annotated, Literal

from pydantic import Discriminator, Field, Tag

from perfect.config.fields import Count, NamedOrOwn, Number, Section


class PadCropConfig(Section):
    name: Literal["pad_crop"]  # Pads with zeros, and crops back to the size at a random place.
    padding: Count = 4  # The pixels that are added at each edge.


class FlipConfig(Section):
    name: Literal["flip"]  # Mirrors left and right at random.
    p: Annotated[Number, Field(gt=0, le=1)] = 0.5  # How likely that is.


class CutoutConfig(Section):
    name: Literal["cutout"]  # Sets a random square to 0.
    size: Count = 8  # The square's side in pixels.


class RandomResizedCropConfig(Section):
    name: Literal["random_resized_crop"]  # Resizes a box of random area and shape.
    size: Count  # The side of the result in pixels.
    min_scale: Annotated[Number, Field(gt=0, le=1)] = 0.08  # The smallest area of the box.


class OwnAugmentConfig(NamedOrOwn):
    """A step of torchvision.transforms.v2, of Albumentations, or of your own, which gets a picture
    (uint8 [3, H, W]; for Albumentations image=[H, W, 3]) and returns one. A value in init_args may
    have a class_path too, as the transforms of a RandomApply have.

    It is tried at load, and draws anew at each serve. With one, all steps run picture by picture,
    on the thread that trains or, with loader.worker_kind: process, in worker processes. Evaluation
    crops the middle of its pictures if the steps make smaller ones."""

    name: str | None = None  # Leave it out beside class_path.


OWN = "a class_path"


def name_or_class_path(step: object) -> str | None:
    """Return which kind of step this is."""
    given = step.get if isinstance(step, dict) else partial(getattr, step)
    return OWN if given("class_path", None) is not None else given("name", None)


AugmentConfig = Annotated[
    Annotated[PadCropConfig, Tag("pad_crop")]
    | Annotated[FlipConfig, Tag("flip")]
    | Annotated[CutoutConfig, Tag("cutout")]
    | Annotated[RandomResizedCropConfig, Tag("random_resized_crop")]
    | Annotated[OwnAugmentConfig, Tag(OWN)],
    Discriminator(name_or_class_path),
]
