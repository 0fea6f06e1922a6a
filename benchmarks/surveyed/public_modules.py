"""Lightning modules in the shape of four public ones: examples, a library's, users'."""

import copy
from typing import Any

import lightning as L
import torch
from torch import nn
from torch.nn import functional

from benchmarks.surveyed.case import Case, library, padded_text

PIXELS = 8


class AutoEncoder(L.LightningModule):
    """Lightning's autoencoder example."""

    def __init__(self) -> None:
        super().__init__()
        size = PIXELS * PIXELS
        self.encoder = nn.Sequential(nn.Linear(size, 16), nn.ReLU(), nn.Linear(16, 3))
        self.decoder = nn.Sequential(nn.Linear(3, 16), nn.ReLU(), nn.Linear(16, size))

    def forward(self, x: torch.Tensor) -> torch.Tensor:
        return self.decoder(self.encoder(x))

    def training_step(self, batch: Any, batch_idx: int) -> torch.Tensor:
        return self._common_step(batch, "train")

    def validation_step(self, batch: Any, batch_idx: int) -> None:
        self._common_step(batch, "val")

    def _common_step(self, batch: Any, stage: str) -> torch.Tensor:
        x, _ = batch
        x = x.view(x.size(0), -1)
        loss = functional.mse_loss(x, self(x))
        self.log(f"{stage}_loss", loss, on_step=True)
        return loss

    def configure_optimizers(self) -> torch.optim.Optimizer:
        return torch.optim.Adam(self.parameters(), lr=1e-3)


class Gan(L.LightningModule):
    """Lightning's GAN example: two optimizers, which the step itself calls."""

    def __init__(self, latent: int = 8) -> None:
        super().__init__()
        self.automatic_optimization = False
        self.latent = latent
        size = PIXELS * PIXELS
        self.generator = nn.Sequential(
            nn.Linear(latent, 32), nn.BatchNorm1d(32), nn.LeakyReLU(0.2), nn.Linear(32, size),
            nn.Tanh(),
        )  # fmt: skip
        self.discriminator = nn.Sequential(
            nn.Linear(size, 32), nn.LeakyReLU(0.2), nn.Linear(32, 1), nn.Sigmoid()
        )

    def training_step(self, batch: Any, batch_idx: int) -> None:
        real = batch[0].view(batch[0].size(0), -1)
        both: Any = self.optimizers()
        of_generator, of_discriminator = both
        z = torch.randn(real.shape[0], self.latent).type_as(real)
        valid, fake = torch.ones(real.size(0), 1), torch.zeros(real.size(0), 1)
        valid, fake = valid.type_as(real), fake.type_as(real)

        self.toggle_optimizer(of_generator)
        loss = self._adversarial(self.generator(z), valid)
        self.log("g_loss", loss, prog_bar=True)
        self.manual_backward(loss)
        of_generator.step()
        of_generator.zero_grad()
        self.untoggle_optimizer(of_generator)

        self.toggle_optimizer(of_discriminator)
        loss = self._adversarial(real, valid)
        loss = (loss + self._adversarial(self.generator(z).detach(), fake)) / 2
        self.log("d_loss", loss, prog_bar=True)
        self.manual_backward(loss)
        of_discriminator.step()
        of_discriminator.zero_grad()
        self.untoggle_optimizer(of_discriminator)

    def _adversarial(self, pictures: torch.Tensor, wanted: torch.Tensor) -> torch.Tensor:
        return functional.binary_cross_entropy(self.discriminator(pictures), wanted)

    def configure_optimizers(self) -> Any:
        parts = self.generator, self.discriminator
        return [torch.optim.Adam(p.parameters(), lr=2e-4, betas=(0.5, 0.999)) for p in parts], []


def convolutions() -> nn.Module:
    """A backbone of 16 features, as a small ResNet without its last layer is one."""
    return nn.Sequential(
        nn.Conv2d(3, 8, 3, 2, 1, bias=False), nn.BatchNorm2d(8), nn.ReLU(inplace=True),
        nn.Conv2d(8, 16, 3, 2, 1, bias=False), nn.BatchNorm2d(16), nn.ReLU(inplace=True),
        nn.AdaptiveAvgPool2d(1),
    )  # fmt: skip


