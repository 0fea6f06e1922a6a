"""Device seconds until the best of twelve is known: no stopping, halving, a pruner of Optuna.

The jobs are small GPTs that differ in their rate, and learn a text that can be learnt.
"""

import tempfile
from typing import Any

import lightning as L
import torch
from torch.nn import functional
from torch.utils.data import DataLoader, TensorDataset

from benchmarks.fleet_peers.gpt_jobs import GptJob, GptSize
from benchmarks.harness.command import Options
from benchmarks.harness.report import Report, format_table
from trainers.fleet import Fleet, Halving
from trainers.fleet.search.optuna_pruner import OptunaPruner

SIZE = GptSize(layers=2, width=64, heads=2, length=32, words=64, batch=16, steps=180)
TINY = GptSize(layers=1, width=16, heads=1, length=8, words=16, batch=4, steps=9)


class Learner(GptJob):
    """Validates on other words of the same language: each word has one likely successor."""

    def validation_step(self, batch: Any, batch_idx: int) -> None:
        (ids,) = batch
        logits = self.net(ids[:, :-1])
        loss = functional.cross_entropy(logits.flatten(0, 1), ids[:, 1:].flatten())
        self.log("val_loss", loss)


def words(size: GptSize, batches: int, seed: int) -> DataLoader[Any]:
    dice = torch.Generator().manual_seed(seed)
    count = batches * size.batch
    follows = torch.randperm(size.words, generator=torch.Generator().manual_seed(0))
    ids = torch.randint(size.words, (count, size.length + 1), generator=dice)
    for place in range(size.length):
        likely = torch.rand(count, generator=dice) < 0.8
        ids[:, place + 1] = torch.where(likely, follows[ids[:, place]], ids[:, place + 1])
    return DataLoader(TensorDataset(ids), size.batch)


def run(size: GptSize, jobs: int, stop: Any) -> tuple[str, float, dict[str, Any]]:
    every = size.steps // 9
    with tempfile.TemporaryDirectory() as folder:
        fleet = Fleet(None, "cpu", stop=stop, metric=None if stop else "val_loss", folder=folder)
        for number in range(jobs):
            lr = 1e-4 * 2.0**number

            def module(lr: float = lr) -> L.LightningModule:
                return Learner(size, lr)

            fleet.add(
                f"lr={lr:.0e}", module, train=words(size, size.steps, 1), val=words(size, 4, 2),
                trainer={
                    "max_epochs": 1, "logger": False, "enable_checkpointing": False,
                    "val_check_interval": every, "num_sanity_val_steps": 0,
                },
                seed=0,
            )  # fmt: skip
        result = fleet.fit()
    failed = [job.details for job in result.jobs.values() if job.state == "failed"]
    assert not failed, failed[0]
    seconds = sum(job.seconds for job in result.jobs.values())
    kept = {
        name: {"state": job.state, "step": job.step, "val_loss": job.metric}
        for name, job in result.jobs.items()
    }
    return result.best, seconds, kept


def measure(options: Options) -> Report:
    smoke = options.smoke
    import optuna

    size, jobs = (TINY, 3) if smoke else (SIZE, 12)
    first = size.steps // 9
    rules: dict[str, Any] = {
        "no stopping": None,
        "halving": Halving("val_loss", eta=3, first=first),
        "Optuna's successive halving": OptunaPruner(
            optuna.pruners.SuccessiveHalvingPruner(min_resource=first, reduction_factor=3),
            "val_loss", every=first, mode="min",
        ),
        "Optuna's median": OptunaPruner(
            optuna.pruners.MedianPruner(n_startup_trials=2), "val_loss", every=first, mode="min"
        ),
    }  # fmt: skip
    report = Report(
        "stopping",
        "device seconds until the best is known",
        {"jobs": jobs, "steps": size.steps, "first": first},
    )
    lines = []
    whole, all_steps = 0.0, jobs * size.steps
    for name, rule in rules.items():
        best, seconds, kept = run(size, jobs, rule)
        whole = whole or seconds
        steps = sum(job["step"] for job in kept.values())
        report.rows.append({"rule": name, "best": best, "seconds": seconds, "jobs": kept})
        lines.append([
            name, best, f"{seconds:.1f}", f"{seconds / whole:.2f}", str(steps),
            f"{steps / all_steps:.2f}",
        ])  # fmt: skip
    head = ["rule", "best", "device s", "over none", "steps", "of all steps"]
    report.tables["twelve rates"] = format_table(head, lines)
    report.remarks.append(
        "Device seconds have what each job's build and capture takes, which early stopping does"
        " not save; the last column has steps alone."
    )
    return report
