"""A torchvision transform, cut in two: one part is cached, one part is redone at every serve.

    Resize  CenterCrop  ToImage | RandomCrop  RandomHorizontalFlip  ToDtype(float32)  Normalize
    `----- decode: cached ----' | `---------------- augment: per serve ----------------------'
                                ^ before the first that is random, unknown, or no longer uint8

Only torchvision's own classes are known, by their exact class. The redone part becomes steps of
ours over a whole batch, if each of its transforms has one (`torchvision_steps`); else it runs on
every picture, in the form that the picture had. `report` says what was done and why. A transform of
a Hugging Face data set gets rows, {"image": [picture], "label": [3]}, and is redone whole.
"""

from collections.abc import Callable, Iterator, Mapping, Sequence
from dataclasses import dataclass
from typing import Any, cast

import numpy as np
import torch
from PIL import Image

from loaders.adopting.torchvision_steps import (
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
from loaders.errors import LoaderError
from loaders.pixels.augmentation import Augmentation, Chain, Draws
from loaders.slots.leaves import mode_of

DETERMINISTIC = frozenset(
    {"CenterCrop", "Grayscale", "Identity", "PILToTensor", "Pad", "RGB", "Resize", "ToImage"}
    | {"ToPILImage", "ToPureTensor"}
)
TO_FLOAT = frozenset({"ConvertImageDtype", "Normalize", "ToDtype", "ToTensor"})
RANDOM = frozenset(
    {"AugMix", "AutoAugment", "ColorJitter", "ElasticTransform", "GaussianBlur", "GaussianNoise"}
    | {"JPEG", "RandAugment", "ScaleJitter", "TrivialAugmentWide"}
)  # and every class whose name begins with Random

MODES = frozenset({"F", "I", "L", "RGB", "RGBA"})
"""The modes of Pillow that are stored as they are, and that the array of pixels shows."""


@dataclass(frozen=True, slots=True)
class Decode:
    """The cached part: it applies one transform after the other to a picture as it was read."""

    steps: tuple[Step, ...]

    def __call__(self, picture: Any) -> Any:
        for step in self.steps:
            picture = step(picture)
        return picture

    @property
    def keeps_pixels(self) -> bool:
        """Whether it changes nothing but the picture's type."""
        return all(torchvision_name(step) in CONVERSIONS for step in self.steps)


@dataclass(frozen=True, slots=True)
class PerSample:
    """The redone part, for one stored picture, which gets back the `form` that it had."""

    steps: tuple[Step, ...]
    form: Form = "picture"

    def __call__(self, stored: Any) -> torch.Tensor | list[torch.Tensor]:
        picture = _restore(stored, self.form) if isinstance(stored, torch.Tensor) else stored
        for step in self.steps:
            picture = step(picture)
        if isinstance(picture, list | tuple):  # several views
            return [_as_tensor(view, self.steps) for view in cast(list[Any], picture)]
        return _as_tensor(picture, self.steps)


@dataclass(frozen=True, slots=True)
class OnePicture:
    """A step of ours between transforms of one picture. It draws from torch's generator."""

    step: Augmentation

    def __call__(self, picture: torch.Tensor) -> torch.Tensor:
        key = torch.randint(1 << 62, (1,)).numpy().astype(np.uint64)
        return self.step(picture[None], Draws(key))[0]


@dataclass(frozen=True, slots=True)
class AlbumentationsTransform:
    """A transform of Albumentations, which takes and gives arrays [H, W, C], for one picture."""

    transform: Callable[..., Any]

    def __call__(self, picture: torch.Tensor) -> torch.Tensor:
        made = self.transform(image=picture.permute(1, 2, 0).numpy().copy())["image"]
        return torch.from_numpy(np.ascontiguousarray(made)).permute(2, 0, 1)


@dataclass(frozen=True, slots=True)
class TransformSplit:
    """A transform in two parts, and what to say about it."""

    decode: Decode | None
    augment: Augmentation | Callable[[Any], Any] | None
    batched: bool
    """Whether `augment` takes (images, draws) of a batch, and not one picture."""
    report: str
    """What is cached and what is redone, and why."""
    rest: tuple[Step, ...] = ()
    """The transforms that `augment` was made of."""
    size: Size | None = None
    """The size of the pictures that `decode` returns, where that is known."""

    def for_picture(self, picture: object) -> "TransformSplit":
        """The split for pictures like this one, which `decode` returned. Before one is seen, they
        are taken for PIL pictures, as torchvision's data sets return, unless `decode` converts."""
        if not self.rest:
            return self
        return _split(
            self.decode.steps if self.decode else (), self.rest, self.size, form_of(picture)
        )


def split_transform(
    transform: object,  # a Compose, nn.Sequential, list, any callable, or None
    size: Size | None = None,
) -> TransformSplit:
    """Split a transform. `size` is the height and width of the pictures, where that is known."""
    steps = tuple(flat_steps(transform))
    cached = 0
    form: Form = "picture"
    for step in steps:
        if _why_not_cached(step):
            break
        cached += 1
        size, form = size_after(step, size), form_after(step, form)
    return _split(steps[:cached], steps[cached:], size, form)


def form_of(picture: object) -> Form:
    if (mode := mode_of(picture)) is not None:
        if mode not in MODES:
            raise LoaderError(
                f"a picture of Pillow's mode {mode!r} cannot be stored and given back to a"
                " transform as it was: let the data set convert it to RGB"
            )
        return "picture"
    if isinstance(picture, np.ndarray):
        return "array"
    return "image" if is_from(picture, "torchvision.tv_tensors") else "tensor"


def _split(
    decoded: tuple[Step, ...], rest: tuple[Step, ...], size: Size | None, form: Form
) -> TransformSplit:
    report = [f"cached: {_names(decoded) or 'what the data set reads'}"]
    if rest:
        report += [f"redone at every serve: {_names(rest)} ({_why_not_cached(rest[0])})"]
    ours = batched(rest, size, form)
    if isinstance(ours, str):
        report += [f"picture by picture, for want of a batched form: {ours}"]
        augment = PerSample(rest, form)
    else:
        augment = Chain(tuple(ours)) if ours else None
    return TransformSplit(
        Decode(decoded) if decoded else None,
        augment,
        not isinstance(ours, str),
        "; ".join(report),
        rest,
        size,
    )


def flat_steps(transform: object) -> Iterator[Step]:
    """The single transforms of a nest of lists, in order."""
    inner: Sequence[object] | None = None
    if isinstance(transform, list | tuple):
        inner = transform
    elif type(transform) is torch.nn.Sequential:
        inner = list(transform)
    elif torchvision_name(transform) == "Compose":
        inner = cast(Any, transform).transforms
    if inner is not None:
        for each in inner:
            yield from flat_steps(each)
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
        return (
            f"{name} turns bytes into floats, which would take four times the memory in the cache"
        )
    if name is not None and (name in RANDOM or name.startswith("Random")):
        return f"{name} is random"
    return f"{name_of(step)} may be random: only transforms of torchvision are known not to be"


def _restore(stored: torch.Tensor, form: Form) -> Any:
    match form:
        case "tensor":
            return stored
        case "array":
            return stored.numpy()
        case "image":
            from torchvision import tv_tensors  # it is imported already, by its transforms

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
        f"the transforms {_names(steps)} gave a {type(picture).__name__}, but a serve needs one"
        " picture (PIL, array or tensor), or a list of them: let the last transform return such"
    )


def _names(steps: Sequence[Step]) -> str:
    return ", ".join(name_of(step) for step in steps)


@dataclass(frozen=True, slots=True)
class RowTransform:
    """A transform of a batch of rows, for one row."""

    transform: Callable[[dict[str, list[Any]]], Mapping[str, Any]]

    def __call__(self, row: dict[str, Any]) -> dict[str, Any]:
        made = self.transform({name: [value] for name, value in row.items()})
        return {name: values[0] for name, values in made.items()}


def take_transform(dataset: Any) -> tuple[Any, RowTransform] | None:
    """A Hugging Face data set without its transform, and the transform. None: it has none."""
    if type(dataset).__module__ != "datasets.arrow_dataset":
        return None
    format_ = dataset.format
    if format_["type"] != "custom" or "transform" not in format_["format_kwargs"]:
        return None
    kept = {name: format_[name] for name in ("columns", "output_all_columns")}
    return dataset.with_format(None, **kept), RowTransform(format_["format_kwargs"]["transform"])
