"""What a job takes beside its plan's arenas, how long it is, and its plan on one line."""

import math

import lightning as L

from loaders.stats import LoaderStats
from offload import Plan
from offload.sizes import say_size
from trainers.fleet.deciding.fleet_error import FleetError
from trainers.lightning_seams import combined_loader

FORWARD = 1 / 3
"""A batch of validation, which is a forward pass, is reckoned to take so much of a step."""


def loader_bytes(trainer: L.Trainer) -> int:
    """Return what the buffers and caches of the train loaders take, as far as they say it."""
    loaders = combined_loader(trainer)
    found = [getattr(one, "stats", None) for one in (loaders.flattened if loaders else ())]
    kept = [stats for stats in found if isinstance(stats, LoaderStats)]
    return sum(stats.buffer_bytes + stats.batch_bytes + stats.cache_bytes for stats in kept)


def plan_line(plan: Plan) -> str:
    """Say on one line what a plan takes."""
    device, host = say_size(plan.device_bytes), say_size(plan.host_bytes)
    return f"{device} of the device, {host} of the host, {plan.predicted_seconds:.3g} s a step"


def validation_seconds(trainer: L.Trainer | None, left: int, step_seconds: float) -> float:
    """Return what the validations during `left` steps take, where a step takes so long."""
    assert trainer is not None
    batches, every = left * trainer.accumulate_grad_batches, trainer.val_check_batch
    each = sum(trainer.num_val_batches)
    if not every or not math.isfinite(every) or not math.isfinite(each):
        return 0.0
    rounds = batches / every / (trainer.check_val_every_n_epoch or 1)
    return rounds * each * step_seconds * FORWARD


def steps_left(job: str, trainer: L.Trainer | None, done: int) -> int:
    """Return how many optimizer steps come after `done`."""
    assert trainer is not None
    total = trainer.estimated_stepping_batches
    if total < 0 or math.isinf(total):
        raise FleetError(
            f"job {job} has no end: give its Trainer max_epochs or max_steps, so that the fleet can"
            " share its devices"
        )
    return max(0, int(total) - done)
