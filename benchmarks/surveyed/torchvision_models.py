"""Models of torchvision, narrow where its constructors allow it."""

from typing import Any

import torch
from torch import nn
from torch.nn import functional

from benchmarks.surveyed.case import Case, class_loss, library, pictures, wrapped


def _models() -> Any:
    return library("torchvision.models")


def _resnet() -> nn.Module:
    block = library("torchvision.models.resnet").BasicBlock
    return _models().ResNet(block, [1, 1, 1, 1], num_classes=10)


def _swin() -> nn.Module:
    return _models().SwinTransformer(
        patch_size=[2, 2], embed_dim=24, depths=[2, 1], num_heads=[2, 4], window_size=[4, 4],
        num_classes=10,
    )  # fmt: skip


def _vit() -> nn.Module:
    return _models().VisionTransformer(
        image_size=32, patch_size=8, num_layers=2, num_heads=3, hidden_dim=48, mlp_dim=96,
        dropout=0.1, num_classes=10,
    )  # fmt: skip


def _densenet() -> nn.Module:
    return _models().DenseNet(8, (2, 2), 16, drop_rate=0.1, num_classes=10)


def _googlenet() -> nn.Module:
    return _models().GoogLeNet(num_classes=10, init_weights=False, aux_logits=True)


def _named(name: str) -> Any:
    return lambda: getattr(_models(), name)(weights=None, num_classes=10)


def _lraspp() -> nn.Module:
    make = library("torchvision.models.segmentation").lraspp_mobilenet_v3_large
    return make(weights=None, weights_backbone=None, num_classes=5)


def _with_auxiliary(net: nn.Module, batch: Any) -> torch.Tensor:
    x, y = batch
    said = net(x)
    aside = functional.cross_entropy(said.aux_logits1, y) + functional.cross_entropy(
        said.aux_logits2, y
    )
    return functional.cross_entropy(said.logits, y) + 0.3 * aside


def _by_pixel(net: nn.Module, batch: Any) -> torch.Tensor:
    x, y = batch
    return functional.cross_entropy(net(x)["out"], y)


def _pixels() -> Any:
    return torch.randn(2, 3, 64, 64), torch.randint(0, 5, (2, 64, 64))


HOME = "torchvision"
CASES: tuple[Case, ...] = (
    wrapped("ResNet", HOME, _resnet, pictures, class_loss),
    wrapped("DenseNet", HOME, _densenet, pictures, class_loss),
    wrapped("GoogLeNet with auxiliary heads", HOME, _googlenet, lambda: pictures(64),
            _with_auxiliary),
    wrapped("SwinTransformer", HOME, _swin, pictures, class_loss),
    wrapped("VisionTransformer", HOME, _vit, pictures, class_loss),
    wrapped("mobilenet_v3_small", HOME, _named("mobilenet_v3_small"), pictures, class_loss),
    wrapped("shufflenet_v2_x0_5", HOME, _named("shufflenet_v2_x0_5"), pictures, class_loss),
    wrapped("lraspp_mobilenet_v3_large", HOME, _lraspp, _pixels, _by_pixel),
)  # fmt: skip
