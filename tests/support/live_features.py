"""Cases of Lightning's own callbacks and options, and of modules that change (live_modules.py)."""
# pyright: reportArgumentType=false, reportAttributeAccessIssue=false, reportCallIssue=false

import copy
import warnings
from pathlib import Path
from typing import Any, ClassVar

import lightning as L
import torch
from lightning.pytorch import callbacks as of_lightning
from support import offload_lightning as ol
from support.live_modules import WIDTH, Case, Manual
from torch import nn


class Pruned(Case):
    @classmethod
    def callbacks(cls) -> list[L.Callback]:
        return [of_lightning.ModelPruning("l1_unstructured", amount=0.2)]


class PrunedWithin(Case):
    @classmethod
    def callbacks(cls) -> list[L.Callback]:
        prune = of_lightning.ModelPruning(
            "l1_unstructured",
            amount=0.2,
            prune_on_train_epoch_end=False,
            use_lottery_ticket_hypothesis=False,
        )
        return [prune]


class WithNorm(Case):
    def __init__(self) -> None:
        super().__init__()
        self.norm = nn.BatchNorm1d(WIDTH)

    def forward(self, x: torch.Tensor) -> torch.Tensor:
        return self.head(self.body(self.norm(self.enter(x))))


class Averaged(WithNorm):
    options: ClassVar[Any] = {"max_epochs": 4}

    @classmethod
    def callbacks(cls) -> list[L.Callback]:
        return [of_lightning.StochasticWeightAveraging(1e-2, swa_epoch_start=2, annealing_epochs=1)]


class AveragedWeights(WithNorm):
    @classmethod
    def callbacks(cls) -> list[L.Callback]:
        return [of_lightning.EMAWeightAveraging(decay=0.9)]


class AveragedPlainly(WithNorm):
    @classmethod
    def callbacks(cls) -> list[L.Callback]:
        return [of_lightning.WeightAveraging(use_buffers=False)]


class Scheduled(Case):
    options: ClassVar[Any] = {"max_epochs": 3}

    @classmethod
    def callbacks(cls) -> list[L.Callback]:
        return [of_lightning.GradientAccumulationScheduler({0: 1, 1: 2, 2: 4})]


class FoundRate(Case):
    def __init__(self) -> None:
        super().__init__()
        self.lr = 1e-2

    def configure_optimizers(self) -> Any:
        return torch.optim.AdamW(self.parameters(), self.lr)

    @classmethod
    def callbacks(cls) -> list[L.Callback]:
        return [of_lightning.LearningRateFinder(num_training_steps=12)]


class FoundBatch(Case):
    options: ClassVar[Any] = {"validate": False}

    class Data(L.LightningDataModule):
        batch_size = 4

        def train_dataloader(self) -> Any:
            return ol.data(44, self.batch_size)

        def val_dataloader(self) -> Any:
            return ol.data(20)

    @classmethod
    def loader(cls) -> Any:
        return cls.Data()

    @classmethod
    def callbacks(cls) -> list[L.Callback]:
        return [of_lightning.BatchSizeFinder(steps_per_trial=2, max_trials=2)]


class Finetuned(Case):
    options: ClassVar[Any] = {"max_epochs": 3}

    def __init__(self) -> None:
        super().__init__()
        self.backbone = nn.Sequential(nn.Linear(12, 12), nn.BatchNorm1d(12))

    def forward(self, x: torch.Tensor) -> torch.Tensor:
        return super().forward(self.backbone(x))

    def configure_optimizers(self) -> Any:
        rest = [p for n, p in self.named_parameters() if not n.startswith("backbone")]
        return torch.optim.AdamW(rest, 1e-2)

    @classmethod
    def callbacks(cls) -> list[L.Callback]:
        return [of_lightning.BackboneFinetuning(1, backbone_initial_lr=1e-3)]


class Stopped(Case):
    options: ClassVar[Any] = {"max_epochs": 6}

    def configure_optimizers(self) -> Any:
        return torch.optim.SGD(self.parameters(), 2.0)

    @classmethod
    def callbacks(cls) -> list[L.Callback]:
        return [
            of_lightning.EarlyStopping("val_loss", patience=1),
            of_lightning.EarlyStopping(
                "loss", check_on_train_epoch_end=True, divergence_threshold=90.0
            ),
        ]


class Saved(Case):
    """What is saved in the middle of an epoch is what plain Lightning saves."""

    options: ClassVar[Any] = {"enable_checkpointing": True}

    @classmethod
    def callbacks(cls) -> list[L.Callback]:
        return [of_lightning.ModelCheckpoint(every_n_train_steps=3, save_top_k=-1)]

    def on_fit_end(self) -> None:
        folder = Path(self.trainer.checkpoint_callback.dirpath)
        for file in sorted(folder.iterdir()):
            found = torch.load(file, weights_only=False)
            self.seen += [t.tolist() for t in found["state_dict"].values()]
            self.seen.append(found["optimizer_states"])


