"""Nets for small pictures: N x 3 x H x W -> N x num_classes logits.

    resnet18      4 stages of 2 blocks, width 64-128-256-512: a 32x32 picture ends as 4x4
    resnet8       3 stages of 1 block,  width 16-32-64:       a 32x32 picture ends as 8x8
    vgg16         13 convolutions with batch norm, one linear head
    mobilenetv2   inverted residuals; the stem and the first 24-channel block keep stride 1
    pilot         280k parameters, for studies on a CPU
    resnet50      224x224 pictures, from torchvision: the ImageNet figures

They differ from torchvision's in strides, biases and heads, so that a 32x32 picture keeps its
detail; their names of parameters are those of every checkpoint that we have written.
"""

from collections.abc import Sequence

from torch import Tensor, nn
from torch.nn import functional as F


def _convolution(
    before: int,
    after: int,
    kernel: int = 3,
    stride: int = 1,
    *,
    padding: int = 1,
    groups: int = 1,
    activation: type[nn.ReLU | nn.ReLU6] = nn.ReLU,
) -> list[nn.Module]:
    # There is no bias, because the norm that follows would subtract it again.
    conv = nn.Conv2d(before, after, kernel, stride, padding, groups=groups, bias=False)
    return [conv, nn.BatchNorm2d(after), activation(inplace=True)]


# ---- residual nets (He et al. 2016), with a 3x3 stem and no max-pool --------------------------


class ResidualBlock(nn.Module):
    """Two 3x3 convolutions and a shortcut, which is a 1x1 convolution if the shape changes."""

    def __init__(self, before: int, after: int, stride: int) -> None:
        super().__init__()
        self.conv1 = nn.Conv2d(before, after, 3, stride, padding=1, bias=False)
        self.norm1 = nn.BatchNorm2d(after)
        self.conv2 = nn.Conv2d(after, after, 3, padding=1, bias=False)
        self.norm2 = nn.BatchNorm2d(after)
        self.shortcut: nn.Module = nn.Identity()
        if stride != 1 or before != after:
            self.shortcut = nn.Sequential(
                nn.Conv2d(before, after, 1, stride, bias=False), nn.BatchNorm2d(after)
            )

    def forward(self, x: Tensor) -> Tensor:
        y = F.relu(self.norm1(self.conv1(x)))
        return F.relu(self.norm2(self.conv2(y)) + self.shortcut(x))


class ResNet(nn.Module):
    """Each stage has `blocks` blocks, and each stage but the first halves the picture."""

    def __init__(
        self, num_classes: int, widths: Sequence[int], blocks: int, stem_stride: int = 1
    ) -> None:
        super().__init__()
        self.stem = nn.Sequential(*_convolution(3, widths[0], stride=stem_stride))
        stages: list[nn.Module] = []
        before = widths[0]
        for stage, width in enumerate(widths):
            for block in range(blocks):
                halve = stage > 0 and block == 0
                stages.append(ResidualBlock(before, width, stride=2 if halve else 1))
                before = width
        self.stages = nn.Sequential(*stages)
        self.head = nn.Linear(before, num_classes)

    def forward(self, x: Tensor) -> Tensor:
        return self.head(self.stages(self.stem(x)).mean(dim=(2, 3)))


def resnet18(num_classes: int) -> ResNet:
    return ResNet(num_classes, widths=(64, 128, 256, 512), blocks=2)


def resnet8(num_classes: int) -> ResNet:
    return ResNet(num_classes, widths=(16, 32, 64), blocks=1)


def resnet8_stride2(num_classes: int) -> ResNet:
    """Halve the picture in the stem, so that 64x64 pixels cost as much as 32x32 ones."""
    return ResNet(num_classes, widths=(16, 32, 64), blocks=1, stem_stride=2)


def resnet50(num_classes: int) -> nn.Module:
    from torchvision.models import resnet50  # this import is slow, and only resnet50 needs it

    return resnet50(num_classes=num_classes)


# ---- VGG16 (Simonyan & Zisserman 2015) without the two hidden linear layers -------------------

VGG_STAGES = ((64, 64), (128, 128), (256, 256, 256), (512, 512, 512), (512, 512, 512))
"""The widths of the convolutions between two 2x2 max-pools."""


class PooledNet(nn.Module):
    """Layers, the mean over all places, and a linear head."""

    def __init__(self, layers: Sequence[nn.Module], width: int, num_classes: int) -> None:
        super().__init__()
        self.features = nn.Sequential(*layers)
        self.head = nn.Linear(width, num_classes)

    def forward(self, x: Tensor) -> Tensor:
        return self.head(self.features(x).mean(dim=(2, 3)))


def vgg16(num_classes: int) -> PooledNet:
    layers: list[nn.Module] = []
    before = 3
    for stage in VGG_STAGES:
        for width in stage:
            layers += _convolution(before, width)
            before = width
        layers.append(nn.MaxPool2d(2))
    return PooledNet(layers, before, num_classes)


# ---- MobileNetV2 (Sandler et al. 2018), without dropout ---------------------------------------

MOBILENET_STAGES = (
    # expansion, channels, blocks, stride of the first block
    (1, 16, 1, 1),
    (6, 24, 2, 1),  # stride 2 on ImageNet
    (6, 32, 3, 2),
    (6, 64, 4, 2),
    (6, 96, 3, 1),
    (6, 160, 3, 2),
    (6, 320, 1, 1),
)
STEM, LAST = 32, 1280


def _pointwise(before: int, after: int) -> list[nn.Module]:
    return _convolution(before, after, 1, padding=0, activation=nn.ReLU6)


class InvertedResidual(nn.Module):
    """narrow --1x1--> wide --3x3 depthwise--> wide --1x1--> narrow, + the input if shapes agree."""

    def __init__(self, before: int, after: int, stride: int, expansion: int) -> None:
        super().__init__()
        wide = before * expansion
        expand = _pointwise(before, wide) if expansion > 1 else []
        self.body = nn.Sequential(
            *expand,
            *_convolution(wide, wide, stride=stride, groups=wide, activation=nn.ReLU6),
            nn.Conv2d(wide, after, 1, bias=False),  # a ReLU on few channels would lose too much
            nn.BatchNorm2d(after),
        )
        self.residual = stride == 1 and before == after

    def forward(self, x: Tensor) -> Tensor:
        return x + self.body(x) if self.residual else self.body(x)


def mobilenetv2(num_classes: int) -> PooledNet:
    layers = _convolution(3, STEM, activation=nn.ReLU6)  # stride 2 on ImageNet
    before = STEM
    for expansion, width, blocks, stride in MOBILENET_STAGES:
        for block in range(blocks):
            first = stride if block == 0 else 1
            layers.append(InvertedResidual(before, width, first, expansion))
            before = width
    return PooledNet([*layers, *_pointwise(before, LAST)], LAST, num_classes)


# ---- the pilot net ----------------------------------------------------------------------------


def pilot(num_classes: int) -> nn.Sequential:
    """The picture shrinks before the channels grow, so that no layer is expensive."""
    return nn.Sequential(
        *_convolution(3, 32, kernel=4, stride=2),
        *_convolution(32, 64, kernel=3, stride=2),
        *_convolution(64, 64, kernel=3, stride=1),
        *_convolution(64, 128, kernel=3, stride=2),
        *_convolution(128, 128, kernel=3, stride=1),
        nn.AdaptiveAvgPool2d(1),
        nn.Flatten(),
        nn.Linear(128, num_classes),
    )
