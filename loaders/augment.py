"""The augmentations that a user names, in one place: `from loaders.augment import Chain, Flip`."""

from loaders.batching.user_views import WholeSample
from loaders.pixels.augmentation import (
    CentreCrop,
    Chain,
    Cutout,
    Flip,
    PadCrop,
    RandomCrop,
    RandomResizedCrop,
)
from loaders.pixels.color import ColorJitter, Normalize, ToFloat

__all__ = [
    "CentreCrop",
    "Chain",
    "ColorJitter",
    "Cutout",
    "Flip",
    "Normalize",
    "PadCrop",
    "RandomCrop",
    "RandomResizedCrop",
    "ToFloat",
    "WholeSample",
]
