"""The networks that a YAML can name.

    resnet18, vgg16, mobilenetv2   32x32 pictures: the three nets of the CIFAR-10 figures
    resnet8, resnet8_stride2       train on two CPU cores; the second is for 64x64 pictures
    pilot                          the smallest: the accuracy study trains dozens of these
    resnet50                       224x224 pictures, from torchvision: the ImageNet figures

    gpt2_tiny, _small, _medium, _large, _xl     text: N x S ids -> N x S x vocabulary logits
    llama_tiny, llama_7b                        the same; with LoRA if the config asks for it

May import: callbacks, config, text.
"""

from collections.abc import Callable, Mapping
from types import MappingProxyType

from torch import nn

from perfect.models.gpt2 import GPT2_SHAPES, Gpt2
from perfect.models.llama import LLAMA_SHAPES, Llama
from perfect.models.picture_nets import (
    mobilenetv2,
    pilot,
    resnet8,
    resnet8_stride2,
    resnet18,
    vgg16,
)


def _resnet50(num_classes: int) -> nn.Module:
    from torchvision.models import resnet50  # this import is slow, and only resnet50 needs it

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


def build_model(name: str, num_classes: int) -> nn.Module:
    """Build the network called `name`, untrained, with `num_classes` logits."""
    return _BUILDERS[name](num_classes)


def build_language_model(name: str, vocabulary: int, dropout: float | None = None) -> Gpt2 | Llama:
    """Build the net called `name`, untrained. Only GPT-2 has dropout (None: 0.1)."""
    if name in GPT2_SHAPES:
        return Gpt2(GPT2_SHAPES[name], vocabulary, 0.1 if dropout is None else dropout)
    return Llama(LLAMA_SHAPES[name], vocabulary)


def longest_sequence(name: str) -> int | None:
    """Return for how many positions a GPT-2 has embeddings; None for LLaMA, which has no limit."""
    return GPT2_SHAPES[name].positions if name in GPT2_SHAPES else None
