"""One job as a trial of Ray Tune, which then decides what runs, where, and what stops.

    Tune --config--> make(config) --> Trainer with OffloadStrategy --metrics, checkpoint--> Tune

Tune runs a trial in a process of its own, with what it gives the process of the machine. So trials
on one device do not share its memory in turns, as jobs of a `Fleet` do.
"""

import tempfile
from collections.abc import Callable, Mapping
from pathlib import Path
from types import MappingProxyType
from typing import Any

import lightning as L

from trainers.fleet.deciding.events import FleetError
from trainers.fleet.jobs.lightning_job import as_list, check_arguments, made_of
from trainers.fleet.ray_cluster.node_fleet import import_tune
from trainers.offloading.strategy import OffloadStrategy
from trainers.read_checkpoint import going_on_from

FILE = "trial.ckpt"
QUIET = MappingProxyType(
    {
        "enable_checkpointing": False,
        "enable_model_summary": False,
        "enable_progress_bar": False,
        "logger": False,
    }
)
"""Tune keeps checkpoints and shows metrics."""
ARGUMENTS = ("module", "train", "val", "trainer", "offload", "seed")


class TuneReporter(L.Callback):
    """Reports what was logged after each validation, or each pass if there is none."""

    def __init__(self, tune: Any, at_validation: bool) -> None:
        self._tune = tune
        self._at_validation = at_validation

    def on_validation_end(self, trainer: L.Trainer, pl_module: L.LightningModule) -> None:
        if self._at_validation and not trainer.sanity_checking:
            self._report(trainer)

    def on_train_epoch_end(self, trainer: L.Trainer, pl_module: L.LightningModule) -> None:
        if not self._at_validation:
            self._report(trainer)

    def _report(self, trainer: L.Trainer) -> None:
        metrics = {name: value.item() for name, value in trainer.callback_metrics.items()}
        if not metrics:
            raise FleetError(
                "the module has logged nothing that Tune could compare: call"
                ' self.log("val_loss", loss) in its validation_step'
            )
        with tempfile.TemporaryDirectory() as folder:
            trainer.save_checkpoint(Path(folder) / FILE)
            checkpoint = self._tune.Checkpoint.from_directory(folder)
            self._tune.report({**metrics, "step": trainer.global_step}, checkpoint=checkpoint)


def tune_trainable(
    make: Callable[[Mapping[str, Any]], Mapping[str, Any]],
) -> Callable[[dict[str, Any]], None]:
    """Return a trainable for `ray.tune.Tuner`. `make(config)` returns arguments of `Fleet.add`:
    module, train, and if needed val, trainer, offload and seed. `offload`: options of
    `OffloadStrategy`; False trains with plain Lightning. The metrics are what the module logs."""
    tune = import_tune()

    def trial(config: dict[str, Any]) -> None:
        made = make(config)
        check_arguments(made, ARGUMENTS)
        L.seed_everything(made.get("seed", 0), verbose=False)
        module, val = made_of(made["module"]), made_of(made.get("val"))
        trainer = _trainer(made, TuneReporter(tune, val is not None))
        before = tune.get_checkpoint()
        if before is None:
            trainer.fit(module, made_of(made["train"]), val)
            return
        with before.as_directory() as folder:
            path = Path(folder) / FILE
            train = made_of(made["train"])
            with going_on_from(path, trainer):  # whoever gave the folder may have written it
                trainer.fit(module, train, val, ckpt_path=path, weights_only=True)

    return trial


def _trainer(made: Mapping[str, Any], reporter: TuneReporter) -> L.Trainer:
    given = {**QUIET, **(made.get("trainer") or {})}
    callbacks = as_list(given.pop("callbacks", None))
    if made.get("offload") is not False:
        given["strategy"] = OffloadStrategy(**(made.get("offload") or {}))
    return L.Trainer(**given, accelerator="auto", devices=1, callbacks=[*callbacks, reporter])
