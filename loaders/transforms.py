"""A torchvision transform, cut in two: what is cached and what is redone at every serve.

    Resize  CenterCrop  ToImage | RandomCrop  RandomHorizontalFlip  ToDtype(float32)  Normalize
    `----- decode: cached ----' | `---------------- augment: per serve ----------------------'
                                ^ before the first that is random, unknown, or no longer uint8

Known are torchvision's own classes, v1 and v2, by exact class: a subclass or a function may roll
dice. What only turns pixels into floats is deterministic too, but would make the cache four times
as large. The rest becomes steps of ours over a whole batch if each of its transforms has one that
means the same (`torchvision_steps`). If one has none, the rest runs as it is on every picture, in
the form that the picture had before it was stored. `report` says what was done and why.
"""

from collections.abc import Iterator, Sequence
from dataclasses import dataclass
from typing import Any, cast

import numpy as np
import torch
from PIL import Image

from loaders.augment import Augmentation, Chain
from loaders.errors import LoaderError
from loaders.torchvision_steps import (
    CONVERSIONS,
    Form,
    Size,
    Step,
    batched,
    dtype_of,
    form_after,
    is_from,
    name_of,
    size_after,
    torchvision_name,
)

DETERMINISTIC = frozenset(
    {"CenterCrop", "Grayscale", "Identity", "PILToTensor", "Pad", "RGB", "Resize", "ToImage"}
    | {"ToPILImage", "ToPureTensor"}
)
TO_FLOAT = frozenset({"ConvertImageDtype", "Normalize", "ToDtype", "ToTensor"})
RANDOM = frozenset(
    {"AugMix", "AutoAugment", "ColorJitter", "ElasticTransform", "GaussianBlur", "GaussianNoise"}
    | {"JPEG", "RandAugment", "ScaleJitter", "TrivialAugmentWide"}
)  # and whatever begins with Random

MODES = frozenset({"1", "F", "I", "L", "LA", "RGB", "RGBA"})
"""Of Pillow, that an array of their pixels tells."""


@dataclass(frozen=True, slots=True)
class Decode:
    """The cached part: one transform after the other on a picture as the data set reads it."""

    steps: tuple[Step, ...]

    def __call__(self, picture: Any) -> Any:
        for step in self.steps:
            picture = step(picture)
        return picture

    @property
    def keeps_pixels(self) -> bool:
        """Whether it does no more than change the picture's type."""
        return all(torchvision_name(step) in CONVERSIONS for step in self.steps)


@dataclass(frozen=True, slots=True)
class PerSample:
    """The redone part on one stored picture: where that is a tensor, as on the `form` it had."""

    steps: tuple[Step, ...]
    form: Form = "picture"

    def __call__(self, stored: Any) -> torch.Tensor:
        picture = _restored(stored, self.form) if isinstance(stored, torch.Tensor) else stored
        for step in self.steps:
            picture = step(picture)
        return _as_tensor(picture, self.steps)


@dataclass(frozen=True, slots=True)
class Split:
    """A transform in two parts, and what to say about it."""

    decode: Decode | None
    augment: Augmentation | PerSample | None
    batched: bool
    """`augment` takes (images, draws) of a batch; else one picture."""
    report: str
    rest: tuple[Step, ...] = ()
    """What `augment` was made of."""
    size: Size | None = None
    """Of what `decode` gives, where that is known."""

    def seen(self, picture: object) -> "Split":
        """The split for pictures like this one, as `decode` gives it, before it is stored. Until
        then they are taken for what torchvision's data sets give: PIL, unless `decode` converts."""
        if not self.rest:
            return self
        return _split(
            self.decode.steps if self.decode else (), self.rest, self.size, form_of(picture)
        )


