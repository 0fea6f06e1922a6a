"""Residual nets for small pictures (He et al. 2016), with a 3x3 stem and no max-pool.

    stem 3x3 -> stage 1 -> stage 2 -> ... -> mean over the picture -> linear
                stride 1    stride 2

    resnet18   4 stages of 2 blocks, width 64-128-256-512: a 32x32 picture ends as 4x4
    resnet8    3 stages of 1 block,  width 16-32-64:       a 32x32 picture ends as 8x8

`stem_stride=2` halves the picture in the stem, so that a 64x64 picture costs as much as a 32x32 one
with stride 1.
"""

from collections.abc import Sequence

from torch import Tensor, nn
from torch.nn import functional as F


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
        self.stem = nn.Sequential(
            nn.Conv2d(3, widths[0], 3, stem_stride, padding=1, bias=False),
            nn.BatchNorm2d(widths[0]),
            nn.ReLU(inplace=True),
        )
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
    return ResNet(num_classes, widths=(16, 32, 64), blocks=1, stem_stride=2)
