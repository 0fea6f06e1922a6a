"""Modules that optimize by hand, of the kinds that people write, and runs of them to compare."""

from typing import Any

import lightning as L
import torch
from support import offload_lightning as ol
from torch import nn
from torch.nn import functional
from torch.utils.data import DataLoader, TensorDataset

LATENT, PIXELS, SAMPLES, BATCH = 6, 48, 40, 8


def pictures(samples: int = SAMPLES) -> DataLoader[Any]:
    noise = torch.Generator().manual_seed(1)
    x = torch.randn(samples, PIXELS, generator=noise)
    return DataLoader(TensorDataset(x, torch.zeros(samples)), BATCH)


def nets() -> tuple[nn.Module, nn.Module]:
    generator = nn.Sequential(
        nn.Linear(LATENT, 64), nn.BatchNorm1d(64), nn.LeakyReLU(0.2), nn.Linear(64, PIXELS),
        nn.Tanh(),
    )  # fmt: skip
    critic = nn.Sequential(
        nn.Linear(PIXELS, 64), nn.LeakyReLU(0.2), nn.Dropout(0.1), nn.Linear(64, 1)
    )
    return generator, critic


class ByHand(L.LightningModule):
    """Two nets with an optimizer each."""

    def __init__(self) -> None:
        super().__init__()
        self.automatic_optimization = False
        self.generator, self.critic = nets()

    def noise(self, real: torch.Tensor) -> torch.Tensor:
        return torch.randn(real.shape[0], LATENT, device=real.device)

    def judged(self, x: torch.Tensor, real: bool) -> torch.Tensor:
        out = self.critic(x)
        wanted = torch.ones_like(out) if real else torch.zeros_like(out)
        return functional.binary_cross_entropy_with_logits(out, wanted)

    def both(self) -> Any:
        return self.optimizers()

    def validation_step(self, batch: Any, batch_idx: int) -> None:
        self.log("val_loss", self.judged(batch[0], True))

    def configure_optimizers(self) -> Any:
        return [
            torch.optim.Adam(self.generator.parameters(), lr=2e-3, betas=(0.5, 0.999)),
            torch.optim.Adam(self.critic.parameters(), lr=1e-3, betas=(0.5, 0.999)),
        ]


class Gan(ByHand):
    """Lightning's example: each net is toggled, trained and cleared in turn."""

    def training_step(self, batch: Any, batch_idx: int) -> None:
        real = batch[0]
        of_generator, of_critic = self.both()
        self.toggle_optimizer(of_generator)
        fake = self.generator(self.noise(real))
        g_loss = self.judged(fake, True)
        self.log("g_loss", g_loss, prog_bar=True, on_step=True, on_epoch=True)
        self.manual_backward(g_loss)
        of_generator.step()
        of_generator.zero_grad()
        self.untoggle_optimizer(of_generator)

        self.toggle_optimizer(of_critic)
        fake = self.generator(self.noise(real)).detach()
        d_loss = (self.judged(real, True) + self.judged(fake, False)) / 2
        self.log_dict({"d_loss": d_loss, "steps": float(self.automatic_optimization)})
        self.manual_backward(d_loss)
        of_critic.step()
        of_critic.zero_grad()
        self.untoggle_optimizer(of_critic)


class ClearsFirst(ByHand):
    """As PyTorch's tutorial does it: gradients are cleared before they are made, so they stay from
    one step to the next. Nothing is toggled: both losses add to the critic's gradients."""

    def training_step(self, batch: Any, batch_idx: int) -> torch.Tensor:
        real = batch[0]
        of_generator, of_critic = self.both()
        of_critic.zero_grad()
        fake = self.generator(self.noise(real))
        self.manual_backward(self.judged(real, True))
        self.manual_backward(self.judged(fake.detach(), False))
        of_critic.step()
        of_generator.zero_grad()
        loss = self.judged(fake, True)
        self.manual_backward(loss)
        of_generator.step()
        self.log("global", self.global_step)
        return loss


class Wasserstein(ByHand):
    """The generator is trained after every third step of the critic, whose weights are clipped."""

    def training_step(self, batch: Any, batch_idx: int) -> None:
        real = batch[0]
        of_generator, of_critic = self.both()
        with self.toggled_optimizer(of_critic):
            fake = self.generator(self.noise(real)).detach()
            loss = self.critic(fake).mean() - self.critic(real).mean()
            of_critic.zero_grad()
            self.manual_backward(loss)
            of_critic.step()
            for p in self.critic.parameters():
                p.data.clamp_(-0.05, 0.05)
            self.log("critic", loss)
        if (batch_idx + 1) % 3 == 0:
            with self.toggled_optimizer(of_generator):
                loss = -self.critic(self.generator(self.noise(real))).mean()
                of_generator.zero_grad()
                self.manual_backward(loss)
                of_generator.step()
                self.log("generator", loss)

    def configure_optimizers(self) -> Any:
        return [
            torch.optim.RMSprop(self.generator.parameters(), lr=1e-3),
            torch.optim.RMSprop(self.critic.parameters(), lr=2e-3),
        ]


