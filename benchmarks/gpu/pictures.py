"""The nets of pictures: torchvision's ResNet-18 and ViT, and one of shapes that nobody rounds."""

from collections.abc import Callable

import torch
from torch import nn
from torch.nn import functional

from benchmarks.gpu.models import Batch, Case, adamw, sgd


def odd() -> nn.Module:
    """Channels, kernels, strides and pictures of odd sizes; grouped, dilated, transposed."""
    return nn.Sequential(
        nn.Conv2d(3, 17, 5, stride=2, padding=2), nn.BatchNorm2d(17), nn.GELU(),
        nn.Conv2d(17, 34, 3, groups=17, dilation=2), nn.BatchNorm2d(34), nn.ReLU(inplace=True),
        nn.MaxPool2d(3, stride=2, ceil_mode=True), nn.Conv2d(34, 29, 1, bias=False),
        nn.ConvTranspose2d(29, 11, 3, stride=2), nn.SiLU(), nn.Dropout(0.1),
        nn.Flatten(), nn.LazyLinear(13), nn.LayerNorm(13), nn.Linear(13, 10),
    )  # fmt: skip


def drawn(make: Callable[[], nn.Module], sample: tuple[int, ...]) -> Callable[[str], nn.Module]:
    """Torch's own beginning from seed 0, drawn on the CPU: the same on any device."""

    def build(device: str) -> nn.Module:
        with torch.random.fork_rng():
            torch.manual_seed(0)
            net = make()
            if any(isinstance(part, nn.LazyLinear) for part in net.modules()):
                net.eval()(torch.zeros(sample))
            return net.train().to(device)

    return build


def pictures(
    make: Callable[[], nn.Module],
    optimizer: Callable[[nn.Module], torch.optim.Optimizer],
    shape: tuple[int, int, int, int],
    setting: str,
) -> Case:
    def batch(device: str) -> Batch:
        return torch.randn(shape).to(device), torch.randint(0, 10, shape[:1]).to(device)

    return Case(
        drawn(make, (1, *shape[1:])), optimizer, batch, lambda _: functional.cross_entropy,
        f"{setting}, {shape[0]} x {shape[2]} x {shape[3]}",
    )  # fmt: skip


def resnet18(smoke: bool) -> Case:
    import torchvision

    shape = (2, 3, 32, 32) if smoke else (64, 3, 224, 224)
    return pictures(
        lambda: torchvision.models.resnet18(num_classes=10), sgd, shape,
        "ResNet-18, SGD with momentum",
    )  # fmt: skip


def vit(name: str, smoke: bool, count: int = 32) -> Case:
    """name: b-16 or l-16."""
    import torchvision

    if smoke:
        return pictures(
            lambda: torchvision.models.VisionTransformer(
                image_size=32, patch_size=8, num_layers=2, num_heads=4, hidden_dim=32, mlp_dim=64,
                num_classes=10,
            ), adamw, (2, 3, 32, 32), f"ViT-{name} (tiny), AdamW",
        )  # fmt: skip
    make = torchvision.models.vit_b_16 if name == "b-16" else torchvision.models.vit_l_16
    return pictures(
        lambda: make(num_classes=10), adamw, (count, 3, 224, 224), f"ViT-{name}, float32, AdamW"
    )


def odd_net(smoke: bool) -> Case:
    shape = (3, 3, 37, 53) if smoke else (13, 3, 111, 157)
    return pictures(odd, adamw, shape, "a convnet of odd shapes, AdamW")
