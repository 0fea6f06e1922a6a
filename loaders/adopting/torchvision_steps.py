"""torchvision's transforms, v1 and v2, and data sets: what is known of each, by its exact class.

A step of ours replaces a transform if it has the same distribution, and the same pixels up to the
rounding of Pillow against torch. (`RandomResizedCrop` is not antialiased between 1x and 2x.) Some
transforms do nothing to a PIL picture or nothing to a tensor, so the form of a picture is followed
from one transform to the next, and its size: a crop of a padded picture is a shift only if it
restores the size. torchvision is not imported.
"""

from collections.abc import Callable, Mapping, Sequence
from dataclasses import replace
from typing import Any, Literal, cast

import torch
from PIL import Image

from loaders.pixels.augmentation import Augmentation, Flip, PadCrop, RandomCrop, RandomResizedCrop
from loaders.pixels.color import ColorJitter, Normalize, ToFloat
from loaders.pixels.resizing import Resizing

# A picture has the form that a user's transforms pass on: PIL, array or tensor.
Step = Callable[[Any], Any]
Size = tuple[int, int]  # height, width

CONVERSIONS = frozenset({"Identity", "PILToTensor", "ToImage", "ToPureTensor"})
"""Transforms that change the type of a picture, but no pixel."""
BILINEAR = ("bilinear", Image.Resampling.BILINEAR)
"""What torchvision calls it, or Pillow."""
Form = Literal["picture", "image", "tensor", "array"]
"""How a picture reaches its transforms: "picture" is PIL, "image" torchvision's kind of tensor."""


def torchvision_name(step: object) -> str | None:
    """The name of a transform's class if torchvision defines it. None: somebody else does."""
    return type(step).__name__ if is_from(step, "torchvision.transforms") else None


def is_from(thing: object, package: str) -> bool:
    return f"{type(thing).__module__}.".startswith(f"{package}.")


def name_of(step: Step) -> str:
    return getattr(step, "__name__", type(step).__name__)


def form_after(step: Step, form: Form) -> Form:
    match torchvision_name(step):
        case "ToImage":
            return "image"
        case "PILToTensor" | "ToTensor":
            return form if form == "image" else "tensor"
        case "ToPureTensor":
            return "tensor" if form == "image" else form
        case "ToPILImage":
            return "picture"
        case _:
            return form


def size_after(step: Any, size: Size | None) -> Size | None:
    match torchvision_name(step):
        case "CenterCrop" | "RandomCrop" | "RandomResizedCrop":
            height, width = step.size
            return height, width
        case "Resize":
            wanted = (step.size,) if isinstance(step.size, int) else tuple(step.size or ())
            if len(wanted) == 2:
                return wanted
            # Only the short side is given. If the picture is a square, the other one is equal.
            square = size is not None and size[0] == size[1] and step.max_size is None
            return (wanted[0], wanted[0]) if square and wanted else None
        case "Pad":
            return None
        case _:
            return size


def resizing_of(step: Any) -> Resizing | None:
    """What `Resize` does to a picture of Pillow. None: another step, or Pillow has to do it."""
    if torchvision_name(step) != "Resize" or step.max_size is not None or step.size is None:
        return None
    size = (step.size,) if isinstance(step.size, int) else tuple(step.size)
    how = getattr(step.interpolation, "value", step.interpolation)
    cubic = how in ("bicubic", Image.Resampling.BICUBIC)
    if min(size) < 1 or not (cubic or how in BILINEAR):
        return None
    return Resizing(size, cubic)


def batched(rest: Sequence[Step], size: Size | None, form: Form) -> list[Augmentation] | str:
    """Steps of ours for all transforms of `rest`, or the reason why there are none."""
    ours: list[Augmentation] = []
    if rest and form == "array":
        return "pictures are arrays [H, W, C]"
    for step in rest:
        made = _ours(step, size, form)
        if isinstance(made, str):
            return made
        ours += made
        size, form = size_after(step, size), form_after(step, form)
    return _on_bytes(ours)


def _ours(step: Any, size: Size | None, form: Form) -> list[Augmentation] | str:
    # A transform that does nothing to this form of picture is left to torchvision.
    pil = form == "picture"
    match torchvision_name(step):
        case "Identity" | "PILToTensor" | "ToImage" | "ToPureTensor":
            return []
        case "RandomHorizontalFlip":
            return [Flip(step.p)]
        case "RandomCrop":
            return _pad_crop(step, size)
        case "ToTensor" if pil:
            return [ToFloat()]
        case "ConvertImageDtype" if dtype_of(step) == torch.float32 and not pil:
            return [ToFloat(by_product=is_from(step, "torchvision.transforms.v2"))]
        case "ToDtype" if dtype_of(step) == torch.float32 and step.scale and not pil:
            return [ToFloat(by_product=True)]
        case "Normalize" if not pil:
            return [Normalize(tuple(map(float, step.mean)), tuple(map(float, step.std)))]
        case "RandomResizedCrop":
            return _resized_crop(step, pil)
        case "ColorJitter" if step.hue is None:
            # In torchvision, None stands for a factor of 1.
            factors = (step.brightness, step.contrast, step.saturation)
            return [ColorJitter(*((1.0, 1.0) if f is None else tuple(f) for f in factors))]
        case "ColorJitter":
            return "ColorJitter with a hue has none"
        case _:
            return f"{name_of(step)} has none"


