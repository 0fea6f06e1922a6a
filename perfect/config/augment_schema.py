"""The steps of a YAML's `augment`: ours by `name`, others by `class_path`."""

from functools import partial
from typing import Annotated, Literal

from pydantic import Discriminator, Field, Tag

from perfect.config.fields import Count, NamedOrOwn, Number, Section


class PadCropConfig(Section):
    name: Literal["pad_crop"]
    padding: Count = 4


class FlipConfig(Section):
    name: Literal["flip"]
    p: Annotated[Number, Field(gt=0, le=1)] = 0.5


class CutoutConfig(Section):
    name: Literal["cutout"]
    size: Count = 8


class RandomResizedCropConfig(Section):
    name: Literal["random_resized_crop"]
    size: Count
    min_scale: Annotated[Number, Field(gt=0, le=1)] = 0.08


class OwnAugmentConfig(NamedOrOwn):
    """A step of torchvision.transforms.v2, of Albumentations, or of your own, which gets a picture
    (uint8 [3, H, W]; for Albumentations image=[H, W, 3]) and returns one. A value in init_args may
    have a class_path too, as the transforms of a RandomApply have.

    It is tried at load, and draws anew at each serve. With one, all steps run picture by picture,
    on the thread that trains or, with loader.worker_kind: process, in worker processes. Evaluation
    crops the middle of its pictures if the steps make smaller ones."""

    name: str | None = None


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
