"""A pipeline of kornia, where a worker process can import it."""

from typing import Any

import torch
from kornia import augmentation  # pyright: ignore[reportMissingImports]

pipeline = augmentation.AugmentationSequential(
    augmentation.RandomHorizontalFlip(p=0.5),
    augmentation.RandomVerticalFlip(p=0.5),
    data_keys=["input", "mask"],
)


def moved(sample: Any) -> tuple[torch.Tensor, torch.Tensor]:
    picture, target = sample
    images = picture.as_subclass(torch.Tensor)[None] / 255
    masks = target["mask"].as_subclass(torch.Tensor)[None, None] / 255
    image, mask = pipeline(images, masks)
    return image[0], mask[0]