def _resized_crop(step: Any, pil: bool) -> list[Augmentation] | str:
    if not pil and not step.antialias:  # Pillow always does it
        return "RandomResizedCrop has one only with antialias=True"
    how = getattr(step.interpolation, "value", step.interpolation)
    if how not in BILINEAR:
        return "RandomResizedCrop has one only for bilinear interpolation"
    return [RandomResizedCrop(tuple(step.size), tuple(step.scale), tuple(step.ratio))]


def _pad_crop(step: Any, size: Size | None) -> list[Augmentation] | str:
    padding = step.padding or 0
    each = {padding} if isinstance(padding, int) else {*padding}
    if each == {0} and not step.pad_if_needed:
        return [] if tuple(step.size) == size else [RandomCrop(tuple(step.size))]
    if tuple(step.size) != size:
        crop, theirs = f"{step.size[0]} x {step.size[1]}", "not known here"
        if size is not None:
            theirs = f"{size[0]} x {size[1]}"
        return (
            f"RandomCrop to {crop} has one with a border only for pictures of that size, and their"
            f" size is {theirs}"
        )
    if len(each) > 1 or (each != {0} and step.padding_mode != "constant") or _has_color(step.fill):
        return "RandomCrop has one only with the same black border on all sides"
    [border] = each
    return [PadCrop(border)]


def _on_bytes(steps: Sequence[Augmentation]) -> list[Augmentation]:
    """Convert to float as late as possible, because bytes are cheaper to move than floats."""
    late: list[Augmentation] = []
    waiting: ToFloat | None = None
    for step in steps:
        if isinstance(step, ToFloat):
            waiting = waiting or step  # a second one leaves floats alone
        elif waiting is None or isinstance(step, Flip | PadCrop):
            late.append(step)
        else:
            scales = isinstance(step, Normalize)
            late += [replace(step, to_float=waiting)] if scales else [waiting, step]
            waiting = None
    return late if waiting is None else [*late, waiting]


def _has_color(fill: object) -> bool:
    if isinstance(fill, Mapping):
        return any(_has_color(each) for each in fill.values())
    return any(fill) if isinstance(fill, list | tuple) else bool(fill)


def dtype_of(step: Any) -> object:
    """The dtype of a conversion. (In v2 it may be a dict with one for each kind of picture.)"""
    return getattr(step, "dtype", None)


NOT_ONE_PICTURE = frozenset(
    {"HMDB51", "Kinetics", "LFWPairs", "LSUN", "MovingMNIST", "PhotoTour", "UCF101"}
)
"""Their samples are videos or pairs, or come from a data set inside."""
READ_TRANSFORMS = frozenset(
    {"Cityscapes", "CocoDetection", "Kitti", "OxfordIIITPet", "Places365", "SBDataset"}
    | {"VOCDetection", "VOCSegmentation"}
)
"""They apply `.transforms` (picture, target), and not `.transform`."""
SAFE_IN_THREADS = frozenset(
    {"CIFAR10", "DatasetFolder", "MNIST", "QMNIST", "STL10", "SVHN", "USPS"}
)
"""Several threads may read them: they look into arrays, or open a file for each sample."""


def torchvision_reader(dataset: Any) -> str | None:
    """The class of torchvision whose [i] reads this data set. None: the user wrote its [i]."""
    reader = getattr(type(dataset), "__getitem__", None)
    if not f"{getattr(reader, '__module__', '')}.".startswith("torchvision.datasets."):
        return None
    return cast(Any, reader).__qualname__.split(".")[0]


def known_size(dataset: Any, owner: str) -> Size | None:
    """The height and width of its pictures, where all have the same."""
    match owner:
        case "CIFAR10" | "MNIST" | "QMNIST":
            return _sides(dataset.data, 1)
        case "STL10" | "SVHN":
            return _sides(dataset.data, 2)
        case "FakeData":
            return dataset.image_size[1], dataset.image_size[2]
        case _:
            return None


def _sides(data: Any, first: int) -> Size | None:
    """The height and width of the pictures in an array that has them from dimension `first` on."""
    shape = getattr(data, "shape", ())
    return (shape[first], shape[first + 1]) if len(shape) > first + 1 else None