class Accumulates(ol.Module):
    """One optimizer, which steps after every second batch and after the last one, with the
    gradients clipped, and its schedule after it."""

    def __init__(self) -> None:
        super().__init__()
        self.automatic_optimization = False

    def training_step(self, batch: Any, batch_idx: int) -> torch.Tensor:
        optimizer: Any = self.optimizers()
        schedule: Any = self.lr_schedulers()
        loss = functional.cross_entropy(self(batch[0]), batch[1])
        self.log("loss", loss, on_step=True, on_epoch=True)
        self.manual_backward(loss / 2)
        if (batch_idx + 1) % 2 == 0 or self.trainer.is_last_batch:
            self.clip_gradients(optimizer, gradient_clip_val=0.3, gradient_clip_algorithm="norm")
            optimizer.step()
            optimizer.zero_grad()
            schedule.step()
            self.log("rate", schedule.get_last_lr()[0])
        return loss


class DeepQ(L.LightningModule):
    """A net of values, and another one that is set to its weights after every third step."""

    def __init__(self) -> None:
        super().__init__()
        self.automatic_optimization = False
        self.net, self.target = (
            nn.Sequential(nn.Linear(4, 64), nn.ReLU(), nn.Linear(64, 3)) for _ in range(2)
        )

    def training_step(self, batch: Any, batch_idx: int) -> torch.Tensor:
        states, actions, rewards, done, after = batch
        optimizer: Any = self.optimizers()
        found = self.net(states).gather(1, actions.unsqueeze(-1)).squeeze(-1)
        with torch.no_grad():
            best = self.target(after).max(1)[0]
            best[done] = 0.0
            wanted = rewards + 0.9 * best.detach()
        loss = functional.mse_loss(found, wanted)
        optimizer.zero_grad()
        self.manual_backward(loss)
        optimizer.step()
        if self.global_step % 3 == 0:
            self.target.load_state_dict(self.net.state_dict())
        self.log_dict({"loss": loss, "reward": rewards.sum()}, prog_bar=True)
        return loss

    def configure_optimizers(self) -> Any:
        return torch.optim.SGD(self.net.parameters(), lr=0.05, momentum=0.9)


def experience(samples: int = SAMPLES) -> DataLoader[Any]:
    noise = torch.Generator().manual_seed(2)
    return DataLoader(
        TensorDataset(
            torch.randn(samples, 4, generator=noise),
            torch.randint(0, 3, (samples,), generator=noise),
            torch.randn(samples, generator=noise),
            torch.arange(samples) % BATCH == 3,
            torch.randn(samples, 4, generator=noise),
        ),
        BATCH,
    )


def differences(one: ol.Result, other: ol.Result) -> list[str]:
    """Everything that is not the same to the last bit, by name: also `.grad`, and the states of all
    optimizers and schedules."""
    found = ol.differences(one, other)
    pairs = zip(one.trainer.optimizers, other.trainer.optimizers, strict=True)
    for number, (mine, theirs) in enumerate(pairs):
        found += unequal(f"optimizer {number}", mine.state_dict(), theirs.state_dict())
    for mine, theirs in zip(
        one.trainer.lr_scheduler_configs, other.trainer.lr_scheduler_configs, strict=True
    ):
        found += unequal("schedule", mine.scheduler.state_dict(), theirs.scheduler.state_dict())
    grads = [{n: p.grad for n, p in r.module.named_parameters()} for r in (one, other)]
    flags = [[p.requires_grad for p in r.module.parameters()] for r in (one, other)]
    found += unequal("gradient", *grads)
    return found + ([] if flags[0] == flags[1] else ["requires_grad"])


unequal = ol._unequal


class Penalized(ByHand):
    """The critic's loss has gradients of its own in it."""

    def training_step(self, batch: Any, batch_idx: int) -> None:
        real = batch[0]
        _, of_critic = self.both()
        fake = self.generator(self.noise(real)).detach()
        mixed = (0.3 * real + 0.7 * fake).requires_grad_(True)
        [slope] = torch.autograd.grad(self.critic(mixed).sum(), mixed, create_graph=True)
        loss = self.critic(fake).mean() - self.critic(real).mean()
        loss = loss + 10 * ((slope.norm(2, dim=1) - 1) ** 2).mean()
        of_critic.zero_grad()
        self.manual_backward(loss)
        torch.nn.utils.clip_grad_norm_(self.critic.parameters(), 0.5)
        of_critic.step()
        self.log("penalized", loss)