class Half(Case):
    options: ClassVar[Any] = {"precision": "bf16-mixed"}


class HalfManual(Manual):
    options: ClassVar[Any] = {"precision": "bf16-mixed"}


class Scaled16(Case):
    options: ClassVar[Any] = {"precision": "16-mixed", "gradient_clip_val": 1.0}


class TrueHalf(Case):
    options: ClassVar[Any] = {"precision": "bf16-true"}


class TrueDouble(Case):
    options: ClassVar[Any] = {"precision": "64-true"}


class Anomalies(Case):
    options: ClassVar[Any] = {"detect_anomaly": True}


class NoInference(Case):
    options: ClassVar[Any] = {"inference_mode": False}

    def validation_step(self, batch: Any, batch_idx: int) -> Any:
        with torch.enable_grad():
            x = batch[0].clone().requires_grad_()
            (slope,) = torch.autograd.grad(self.loss((x, batch[1])), x)
        self.log("slope", slope.norm())


class Overfit(Case):
    options: ClassVar[Any] = {"overfit_batches": 2, "max_epochs": 5, "num_sanity_val_steps": 2}


class Accumulating(Case):
    """The last micro-batches of an epoch are fewer; a step is left out."""

    options: ClassVar[Any] = {"accumulate_grad_batches": 4, "max_epochs": 3}

    def on_train_batch_start(self, batch: Any, batch_idx: int) -> Any:
        return -1 if self.current_epoch == 1 and batch_idx == 3 else None


class GradientsOfOthers(Case):
    """A part that the optimizer does not have adds its gradients up."""

    options: ClassVar[Any] = {"validate": False}

    def configure_optimizers(self) -> Any:
        return torch.optim.SGD(self.body.parameters(), 0.1)

    def on_train_epoch_end(self) -> None:
        self.seen.append(self.head.weight.grad.tolist())
        self.head.weight.data.sub_(self.head.weight.grad, alpha=0.01)
        self.head.zero_grad()


class OwnZeroing(Case):
    class Sgd(torch.optim.SGD):
        def zero_grad(self, set_to_none: bool = True) -> None:
            super().zero_grad(set_to_none=False)

    def configure_optimizers(self) -> Any:
        return self.Sgd(self.parameters(), 0.05)


class CompiledKernels(Case):
    only: ClassVar[Any] = (None,)

    def __init__(self) -> None:
        super().__init__()
        self.body = torch.compile(self.body)


class CompiledStep(Manual):
    only: ClassVar[Any] = (None,)

    def __init__(self) -> None:
        super().__init__()
        self.loss = torch.compile(self.loss, backend="aot_eager")


class Compiled(Case):
    only: ClassVar[Any] = (None,)

    def __init__(self) -> None:
        super().__init__()
        self.body = torch.compile(self.body, backend="aot_eager")


class Copies(Case):
    """The module and the optimizer are copied and restored between steps."""

    def on_train_batch_end(self, outputs: Any, batch: Any, batch_idx: int) -> None:
        if batch_idx == 1:
            self.kept = copy.deepcopy(self.body), copy.deepcopy(self.optimizers().state_dict())
        if batch_idx == 4:
            self.body.load_state_dict(self.kept[0].state_dict())
            self.optimizers().load_state_dict(self.kept[1])
        with warnings.catch_warnings():
            warnings.simplefilter("ignore")
            self.seen.append(sum(p.sum().item() for p in copy.deepcopy(self.body).parameters()))


class Reset(Case):
    """Weights get other values, other data and other tensors between steps."""

    def on_train_batch_end(self, outputs: Any, batch: Any, batch_idx: int) -> None:
        if batch_idx == 1:
            nn.init.constant_(self.head.bias, 0.3)
            self.enter.weight.data = self.enter.weight.data * 0.5
        if batch_idx == 2:
            self.optimizers().state.clear()
        if batch_idx == 3:
            vector = nn.utils.parameters_to_vector(self.parameters())
            nn.utils.vector_to_parameters(vector * 0.99, self.parameters())
        if batch_idx == 4:
            self.head.weight = self.enter.weight if self.head.weight is None else self.head.weight
            self.body[0][0].requires_grad_(False)


class Rebound(Case):
    """A buffer is another tensor after every step, and one is made in the step."""

    def __init__(self) -> None:
        super().__init__()
        self.register_buffer("mean", torch.zeros(WIDTH))

    def forward(self, x: torch.Tensor) -> torch.Tensor:
        x = self.enter(x)
        self.mean = 0.9 * self.mean + 0.1 * x.detach().mean(0)
        if "late" not in self._buffers:
            self.register_buffer("late", x.detach().std(0))
        return self.head(self.body(x - self.mean)) * self.late.mean()
