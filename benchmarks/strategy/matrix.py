"""What differs from plain Lightning: models x settings x budgets, counted. Asked: nothing.

    MLP (batch norm, dropout), ResNet, GPT-2, LLaMA with LoRA
      x plain, clipped by norm / by value, accumulated 2 / 3 (the last group smaller), bf16-mixed
      x no budget, 100, 60, 40 % of the peak, the smallest that is possible

Compared to the last bit: every loss, logged and callback metrics, learning rates, global_step,
parameters, buffers, optimizer state, and the saved checkpoint, entry by entry. Nothing is checked
on the fly: every step is the plan's. A model and a setting are a job, with a plain run of its own.
"""

import multiprocessing
import os
import tempfile
from collections.abc import Callable
from concurrent.futures import ProcessPoolExecutor
from pathlib import Path
from typing import Any

import lightning as L
import torch
from offloading.nests import named_leaves
from offloading.report import Asked, Report, table
from torch import nn
from torch.nn import functional
from torch.utils.data import DataLoader, TensorDataset

from offload import BudgetTooSmall
from perfect.models import add_lora, build_model
from perfect.models.gpt2 import Gpt2, Gpt2Shape
from perfect.models.llama import Llama, LlamaShape
from strategy.baton import quiet_trainer
from trainers import OffloadStrategy

BATCHES, ROWS = 7, 4
SETTINGS: dict[str, dict[str, Any]] = {
    "plain": {},
    "clipped by norm": {"gradient_clip_val": 0.1},
    "clipped by value": {"gradient_clip_val": 0.002, "gradient_clip_algorithm": "value"},
    "accumulated 2": {"accumulate_grad_batches": 2},  # 2 + 2 + 2 + 1
    "accumulated 3": {"accumulate_grad_batches": 3},  # 3 + 3 + 1
    "accumulated 2, clipped": {"accumulate_grad_batches": 2, "gradient_clip_val": 0.1},
    "bf16-mixed": {"precision": "bf16-mixed"},
}
BUDGETS: tuple[str | int | None, ...] = (None, "100%", "60%", "40%", "smallest")  # type: ignore[assignment]
TINY = 64
"""Bytes that no step fits into."""
TRIES = 12


class Mlp(nn.Module):
    def __init__(self) -> None:
        super().__init__()
        parts: list[nn.Module] = []
        for _ in range(4):
            parts += [nn.Linear(24, 24), nn.BatchNorm1d(24), nn.ReLU(), nn.Dropout(0.2)]
        self.net = nn.Sequential(*parts, nn.Linear(24, 10))

    def forward(self, x: torch.Tensor) -> torch.Tensor:
        return self.net(x)


def _lora() -> nn.Module:
    net = Llama(LlamaShape(layers=2, heads=2, width=32, inside=48), 64)
    add_lora(net, Llama.adapted, rank=4, alpha=8.0)
    return net


def _vectors(count: int) -> list[torch.Tensor]:
    return [torch.randn(count, 24), torch.randint(0, 10, (count,))]


def _pictures(count: int) -> list[torch.Tensor]:
    return [torch.randn(count, 3, 12, 12), torch.randint(0, 10, (count,))]


def _words(count: int) -> list[torch.Tensor]:
    text = torch.randint(0, 64, (count, 17))
    return [text[:, :-1].contiguous(), text[:, 1:].contiguous()]


MODELS: dict[str, tuple[Callable[[], nn.Module], Callable[[int], list[torch.Tensor]]]] = {
    "mlp": (Mlp, _vectors),
    "resnet": (lambda: build_model("resnet8", 10), _pictures),
    "gpt2": (lambda: Gpt2(Gpt2Shape(layers=2, heads=2, width=32, positions=16), 64), _words),
    "llama, LoRA": (_lora, _words),
}


class Module(L.LightningModule):
    """Two groups of parameters, a scheduler, metrics by step and by epoch."""

    def __init__(self, net: nn.Module) -> None:
        super().__init__()
        self.net = net

    def training_step(self, batch: Any, batch_idx: int) -> torch.Tensor:
        x, y = batch
        said = self.net(x).flatten(0, -2)
        loss = functional.cross_entropy(said, y.flatten())
        self.log("loss", loss, on_step=True, on_epoch=True)
        self.log("right", (said.argmax(-1) == y.flatten()).float().mean())
        return loss

    def configure_optimizers(self) -> Any:
        learned = [p for p in self.parameters() if p.requires_grad]
        wide = {"params": [p for p in learned if p.ndim >= 2], "weight_decay": 0.1}
        flat = {"params": [p for p in learned if p.ndim < 2], "lr": 2e-3}
        groups = [group for group in (wide, flat) if group["params"]]
        optimizer = torch.optim.AdamW(groups, 1e-2)
        scheduler = torch.optim.lr_scheduler.StepLR(optimizer, 2, 0.5)
        return [optimizer], [{"scheduler": scheduler, "interval": "step"}]


class Curve(L.Callback):
    def __init__(self) -> None:
        self.seen: list[Any] = []

    def on_train_batch_end(
        self, trainer: Any, pl_module: Any, outputs: Any, batch: Any, batch_idx: int
    ) -> None:
        rates = [group["lr"] for group in trainer.optimizers[0].param_groups]
        self.seen.append({"loss": outputs["loss"].clone(), "rates": rates})


