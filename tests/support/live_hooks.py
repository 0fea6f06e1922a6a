"""Cases of hooks, gradients, updates and what is logged (live_modules.py)."""
# pyright: reportArgumentType=false, reportAttributeAccessIssue=false
# pyright: reportCallIssue=false, reportGeneralTypeIssues=false

from typing import Any, ClassVar

import torch
import torchmetrics
from support import offload_lightning as ol
from support.live_modules import Case, Manual
from torch import nn
from torch.nn import functional as F


class GradientAfterStep(Case):
    only: ClassVar[Any] = (None,)

    def on_train_batch_end(self, *_: Any) -> None:
        self.seen.append(self.head.weight.grad.tolist())
        self.head.weight.grad.mul_(2)


class GradientInHooks(Case):
    def on_after_backward(self) -> None:
        for p in self.parameters():
            p.grad.clamp_(-0.1, 0.1)
        self.seen.append(self.head.bias.grad.tolist())

    def on_before_optimizer_step(self, optimizer: Any) -> None:
        self.log_dict({f"norm_{n}": p.grad.norm() for n, p in self.named_parameters()})

    def on_before_zero_grad(self, optimizer: Any) -> None:
        self.head.bias.data.add_(1e-3)


class ZeroedGradients(Case):
    def optimizer_zero_grad(self, epoch: int, batch_idx: int, optimizer: Any) -> None:
        optimizer.zero_grad(set_to_none=False)


class ZeroedByHand(Manual):
    def training_step(self, batch: Any, batch_idx: int) -> Any:
        optimizer = self.optimizers()
        loss = self.loss(batch)
        self.manual_backward(loss)
        optimizer.step()
        optimizer.zero_grad(set_to_none=False)
        return loss.detach()


class OwnClipping(Case):
    def configure_gradient_clipping(self, optimizer: Any, *args: Any, **kwargs: Any) -> None:
        before = [p.grad.norm() for p in self.parameters()]
        assert all(norm > 0 for norm in before)
        self.clip_gradients(optimizer, 0.1, "norm")
        after = torch.stack([p.grad.norm() for p in self.parameters()]).norm()
        assert after <= 0.101, after
        self.seen.append(after.item())


class Clipped(Case):
    options: ClassVar[Any] = {
        "gradient_clip_val": 0.05,
        "gradient_clip_algorithm": "value",
        "accumulate_grad_batches": 2,
    }


class HookedWeights(Case):
    def __init__(self) -> None:
        super().__init__()
        self.head.weight.register_hook(lambda grad: grad * 0.5)
        self.enter.weight.register_post_accumulate_grad_hook(self._noted)
        self.body[1][0].register_full_backward_hook(lambda m, i, o: (i[0] * 0.9,))

    def _noted(self, p: torch.Tensor) -> None:
        p.grad.add_(1e-3)
        self.seen.append(p.grad.sum().item())


class UpdateInBackward(Manual):
    """Every weight has an optimizer, which steps in a hook."""

    def __init__(self) -> None:
        super().__init__()
        self.own = {p: torch.optim.SGD([p], 0.05, momentum=0.9) for p in self.body.parameters()}
        for p in self.own:
            p.register_post_accumulate_grad_hook(self._step)

    def _step(self, p: Any) -> None:
        self.own[p].step()
        self.own[p].zero_grad()

    def configure_optimizers(self) -> Any:
        return torch.optim.AdamW([*self.enter.parameters(), *self.head.parameters()], 1e-2)


class SecondInHook(Case):
    def configure_optimizers(self) -> Any:
        self.more = torch.optim.SGD(self.head.parameters(), 0.1, momentum=0.9)
        rest = [*self.enter.parameters(), *self.body.parameters()]
        return torch.optim.AdamW(rest, 1e-2)

    def on_before_optimizer_step(self, optimizer: Any) -> None:
        self.more.step()
        self.more.zero_grad()


class SecondAfterBatch(Case):
    """Its gradients are read after the step of the others."""

    configure_optimizers = SecondInHook.configure_optimizers

    def on_train_batch_end(self, *_: Any) -> None:
        self.more.step()
        self.more.zero_grad()


class ClosureByHand(Manual):
    def training_step(self, batch: Any, batch_idx: int) -> Any:
        optimizer = self.optimizers()

        def closure() -> torch.Tensor:
            optimizer.zero_grad()
            loss = self.loss(batch)
            self.manual_backward(loss)
            return loss

        loss = optimizer.step(closure=closure)
        self.log("loss", loss)


class Lbfgs(Case):
    def configure_optimizers(self) -> Any:
        return torch.optim.LBFGS(self.parameters(), 0.1, max_iter=3, line_search_fn="strong_wolfe")


