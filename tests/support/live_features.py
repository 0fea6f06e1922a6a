"""Cases of Lightning's own callbacks and options, and of modules that change."""
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
from torch.utils.data import DataLoader, Dataset


class Pruned(Case):
    @classmethod
    def callbacks(cls) -> list[L.Callback]:
        return [of_lightning.ModelPruning("l1_unstructured", amount=0.2)]


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


class HalfManual(Manual):
    options: ClassVar[Any] = {"precision": "bf16-mixed"}


class Scaled16(Case):
    options: ClassVar[Any] = {"precision": "16-mixed", "gradient_clip_val": 1.0}


class TrueHalf(Case):
    options: ClassVar[Any] = {"precision": "bf16-true"}


class Anomalies(Case):
    options: ClassVar[Any] = {"detect_anomaly": True}


class NoInference(Case):
    options: ClassVar[Any] = {"inference_mode": False}

    def validation_step(self, batch: Any, batch_idx: int) -> Any:
        with torch.enable_grad():
            x = batch[0].clone().requires_grad_()
            (slope,) = torch.autograd.grad(self.loss((x, batch[1])), x)
        self.log("slope", slope.norm())


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


class CompiledKernels(Case):
    only: ClassVar[Any] = (None,)

    def __init__(self) -> None:
        super().__init__()
        self.body = torch.compile(self.body)


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


class Exchanged(Case):
    """Submodules are shared, swapped and renewed between two epochs."""

    options: ClassVar[Any] = {"max_epochs": 4}

    def on_train_epoch_start(self) -> None:
        body = self.body
        if self.current_epoch == 1:
            body[0], body[1] = body[1], body[0]
        if self.current_epoch == 2:
            body[0] = body[1]
        if self.current_epoch == 3:
            body[2] = nn.Sequential(nn.Linear(WIDTH, WIDTH), nn.ReLU())


class Window(Case):
    """In the middle of a window the loader draws, a checkpoint is saved, and the run is stopped."""

    only: ClassVar[Any] = (None, "60%")
    options: ClassVar[Any] = {"accumulate_grad_batches": 4, "max_epochs": 3}

    class Noisy(Dataset[Any]):
        def __len__(self) -> int:
            return 88

        def __getitem__(self, number: int) -> Any:
            return torch.randn(12), torch.tensor(number % ol.CLASSES)

    @classmethod
    def loader(cls) -> Any:
        return DataLoader(cls.Noisy(), 8)

    def on_before_batch_transfer(self, batch: Any, dataloader_idx: int) -> Any:
        if not self.trainer.training:
            return batch
        at = self.trainer.fit_loop.epoch_loop.total_batch_idx
        if at in (6, 12):
            file = Path(self.trainer.default_root_dir) / f"{at}.ckpt"
            self.trainer.save_checkpoint(file)
            found = torch.load(file, weights_only=False)
            self.seen += [t.tolist() for t in found["state_dict"].values()]
            self.seen += [repr(found["optimizer_states"]), found["global_step"], found["loops"]]
        self.trainer.should_stop = at == 18
        return batch
