"""The nets of the accuracy benchmark, by name.

`quick` (and `quick-tiny`, a toy of it) is here, for the 30-epoch GPU preset; any other name is the
package's: `pilot` (280k parameters, for a CPU), `resnet18` (3x3 stem).
"""

import torch
from torch import nn

from accuracy.data import CLASSES
from perfect.models import build_model


def build_net(name: str) -> nn.Module:
    if name == "quick":
        return QuickNet((64, 128, 256))
    if name == "quick-tiny":
        return QuickNet((8, 8, 16))
    return build_model(name, num_classes=CLASSES)


def _conv(inside: int, outside: int) -> nn.Sequential:
    return nn.Sequential(
        nn.Conv2d(inside, outside, 3, padding=1, bias=False),
        nn.BatchNorm2d(outside),
        nn.ReLU(inplace=True),
    )


class Residual(nn.Module):
    """x + two convolutions of x."""

    def __init__(self, width: int) -> None:
        super().__init__()
        self.body = nn.Sequential(_conv(width, width), _conv(width, width))

    def forward(self, x: torch.Tensor) -> torch.Tensor:
        return x + self.body(x)


class QuickNet(nn.Module):
    """Learns fast: shallow, wide, pooled early; small logits keep the first steps calm."""

    def __init__(self, widths: tuple[int, ...], scale: float = 0.125) -> None:
        super().__init__()
        layers: list[nn.Module] = [_conv(3, widths[0])]
        for inside, outside in zip((widths[0], *widths), widths, strict=False):
            stage = (_conv(inside, outside), nn.MaxPool2d(2), Residual(outside))
            layers += stage
        self.body = nn.Sequential(*layers, nn.AdaptiveMaxPool2d(1), nn.Flatten())
        self.head = nn.Linear(widths[-1], CLASSES, bias=False)
        self.scale = scale

    def forward(self, x: torch.Tensor) -> torch.Tensor:
        return self.head(self.body(x)) * self.scale
