"""The LightningModules that are trained with and without OffloadStrategy, and their batches.

Weights begin as their authors say: an MLP that begins at torch's default is so flat after twelve
layers that its gradients are denormal numbers, and a kernel takes twice as long on those.
"""

import itertools
import tarfile
import tempfile
from collections.abc import Callable, Iterator, Sequence
from dataclasses import dataclass
from pathlib import Path
from typing import Any

import lightning as L
import torch
import torchvision
from torch import nn
from torch.nn import functional

from perfect.models import build_model
from perfect.models.gpt2 import Gpt2, Gpt2Shape
from perfect.text.text_lines import read_wikitext

SHARED = Path(__file__).resolve().parents[3] / "shared" / "data"
Batch = tuple[torch.Tensor, torch.Tensor]


class Task(L.LightningModule):
    """Cross entropy; the last dimension of what the net says are the classes."""

    def __init__(self, net: nn.Module, optimizer: str) -> None:
        super().__init__()
        self.net, self._kind = net, optimizer

    def training_step(self, batch: Any, batch_idx: int) -> torch.Tensor:
        x, y = batch
        said = self.net(x)
        loss = functional.cross_entropy(said.flatten(0, -2), y.flatten())
        self.log("loss", loss)
        return loss

    def configure_optimizers(self) -> torch.optim.Optimizer:
        return OPTIMIZERS[self._kind]([p for p in self.parameters() if p.requires_grad])


OPTIMIZERS: dict[str, Callable[[Any], torch.optim.Optimizer]] = {
    "SGD": lambda p: torch.optim.SGD(p, 0.01),
    "AdamW": lambda p: torch.optim.AdamW(p, 1e-4),
    "AdamW fused": lambda p: torch.optim.AdamW(p, 1e-4, fused=True),
}


@dataclass(frozen=True, slots=True)
class Case:
    net: Callable[[], nn.Module]
    batch: Callable[[], Batch]
    setting: str
    most: float = 1.0
    """Asked: CPU seconds of a step over plain Lightning's."""


def cases(smoke: bool) -> dict[str, Case]:
    """The hardest first: the smaller a kernel, the more whatever is around it shows."""
    count = 2 if smoke else 8
    text = Gpt2Shape(layers=1, heads=2, width=32, positions=32) if smoke else GPT
    words, rows, length = (64, 2, 8) if smoke else (8192, 2, 128)
    return {
        "mlp": Case(lambda: mlp(2 if smoke else 12, 256), _vectors, "12 x 256, batches of 64", 1.1),
        "gpt2": Case(
            lambda: Gpt2(text, words), lambda: tokens(words, rows, length),
            f"GPT-2 of {text.layers} layers, {text.width} wide, {words} words, {rows} x {length}",
        ),
        "vit-tiny": Case(
            lambda: vit(1 if smoke else 12), lambda: pictures(count),
            f"12 layers, 192 wide, {count} x 32 x 32 in patches of 4",
        ),
        "resnet18": Case(
            lambda: build_model("resnet8" if smoke else "resnet18", 10), lambda: pictures(count),
            f"for CIFAR-10, {count} x 32 x 32",
        ),
        "mobilenet": Case(
            lambda: torchvision.models.mobilenet_v3_small(num_classes=10, dropout=0.0),
            lambda: pictures(count, 64), f"V3 small, {count} x 64 x 64", 1.05,
        ),
    }  # fmt: skip


GPT = Gpt2Shape(layers=6, heads=8, width=256, positions=128)
GPT2_SMALL = Gpt2Shape(layers=12, heads=12, width=768)


def mlp(layers: int, width: int) -> nn.Module:
    parts: list[nn.Module] = []
    for _ in range(layers):
        parts += [nn.Linear(width, width), nn.ReLU()]
    net = nn.Sequential(*parts, nn.Linear(width, 10))
    for part in net:
        if isinstance(part, nn.Linear):
            nn.init.kaiming_normal_(part.weight, nonlinearity="relu")
    return net


def vit(layers: int) -> nn.Module:
    return torchvision.models.VisionTransformer(
        image_size=32, patch_size=4, num_layers=layers, num_heads=3, hidden_dim=192, mlp_dim=768,
        num_classes=10,
    )  # fmt: skip


def _vectors() -> Batch:
    return torch.randn(64, 256), torch.randint(0, 10, (64,))


def pictures(count: int, side: int = 32) -> Batch:
    return torch.randn(count, 3, side, side), torch.randint(0, 10, (count,))


def tokens(words: int, rows: int, length: int) -> Batch:
    text = torch.randint(0, words, (rows, length + 1))
    return text[:, :-1].contiguous(), text[:, 1:].contiguous()


def wikitext(rows: int, length: int, batches: int) -> list[Batch]:
    """Of the text beside the checkout; empty where there is none."""
    archives = [SHARED / f"{name}.tar.xz" for name in ("wikitext-2", "gpt2_bpe")]
    if not all(archive.is_file() for archive in archives):
        return []
    with tempfile.TemporaryDirectory(prefix="wikitext-") as folder:
        for archive in archives:
            with tarfile.open(archive) as packed:
                packed.extractall(folder, filter="data")
        blocks = read_wikitext(Path(folder), length).valid  # the smallest part: 0.2 M tokens
        x, y = (column[: rows * batches].clone() for column in blocks.tensors)
    return list(zip(x.split(rows), y.split(rows), strict=True))


class EndlessBatches(torch.utils.data.IterableDataset[Any]):
    """The same batches, for ever."""

    def __init__(self, batches: Sequence[Batch]) -> None:
        self._batches = batches

    def __iter__(self) -> Iterator[Batch]:
        return itertools.cycle(self._batches)