class SecondTime(Case):
    """It steps every second time."""

    def optimizer_step(self, epoch: int, batch_idx: int, optimizer: Any, closure: Any) -> None:
        if batch_idx % 2:
            optimizer.step(closure=closure)
        else:
            closure()


class Warmup(Case):
    def optimizer_step(self, epoch: int, batch_idx: int, optimizer: Any, closure: Any) -> None:
        optimizer.step(closure=closure)
        for group in optimizer.param_groups:
            group["lr"] = 1e-2 * min(1.0, (self.global_step + 1) / 8)


class Adversaries(Manual):
    def training_step(self, batch: Any, batch_idx: int) -> Any:
        first, second = self.optimizers()
        self.toggle_optimizer(first)
        loss = self.loss(batch)
        first.zero_grad()
        self.manual_backward(loss)
        self.clip_gradients(first, 0.5, "norm")
        first.step()
        self.untoggle_optimizer(first)
        if batch_idx % 2:
            other = -self.loss(batch) * 0.1 + self.head.weight.square().mean()
            second.zero_grad()
            self.manual_backward(other)
            second.step()
            self.lr_schedulers().step()
        self.log_dict({"loss": loss, "rate": second.param_groups[0]["lr"]})

    def configure_optimizers(self) -> Any:
        first = torch.optim.Adam([*self.enter.parameters(), *self.body.parameters()], 1e-2)
        second = torch.optim.SGD(self.head.parameters(), 0.1)
        return [first, second], [torch.optim.lr_scheduler.ExponentialLR(second, 0.9)]


class Accumulated(Manual):
    def training_step(self, batch: Any, batch_idx: int) -> Any:
        optimizer = self.optimizers()
        self.manual_backward(self.loss(batch) / 2)
        if (batch_idx + 1) % 2 == 0:
            optimizer.step()
            optimizer.zero_grad()
        self.seen.append([p.grad is None for p in self.parameters()])


class Reduced(Case):
    def __init__(self) -> None:
        super().__init__()
        self.unused = nn.Linear(3, 3)

    def configure_optimizers(self) -> Any:
        optimizer = torch.optim.SGD(self.parameters(), 0.5)
        scheduler = torch.optim.lr_scheduler.ReduceLROnPlateau(optimizer, factor=0.5, patience=0)
        return {
            "optimizer": optimizer,
            "lr_scheduler": {"scheduler": scheduler, "monitor": "val_loss"},
        }


class Metrics(Case):
    def __init__(self) -> None:
        super().__init__()
        self.right = torchmetrics.Accuracy(task="multiclass", num_classes=ol.CLASSES)
        self.plain = [torchmetrics.MeanMetric(), torchmetrics.MaxMetric()]
        self.many = torchmetrics.MetricCollection(
            [torchmetrics.F1Score(task="multiclass", num_classes=ol.CLASSES, average="macro")]
        )
        self.auroc = torchmetrics.AUROC(task="multiclass", num_classes=ol.CLASSES)

    def training_step(self, batch: Any, batch_idx: int) -> Any:
        out = self(batch[0])
        loss = F.cross_entropy(out, batch[1])
        for metric in self.plain:
            metric.update(loss)
        self.right(out, batch[1])
        self.log("right", self.right, on_step=True, on_epoch=True)
        self.log_dict(self.many(out, batch[1]))
        return loss

    def validation_step(self, batch: Any, batch_idx: int) -> Any:
        self.auroc.update(self(batch[0]).softmax(-1), batch[1])
        self.log("auroc", self.auroc, on_epoch=True)

    def on_train_epoch_end(self) -> None:
        self.seen += [metric.compute().item() for metric in self.plain]
        for metric in self.plain:
            metric.reset()
        self.many.reset()


class Kinds(Case):
    """Numbers of all kinds are logged."""

    def training_step(self, batch: Any, batch_idx: int) -> Any:
        loss = self.loss(batch)
        self.log("sum", loss, reduce_fx="sum", on_epoch=True, on_step=True)
        self.log("max", loss.detach().double(), reduce_fx=torch.max, on_step=False, on_epoch=True)
        self.log("int", batch_idx, reduce_fx="max")
        self.log("bool", (loss > 1.5).float())
        self.log("weighted", loss.item(), batch_size=3, on_epoch=True)
        return {"loss": loss, "more": [loss.detach() * 2, {"out": self.head.bias.detach().clone()}]}

    def on_train_batch_end(self, outputs: Any, *_: Any) -> None:
        self.seen.append(outputs["more"][0].item())
        self.seen.append(self.trainer.callback_metrics["sum"].item())
        self.seen.append(outputs["more"][1]["out"].tolist())