class MoCo(L.LightningModule):
    """MoCo as lightly's documentation has it: a momentum encoder, and a bank of negatives."""

    def __init__(self) -> None:
        super().__init__()
        self.backbone = convolutions()
        heads = library("lightly.models.modules.heads")
        self.projection_head = heads.MoCoProjectionHead(16, 16, 16)
        self.backbone_momentum = copy.deepcopy(self.backbone)
        self.projection_head_momentum = copy.deepcopy(self.projection_head)
        self.utils = library("lightly.models.utils")
        self.utils.deactivate_requires_grad(self.backbone_momentum)
        self.utils.deactivate_requires_grad(self.projection_head_momentum)
        self.criterion = library("lightly.loss").NTXentLoss(memory_bank_size=(32, 16))

    def forward(self, x: torch.Tensor) -> torch.Tensor:
        return self.projection_head(self.backbone(x).flatten(start_dim=1))

    @torch.no_grad()
    def forward_momentum(self, x: torch.Tensor) -> torch.Tensor:
        key = self.backbone_momentum(x).flatten(start_dim=1)
        return self.projection_head_momentum(key).detach()

    def training_step(self, batch: Any, batch_idx: int) -> torch.Tensor:
        schedule = library("lightly.utils.scheduler").cosine_schedule
        momentum = schedule(self.current_epoch, 10, 0.996, 1)
        update = self.utils.update_momentum
        update(self.backbone, self.backbone_momentum, m=momentum)
        update(self.projection_head, self.projection_head_momentum, m=momentum)
        query, key = batch[0]
        return self.criterion(self(query), self.forward_momentum(key))

    def configure_optimizers(self) -> torch.optim.Optimizer:
        return torch.optim.SGD(self.parameters(), lr=0.06)


class TextClassifier(L.LightningModule):
    """A fine-tuning of BERT as transformers' users publish it: weight decay by name, a warm-up."""

    def __init__(self) -> None:
        super().__init__()
        transformers = library("transformers")
        config = transformers.BertConfig(
            vocab_size=64, hidden_size=32, num_hidden_layers=2, num_attention_heads=2,
            intermediate_size=64, max_position_embeddings=32, num_labels=2,
        )  # fmt: skip
        self.model = transformers.BertForSequenceClassification(config)

    def training_step(self, batch: Any, batch_idx: int) -> torch.Tensor:
        outputs = self.model(**batch)
        right = outputs.logits.argmax(-1) == batch["labels"]
        self.log("train_loss", outputs.loss)
        self.log("train_acc", right.float().mean(), prog_bar=True)
        return outputs.loss

    def configure_optimizers(self) -> Any:
        named = [*self.model.named_parameters()]
        light = "bias", "LayerNorm.weight"
        groups = [
            {"params": [p for n, p in named if not n.endswith(light)], "weight_decay": 0.01},
            {"params": [p for n, p in named if n.endswith(light)], "weight_decay": 0.0},
        ]
        optimizer = torch.optim.AdamW(groups, lr=2e-3, eps=1e-8)
        warm_up = library("transformers").get_linear_schedule_with_warmup(optimizer, 2, 10)
        return [optimizer], [{"scheduler": warm_up, "interval": "step", "frequency": 1}]


def _digits() -> Any:
    return torch.randn(6, 1, PIXELS, PIXELS), torch.randint(0, 10, (6,))


def _views() -> Any:
    views = [torch.randn(6, 3, 16, 16) for _ in range(2)]
    return views, torch.zeros(6, dtype=torch.long), [f"{n}.png" for n in range(6)]


CASES = (
    Case("autoencoder example", "lightning", AutoEncoder, _digits),
    Case("GAN example", "lightning", Gan, _digits),
    Case("MoCo", "lightly", MoCo, _views),
    Case("BERT sequence classifier", "transformers", TextClassifier,
         lambda: padded_text("classes")),
)  # fmt: skip
