"""What a job's Trainer shows of its progress: steps, the watched metric, what is left."""

import math

import lightning as L

from loaders.stats import LoaderStats
from trainers.fleet.deciding.fleet_error import FleetError
from trainers.lightning_seams import combined_loader

VALIDATION_COST = 1 / 3
"""A validation batch is a forward pass. It counts as this part of a training step."""


class JobProgress:
    """The progress of one job, before it has a Trainer, too."""

    def __init__(self, job: str, metric_name: str | None) -> None:
        self.trainer: L.Trainer | None = None
        self.checkpoint_metric: float | None = None
        """The watched metric in the checkpoint from which the job resumed."""
        self.has_stepped = False
        """Whether a batch has run since the job began or resumed."""
        self._job = job
        self._metric_name = metric_name
        self._has_trained = False
        """Whether training is over. A test that follows may log other values."""
        self._final_metric: float | None = None

    @property
    def step(self) -> int:
        """The optimizer steps that the job has done."""
        return self.trainer.global_step if self.trainer is not None else 0

    @property
    def metric(self) -> float | None:
        """The watched metric as training logged it last; None if it was never logged."""
        if self._has_trained:
            return self._final_metric
        if self.trainer is None or self._metric_name is None:
            return None
        value = self.trainer.callback_metrics.get(self._metric_name)
        return self.checkpoint_metric if value is None else float(value)

    @property
    def logged_names(self) -> str:
        """The names of all values that the job has logged."""
        return ", ".join(sorted(self.trainer.callback_metrics)) if self.trainer else ""

    def end_training(self) -> None:
        """Keep the metric with which training ended."""
        self._final_metric, self._has_trained = self.metric, True

    def steps_left(self, done: int) -> int:
        """Return the number of optimizer steps after `done`."""
        assert self.trainer is not None
        total = self.trainer.estimated_stepping_batches
        if total < 0 or math.isinf(total):
            raise FleetError(
                f"job {self._job} has no end: give its Trainer max_epochs or max_steps, so that the"
                " fleet can share its devices"
            )
        return max(0, int(total) - done)

    def validation_seconds(self, left: int, step_seconds: float) -> float:
        """Predict the seconds of the validations during the `left` next steps."""
        trainer = self.trainer
        assert trainer is not None
        batches, every = left * trainer.accumulate_grad_batches, trainer.val_check_batch
        each = sum(trainer.num_val_batches)
        if not every or not math.isfinite(every) or not math.isfinite(each):
            return 0.0
        rounds = batches / every / (trainer.check_val_every_n_epoch or 1)
        return rounds * each * step_seconds * VALIDATION_COST

    def loader_bytes(self) -> int:
        """Return the bytes of the buffers and caches of the train loaders that report them."""
        assert self.trainer is not None
        loaders = combined_loader(self.trainer)
        reported = [getattr(part, "stats", None) for part in (loaders.flattened if loaders else ())]
        stats = [each for each in reported if isinstance(each, LoaderStats)]
        return sum(each.buffer_bytes + each.batch_bytes + each.cache_bytes for each in stats)
