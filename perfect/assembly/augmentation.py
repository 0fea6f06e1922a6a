"""Builds the augmentation of config.augment: steps of ours and of the user, in their order.

only ours       Chain(steps): a whole batch in one pass over the pixels
a user's step   PerSample(steps): one picture after the other, in the order of the YAML
"""

import inspect
from collections.abc import Callable, Sequence
from typing import Any

import torch

from loaders.adopting.transforms import AlbumentationsTransform, OnePicture, PerSample
from loaders.pixels.augmentation import (
    Augmentation,
    CentreCrop,
    Chain,
    Cutout,
    Flip,
    Geometric,
    PadCrop,
    RandomResizedCrop,
)
from loaders.sources.randomness import generators_of, seeded_randomness
from perfect.assembly.own_class import load_class
from perfect.config.fields import (
    AugmentConfig,
    CutoutConfig,
    FlipConfig,
    OwnAugmentConfig,
    PadCropConfig,
    RandomResizedCropConfig,
)
from perfect.errors import BuildError

TRIES = 4
"""A user's step is tried so often, because random sizes may be equal by chance."""


def build_augmentation(configs: Sequence[AugmentConfig]) -> Augmentation | PerSample | None:
    ours = [_build_step(config) for config in configs if not isinstance(config, OwnAugmentConfig)]
    if len(ours) == len(configs):
        return Chain(ours) if ours else None
    return PerSample(
        tuple(
            _build_own_step(config, f"augment.{number}")
            if isinstance(config, OwnAugmentConfig)
            else OnePicture(_build_step(config))
            for number, config in enumerate(configs)
        ),
        "tensor",
    )


def centre_crop(configs: Sequence[AugmentConfig], side: int) -> Augmentation | None:
    """Return the augmentation of evaluation: the middle, as large as training's crops."""
    resized = [c.size for c in configs if isinstance(c, RandomResizedCropConfig)]
    if not any(isinstance(config, OwnAugmentConfig) for config in configs):
        return CentreCrop(resized[-1]) if resized else None
    height, width = pictures_after(configs, side)[0]
    return None if (height, width) == (side, side) else CentreCrop((height, width))


def pictures_after(
    configs: Sequence[AugmentConfig], side: int
) -> tuple[tuple[int, int], list[BuildError]]:
    """Return the size of the pictures of training, and the steps that do not fit the pictures that
    reach them. Stored pictures are squares of `side` pixels."""
    problems: list[BuildError] = []
    picture = torch.zeros(3, side, side, dtype=torch.uint8)
    for number, config in enumerate(configs):
        key, least = f"augment.{number}", min(picture.shape[1:])
        if isinstance(config, OwnAugmentConfig):
            try:
                picture = _try_step(_build_own_step(config, key), picture, f"{key}.class_path")
            except BuildError as error:
                return (side, side), [*problems, error]
        elif isinstance(config, PadCropConfig) and config.padding >= least:
            why = f"must be less than the picture's side ({least} pixels): lower it"
            problems.append(BuildError(f"{key}.padding", f"{config.padding} {why}"))
        elif isinstance(config, RandomResizedCropConfig):
            if config.size > least:
                why = f"is larger than the stored picture ({least} pixels): lower it, or raise"
                why = f"{config.size} {why} data.picture_size"
                problems.append(BuildError(f"{key}.size", why))
            picture = picture.new_zeros(3, config.size, config.size)
    height, width = picture.shape[1:]
    if max(height, width) > side and not problems:
        why = (
            f"pictures become {height} x {width}, larger than the stored {side} x {side} that are"
            " evaluated: raise data.picture_size, or crop"
        )
        problems.append(BuildError("augment", why))
    return (height, width), problems


def _build_step(config: AugmentConfig) -> Geometric:
    match config:
        case PadCropConfig():
            return PadCrop(config.padding)
        case FlipConfig():
            return Flip(config.p)
        case CutoutConfig():
            return Cutout(config.size)
        case RandomResizedCropConfig():
            return RandomResizedCrop(config.size, scale=(config.min_scale, 1.0))
        case OwnAugmentConfig():
            raise TypeError(f"{config.class_path} is not a step of ours")


def _build_own_step(config: OwnAugmentConfig, key: str) -> Any:
    if not issubclass(load_class(config.class_path or "", f"{key}.class_path"), Callable):
        raise BuildError(f"{key}.class_path", f"{config.class_path} cannot be called on a picture")
    made = _construct_nested({"class_path": config.class_path, "init_args": config.init_args}, key)
    modules = (kind.__module__ for kind in inspect.getmro(type(made)))
    theirs = any(module.partition(".")[0] == "albumentations" for module in modules)
    return AlbumentationsTransform(made) if theirs else made


def _construct_nested(value: Any, key: str) -> Any:
    """Return the value with an object in place of each section that has a class_path."""
    if isinstance(value, list):
        return [_construct_nested(part, f"{key}.{number}") for number, part in enumerate(value)]
    if not isinstance(value, dict):
        return value
    if "class_path" not in value:
        return {name: _construct_nested(part, f"{key}.{name}") for name, part in value.items()}
    path, here = str(value["class_path"]), f"{key}.init_args"
    made = load_class(path, f"{key}.class_path")
    arguments = _construct_nested(value.get("init_args", {}), here)
    try:
        inspect.signature(made).bind(**arguments)  # Albumentations only warns of unknown ones
        return made(**arguments)
    except Exception as error:
        why = " ".join(str(error).split()).rstrip(".")
        raise BuildError(here, f"{path} does not take them: {why}; change them") from error


def _try_step(step: Any, picture: torch.Tensor, key: str) -> torch.Tensor:
    """Return what the step makes of the picture, or raise BuildError if that is no picture."""
    alone, held = PerSample((step,), "tensor"), generators_of(step)
    made, sizes = picture, set[tuple[int, ...]]()
    given = f"a picture (uint8 {[*picture.shape]})"
    for seed in range(TRIES):
        with seeded_randomness(seed + 1, held=held):
            try:
                result = alone(picture.clone())
            except Exception as error:
                why = f"fails on {given}: {type(error).__name__}: {error}; remove or change it"
                raise BuildError(key, why) from error
        if isinstance(result, list):
            raise BuildError(
                key, f"makes {len(result)} views of {given}: give a step that makes one"
            )
        made = result
        if made.dtype != torch.uint8 or made.ndim != 3 or len(made) != len(picture):
            raise BuildError(
                key,
                f"makes {str(made.dtype).removeprefix('torch.')} {[*made.shape]} of {given}: give"
                " a step that keeps uint8 [3, H, W], which the model turns into floats itself",
            )
        sizes.add(tuple(made.shape))
    if len(sizes) > 1:
        raise BuildError(key, f"makes pictures of several sizes ({sorted(sizes)}): crop to one")
    return made
