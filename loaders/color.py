"""The augmentations that change values. `loaders.augment` has them too, with all others."""

from loaders.pixels.color import ColorJitter, Normalize, ToFloat

__all__ = ["ColorJitter", "Normalize", "ToFloat"]
