"""Models of timm, with a few narrow layers for pictures of 32 x 32."""

from typing import Any

from torch import nn

from benchmarks.surveyed.case import Case, class_loss, library, pictures, wrapped

VIT = {"img_size": 32, "patch_size": 8, "embed_dim": 48, "depth": 2, "num_heads": 3}
NETS: tuple[tuple[str, dict[str, Any]], ...] = (
    ("resnet10t", {}),
    ("vit_tiny_patch16_224", VIT),
    ("deit_tiny_distilled_patch16_224", VIT),
    ("swin_tiny_patch4_window7_224", {
        "img_size": 32, "patch_size": 2, "window_size": 4, "embed_dim": 24, "depths": (2, 1),
        "num_heads": (2, 4)}),
    ("convnext_atto", {"depths": (1, 1, 1, 1), "dims": (8, 16, 16, 32)}),
    ("tinynet_e", {}),
    ("mobilenetv3_small_050", {}),
    ("regnetx_002", {}),
    ("mixer_s16_224", {"img_size": 32}),
    ("densenet121", {"growth_rate": 8, "block_config": (2, 2)}),
    ("xcit_nano_12_p16_224", {"img_size": 32, "embed_dim": 32, "depth": 2, "num_heads": 2}),
    ("mobilevit_xxs", {}),
    ("beit_base_patch16_224", VIT),
    ("eva02_tiny_patch14_224", VIT),
    ("levit_128s", {"img_size": 64, "embed_dim": (16, 32), "num_heads": (2, 2), "depth": (1, 1),
                    "key_dim": 8}),
)  # fmt: skip


def _net(name: str, sizes: dict[str, Any]) -> nn.Module:
    return library("timm").create_model(name, pretrained=False, num_classes=10, **sizes)


def _case(name: str, sizes: dict[str, Any]) -> Case:
    size = sizes.get("img_size", 32)
    return wrapped(name, "timm", lambda: _net(name, sizes), lambda: pictures(size), class_loss)


CASES = tuple(_case(name, sizes) for name, sizes in NETS)
