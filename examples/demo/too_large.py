"""Promise 2: a step that does not fit into memory trains, to the same bits.

trainer = L.Trainer(strategy="auto")                                  dies of the limit
trainer = L.Trainer(strategy=OffloadStrategy(budget, host_dir=...))   trains below it
"""

import resource
from pathlib import Path
from typing import Any

import lightning as L
import torch
from children import Child, say
from front_page import Outcome
from torch import nn
from torch.utils.data import DataLoader, TensorDataset

from perfect.report.page import note
from trainers import OffloadStrategy

PROMISE = "A model that does not fit"
WIDTH, DEPTH, MIB = 256, 24, 1 << 20


class Deep(L.LightningModule):
    def __init__(self) -> None:
        super().__init__()
        layers = [(nn.Linear(WIDTH, WIDTH), nn.GELU(), nn.LayerNorm(WIDTH)) for _ in range(DEPTH)]
        self.net = nn.Sequential(*(layer for block in layers for layer in block))
        self.losses: list[torch.Tensor] = []

    def training_step(self, batch: list[torch.Tensor], batch_idx: int) -> torch.Tensor:
        loss = nn.functional.mse_loss(self.net(batch[0]), batch[0])
        self.losses.append(loss.detach().clone())
        return loss

    def configure_optimizers(self) -> torch.optim.Optimizer:
        return torch.optim.Adam(self.parameters(), 1e-3)


def train(strategy: Any, limit: int | None, samples: int) -> list[float] | str:
    """Return the losses of four steps, or the error that ended them."""
    if limit is not None:
        resource.setrlimit(resource.RLIMIT_DATA, (limit, limit))
    torch.set_num_threads(1)
    L.seed_everything(0)
    module, data = Deep(), TensorDataset(torch.randn(4 * samples, WIDTH))
    trainer = L.Trainer(
        accelerator="cpu", strategy=strategy, max_epochs=1, logger=False,
        enable_checkpointing=False, enable_progress_bar=False, enable_model_summary=False,
    )  # fmt: skip
    try:
        trainer.fit(module, DataLoader(data, samples))
    except (MemoryError, RuntimeError) as error:
        return f"{type(error).__name__}: {error}"
    return [float(loss) for loss in module.losses]


def run(folder: Path, samples: int = 8192, room: int = 550, budget: int = 200) -> Outcome:
    """`room`: MiB that the limit leaves beside what Python and torch take already."""
    status = Path("/proc/self/status").read_text().split()
    limit = int(status[status.index("VmData:") + 1]) * 1024 + room * MIB
    ours = OffloadStrategy(f"{budget}MiB", host_dir=folder)

    def ended(what: str, strategy: Any, limit: int | None) -> list[float] | str:
        say(f"{PROMISE}: {what}")
        return Child(folder / "steps.log", train, strategy, limit, samples).result()

    # The first planned step compiles a library, and a compiler does not fit below the limit.
    Child(folder / "steps.log", train, OffloadStrategy("100%"), None, 8).result()
    free = ended("plain Lightning without a limit", "auto", None)
    plain = ended("plain Lightning below the limit", "auto", limit)
    found = ended("OffloadStrategy below the limit", ours, limit)
    return judge(free, plain, found, f"{limit // MIB:,} MiB, {room} MiB beside torch")


def judge(free: Any, plain: Any, ours: Any, limit: str) -> Outcome:
    """The promise holds if plain Lightning died of the limit, and ours has the free run's bits."""
    died, same = isinstance(plain, str), isinstance(ours, list) and ours == free
    losses = "the losses of a run without a limit, bit for bit"
    return Outcome(
        PROMISE,
        f"trains below {limit}, with {losses}" if same else f"{ours} instead of {free}",
        f"plain Lightning ends: {plain}" if died else "plain Lightning fits, too",
        died and same,
        (note(f"The limit is RLIMIT_DATA. Losses: {', '.join(map(str, free))}"),),
    )
