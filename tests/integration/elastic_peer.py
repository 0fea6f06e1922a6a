"""One peer of a swarm, as a process of its own: `python elastic_peer.py SETTINGS.json`.

It trains a small net on made-up numbers and leaves `NAME.json`: its last step, the digest of its
weights, what it saw. What a test wants at a certain moment (a kill, a stop) it asks for by `at`.
"""

import hashlib
import json
import os
import signal
import sys
import time
import warnings
from pathlib import Path
from typing import Any

import lightning as L
import torch
from torch.utils.data import TensorDataset

from loaders import ReuseLoader
from trainers.elastic.peer.elastic_strategy import ElasticStrategy

warnings.simplefilter("ignore")


class Net(L.LightningModule):
    def __init__(self, width: int, dropout: float, norm: bool, slow: float) -> None:
        super().__init__()
        middle: list[torch.nn.Module] = [torch.nn.BatchNorm1d(width)] if norm else []
        self.layers = torch.nn.Sequential(
            torch.nn.Linear(8, width), *middle, torch.nn.ReLU(), torch.nn.Dropout(dropout),
            torch.nn.Linear(width, 4),
        )  # fmt: skip
        self.slow = slow

    def training_step(self, batch: Any) -> torch.Tensor:
        inputs, labels = batch
        if self.slow:
            time.sleep(self.slow)
        loss = torch.nn.functional.cross_entropy(self.layers(inputs), labels)
        self.log("train_loss", loss)
        return loss

    def validation_step(self, batch: Any, batch_idx: int) -> None:
        inputs, labels = batch
        self.log("val_loss", torch.nn.functional.cross_entropy(self.layers(inputs), labels))

    def configure_optimizers(self) -> Any:
        optimizer = torch.optim.AdamW(self.parameters(), lr=1e-2)
        return {
            "optimizer": optimizer,
            "lr_scheduler": {
                "scheduler": torch.optim.lr_scheduler.StepLR(optimizer, 5),
                "interval": "step",
            },
        }


class Watch(L.Callback):
    """Keeps what a test compares, and does to this process what the test asks for."""

    def __init__(self, at: dict[str, Any], out: Path) -> None:
        self.digests: list[str] = []
        self.losses: list[float] = []
        self.rates: list[float] = []
        self.at = at
        self.out = out

    def on_train_batch_end(self, trainer: L.Trainer, module: L.LightningModule, *_: Any) -> None:
        self.digests.append(f"{trainer.global_step} {digest(module)}")
        self.losses.append(float(trainer.callback_metrics["train_loss"]))
        self.rates.append(trainer.optimizers[0].param_groups[0]["lr"])
        self.out.joinpath("step").write_text(str(trainer.global_step))
        if trainer.global_step == self.at.get("kill"):
            os.kill(os.getpid(), signal.SIGKILL)
        if trainer.global_step == self.at.get("term"):
            os.kill(os.getpid(), signal.SIGTERM)


def digest(module: torch.nn.Module) -> str:
    found = hashlib.blake2b(digest_size=8)
    for tensor in module.state_dict().values():
        found.update(tensor.numpy().tobytes())
    return found.hexdigest()


def data(samples: int) -> TensorDataset:
    dice = torch.Generator().manual_seed(1)
    inputs = torch.randn(samples, 8, generator=dice)
    return TensorDataset(inputs, inputs[:, :4].argmax(1))


def main(settings: dict[str, Any]) -> None:
    name, out = settings["name"], Path(settings["out"])
    out.mkdir(parents=True, exist_ok=True)
    torch.manual_seed(settings.get("seed", 7))
    module = Net(
        settings.get("width", 16), settings.get("dropout", 0.2), settings.get("norm", True),
        settings.get("slow", 0.0),
    )  # fmt: skip
    samples = settings.get("samples", 200)
    loader = ReuseLoader(
        data(samples), batch_size=settings.get("batch", 32), reuse=settings.get("reuse", 2),
        buffer_batches=2, seed=3, workers=1,
    )  # fmt: skip
    watch = Watch(settings.get("at", {}), out)
    strategy = ElasticStrategy(
        lanes=settings.get("lanes", 8),
        join=settings["join"],
        secret_file=settings["secret"],
        name=name,
        **settings.get("strategy", {}),
    )
    trainer = L.Trainer(
        strategy=strategy, accelerator="cpu", max_steps=settings["steps"], max_epochs=-1,
        gradient_clip_val=1.0, callbacks=[watch], logger=False, enable_checkpointing=False,
        enable_progress_bar=False, enable_model_summary=False, num_sanity_val_steps=0,
        default_root_dir=out, **settings.get("trainer", {}),
    )  # fmt: skip
    val = torch.utils.data.DataLoader(data(64), batch_size=64) if settings.get("val") else None
    error = ""
    began = time.monotonic()
    try:
        trainer.fit(module, loader, val, ckpt_path=settings.get("resume"))
    except Exception as problem:
        error = f"{type(problem).__name__}: {problem}"
        if settings.get("loud"):
            raise
    finally:
        told = {
            "step": trainer.global_step, "digest": digest(module), "digests": watch.digests,
            "losses": watch.losses, "rates": watch.rates, "error": error,
            "seconds": time.monotonic() - began, "gaps": strategy.gaps,
        }  # fmt: skip
        out.joinpath("result.json").write_text(json.dumps(told))


if __name__ == "__main__":
    main(json.loads(Path(sys.argv[1]).read_text()))
