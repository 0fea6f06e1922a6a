"""One peer of a swarm in this process, with its anchor on a thread; with a budget or without."""

import json
import threading
from dataclasses import dataclass, field
from pathlib import Path
from typing import Any

import lightning as L
import torch
from support.secret_files import write_secret
from torch.nn import functional
from torch.utils.data import DataLoader, TensorDataset

from loaders import ReuseLoader
from trainers.elastic.anchor.anchor import Anchor
from trainers.elastic.deciding.roster import Settings
from trainers.elastic.peer.elastic_fit import ElasticFit
from trainers.elastic.peer.elastic_strategy import ElasticStrategy
from trainers.elastic.peer.replay_strategy import ReplayStrategy
from trainers.elastic.wire.secret import read_secret

WIDTH = 64
OPTIMIZERS = {
    "sgd": lambda p: torch.optim.SGD(p, 0.1, momentum=0.9, weight_decay=0.01),
    "adamw": lambda p: torch.optim.AdamW(p, 0.01, weight_decay=0.1),
}
CLIPS: dict[str, dict[str, Any]] = {
    "norm": {"gradient_clip_val": 0.5},
    "value": {"gradient_clip_val": 0.02, "gradient_clip_algorithm": "value"},
    "none": {},
}


class Classifier(L.LightningModule):
    """Statistics, a buffer that is read, random numbers, a weight without a gradient, logs."""

    def __init__(self, optimizer: str = "adamw") -> None:
        super().__init__()
        torch.manual_seed(7)
        self.layers = torch.nn.Sequential(
            torch.nn.Linear(8, WIDTH), torch.nn.BatchNorm1d(WIDTH), torch.nn.ReLU(),
            torch.nn.Dropout(0.3), torch.nn.Linear(WIDTH, WIDTH), torch.nn.ReLU(),
            torch.nn.Linear(WIDTH, 4),
        )  # fmt: skip
        self.unused = torch.nn.Parameter(torch.ones(3))
        self.seen: torch.Tensor
        self.register_buffer("seen", torch.ones(()))
        self.optimizer = optimizer

    def training_step(self, batch: Any, batch_idx: int) -> Any:
        inputs, labels = batch
        scores = self.layers(inputs) / self.seen.clone()
        self.seen += 0.25
        loss = functional.cross_entropy(scores, labels)
        self.log("train_loss", loss)
        self.log_dict({"right": (scores.argmax(1) == labels).float().mean(), "one": 1.0})
        return {"loss": loss}

    def validation_step(self, batch: Any, batch_idx: int) -> None:
        inputs, labels = batch
        self.log("val_loss", functional.cross_entropy(self.layers(inputs), labels))

    def configure_optimizers(self) -> Any:
        optimizer = OPTIMIZERS[self.optimizer](self.parameters())
        schedule = torch.optim.lr_scheduler.StepLR(optimizer, 3)
        return [optimizer], [{"scheduler": schedule, "interval": "step"}]


@dataclass
class Watch(L.Callback):
    """What a step leaves."""

    logs: list[dict[str, float]] = field(default_factory=list)
    states: list[dict[str, torch.Tensor]] = field(default_factory=list)

    def on_train_batch_end(
        self, trainer: L.Trainer, pl_module: L.LightningModule, *_: Any, **more: Any
    ) -> None:
        known = {name: float(value) for name, value in trainer.callback_metrics.items()}
        self.logs.append({**known, "lr": trainer.optimizers[0].param_groups[0]["lr"]})
        self.states.append(state_of(trainer, pl_module))

    def on_validation_end(self, trainer: L.Trainer, pl_module: L.LightningModule) -> None:
        self.logs.append({"val_loss": float(trainer.callback_metrics["val_loss"])})


def state_of(trainer: L.Trainer, module: L.LightningModule) -> dict[str, torch.Tensor]:
    found = {name: t.clone() for name, t in module.state_dict().items()}
    names: dict[Any, str] = {p: name for name, p in module.named_parameters()}
    for p, state in trainer.optimizers[0].state.items():
        found |= {f"{names[p]} {key}": t.clone() for key, t in state.items()}
    return found


def data(samples: int) -> TensorDataset:
    dice = torch.Generator().manual_seed(1)
    inputs = torch.randn(samples, 8, generator=dice)
    return TensorDataset(inputs, inputs[:, :4].argmax(1))


@dataclass
class Ran:
    """What a run leaves."""

    watch: Watch
    trainer: L.Trainer
    strategy: Any
    module: Any

    @property
    def digests(self) -> list[str]:
        """Of the commits, as its log has them."""
        log = Path(self.trainer.default_root_dir) / "elastic" / "one.jsonl"
        lines = [json.loads(line) for line in log.read_text().splitlines()]
        return [line["digest"] for line in lines if "commit" in line]


def train(
    out: Path, steps: int = 8, *, optimizer: str = "adamw", module: Any = None,
    strategy: ElasticFit, samples: int = 100, **more: Any,
) -> Ran:  # fmt: skip
    """Train alone. `samples` that lanes do not divide make the last step of a pass smaller."""
    module = Classifier(optimizer) if module is None else module
    loader = ReuseLoader(data(samples), batch_size=32, reuse=2, buffer_batches=2, seed=3, workers=1)
    watch = Watch()
    trainer = L.Trainer(
        strategy=strategy, max_steps=steps, max_epochs=-1, callbacks=[watch],
        logger=False, enable_checkpointing=False, enable_progress_bar=False,
        enable_model_summary=False, num_sanity_val_steps=0, default_root_dir=out,
        **{"accelerator": "cpu", "val_check_interval": 3, **more},
    )  # fmt: skip
    trainer.fit(module, loader, DataLoader(data(50), batch_size=30))
    return Ran(watch, trainer, strategy, module)


def alone(out: Path, budget: str | int | None, steps: int = 8, **more: Any) -> Ran:
    """Train with an anchor of its own."""
    out.mkdir(parents=True, exist_ok=True)
    secret = write_secret(out)
    given = {
        key: more.pop(key) for key in ("sum", "checkpoint", "device", "devices") if key in more
    }
    with Anchor("127.0.0.1", 0, read_secret(secret), Settings()) as anchor:
        serving = threading.Thread(target=anchor.run)
        serving.start()
        strategy = ElasticStrategy(
            lanes=8, join=str(anchor.address), secret_file=secret, name="one", budget=budget,
            **given,
        )  # fmt: skip
        try:
            return train(out, steps, strategy=strategy, **more)
        finally:
            anchor.stop()
            serving.join()


def replayed(out: Path, logs: list[Path], budget: str | int | None, **more: Any) -> Ran:
    strategy = ReplayStrategy(logs, budget=budget)
    return train(out, strategy.history.steps, strategy=strategy, **more)


def assert_equal(one: Ran, other: Ran) -> None:
    """Losses and other logs, weights and the optimizer's state, after every step."""
    assert one.watch.logs == other.watch.logs
    assert len(one.watch.states) == len(other.watch.states)
    for step, (a, b) in enumerate(zip(one.watch.states, other.watch.states, strict=True)):
        assert a.keys() == b.keys(), step
        assert [name for name in a if not torch.equal(a[name], b[name])] == [], step
