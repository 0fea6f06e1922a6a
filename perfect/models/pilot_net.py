"""The smallest net that still tells schedules apart: 280k parameters, for studies on a CPU.

    32x32 --4x4/2--> 16x16 --3x3/2--> 8x8 --3x3--> 8x8 --3x3/2--> 4x4 --3x3--> 4x4 --> mean
             32             64          64            128         128       channels

The picture shrinks before the channels grow, so that no layer is expensive.
"""

from torch import nn


def _convolution(before: int, after: int, kernel: int, stride: int) -> list[nn.Module]:
    conv = nn.Conv2d(before, after, kernel, stride, padding=1, bias=False)
    return [conv, nn.BatchNorm2d(after), nn.ReLU(inplace=True)]


def pilot(num_classes: int) -> nn.Sequential:
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