def measure(smoke: bool) -> Report:
    models = ["mlp", "gpt2"] if smoke else [*MODELS]
    settings = ["accumulated 2, clipped"] if smoke else [*SETTINGS]
    jobs = [(model, setting, smoke) for setting in settings for model in models]
    spawn = multiprocessing.get_context("spawn")
    with ProcessPoolExecutor(os.cpu_count(), mp_context=spawn) as pool:
        found = list(pool.map(one, *zip(*jobs, strict=True)))
    rows = [row for job in found for row in job]
    wrong = {key: sum(len(row[key]) for row in rows) for key in ("tensors", "metrics", "entries")}
    report = Report(
        "matrix",
        "Claim: no tensor, no metric and no checkpoint entry differs from plain Lightning's",
        {"runs": len(rows), "batches": BATCHES, "rows": ROWS},
        rows=rows,
    )
    for key, name in (("tensors", "tensors of parameters, buffers, optimizer state"),
                      ("metrics", "losses, metrics, learning rates, global steps"),
                      ("entries", "checkpoint entries")):  # fmt: skip
        compared = sum(row["compared"][key] for row in rows)
        report.asked.append(Asked(f"{name} that differ, of {compared:,}", 0, wrong[key]))
    report.tables["Differences / compared, over all budgets"] = _table(rows, models, settings)
    report.tables["Device bytes, of the peak (all settings: least to most)"] = _shares(rows, models)
    report.remarks = ["budgets: " + ", ".join(str(b or "none") for b in _budgets(smoke))]
    return report


def _table(rows: list[dict[str, Any]], models: list[str], settings: list[str]) -> str:
    lines = []
    for setting in settings:
        cells = [setting]
        for model in models:
            ours = [r for r in rows if (r["model"], r["setting"]) == (model, setting)]
            wrong = sum(len(r[key]) for r in ours for key in ("tensors", "metrics", "entries"))
            cells.append(f"{wrong} / {sum(sum(r['compared'].values()) for r in ours):,}")
        lines.append(cells)
    return table(["setting", *models], lines)


def _shares(rows: list[dict[str, Any]], models: list[str]) -> str:
    budgets = list(dict.fromkeys(str(row["budget"]) for row in rows))
    lines = []
    for budget in budgets:
        cells = [budget]
        for model in models:
            shares = [r["share"] for r in rows if (r["model"], str(r["budget"])) == (model, budget)]
            cells.append(f"{min(shares):.1%} to {max(shares):.1%}")
        lines.append(cells)
    return table(["budget", *models], lines)


def _budgets(smoke: bool) -> tuple[str | int | None, ...]:
    return ("40%", "smallest") if smoke else BUDGETS


def one(model: str, setting: str, smoke: bool) -> list[dict[str, Any]]:
    """A plain run, and one at each budget, in a child."""
    import logging
    import warnings

    warnings.filterwarnings("ignore")
    logging.getLogger("lightning.pytorch").setLevel(logging.ERROR)
    torch.set_num_threads(1)
    plain = _run(model, setting, "auto")
    rows = []
    for budget in _budgets(smoke):
        if budget == "smallest":
            strategy, ours = _smallest(model, setting)
        else:
            strategy = OffloadStrategy(budget)
            ours = _run(model, setting, strategy)
        row: dict[str, Any] = {"model": model, "setting": setting, "budget": budget or "none"}
        row["compared"] = {key: len(plain[key]) for key in plain}
        row["share"] = strategy.plan.device_bytes / strategy.plan.peak_bytes
        rows.append(row | {key: _different(plain[key], ours[key]) for key in plain})
    return rows


def _smallest(model: str, setting: str) -> Any:
    """The strategy and the run. Refused is the first step, or a later one: a micro-batch that adds
    to gradients needs more than one that begins them."""
    budget = TINY
    for _ in range(TRIES):
        strategy = OffloadStrategy(budget)
        try:
            return strategy, _run(model, setting, strategy)
        except BudgetTooSmall as refused:
            if refused.needed <= budget:
                raise
            budget = refused.needed
    raise RuntimeError(f"{model}, {setting}: {budget} bytes are still refused")


def _run(model: str, setting: str, strategy: Any) -> dict[str, dict[str, Any]]:
    """All that can be compared, by name."""
    net, data = MODELS[model]
    torch.manual_seed(0)
    module, curve = Module(net()), Curve()
    loader = DataLoader(TensorDataset(*data(BATCHES * ROWS)), ROWS)
    trainer = quiet_trainer(strategy, curve, log_every_n_steps=1, **SETTINGS[setting])
    torch.manual_seed(1)
    trainer.fit(module, loader)
    with tempfile.TemporaryDirectory() as folder:
        path = Path(folder) / "last.ckpt"
        trainer.save_checkpoint(path)
        saved = torch.load(path, weights_only=False)
    metrics = {"step": trainer.global_step, "curve": curve.seen,
               "logged": trainer.logged_metrics, "callback": trainer.callback_metrics}  # fmt: skip
    tensors = {"module": module.state_dict(), "optimizer": trainer.optimizers[0].state_dict()}
    everything = {"tensors": tensors, "metrics": metrics, "entries": saved}
    return {key: dict(named_leaves("", tree)) for key, tree in everything.items()}


def _different(plain: dict[str, Any], ours: dict[str, Any]) -> list[str]:
    """Names of what is another, or is there in one of the two only."""
    return sorted(
        name
        for name in plain.keys() | ours.keys()
        if name not in plain or name not in ours or not _same(plain[name], ours[name])
    )


def _same(one: Any, other: Any) -> bool:
    if isinstance(one, torch.Tensor) and isinstance(other, torch.Tensor):
        alike = one.dtype == other.dtype and one.shape == other.shape
        return alike and torch.equal(one.nan_to_num(), other.nan_to_num())
    return type(one) is type(other) and one == other
