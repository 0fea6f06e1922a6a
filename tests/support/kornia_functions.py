"""A pipeline of kornia, where a worker process can import it."""

from typing import Any

import torch
from kornia.augmentation import AugmentationSequential, RandomHorizontalFlip, RandomVerticalFlip

pipeline = AugmentationSequential(
    RandomHorizontalFlip(p=0.5), RandomVerticalFlip(p=0.5), data_keys=["input", "mask"]
)


def moved(sample: Any) -> tuple[torch.Tensor, torch.Tensor]:
    picture, target = sample
    images = picture.as_subclass(torch.Tensor)[None] / 255
    masks = target["mask"].as_subclass(torch.Tensor)[None, None] / 255
    image, mask = pipeline(images, masks)
    return image[0], mask[0]
