"""VGG16 with batch norm for 32x32 pictures (Simonyan & Zisserman 2015): 13 convolutions, one head.

    64 64 | 128 128 | 256 256 256 | 512 512 512 | 512 512 512 | linear
          2x2 max-pool at every bar: 32 -> 16 -> 8 -> 4 -> 2 -> 1

The two hidden linear layers of the ImageNet net are left out: on a 1x1 picture they are of little
use, and they would hold most of the parameters.
"""

from torch import Tensor, nn

STAGES = ((64, 64), (128, 128), (256, 256, 256), (512, 512, 512), (512, 512, 512))


class VGG(nn.Module):
    def __init__(self, num_classes: int) -> None:
        super().__init__()
        layers: list[nn.Module] = []
        before = 3
        for stage in STAGES:
            for width in stage:
                # There is no bias, because the norm that follows would subtract it again.
                layers.append(nn.Conv2d(before, width, 3, padding=1, bias=False))
                layers += [nn.BatchNorm2d(width), nn.ReLU(inplace=True)]
                before = width
            layers.append(nn.MaxPool2d(2))
        self.features = nn.Sequential(*layers)
        self.head = nn.Linear(before, num_classes)

    def forward(self, x: Tensor) -> Tensor:
        return self.head(self.features(x).mean(dim=(2, 3)))


def vgg16(num_classes: int) -> VGG:
    return VGG(num_classes)
