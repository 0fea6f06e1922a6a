"""The networks that a config can name: one small file a family, built by name.

    resnet18, vgg16, mobilenetv2   32x32 pictures: the three nets of the CIFAR-10 figures
    resnet8, resnet8_stride2       trains on two CPU cores; the second for 64x64 pictures
    pilot                          the smallest: the accuracy study runs dozens of these
    resnet50                       224x224 pictures, as torchvision has it: the ImageNet figures

Every net takes N x 3 x H x W and gives N x num_classes logits; all pool globally before one linear
head, so H and W are free as long as they survive the strides. Weights start at PyTorch's defaults.
A net of your own needs none of this: name its class in the config (`model: {class_path: ...}`).
"""

import difflib
from collections.abc import Callable, Mapping
from types import MappingProxyType

from torch import nn

from perfect.models.mobilenet import mobilenetv2
from perfect.models.pilot import pilot
from perfect.models.resnet import resnet8, resnet8_stride2, resnet18
from perfect.models.vgg import vgg16

__all__ = ["MODEL_NAMES", "UnknownModel", "build_model"]


class UnknownModel(ValueError):
    """A name that is none of ours."""


def _resnet50(num_classes: int) -> nn.Module:
    from torchvision.models import resnet50  # only ImageNet pays for this import

    return resnet50(num_classes=num_classes)


_BUILDERS: Mapping[str, Callable[[int], nn.Module]] = MappingProxyType(
    {
        "resnet18": resnet18,
        "vgg16": vgg16,
        "mobilenetv2": mobilenetv2,
        "resnet8": resnet8,
        "resnet8_stride2": resnet8_stride2,
        "pilot": pilot,
        "resnet50": _resnet50,
    }
)

MODEL_NAMES: tuple[str, ...] = tuple(_BUILDERS)


def build_model(name: str, num_classes: int) -> nn.Module:
    """The network called `name`, untrained, with `num_classes` logits."""
    if name not in _BUILDERS:
        near = difflib.get_close_matches(name, MODEL_NAMES, n=1)
        hint = f"did you mean '{near[0]}'? " if near else ""
        raise UnknownModel(
            f"no model is called '{name}': {hint}there are {', '.join(MODEL_NAMES)};"
            " for a model of your own give class_path"
        )
    if num_classes < 1:
        raise ValueError(f"a model needs at least 1 class, not {num_classes}")
    return _BUILDERS[name](num_classes)
