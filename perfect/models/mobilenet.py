"""MobileNetV2 for 32x32 pictures (Sandler et al. 2018): inverted residuals, with stride 1 at first.

    narrow --1x1--> wide --3x3 depthwise--> wide --1x1--> narrow   (+ the input, if shapes agree)

On ImageNet the net divides the picture by 32. Here the stem and the first 24-channel block keep
stride 1, so that 32x32 ends as 4x4, as in our ResNet18; the parameters are the same as on ImageNet.
There is no dropout before the head: the augmentation regularises in its place.
"""

from torch import Tensor, nn

STAGES = (
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


def _convolution(before: int, after: int, kernel: int, stride: int, groups: int) -> list[nn.Module]:
    conv = nn.Conv2d(before, after, kernel, stride, kernel // 2, groups=groups, bias=False)
    return [conv, nn.BatchNorm2d(after), nn.ReLU6(inplace=True)]


class InvertedResidual(nn.Module):
    def __init__(self, before: int, after: int, stride: int, expansion: int) -> None:
        super().__init__()
        wide = before * expansion
        expand = _convolution(before, wide, 1, 1, groups=1) if expansion > 1 else []
        self.body = nn.Sequential(
            *expand,
            *_convolution(wide, wide, 3, stride, groups=wide),
            nn.Conv2d(wide, after, 1, bias=False),  # a ReLU on few channels would lose too much
            nn.BatchNorm2d(after),
        )
        self.residual = stride == 1 and before == after

    def forward(self, x: Tensor) -> Tensor:
        return x + self.body(x) if self.residual else self.body(x)


class MobileNetV2(nn.Module):
    def __init__(self, num_classes: int) -> None:
        super().__init__()
        layers = _convolution(3, STEM, 3, 1, groups=1)  # stride 2 on ImageNet
        before = STEM
        for expansion, width, blocks, stride in STAGES:
            for block in range(blocks):
                first = stride if block == 0 else 1
                layers.append(InvertedResidual(before, width, first, expansion))
                before = width
        layers += _convolution(before, LAST, 1, 1, groups=1)
        self.features = nn.Sequential(*layers)
        self.head = nn.Linear(LAST, num_classes)

    def forward(self, x: Tensor) -> Tensor:
        return self.head(self.features(x).mean(dim=(2, 3)))


def mobilenetv2(num_classes: int) -> MobileNetV2:
    return MobileNetV2(num_classes)