def split_transform(
    transform: object,  # a Compose, nn.Sequential, list, any callable, or None
    size: Size | None = None,
) -> Split:
    """`size`: height and width of the pictures that the data set gives, where that is known."""
    steps = tuple(_flat(transform))
    cached = 0
    form: Form = "picture"
    for step in steps:
        if _why_not_cached(step):
            break
        cached += 1
        size, form = size_after(step, size), form_after(step, form)
    return _split(steps[:cached], steps[cached:], size, form)


def form_of(picture: object) -> Form:
    if isinstance(picture, Image.Image):
        if picture.mode not in MODES:
            raise LoaderError(
                f"a picture of Pillow's mode {picture.mode!r} cannot be stored and given back to a"
                " transform as it was: convert it to RGB where the data set reads it"
            )
        return "picture"
    if isinstance(picture, np.ndarray):
        return "array"
    return "image" if is_from(picture, "torchvision.tv_tensors") else "tensor"


def _split(
    decoded: tuple[Step, ...], rest: tuple[Step, ...], size: Size | None, form: Form
) -> Split:
    said = [f"cached: {_names(decoded) or 'what the data set reads'}"]
    if rest:
        said += [f"redone at every serve: {_names(rest)} ({_why_not_cached(rest[0])})"]
    ours = batched(rest, size, form)
    if isinstance(ours, str):
        said += [f"picture by picture, for want of a batched form: {ours}"]
        augment = PerSample(rest, form)
    else:
        augment = Chain(tuple(ours)) if ours else None
    return Split(
        Decode(decoded) if decoded else None,
        augment,
        not isinstance(ours, str),
        "; ".join(said),
        rest,
        size,
    )


# ---- where to cut -------------------------------------------------------------------------------


def _flat(transform: object) -> Iterator[Step]:
    """The transforms of nested lists, in order."""
    inner: Sequence[object] | None = None
    if isinstance(transform, list | tuple):
        inner = transform
    elif type(transform) is torch.nn.Sequential:
        inner = list(transform)
    elif torchvision_name(transform) == "Compose":
        inner = cast(Any, transform).transforms
    if inner is not None:
        for each in inner:
            yield from _flat(each)
    elif callable(transform):
        yield transform
    elif transform is not None:
        raise TypeError(
            f"a transform must be callable, or a list of such, not {type(transform).__name__}"
        )


def _why_not_cached(step: Step) -> str:
    name = torchvision_name(step)
    if name in DETERMINISTIC or (name in TO_FLOAT and dtype_of(step) == torch.uint8):
        return ""
    if name in TO_FLOAT:
        return f"{name} leaves uint8: cached, floats would take four times the memory"
    if name is not None and (name in RANDOM or name.startswith("Random")):
        return f"{name} is random"
    return f"{name_of(step)} may be random: only torchvision's own are known not to be"


# ---- one picture --------------------------------------------------------------------------------


def _restored(stored: torch.Tensor, form: Form) -> Any:
    match form:
        case "tensor":
            return stored
        case "array":
            return stored.numpy()
        case "image":
            from torchvision import tv_tensors  # slow to import; here its transforms are there

            return tv_tensors.Image(stored)
        case "picture":
            pixels = stored.permute(1, 2, 0).numpy()
            return Image.fromarray(pixels[..., 0] if pixels.shape[2] == 1 else pixels)


def _as_tensor(picture: object, steps: Sequence[Step]) -> torch.Tensor:
    if isinstance(picture, torch.Tensor):
        return picture.as_subclass(torch.Tensor)
    if isinstance(picture, Image.Image):
        pixels = np.array(picture)
        return torch.from_numpy(pixels if pixels.ndim == 3 else pixels[..., None]).permute(2, 0, 1)
    if isinstance(picture, np.ndarray):
        return torch.from_numpy(picture)
    raise LoaderError(
        f"the transforms {_names(steps)} gave a {type(picture).__name__}: a serve needs one"
        " picture (PIL, array or tensor); end them in one"
    )


def _names(steps: Sequence[Step]) -> str:
    return ", ".join(name_of(step) for step in steps)
