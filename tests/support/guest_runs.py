"""A training, a net that is served beside it, and threads that ask."""

import threading
import time
from collections.abc import Callable
from typing import Any

import lightning as L
import torch
from support.accelerators import here
from torch import nn
from torch.utils.data import DataLoader, TensorDataset

from trainers import OffloadStrategy

STEPS = 12
PATIENCE = 60.0


class Trained(L.LightningModule):
    """Dropout and statistics: whoever draws or writes where he should not is found out."""

    def __init__(self) -> None:
        super().__init__()
        self.net = nn.Sequential(
            nn.Linear(16, 64), nn.BatchNorm1d(64), nn.ReLU(), nn.Dropout(0.3), nn.Linear(64, 4)
        )

    def training_step(self, batch: Any, batch_idx: int) -> torch.Tensor:
        x, y = batch
        loss = nn.functional.cross_entropy(self.net(x), y)
        self.log("loss", loss)
        return loss

    def configure_optimizers(self) -> torch.optim.Optimizer:
        return torch.optim.AdamW(self.parameters(), 0.01)


def batches() -> DataLoader[Any]:
    numbers = torch.Generator().manual_seed(3)
    x = torch.randn(8 * STEPS, 16, generator=numbers)
    return DataLoader(TensorDataset(x, x[:, :4].argmax(1)), batch_size=8)


def served() -> nn.Module:
    torch.manual_seed(7)
    return nn.Sequential(nn.Linear(16, 48), nn.GELU(), nn.Linear(48, 3)).eval()


class Clients(L.Callback):
    """Threads that ask from the first step to the end of the training."""

    def __init__(
        self, ask: Callable[[int], object], count: int = 2, first: int = 0, most: int | None = None
    ) -> None:
        """`first`: the step from which they ask. `most`: so many times; the training waits
        for them."""
        self.answers: list[Any] = []
        self.errors: list[BaseException] = []
        self._ask, self._count, self._first, self._most = ask, count, first, most
        self._over = threading.Event()
        self._threads: list[threading.Thread] = []

    def on_train_batch_start(
        self, trainer: L.Trainer, pl_module: L.LightningModule, batch: Any, batch_idx: int
    ) -> None:
        if batch_idx > self._first and self._most is not None:
            self._await_one(trainer.strategy)
        if batch_idx != self._first:
            return
        self._threads = [threading.Thread(target=self._run, args=(n,)) for n in range(self._count)]
        for thread in self._threads:
            thread.start()

    def _await_one(self, strategy: Any) -> None:
        """Wait until somebody waits for the next step, or all have their answers."""
        until = time.monotonic() + PATIENCE
        while not (self.errors or strategy._run.gate._waiting or len(self.answers) == self._most):
            assert time.monotonic() < until
            time.sleep(1e-3)

    def on_train_end(self, trainer: L.Trainer, pl_module: L.LightningModule) -> None:
        self._over.set()

    def _run(self, number: int) -> None:
        try:
            while not self._over.is_set() and len(self.answers) != self._most:
                self.answers.append(self._ask(number))
        except BaseException as error:
            self.errors.append(error)

    def join(self) -> None:
        for thread in self._threads:
            thread.join(PATIENCE)
            assert not thread.is_alive()


def fitted(
    strategy: OffloadStrategy, clients: Clients | None = None, **options: Any
) -> dict[str, torch.Tensor]:
    torch.manual_seed(1)
    module = Trained()
    trainer = L.Trainer(
        max_epochs=1, **here(), strategy=strategy,
        enable_checkpointing=False, enable_progress_bar=False, enable_model_summary=False,
        **{"logger": False, "callbacks": [clients] if clients else [], **options},
    )  # fmt: skip
    trainer.fit(module, batches())
    if clients:
        clients.join()
    return {key: value.clone() for key, value in module.state_dict().items()}


def same(one: dict[str, torch.Tensor], other: dict[str, torch.Tensor]) -> bool:
    return all(torch.equal(value, other[key]) for key, value in one.items())


X = torch.randn(5, 16, generator=torch.Generator().manual_seed(9))


def answers_alone(net: nn.Module) -> torch.Tensor:
    with torch.no_grad():
        return net(X)
